"""Compiled loops find and draw what operations of PyTorch do, also in larger trees."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.decoding import compiled
from lm.output.decoding.positions import Positions
from lm.output.decoding.search import TopK

from .truth import Layer, Options, sample

WAYS: list[Options] = [
    {}, {"top_k": 30}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9},
    {"min_p": 0.1, "temperature": 1.5}, {"top_p": 0.9, "min_p": 0.01},
]  # fmt: skip
TREES = {
    "two_level": ClassTree.two_level(num_words=700),
    "shortlist": ClassTree.two_level(torch.arange(700) % 31, shortlist=90),
    "balanced": ClassTree.balanced(700, 3),
    "full": ClassTree.full(700),
}


def random_layer(shape: str) -> Layer:
    """Hidden vectors from flat to peaked."""
    tree = TREES[shape]
    hidden, weight = (torch.randn(num, 8, dtype=torch.float64) for num in (12, tree.num_rows))
    scale = torch.logspace(-1, 1, 12, dtype=torch.float64)[:, None]
    return scale * hidden, weight, tree, torch.zeros(tree.num_rows, dtype=torch.float64)


@pytest.mark.parametrize("_way", ["compiled"], indirect=True)
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("node_cost", [1, 1 << 40])
def test_draws_are_those_of_the_reference(
    shape: str, options: Options, node_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes are opened by probability or in the order of their rows."""
    monkeypatch.setattr(compiled, "NODE_COST", node_cost)
    layer = random_layer(shape)
    words = sample(*layer, seeds=torch.arange(12), **options)
    monkeypatch.setattr(compiled, "is_usable", lambda _: False)
    assert torch.equal(words, sample(*layer, seeds=torch.arange(12), **options))


@pytest.mark.parametrize("_way", ["compiled"], indirect=True)
def test_loops_that_are_wrong_are_replaced_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draw(positions: Positions, seeds: Tensor, power: float) -> Tensor:
        return torch.zeros_like(seeds)

    def find(positions: Positions, k: int) -> TopK:
        return TopK(torch.zeros(2, k), torch.arange(k).expand(2, -1))

    def fail(positions: Positions, k: int) -> TopK:
        raise OSError("no space left\non the disk")

    wrong: list[tuple[str, Any, str]] = [
        ("topk", find, "log-probabilities are off by"),
        ("draw_words", draw, r"\d+ of 16 words differ"),
        ("topk", fail, "OSError: no space left$"),
    ]
    layer, hidden = HierarchicalSoftmax(8, TREES["two_level"]), torch.ones(2, 8)
    try:
        for name, function, problem in wrong:
            compiled._verified.cache_clear()
            with monkeypatch.context() as patch:
                patch.setattr(compiled, name, function)
                with pytest.warns(UserWarning, match=f"slowly, .* compiled loops: {problem}"):
                    words = layer.topk(hidden, 9).word
                assert torch.equal(words, layer.topk(hidden, 9).word)
    finally:
        compiled._verified.cache_clear()
