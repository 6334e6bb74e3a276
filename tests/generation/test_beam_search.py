"""Beam search equals the search among all continuations, and its scores are log-probabilities."""

import math
from typing import Any

import pytest
import torch

from lm.generation import Hypothesis, beam_search
from lm.model.language_model import LanguageModel
from lm.output import ClassTree
from tests.models import log_probs, small_model

PROMPT, EOS = [0, 2], 0
TREES = {"full": ClassTree.full(4), "two_level": ClassTree.two_level([0, 1, 1, 0])}
TREES["huffman"] = ClassTree.huffman([5, 3, 1, 1])


def log_prob(model: LanguageModel, tokens: list[int]) -> float:
    each = log_probs(model, [*PROMPT, *tokens[:-1]])[len(PROMPT) - 1 :]
    return float(each[range(len(tokens)), tokens].sum())


@pytest.mark.parametrize("bias", [0.0, 90.0], ids=["as it is", "nearly sure"])
@pytest.mark.parametrize("tree", TREES)
def test_excluded_tokens_are_conditioned_on(tree: str, bias: float) -> None:
    model = small_model(TREES[tree])
    for _, row in TREES[tree].path(2):
        model.get_parameter("output.bias").data[row] += bias
    sizes: Any = {"num_tokens": 3, "num_beams": 99}
    found = beam_search(model, PROMPT, length_penalty=0, eos_id=EOS, excluded=[2, 2], **sizes)
    assert len(found) == 1 + 2 + 4 * 3
    assert all(2 not in each.tokens for each in found)
    assert sum(math.exp(each.log_prob) for each in found) == pytest.approx(1, abs=1e-10)
    (only,) = beam_search(model, PROMPT, num_tokens=3, num_beams=99, eos_id=EOS, excluded=[1, 2, 3])
    assert only.tokens == [EOS]
    assert only.log_prob == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize("backbone", ["lstm", "transformer"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 3.0])
@pytest.mark.parametrize(("num_beams", "num_tokens"), [(1, 7), (3, 7), (200, 4)])
def test_results_are_those_of_a_search_that_does_not_stop_early(
    backbone: str, tree: str, penalty: float, num_beams: int, num_tokens: int
) -> None:
    """The widest one is exhaustive."""
    for seed in range(2):
        torch.manual_seed(seed)
        model = small_model(TREES[tree], backbone)
        live: list[list[int]] = [[]]
        results: list[Hypothesis] = []
        for length in range(1, num_tokens + 1):
            extended = [[*tokens, word] for tokens in live for word in range(4)]
            values = {tuple(tokens): log_prob(model, tokens) for tokens in extended}
            extended.sort(key=lambda tokens: -values[tuple(tokens)])
            for tokens in extended[:num_beams]:
                if tokens[-1] == EOS or length == num_tokens:
                    value = values[tuple(tokens)]
                    results.append(Hypothesis(tokens, value, value / length**penalty))
            live = [each for each in extended if each[-1] != EOS][:num_beams]
        options: Any = {"num_tokens": num_tokens, "num_beams": num_beams}
        found = beam_search(model, PROMPT, length_penalty=penalty, eos_id=EOS, **options)
        expected = sorted(results, key=lambda each: -each.score)[:num_beams]
        assert num_beams < 200 or len(found) == 1 + 3 + 9 + 27 * 4
        for actual, best in zip(found, expected, strict=True):
            assert actual.tokens == best.tokens
            assert actual[1:] == pytest.approx(best[1:], abs=1e-10)
