"""N-grams of an ARPA file over its own words: the definition, incomplete files, mistakes."""

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest

from lm.rescoring.models import ArpaScores
from lm.scoring.arpa_model import ArpaModel
from tests.scoring.arpa_files import NGrams, definition, write

WORDS = ["a", "b", "c", "d", "<unk>", "</s>"]


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


def edited(tmp_path: Path, *edits: tuple[str, str]) -> Path:
    """A file of bigrams with some of its text replaced."""
    path = tmp_path / "model.arpa"
    write(path, random_ngrams(2, has_unk=True), 2)
    text = path.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "edits",
    [
        [("ngram 1=", "ngram  1=\t"), ("ngram 2=", "ngram\t2 = ")],
        [("ngram", "NGRAM"), ("data", "Data"), ("-grams:", "-Grams:"), ("end", "END")],
        [("a comment\n", "a comment\n\n\n"), ("\\2-grams:\n", "\\2-grams: \n\n")],
    ],
)
def test_heads_of_other_programs_are_read(edits: list[tuple[str, str]], tmp_path: Path) -> None:
    expected = ArpaScores(ArpaModel(edited(tmp_path)))(["a b d c"])[0]
    assert ArpaScores(ArpaModel(edited(tmp_path, *edits)))(["a b d c"])[0].tolist() == (
        expected.tolist()
    )


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
