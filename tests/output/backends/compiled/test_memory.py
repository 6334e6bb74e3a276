"""Gradients in mapped and in reused memory are zero where nothing was written."""

import mmap
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends.compiled import loops, memory

from ...definition import nll


def gradient(
    hidden: Tensor, weight: Tensor, target: Tensor, tree: ClassTree, backend: str
) -> Tensor:
    loss = nll([hidden, weight, target], tree, reduction="mean", backend=backend)
    return torch.autograd.grad(loss, weight)[0]


@pytest.mark.parametrize("sizes", [(400, 400), (400, 600, 400)])
@pytest.mark.parametrize("alive", [False, True])
def test_each_layer_of_a_process_reuses_its_gradients_memory(
    sizes: tuple[int, ...], alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step after the other, or with the gradients of all layers `alive` at the same time.

    They are zero where nothing was written; those of few rows are in fresh memory.
    """
    monkeypatch.setattr(memory, "LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(memory, "_free", [])
    trees = [ClassTree.two_level(torch.arange(size) // 20) for size in sizes]
    weights = [torch.randn(tree.num_rows, 80, requires_grad=True) for tree in trees]
    hidden, words = torch.randn(400, 80), torch.arange(400)
    mapped = Mock(side_effect=mmap.mmap)

    def train(target: Tensor) -> int:
        """The number of gradients in fresh memory."""
        mapped.reset_mock()
        grads = []
        for tree, weight in zip(trees, weights, strict=True):
            found = gradient(hidden, weight, target, tree, "compiled")
            expected = gradient(hidden, weight, target, tree, "reference")
            torch.testing.assert_close(found, expected)
            grads.append(found.fill_(torch.nan))
            del found
            if not alive:
                grads.clear()
        return mapped.call_count

    monkeypatch.setattr(mmap, "mmap", mapped)
    assert train(words) == (len(sizes) if alive else len(set(sizes)))
    assert train(words % 280) == 0
    assert train(words % 40) == len(sizes)
    monkeypatch.setattr(memory, "REUSED_BYTES", 200_000)
    train(words)
    assert sum(map(len, memory._free)) <= 200_000


def test_memory_that_a_thread_takes_while_other_is_given_back_is_not_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = list[mmap.mmap | None]()

    class Limit(int):
        def __lt__(self, _: int) -> bool:
            taken.append(memory._take(4096))  # as another thread, before the sizes are compared
            return False

    monkeypatch.setattr(memory, "REUSED_BYTES", Limit(1 << 20))
    monkeypatch.setattr(memory, "_free", [mmap.mmap(-1, 4096)])
    memory._give_back(mmap.mmap(-1, 4096))
    (kept,), (given,) = memory._free, taken
    assert kept is not given


@pytest.mark.parametrize(("dtype", "num_threads"), [(torch.float32, 2), (torch.bfloat16, 1)])
def test_zeros_of_a_large_gradient_are_written_past_the_caches(
    dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows that are no multiple of a line of a cache."""
    monkeypatch.setattr(memory, "_free", [])
    tree = ClassTree.two_level(torch.arange(40_000) // 173)
    weight = torch.randn(tree.num_rows, 77, dtype=dtype).requires_grad_()
    assert weight.numel() * weight.element_size() > loops.CACHE_BYTES
    hidden = torch.randn(120, 77, dtype=dtype)

    words = torch.arange(120)
    torch.set_num_threads(num_threads)
    first = gradient(hidden, weight, words * 333, tree, "compiled")
    place = first.data_ptr()
    first.fill_(torch.nan)
    del first
    for target in (39_999 - words * 200, words * 200, words * 331 + 400):
        found = gradient(hidden, weight, target, tree, "compiled")
        assert found.data_ptr() == place
        is_zero = gradient(hidden, weight, target, tree, "reference") == 0
        torch.testing.assert_close(found == 0, is_zero)
        assert bool(is_zero.any())
        found.fill_(torch.nan)
        del found
