"""Beam search equals the search among all continuations, and its scores are log-probabilities."""

import math
from itertools import product
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


def all_continuations(model: LanguageModel, num_tokens: int, penalty: float) -> list[Hypothesis]:
    """Every continuation that ends with `<eos>` or has all tokens, the best first."""
    found = []
    for length in range(1, num_tokens + 1):
        for tokens in product(range(4), repeat=length):
            if EOS not in tokens[:-1] and (tokens[-1] == EOS or length == num_tokens):
                value = log_prob(model, list(tokens))
                found.append(Hypothesis(list(tokens), value, value / length**penalty))
    return sorted(found, key=lambda each: -each.score)


@pytest.mark.parametrize("backbone", ["lstm", "transformer"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 3.0])
def test_a_wide_beam_equals_exhaustive_search(tree: str, backbone: str, penalty: float) -> None:
    model = small_model(TREES[tree], backbone)
    expected = all_continuations(model, 4, penalty)
    sizes: Any = {"num_tokens": 4, "num_beams": 200}
    found = beam_search(model, PROMPT, length_penalty=penalty, eos_id=EOS, **sizes)
    assert len(found) == len(expected) == 1 + 3 + 9 + 27 * 4
    for actual, best in zip(found, expected, strict=True):
        assert actual.tokens == best.tokens
        assert actual.log_prob == pytest.approx(best.log_prob, abs=1e-10)
        assert actual.score == pytest.approx(best.score, abs=1e-10)


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


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_narrow_beam_has_the_results_of_a_search_that_does_not_stop_early(
    penalty: float, num_beams: int
) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model = small_model(TREES["two_level"])
        live: list[list[int]] = [[]]
        results: list[tuple[float, list[int]]] = []
        for length in range(1, 8):
            extended = [[*tokens, word] for tokens in live for word in range(4)]
            extended.sort(key=lambda tokens: -log_prob(model, tokens))
            done = [each for each in extended[:num_beams] if each[-1] == EOS or length == 7]
            results += [(log_prob(model, tokens) / length**penalty, tokens) for tokens in done]
            live = [each for each in extended if each[-1] != EOS][:num_beams]
        options: Any = {"num_tokens": 7, "num_beams": num_beams, "length_penalty": penalty}
        found = beam_search(model, PROMPT, eos_id=EOS, **options)
        best = sorted(results, reverse=True)[:num_beams]
        assert [each.tokens for each in found] == [tokens for _, tokens in best]
