"""Compiled code is loaded once it saves the time that this takes."""

import subprocess
import sys

import pytest
import torch

from lm.output import HierarchicalSoftmax
from lm.output.backends import BACKENDS, verify
from lm.output.backends.compiled import backend
from lm.output.backends.compiled.backend import CompiledBackend
from lm.output.decoding import compiled
from lm.output.decoding.expansion import Expander

from ...definition import two_level

FEW_POSITIONS = """
import sys, torch
from lm.output import ClassTree, HierarchicalSoftmax
layer = HierarchicalSoftmax(16, ClassTree.two_level(num_words=900))
hidden, target = torch.randn(300, 16), torch.arange(300)
layer.nll_by_level(hidden, target)
with torch.no_grad():
    layer.loss(hidden, target)
layer.sample(hidden), layer.topk(hidden, 3), layer.sample(hidden, top_p=0.9)
assert "numba" not in sys.modules
layer.loss(hidden, target)
assert "numba" in sys.modules
"""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has computed nothing."""
    monkeypatch.setattr(verify, "_differences", {})
    monkeypatch.setitem(BACKENDS, "compiled", CompiledBackend())
    monkeypatch.setattr(compiled, "_seconds_so_far", {"search": 0.0, "draws": 0.0})
    monkeypatch.setattr(compiled, "FREE_SECONDS", 1.0)  # benchmarks set it


def test_few_positions_without_gradient_load_nothing() -> None:
    subprocess.run([sys.executable, "-c", FEW_POSITIONS], check=True)


@pytest.mark.usefixtures("fresh")
def test_without_gradient_it_is_loaded_after_many_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = two_level(90, 9)
    layer, hidden = HierarchicalSoftmax(8, tree), torch.randn(10, 8)
    monkeypatch.setattr(backend, "FREE_COLUMNS", 3 * 10 * tree.max_path_columns)
    losses = []
    for is_loaded in (False, False, False, True):
        losses.append(layer.nll_by_level(hidden, torch.arange(10)).sum())
        assert verify.was_verified("compiled") == is_loaded
    torch.testing.assert_close(losses[0].expand(4), torch.stack(losses))


@pytest.mark.usefixtures("fresh")
def test_with_gradient_it_is_loaded_at_once() -> None:
    layer = HierarchicalSoftmax(8, two_level(90, 9))
    assert layer.loss(torch.randn(10, 8), torch.arange(10)).requires_grad
    assert verify.was_verified("compiled")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("way", ["search", "draws"])
def test_loops_of_decoding_are_loaded_after_many_positions(way: str) -> None:
    tree = two_level(2000, 40)
    expander = Expander(torch.randn(100, 8), torch.randn(tree.num_rows, 8), tree, None)
    usable = [compiled.is_usable(expander, way) for _ in range(20)]  # type: ignore[arg-type]
    seconds = {"search": 5e-7 * tree.num_rows, "draws": 1.5e-3}[way] * 100
    assert usable.index(True) == int(1 / seconds)
    assert all(usable[usable.index(True) :])
