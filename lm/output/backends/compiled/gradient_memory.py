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
_MAPPING: dict[str, Any] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
)
"""Private pages where the system has them: touching one first is cheaper than a shared one."""

_free: list[mmap.mmap] = []
"""Memory of gradients that no longer exist, the oldest first: one for each layer of a model."""


def zeros_except(num_rows: int, like: Tensor, zero: Callable[[Tensor], None]) -> Tensor:
    """A gradient like `like` [R, …] that is zero outside of `num_rows` rows that the caller writes.

    `zero` is called with it to set the other rows if its memory may have other numbers. It is no
    view, whose base would be a second owner: autograd adds others to it in place.
    """
    num_bytes = like.numel() * like.element_size()
    if num_bytes < LARGE_BYTES:
        out = torch.empty(like.shape, dtype=like.dtype)
        zero(out)
        return out
    is_rare = num_rows < REUSED_SHARE * len(like) or num_bytes > REUSED_BYTES
    used = None if is_rare else _take(num_bytes)
    memory = mmap.mmap(-1, num_bytes, **_MAPPING) if used is None else used
    lease = (ctypes.c_char * num_bytes).from_buffer(memory)
    if not is_rare:
        weakref.finalize(lease, _give_back, memory).atexit = False
    out = torch.frombuffer(lease, dtype=like.dtype).resize_(like.shape)
    if used is not None:
        zero(out)
    return out


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
