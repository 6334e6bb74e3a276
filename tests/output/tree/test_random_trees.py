"""Laws of the output layer for random trees of any depth."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.output import ClassTree
from lm.output.decoding.distribution import candidate_log_prob, log_prob, topk

from ..decoding.truth import draw_many, word_log_prob
from ..definition import problem
from ..laws import Case, Way, equals_the_definition, problem_of

Law = Callable[[ClassTree], None]
few_and_many = pytest.mark.parametrize("examples", [4, pytest.param(200, marks=pytest.mark.long)])


@st.composite
def trees(draw: st.DrawFn) -> ClassTree:
    """Trees of 1 to 12 words and up to 5 levels of classes; words and classes share parents."""
    num_words = draw(st.integers(1, 12))
    label = st.lists(st.integers(-1, 2), min_size=num_words, max_size=num_words)
    levels = draw(st.lists(label, min_size=1, max_size=5))
    for above, below in pairwise(levels):
        below[:] = [b if a >= 0 else -1 for a, b in zip(above, below, strict=True)]
    return ClassTree.from_levels(levels, draw(st.integers(0, min(2, num_words))))


def holds(law: Law, examples: int) -> None:
    """Check a law for random trees."""

    @settings(max_examples=examples)
    @given(trees())
    def check(tree: ClassTree) -> None:
        torch.manual_seed(0)
        law(tree)

    check()


def distribution_law(tree: ClassTree) -> None:
    hidden, weight, bias, _ = (tensor.detach() for tensor in problem(tree, 3))
    layer = hidden, weight, tree, bias
    expected = word_log_prob(*layer)
    assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
    assert_close(expected.exp().sum(1), torch.ones(3, dtype=torch.float64))
    assert_close(log_prob(hidden, weight, tree, bias), expected)
    words = torch.arange(tree.vocab_size).flip(0).expand(3, -1)
    found = candidate_log_prob(hidden, weight, words, tree, bias)
    assert_close(found, expected.flip(1))
    best = topk(*layer, k=tree.vocab_size)
    ordered = expected.sort(dim=1, descending=True, stable=True)
    assert torch.equal(best.word, ordered.indices)
    share = torch.stack([row.bincount(minlength=tree.vocab_size) for row in draw_many(layer, 400)])
    deviation = (share / 400 - expected.exp()) / (expected.exp() / 400).sqrt().clamp(min=1e-3)
    assert float(deviation.abs().max()) < 6


@few_and_many
@pytest.mark.parametrize("form", ["dense", "row-wise"])
@pytest.mark.parametrize("backend", ["reference", "compiled"])
def test_loss_and_gradients_are_those_of_the_definition(
    backend: str, form: str, examples: int
) -> None:
    def law(tree: ClassTree) -> None:
        equals_the_definition(Way(backend, form), case := Case(tree, 5), *problem_of(case))

    holds(law, examples)


@few_and_many
def test_decoding_is_exact(examples: int) -> None:
    """All words sum to 1; candidates, top-k; draws are as frequent as they are probable."""
    holds(distribution_law, examples)
