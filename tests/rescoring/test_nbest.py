"""Word errors are those of the definition, and their intervals those of samples of utterances."""

import logging
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from lm.rescoring.nbest import NBest
from lm.rescoring.utterances import Utterances
from lm.rescoring.word_errors import WordErrors, word_errors


def definition(reference: Sequence[str], hypothesis: Sequence[str]) -> tuple[int, ...]:
    """Errors, minus equal words, substitutions, insertions, deletions: the least, recursively."""

    @cache
    def least(i: int, j: int) -> tuple[int, ...]:
        if i == j == 0:
            return 0, 0, 0, 0, 0
        steps = []
        if i and j:
            equal = reference[i - 1] == hypothesis[j - 1]
            steps.append((least(i - 1, j - 1), (0, -1, 0, 0, 0) if equal else (1, 0, 1, 0, 0)))
        if j:
            steps.append((least(i, j - 1), (1, 0, 0, 1, 0)))
        if i:
            steps.append((least(i - 1, j), (1, 0, 0, 0, 1)))
        return min(tuple(a + b for a, b in zip(x, y, strict=True)) for x, y in steps)

    return least(len(reference), len(hypothesis))


def test_word_errors_are_the_edit_distance_with_the_most_equal_words() -> None:
    rng = random.Random(1)
    for _ in range(300):
        first, second = (rng.choices("abcd", k=rng.randrange(8)) for _ in range(2))
        total, _, *kinds = definition(first, second)
        found = word_errors(first, second)
        assert list(found) == kinds
        assert sum(found) == total
    assert word_errors(["a", "b"], ["b", "c"]) == (0, 1, 1)


def test_intervals_of_error_rates_are_those_of_samples_of_utterances() -> None:
    rng, size = np.random.default_rng(3), 400
    texts = ["a b c d"] * (2 * size)
    nbest = NBest(
        name="made",
        separator="\t",
        ids=[str(k) for k in range(size)],
        first=np.arange(0, 2 * size, 2),
        texts=texts,
        scores=np.zeros((2 * size, 0)),
    )
    counts = rng.integers(0, 3, (2 * size, 3)) // 2
    errors = WordErrors(counts=counts, references=["a b c d"] * size)
    report = errors.report(nbest, nbest.first + 1)
    assert report == errors.report(nbest, nbest.first + 1)
    kinds = [report[name] for name in ("substitutions", "insertions", "deletions")]
    assert kinds == counts[1::2].sum(0).tolist()
    after, change = counts[1::2].sum(1), (counts[1::2] - counts[::2]).sum(1)
    for name, each in (("after", after), ("change", change)):
        mean, error = 25 * each.mean(), 25 * each.std() / size**0.5  # four words each
        assert report[f"wer_{name}_low"] == pytest.approx(mean - 1.96 * error, abs=error / 4)
        assert report[f"wer_{name}_high"] == pytest.approx(mean + 1.96 * error, abs=error / 4)


def test_references_without_hypotheses_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "list").write_text("u1\t0.5\tit was\n")
    (tmp_path / "said").write_text("u1 it was\nu2 it is\n")
    with caplog.at_level(logging.WARNING):
        read = Utterances.read(str(tmp_path / "list"), str(tmp_path / "said"))
    assert "1 of 2 references have no hypotheses" in caplog.text
    assert read.errors is not None
    assert read.errors.num_words == 2
