"""The ways in which the output layer computes, for its tests."""

from collections.abc import Iterator

import pytest
import torch

from lm.output import ClassTree
from lm.output.backends import BACKENDS
from lm.output.backends.reference import forward, nodes
from lm.output.backends.triton.launch import instrumented

from .definition import SMALL_TILES, TWO_LEVEL, N

TREES = {
    "full": ClassTree.full(N),
    "two levels": TWO_LEVEL,
    "a class of one word": ClassTree.two_level((torch.arange(N) + 1) // N),
    "shortlist": ClassTree.two_level((torch.arange(N) * 7) % 5, 4),
    "balanced": ClassTree.balanced(N, 3),
    "huffman": ClassTree.huffman(torch.arange(N) + 1),
    "paths": ClassTree.from_paths([[w % 2, w % 3, 3 + w // 6] for w in range(N - 1)] + [[2]]),
}


@pytest.fixture(params=["saved", "computed again", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What "auto" chooses: the reference backend with saved log-probabilities, or computing them
    again in blocks of few children; or the fused kernels, in tiles so small that a node has
    several.
    """
    kind = str(request.param)
    if kind == "computed again":
        monkeypatch.setattr(forward, "SAVED_ELEMENTS", 0)
        monkeypatch.setattr(forward, "SAVED_ELEMENTS_OF_ONE_NODE", 0)
        monkeypatch.setattr(nodes, "CAST_ELEMENTS", 37)
        monkeypatch.setattr(nodes, "BLOCK_ELEMENTS", 37)
    if kind != "triton":
        yield kind
        return
    pytest.importorskip("triton")
    monkeypatch.setattr(BACKENDS["triton"], "automatic_on", None)
    with instrumented(tiles=SMALL_TILES):
        yield kind


@pytest.fixture(params=list(TREES.values()), ids=list(TREES))
def tree(request: pytest.FixtureRequest) -> ClassTree:
    """Trees of all shapes over 23 words."""
    assert isinstance(request.param, ClassTree)
    return request.param
