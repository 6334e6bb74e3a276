"""The ways in which the output layer computes, for its tests."""

from collections.abc import Iterator

import pytest

from lm.output import ClassTree
from lm.output.backends import BACKENDS, nodes
from lm.output.backends.reference import backend as reference
from lm.output.backends.triton.launch import instrumented

from .definition import SMALL_TILES, TREES


@pytest.fixture(params=["saved", "computed again", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What "auto" chooses: the reference backend with saved log-probabilities, or computing them
    again in blocks of few children; or the fused kernels, in tiles so small that a node has
    several.
    """
    kind = str(request.param)
    if kind == "computed again":
        monkeypatch.setattr(reference, "SAVED_ELEMENTS", 0)
        monkeypatch.setattr(reference, "SAVED_ELEMENTS_OF_ONE_NODE", 0)
        monkeypatch.setattr(nodes, "CAST_ELEMENTS", 37)
        monkeypatch.setattr(nodes, "BLOCK_ELEMENTS", 37)
    if kind != "triton":
        yield kind
        return
    pytest.importorskip("triton")
    monkeypatch.setattr(BACKENDS["triton"], "automatic_on", frozenset({"cpu"}))
    with instrumented(tiles=SMALL_TILES):
        yield kind


@pytest.fixture(params=TREES)
def tree(request: pytest.FixtureRequest) -> ClassTree:
    """Trees of all shapes over 23 words."""
    return TREES[request.param]
