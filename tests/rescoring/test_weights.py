"""Totals are those of equations (1) and (2); tuning finds weights; word errors and their intervals
are those of the definition.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from lm.rescoring.nbest import Floats, NBest
from lm.rescoring.weights import ScoredList, Weights, tune
from lm.rescoring.word_errors import WordErrors, _distance, word_errors


def nbest_of(texts: list[str], scores: Floats) -> NBest:
    """A list with two hypotheses per utterance."""
    return NBest(
        name="made",
        separator="\t",
        ids=[f"u{k}" for k in range(len(texts) // 2)],
        first=np.arange(0, len(texts), 2),
        texts=texts,
        scores=scores,
    )


def scored_list(scores: Floats, texts: list[str], models: Sequence[Sequence[Any]]) -> ScoredList:
    """Such a list, and given log-probabilities of words."""
    return ScoredList(nbest_of(texts, scores), [list(map(np.array, each)) for each in models])


def test_a_tuned_mixture_has_no_more_errors_than_either_model_alone() -> None:
    rng = np.random.default_rng(1)
    for _ in range(12):
        texts, acoustic = ["a", "b"] * 15, rng.normal(size=(30, 1))
        models = [[[value, 0.0] for value in rng.normal(size=30) - 3] for _ in range(2)]
        errors = WordErrors(counts=rng.integers(0, 3, (30, 1)), references=["a"] * 15)

        def fewest(chosen: list[list[list[float]]]) -> int:
            scored = scored_list(acoustic, texts, chosen)  # noqa: B023
            weights = tune(scored, errors)  # noqa: B023
            return int(errors.errors[scored.choose(scored.totals(weights))].sum())  # noqa: B023

        assert fewest(models) <= min(fewest(models[:1]), fewest(models[1:]))


@pytest.mark.parametrize(
    "weights",
    [
        Weights(lm_weight=2.0, insertion_penalty=0.25, mixture=0.3),
        Weights(lm_weight=0.5, first_pass_share=0.25, mixture=0.0),
        Weights(lm_weight=0.0, insertion_penalty=-1.0, first_pass_share=1.0),
    ],
)
@pytest.mark.parametrize("num_scores", [0, 1, 2])
def test_totals_are_those_of_the_definition(weights: Weights, num_scores: int) -> None:
    rng, texts = np.random.default_rng(num_scores), ["a", "a b", "", "b a b"]
    scores, share = rng.normal(size=(4, num_scores)), weights.mixture
    models = [[-rng.random(len(text.split()) + 1) for text in texts] for _ in range(2)]
    found = scored_list(scores, texts, models).totals(weights)
    for k, text in enumerate(texts):
        first, second = models[0][k], models[1][k]
        language = np.log(share * np.exp(first) + (1 - share) * np.exp(second)).sum()
        if num_scores > 1:
            r = weights.first_pass_share
            language = (1 - r) * language + r * scores[k, 1]
        expected = weights.lm_weight * language
        expected += scores[k, :1].sum() - weights.insertion_penalty * len(text.split())
        assert found[k] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("weights", "unused"),
    [
        (Weights(lm_weight=1.0, mixture=0.5, first_pass_share=0.5), []),
        (Weights(lm_weight=1.0, mixture=0.0, first_pass_share=0.5), ["run"]),
        (Weights(lm_weight=1.0, mixture=1.0, first_pass_share=0.0), ["arpa", "the first pass"]),
        (Weights(lm_weight=1.0, mixture=0.5, first_pass_share=1.0), ["run", "arpa"]),
        (Weights(lm_weight=0.0), ["run", "arpa", "the first pass"]),
    ],
)
def test_models_without_a_weight_are_unused(weights: Weights, unused: list[str]) -> None:
    assert weights.unused(run="run", second="arpa", has_first_pass=True) == unused
    alone = weights.unused(run="run", second=None, has_first_pass=False)
    assert alone == [name for name in unused if name == "run"]


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


@pytest.mark.parametrize(
    "distance", [_distance, vars(_distance)["py_func"]], ids=["compiled", "python"]
)
def test_word_errors_are_the_edit_distance_with_the_most_equal_words(
    distance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.rescoring.word_errors._distance", distance)
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
    nbest = nbest_of(["a b c d"] * (2 * size), np.zeros((2 * size, 0)))
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
