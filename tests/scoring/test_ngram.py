"""N-gram models of ARPA files and Kneser–Ney: probabilities of their equations, mistakes."""

import itertools
import math
import random
from collections import Counter
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest

from data_prep.errors import UserError
from data_prep.tokenizer.tokenizer import WordTokenizer
from lm.rescoring.models import ArpaScores
from lm.scoring import kneser_ney, ngram_tree
from lm.scoring.arpa import ArpaModel
from lm.scoring.kneser_ney import estimate
from tests.scoring.arpa_files import NGrams, definition, write

WORDS = ["a", "b", "c", "d", "<unk>", "</s>"]
NUM_WORDS, EOS = 90, 0
BEGIN = NUM_WORDS
NGram = tuple[int, ...]


def random_ngrams(order: int, has_unk: bool) -> NGrams:
    """Some n-grams of each order, with and without their prefixes and suffixes; log10 P and b."""
    rng = random.Random(order)
    unigrams = [word for word in ["<s>", *WORDS] if has_unk or word != "<unk>"]
    ngrams: NGrams = {(word,): (-rng.uniform(0.1, 2), -rng.uniform(0, 1)) for word in unigrams}
    for n in range(2, order + 1):
        for words in itertools.product(unigrams, repeat=n):
            inner = "</s>" in words[:-1] or "<s>" in words[1:]
            if not inner and rng.random() < 0.3:
                backoff = -rng.uniform(0, 1) if rng.random() < 0.7 else 0.0
                ngrams[words] = (-rng.uniform(0.1, 2), backoff if n < order else 0.0)
    return ngrams


@pytest.mark.parametrize(("order", "has_unk"), [(1, True), (2, False), (3, True), (4, False)])
def test_scores_are_those_of_the_definition(order: int, has_unk: bool, tmp_path: Path) -> None:
    ngrams, path, rng = random_ngrams(order, has_unk), tmp_path / "model.arpa", random.Random(1)
    write(path, ngrams, order)
    scores = ArpaScores(ArpaModel(path))
    lines = [rng.choices(["a", "b", "c", "d", "zebra", "</s>"], k=k % 9) for k in range(60)]
    for line, found in zip(lines, scores([" ".join(line) for line in lines]), strict=True):
        expected = math.log(10) * np.array(definition(ngrams, line, order))
        assert found == pytest.approx(expected, rel=1e-12)
        state, total = scores.start(), 0.0
        for word in line:
            (row,) = scores.candidate_log_probs([state], ["b", word])
            total += row[1]
            ((state,),) = scores.step_many([state], [word])
        total += scores.candidate_log_probs([state, state], [scores.eos_id])[1, 0]
        assert total == pytest.approx(expected.sum(), rel=1e-12)


@pytest.mark.parametrize(
    "edits",
    [
        [("ngram 1=", "ngram  1=\t"), ("ngram 2=", "ngram\t2 = ")],
        [("ngram", "NGRAM"), ("data", "Data"), ("-grams:", "-Grams:"), ("end", "END")],
        [("a comment\n", "a comment\n\n\n"), ("\\2-grams:\n", "\\2-grams: \n\n")],
    ],
)
def test_heads_of_other_programs_are_read(edits: list[tuple[str, str]], tmp_path: Path) -> None:
    path = write(tmp_path / "model.arpa", random_ngrams(2, has_unk=True), 2)
    expected, text = ArpaScores(ArpaModel(path))(["a b d c"])[0], path.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    assert ArpaScores(ArpaModel(path))(["a b d c"])[0].tolist() == expected.tolist()


@pytest.mark.parametrize("base", [10, math.e])
def test_probabilities_of_words_that_do_not_add_up_to_1_are_reported(
    base: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.arpa"
    ngrams: NGrams = {("<s>",): (-99.0, 0.0)}
    for word, p in (("a", 0.5), ("b", 0.2), ("</s>", 0.3)):
        ngrams[word,] = (math.log(p, base), 0.0)
    write(path, ngrams, 1)
    ArpaModel(path)
    assert ("its 1-grams add up to" in caplog.text) == (base != 10)


@pytest.mark.parametrize(("log_prob", "total"), [(-0.01, 58.6), (-1.77, None)])
@pytest.mark.parametrize("order", [2, 3, 5])
def test_probabilities_after_words_that_add_up_to_more_than_1_are_reported(
    order: int, log_prob: float, total: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words, before = [f"w{k}" for k in range(60)], ["w7"] * (order - 1)
    ngrams: NGrams = {(word,): (-1.778, 0.0) for word in words}
    for n in range(1, order):
        value = log_prob if n == order - 1 else -3.0
        ngrams |= {(*before[:n], word): (value, 0.0) for word in words}
    ArpaModel(write(tmp_path / "model.arpa", ngrams, order))
    problem = f"its {order}-grams after '{' '.join(before)}' add up to {total}, not to 1"
    assert (problem in caplog.text) == bool(caplog.text) == (total is not None)


def lines(num_lines: int = 600) -> list[list[int]]:
    """Lines of words by inverse rank, the last words of which never occur."""
    random = Random(3)
    words = range(1, NUM_WORDS - 9)
    weights = [1 / word for word in words]
    return [random.choices(words, weights, k=random.randint(0, 9)) for _ in range(num_lines)]


def joined(text: list[list[int]]) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return np.array([token for line in text for token in [*line, EOS]], np.uint16)


class Definition:
    """Equations (1) and (2), of n-grams that are counted one by one."""

    def __init__(self, text: list[list[int]], order: int, prune: list[int]) -> None:
        padded = [[BEGIN, *line, EOS] for line in text]
        counts = [
            Counter(tuple(line[i : i + n]) for line in padded for i in range(len(line) - n + 1))
            for n in range(1, order + 1)
        ]
        self.adjusted = [Counter(gram[1:] for gram in longer) for longer in counts[1:]]
        self.adjusted.append(counts[-1])
        for adjusted, count in zip(self.adjusted[1:], counts[1:], strict=True):
            adjusted |= {gram: count[gram] for gram in count if gram[0] == BEGIN}
        self.counts_of_counts = [Counter(each.values()) for each in self.adjusted]
        self.counts, self.prune = counts, [*prune, *[prune[-1]] * order]
        self.probs = cache(self._probs)

    def discount(self, n: int, count: int) -> float:
        """The function D."""
        number = self.counts_of_counts[n - 1]
        y = number[1] / (number[1] + 2 * number[2]) if number[1] and number[2] else 0.5
        values = [0.0] + [k - (k + 1) * y * number[k + 1] / max(1, number[k]) for k in (1, 2, 3)]
        if min(number[1], number[2], number[3], *values[1:]) <= 0:
            values = [0.0, y, y, y]
        return values[min(count, 3)]

    def _probs(self, history: NGram) -> list[float]:
        """P(word | history) of all words."""
        n = len(history) + 1
        lower = self.probs(history[1:]) if history else [1 / NUM_WORDS] * NUM_WORDS
        adjusted = [self.adjusted[n - 1][*history, word] for word in range(NUM_WORDS)]
        if not (total := sum(adjusted)):
            return lower
        shares = [(count - self.discount(n, count)) / total for count in adjusted]
        if n > 1:
            occurs = [self.counts[n - 1][*history, word] for word in range(NUM_WORDS)]
            kept = [count > self.prune[n - 1] for count in occurs]
            shares = [share * is_kept for share, is_kept in zip(shares, kept, strict=True)]
        rest = 1 - sum(shares)
        return [share + rest * p for share, p in zip(shares, lower, strict=True)]


@pytest.mark.parametrize("text", [lines(), lines(5), [[1, 2]] * 9])  # the last one has none once
@pytest.mark.parametrize("prune", [[0], [0, 0, 1], [0, 1, 1, 2]])
@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_probabilities_are_as_defined(order: int, prune: list[int], text: list[list[int]]) -> None:
    random = Random(order)
    tree = estimate(joined(text), NUM_WORDS, EOS, order, prune[:order])
    definition = Definition(text, order, prune)
    seen = [line[: random.randint(0, 9)] for line in random.choices(text, k=30)]
    for before in [*seen, [NUM_WORDS - 1], [1, NUM_WORDS - 1, 2], [1, 1, 1, 1, 1, 1]]:
        found = np.exp(tree.log_prob(tree.context(np.array(before, np.int64))))
        assert found.sum() == pytest.approx(1, abs=1e-6)
        assert found == pytest.approx(definition.probs((BEGIN, *before)[1 - order :]), rel=1e-6)
        assert found.min() > 0
    values, contexts = tree.read(joined(text))
    for context, value, token in zip(contexts, values, joined(text), strict=True):
        assert tree.log_prob(int(context))[token] == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("prune", [[], [0, 0, 1]])
def test_loops_as_python_are_equal(prune: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    text = joined(lines(30))
    expected = estimate(text, NUM_WORDS, EOS, 4, prune)
    values, contexts = expected.read(text)
    for module in (kneser_ney, ngram_tree):  # NumPy checks every index
        for name, function in list(vars(module).items()):
            monkeypatch.setattr(module, name, getattr(function, "py_func", function))
    found = estimate(text, NUM_WORDS, EOS, 4, prune)
    for each, other in zip(found.arrays, expected.arrays, strict=True):
        assert each == pytest.approx(other, abs=1e-6)
    assert found.read(text)[1].tolist() == contexts.tolist()
    assert found.read(text)[0] == pytest.approx(values, abs=1e-6)
    assert found.log_prob(3) == pytest.approx(expected.log_prob(3), abs=1e-6)


def test_sizes_are_numbers_of_ngrams_that_occur_more_often_than_the_threshold() -> None:
    text = lines()
    counts = Definition(text, 4, [0]).counts
    for prune in ([], [0, 0, 1], [0, 2]):
        least = [*prune, *[(prune or [0])[-1]] * 4][1:4]
        expected = [sum(n > t for n in c.values()) for c, t in zip(counts[1:], least, strict=True)]
        assert estimate(joined(text), NUM_WORDS, EOS, 4, prune).sizes == [NUM_WORDS + 1, *expected]


@pytest.mark.parametrize("prune", [[], [0, 0, 1]])
def test_an_arpa_file_has_the_same_probabilities(prune: list[int], tmp_path: Path) -> None:
    train, text = joined(lines()[:300]), joined(lines()[300:])
    names = ["<eos>", "<unk>", *(f"w{word}" for word in range(2, NUM_WORDS))]
    tree = estimate(train, NUM_WORDS, EOS, 4, prune)
    tree.write_arpa(tmp_path / "arpa", ["</s>", *names[1:], "<s>"])
    ngram = ArpaModel(tmp_path / "arpa")
    assert ngram.order == 4
    expected = ngram.read(ngram.token_ids(WordTokenizer(names), text))[0]
    assert tree.read(text)[0] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UserError, match="has a word </s>"):
        tree.write_arpa(tmp_path / "arpa", ["</s>", "</s>", *names[2:], "<s>"])


def test_nothing_to_count_is_refused() -> None:
    with pytest.raises(UserError, match="has no token to count"):
        estimate(np.zeros(0, np.uint16), NUM_WORDS, EOS)
