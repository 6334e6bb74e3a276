"""N-grams of an ARPA file over its own words: the definition, incomplete files, mistakes."""

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import UserError
from lm.rescoring.models import ArpaScores
from lm.scoring.ngram import NGramModel

WORDS = ["a", "b", "c", "d", "<unk>", "</s>"]
NGrams = dict[tuple[str, ...], tuple[float, float]]


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


def write(path: Path, ngrams: NGrams, order: int) -> None:
    rows = ["a comment", "\\data\\"]
    by_order = [[words for words in ngrams if len(words) == n] for n in range(1, order + 1)]
    rows += [f"ngram {n}={len(each)}" for n, each in enumerate(by_order, 1)]
    for n, each in enumerate(by_order, 1):
        rows += ["", f"\\{n}-grams:"]
        for words in each:
            value, backoff = ngrams[words]
            tail = f"\t{backoff!r}" if backoff else ""
            rows.append(f"{value!r}\t{' '.join(words)}{tail}")
    path.write_text("\n".join([*rows, "", "\\end\\", ""]))


def definition(ngrams: NGrams, line: list[str], order: int) -> list[float]:
    """Equation (1) of `ngram.py` for the words of a line and its end, log10."""
    known = [w if (w,) in ngrams and w not in ("<s>", "</s>") else "<unk>" for w in line]
    text, values = ["<s>", *known, "</s>"], []
    for place in range(1, len(text)):
        value, history = 0.0, tuple(text[max(0, place - order + 1) : place])
        while (*history, text[place]) not in ngrams:
            if not history:
                value -= 100
                break
            value += ngrams.get(history, (0.0, 0.0))[1]
            history = history[1:]
        else:
            value += ngrams[*history, text[place]][0]
        values.append(value)
    return values


@pytest.mark.parametrize(("order", "has_unk"), [(1, True), (2, False), (3, True), (4, False)])
def test_scores_are_those_of_the_definition(order: int, has_unk: bool, tmp_path: Path) -> None:
    ngrams, path, rng = random_ngrams(order, has_unk), tmp_path / "model.arpa", random.Random(1)
    write(path, ngrams, order)
    scores = ArpaScores(NGramModel(path))
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


def test_files_that_are_not_arpa_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.arpa"
    write(path, random_ngrams(2, has_unk=True), 2)
    text = path.read_text()
    (tmp_path / "binary").write_bytes(b"mmap lm http://kheafield.com/code format version 5\n\0")
    for content, error in (
        (text.replace("\\end\\", ""), "is not complete"),
        (text.replace("ngram 2=", "ngram 2=1"), "is not complete"),
        (text.replace("\\2-grams:\n", "\\2-grams:\n-1 a\n"), "expected log10 P, 2 words and"),
        (text.replace("\\2-grams:\n", "\\2-grams:\nx\ta b\n"), r"line \d+: expected log10 P"),
        ("the cat\n", "is not an ARPA file"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=error):
            NGramModel(path)
    with pytest.raises(UserError, match="is a binary file of KenLM: give the ARPA file"):
        NGramModel(tmp_path / "binary")
