"""What compiled loops read and write: the memory of tensors as numpy's arrays."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:  # numpy is imported with numba, when something is computed
    Array = Any
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""What numba gets numbers as that it has no type for, see `vectors`."""


def own(tensor: Tensor) -> Array:
    """`as_array` of a tensor that no caller will resize, which takes less time."""
    bits = _BITS.get(tensor.dtype)
    array: Array = (tensor if bits is None else tensor.view(bits)).numpy()
    return array


def as_array(tensor: Tensor) -> Array:
    """A tensor's memory as numpy's, of bf16 and fp16 the bits, see `vectors`."""
    bits = _BITS.get(tensor.dtype)
    alias = from_dlpack(to_dlpack((tensor if bits is None else tensor.view(bits)).detach()))
    array: Array = alias.numpy()  # which forbids to resize the storage: FSDP resizes the tensor's
    return array
