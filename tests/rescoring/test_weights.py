"""Totals are those of equations (1) and (2); tuning finds weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lm.rescoring.nbest import Floats, NBest
from lm.rescoring.weights import ScoredList, Weights, tune
from lm.rescoring.word_errors import WordErrors


def scored_list(scores: Floats, texts: list[str], models: Sequence[Sequence[Any]]) -> ScoredList:
    """A list with two hypotheses per utterance and given log-probabilities of words."""
    ids = [f"u{k}" for k in range(len(texts) // 2)]
    nbest = NBest(
        name="made",
        separator="\t",
        ids=ids,
        first=np.arange(0, len(texts), 2),
        texts=texts,
        scores=scores,
    )
    arrays = [list(map(np.array, each)) for each in models]
    return ScoredList(nbest, [lambda texts, each=each: each for each in arrays])  # type: ignore[misc]


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


EVERY = ["run", "arpa", "the first pass"]


@pytest.mark.parametrize(
    ("weights", "unused"),
    [
        (Weights(lm_weight=1.0, mixture=0.5, first_pass_share=0.5), []),
        (Weights(lm_weight=1.0, mixture=0.0, first_pass_share=0.5), ["run"]),
        (Weights(lm_weight=1.0, mixture=1.0, first_pass_share=0.0), ["arpa", "the first pass"]),
        (Weights(lm_weight=1.0, mixture=0.5, first_pass_share=1.0), ["run", "arpa"]),
        (
            Weights(lm_weight=0.0, mixture=0.5, first_pass_share=0.5),
            ["run", "arpa", "the first pass"],
        ),
    ],
)
def test_models_without_a_weight_are_unused(weights: Weights, unused: list[str]) -> None:
    assert weights.unused(run="run", second="arpa", has_first_pass=True) == unused
    alone = weights.unused(run="run", second=None, has_first_pass=False)
    assert alone == [name for name in unused if name == "run"]
