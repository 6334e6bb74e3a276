"""Memory of the compiled backend: arrays of tensors, what a forward saves, and gradients.

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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from lm.output.backends.base import Needs, Problem
from lm.output.inputs import compute_dtype

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:  # numpy is imported with numba, when something is computed
    Array = Any
ALIGN = 32
"""Hidden vectors are followed by zeros up to a multiple of this many numbers."""
SAVED_ELEMENTS = 1 << 26
"""Most errors saved: 256 MB in fp32; for row-wise gradients of classes, whose factors they are, as
many as there are."""
SAVED_ELEMENTS_OF_ONE_NODE = 1 << 20
"""Most errors saved of a tree of one node, the full softmax."""
FULL_SAVED_ELEMENTS = 1 << 28
"""Most errors saved of a full softmax whose products are of bf16 numbers: 1 GB, a third
of what PyTorch's `cross_entropy` of as many logits takes. It takes half to two thirds of the time
of computing logits again in PyTorch's products."""
LARGE_BYTES = 1 << 20
"""From this size on a gradient is mapped; malloc reuses smaller blocks."""
REUSED_BYTES = 1 << 31
"""Most memory that is held for the next gradients."""
REUSED_SHARE = 0.25
"""Least share of written rows; gradients with a smaller one are freshly mapped."""
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""Integers as which numba gets bf16 and fp16, for which it has no type, see `vectors`."""
_MAPPING: dict[str, Any] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
)
"""Private pages where the system has them: touching one first is cheaper than a shared one."""

_free: list[mmap.mmap] = []
"""Memory of gradients that no longer exist, the oldest first: one for each layer of a model."""


def own(tensor: Tensor) -> Array:
    """Faster `as_array`, for tensors that this package alone holds."""
    bits = _BITS.get(tensor.dtype)
    array: Array = (tensor if bits is None else tensor.view(bits)).numpy()
    return array


def as_array(tensor: Tensor) -> Array:
    """A tensor's memory as numpy's, of bf16 and fp16 the bits, see `vectors`."""
    alias = from_dlpack(to_dlpack(tensor.detach()))
    return own(alias)  # numpy forbids to resize the storage: FSDP resizes the tensor's


class Saved(NamedTuple):
    """What the forward saves, by sorted position; without elements if it is not needed."""

    position: Tensor  # [P], node and child [D, P]: see `Visits`
    node: Tensor
    child: Tensor
    error: Tensor  # [P · max_path_columns], (4) of all visits, node by node; the rest undefined
    d_hidden_unscaled: Tensor  # [P, W], Σ W_nᵀ e_v of (5)
    hidden: Tensor  # [P, …], where they are read again


def saves_errors(problem: Problem, needs: Needs) -> bool:
    """Whether compiled loops, which save the errors, compute the softmaxes, rather than PyTorch."""
    if problem.shard is not None:
        return False
    if problem.depth > 1:
        return needs.row_wise or problem.num_columns <= SAVED_ELEMENTS
    is_bf16 = multiplies_bf16(problem)
    return problem.num_columns <= (FULL_SAVED_ELEMENTS if is_bf16 else SAVED_ELEMENTS_OF_ONE_NODE)


def new_saved(problem: Problem, needs: Needs) -> Saved:
    """Memory for what is saved."""
    num, depth, dtype = problem.num_positions, problem.depth, compute_dtype(problem.hidden.dtype)
    is_read = (needs.weight or needs.bias) and multiplies_bf16(problem)
    none = problem.hidden.new_empty(0, dtype=dtype)
    new, shapes = problem.hidden.new_empty, ((num,), (depth, num), (depth, num))
    position, node, child = (new(shape, dtype=torch.int64) for shape in shapes)
    return Saved(
        position,
        node,
        child,
        error=none.new_empty(problem.num_columns if needs.any else 0),
        d_hidden_unscaled=none.new_empty(num if needs.hidden else 0, problem.weight.shape[1]),
        hidden=new_sorted(problem, torch.bfloat16) if is_read else none,
    )


def new_sorted(problem: Problem, dtype: torch.dtype) -> Tensor:
    """Memory for the hidden vectors of the sorted positions.

    [P, W up to a multiple of `ALIGN`], so that each begins a line of a cache.
    """
    size = -(-problem.weight.shape[1] // ALIGN) * ALIGN
    return problem.hidden.new_empty(problem.num_positions, size, dtype=dtype)


def multiplies_bf16(problem: Problem) -> bool:
    """Whether the processor multiplies bf16 numbers, and hidden vectors have them.

    Rows in fp32 are then rounded, as autocast rounds those of a linear layer.
    """
    if problem.hidden.dtype != torch.bfloat16:
        return False
    from lm.output.codegen import vectors

    return vectors.HAS_BF16 and problem.weight.dtype in (torch.bfloat16, torch.float32)


def zeros_except(num_rows: int, like: Tensor, zero: Callable[[Tensor], None]) -> Tensor:
    """A gradient like `like` [R, …] that is zero outside of `num_rows` rows that the caller writes.

    `zero` is called with it to set the other rows if its memory may have other numbers. It is no
    view, whose base would be a second owner: autograd adds others to it in place.
    """
    num_bytes = like.numel() * like.element_size()
    if num_bytes < LARGE_BYTES:
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
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
    _free.append(memory)  # the list is never replaced: other threads take from it
    while sum(map(len, tuple(_free))) > REUSED_BYTES:
        with suppress(IndexError):
            _free.pop(0)
