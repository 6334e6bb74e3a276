"""Compiled loops find and draw what operations of PyTorch do, also in larger trees."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.decoding import compiled
from lm.output.decoding.expansion import Expander

from .truth import Options

PREVIOUS = torch.tensor([[4, 17, 4, -1]])
WAYS: list[Options] = [
    {}, {"temperature": 0.6}, {"temperature": 1.6}, {"excluded": [0, 699]}, {"top_k": 30},
    {"top_p": 0.9}, {"repetition_penalty": 1.3, "previous": PREVIOUS}, {"min_p": 0.1},
    {"top_p": 0.9, "temperature": 0.7}, {"top_p": 0.7, "temperature": 1.5}, {"top_p": 0.999999},
    {"min_p": 0.1, "temperature": 1.5}, {"top_p": 0.6, "temperature": 0.4, "excluded": [5, 9]},
    {"top_p": 0.3}, {"top_p": 0.9, "min_p": 0.01}, {"top_p": 0.5, "excluded": [7, 7, *range(99)]},
    {"top_p": 0.8, "repetition_penalty": 1.3, "previous": PREVIOUS, "excluded": [5]},
]  # fmt: skip
TREES = {
    "two_level": ClassTree.two_level(num_words=700),
    "shortlist": ClassTree.two_level(torch.arange(700) % 31, shortlist=90),
    "balanced": ClassTree.balanced(700, 3),
    "full": ClassTree.full(700),
}


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("node_cost", [1, 1 << 40])
def test_draws_are_those_of_the_reference(
    shape: str, options: Options, node_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp64, flat and peaked; nodes are opened by probability or in the order of their rows."""
    monkeypatch.setattr(compiled, "NODE_COST", node_cost)
    layer = HierarchicalSoftmax(8, TREES[shape]).double()
    layer.weight.detach().normal_()
    scale = torch.logspace(-1, 1, 12, dtype=torch.float64)[:, None]
    hidden = scale * torch.randn(12, 8, dtype=torch.float64)
    if "previous" in options:
        options = options | {"previous": options["previous"].expand(12, -1)}
    words = layer.sample(hidden, seeds=torch.arange(12), **options)
    monkeypatch.setattr(compiled, "is_usable", lambda *arguments, **options: False)
    assert torch.equal(words, layer.sample(hidden, seeds=torch.arange(12), **options))


def test_many_ties_are_in_the_order_of_words() -> None:
    tree = ClassTree.two_level(torch.arange(600).flip(0) % 20)
    hidden, weight = torch.ones(1, 4), torch.zeros(tree.num_rows, 4)
    weight[tree.row_of_word[300:]] = 1.0
    layer = HierarchicalSoftmax(4, tree)
    layer.weight.detach()[:, :4] = weight
    best = layer.topk(hidden, 600).word[0]
    assert best.tolist() == [*range(300, 600), *range(300)]


@pytest.mark.parametrize("_way", ["compiled"], indirect=True)
def test_loops_that_are_wrong_are_replaced_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draw(expander: Expander, seeds: Tensor, power: float) -> Tensor:
        return torch.zeros_like(seeds)

    monkeypatch.setattr(compiled, "sets", lambda *arguments: iter([WRONG]))
    monkeypatch.setattr(compiled, "draw_words", draw)
    compiled._verified.cache_clear()
    layer, hidden = HierarchicalSoftmax(8, TREES["two_level"]), torch.ones(2, 8)
    ways: dict[str, Callable[[], Tensor]] = {
        "are off by": lambda: layer.topk(hidden, 9).word,
        "of 16 words differ": lambda: layer.sample(hidden, seeds=torch.arange(2)),
    }
    try:
        for problem, find in ways.items():
            with pytest.warns(UserWarning, match=f"drawn slowly, .* compiled loops: .* {problem}"):
                words = find()
            assert torch.equal(words, find())
    finally:
        compiled._verified.cache_clear()


WRONG = (torch.arange(2), torch.zeros(2, 300), torch.arange(300).expand(2, -1), torch.arange(0))
