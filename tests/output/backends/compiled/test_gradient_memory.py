"""Gradients in mapped and in reused memory are zero where nothing was written."""

import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends.compiled import gradient_memory as memory
from lm.output.backends.compiled import loops

from ...definition import definition


def dense_gradient(hidden: Tensor, weight: Tensor, target: Tensor, tree: ClassTree) -> Tensor:
    """The gradient of the mean loss, by its definition."""
    return torch.autograd.grad(definition(hidden, weight, None, target, tree).mean(), weight)[0]


def test_a_gradient_in_reused_memory_is_zero_where_nothing_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(memory, "_free", [])
    tree = ClassTree.two_level(torch.arange(400) // 20)
    hidden, weight = torch.randn(300, 80), torch.randn(tree.num_rows, 80, requires_grad=True)

    def gradient(target: Tensor) -> Tensor:
        nll = hierarchical_cross_entropy(hidden, weight, target, tree, backend="compiled")
        return torch.autograd.grad(nll, weight)[0]

    everywhere, nearly, seldom = (torch.arange(300) % size for size in (400, 280, 40))
    first = gradient(everywhere)
    place = first.data_ptr()
    first.fill_(torch.nan)
    other = gradient(nearly)  # while the first one lives
    assert other.data_ptr() != place
    del first
    reused = gradient(nearly)
    assert reused.data_ptr() == place
    torch.testing.assert_close(reused, dense_gradient(hidden, weight, nearly, tree))
    torch.testing.assert_close(other, reused)
    del reused
    fresh = gradient(seldom)  # few of its rows are written
    assert fresh.data_ptr() != place
    torch.testing.assert_close(fresh, dense_gradient(hidden, weight, seldom, tree))
    assert len(memory._free) == 1


@pytest.mark.parametrize("sizes", [(400, 400), (400, 600, 400)])
@pytest.mark.parametrize("alive", [False, True])
def test_each_layer_of_a_process_reuses_its_gradients_memory(
    sizes: tuple[int, ...], alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step after the other, or with the gradients of all layers `alive` at the same time."""
    monkeypatch.setattr(memory, "LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(memory, "_free", [])
    trees = [ClassTree.two_level(torch.arange(size) // 20) for size in sizes]
    weights = [torch.randn(tree.num_rows, 80, requires_grad=True) for tree in trees]
    hidden, target = torch.randn(400, 80), torch.arange(400)

    num_mapped, real = 0, mmap.mmap

    def counted(*arguments: Any, **options: Any) -> mmap.mmap:
        nonlocal num_mapped
        num_mapped += 1
        return real(*arguments, **options)

    def train() -> None:
        grads = []
        for tree, weight in zip(trees, weights, strict=True):
            loss = hierarchical_cross_entropy(hidden, weight, target, tree, backend="compiled")
            grads.append(torch.autograd.grad(loss, weight)[0])
            if not alive:
                grads.clear()

    monkeypatch.setattr(mmap, "mmap", counted)
    train()
    assert num_mapped == (len(sizes) if alive else len(set(sizes)))
    train()
    assert num_mapped == (len(sizes) if alive else len(set(sizes)))
    monkeypatch.setattr(memory, "REUSED_BYTES", 200_000)
    train()
    assert sum(map(len, memory._free)) <= 200_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_zeros_of_a_large_gradient_are_written_past_the_caches(
    dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows that are no multiple of a line of a cache."""
    monkeypatch.setattr(memory, "_free", [])
    tree = ClassTree.two_level(torch.arange(40_000) // 173)
    weight = torch.randn(tree.num_rows, 77, dtype=dtype).requires_grad_()
    assert weight.numel() * weight.element_size() > loops.CACHE_BYTES
    hidden = torch.randn(120, 77, dtype=dtype)

    def gradient(target: Tensor, backend: Any) -> Tensor:
        nll = hierarchical_cross_entropy(hidden, weight, target, tree, backend=backend)
        return torch.autograd.grad(nll, weight)[0]

    words, before = torch.arange(120), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        first = gradient(words * 333, "compiled")
        place = first.data_ptr()
        first.fill_(torch.nan)
        del first
        for target in (39_999 - words * 200, words * 200, words * 331 + 400):
            found = gradient(target, "compiled")
            assert found.data_ptr() == place
            is_zero = gradient(target, "reference") == 0
            torch.testing.assert_close(found == 0, is_zero)
            assert bool(is_zero.any())
            found.fill_(torch.nan)
            del found
    finally:
        torch.set_num_threads(before)
