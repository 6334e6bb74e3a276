"""Memory for gradients on a CPU that is zero outside of written rows, without writing the zeros.

Touching a page of memory for the first time costs the system more than the arithmetic on it. So a
large gradient with few written rows is freshly mapped memory, whose other pages are never touched;
and one with many written rows reuses the memory of an earlier gradient that no longer exists, of
which only the rows in between are zeroed.
"""

import ctypes
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

LARGE_BYTES = 1 << 20
"""From this size on a gradient is mapped; malloc reuses smaller blocks."""
REUSED_BYTES = 1 << 31
"""Most memory that is held for the next gradients."""
REUSED_SHARE = 0.25
"""Least share of written rows; gradients with a smaller one are freshly mapped."""
ROWS_PER_CALL = 16
"""The time of a call of PyTorch, as a number of rows set to zero."""
_MAPPING: dict[str, Any] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
)
"""Private pages where the system has them: touching one first is cheaper than a shared one."""

_free: list[mmap.mmap] = []
"""Memory of gradients that no longer exist, the oldest first: one for each layer of a model."""


def zero_between(out: Tensor, first: Tensor, num: Tensor) -> None:
    """Set the rows of `out` [R, …] to zero that `zeros_except` is not to leave to its caller."""
    begin = torch.cat([first.new_zeros(1), first + num])
    end = torch.cat([first, first.new_full((1,), len(out))])
    is_gap = begin < end
    if int(is_gap.sum()) * ROWS_PER_CALL > len(out):  # many small gaps, as of a deep, narrow tree
        out.zero_()
        return
    for rows in zip(begin[is_gap].tolist(), end[is_gap].tolist(), strict=True):
        out[slice(*rows)] = 0


def zeros_except(
    first: Tensor,
    num: Tensor,
    like: Tensor,
    zero: Callable[[Tensor, Tensor, Tensor], None] = zero_between,
) -> Tensor:
    """A gradient like `like` [R, …] that is zero outside of the rows that the caller fills in.

    These are `num` [n] rows from `first` [n] on, intervals that are ascending and disjoint. The
    gradient is no view, whose base would be a second owner: autograd adds others to it in place.
    `zero` is called with it, `first` and `num` if its memory may have other numbers.
    """
    num_bytes, dtype = like.numel() * like.element_size(), like.dtype
    if like.device.type != "cpu" or num_bytes < LARGE_BYTES:
        out = torch.empty(like.shape, dtype=dtype, device=like.device)
        zero(out, first, num)
        return out
    share = int(num.sum()) / like.shape[0]
    if is_mapped(num_bytes, share):
        fresh = mmap.mmap(-1, num_bytes, **_MAPPING)
        return torch.frombuffer(fresh, dtype=dtype).resize_(like.shape)
    memory = _take(num_bytes)
    is_used = memory is not None
    if memory is None:
        memory = mmap.mmap(-1, num_bytes, **_MAPPING)
    lease = (ctypes.c_char * num_bytes).from_buffer(memory)
    weakref.finalize(lease, _give_back, memory).atexit = False
    out = torch.frombuffer(lease, dtype=dtype).resize_(like.shape)
    if is_used:
        zero(out, first, num)
    return out


def is_mapped(num_bytes: float, share: float) -> bool:
    """Whether a gradient of such a size and share of written rows is freshly mapped memory."""
    is_rare = share < REUSED_SHARE or num_bytes > REUSED_BYTES
    return num_bytes >= LARGE_BYTES and is_rare


def _take(num_bytes: int) -> mmap.mmap | None:
    """Held memory of this size, the newest, if there is any; another thread may take it first."""
    for memory in reversed(tuple(_free)):
        if len(memory) == num_bytes:
            with suppress(ValueError):
                _free.remove(memory)
                return memory
    return None


def _give_back(memory: mmap.mmap) -> None:
    kept = [*_free, memory]
    while sum(map(len, kept)) > REUSED_BYTES:
        del kept[0]
    _free[:] = kept
