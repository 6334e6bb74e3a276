"""Which bytes of tensors have been written, in torch operations and emulated launches."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .access import Array, Fault
from .global_memory import SPACING
from .ptx import Unsupported

EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
"""Operations whose results have no values."""

LARGE = 1 << 30
"""Bytes beyond which a tensor is taken to be rows with gaps."""


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, follows which memory has been allocated and not written.

    Tensors are kept, so that their memory is not used again.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written: dict[int, Array] = {}  # by address of a storage that began without values
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute an operation, and note what it allocates, reads or writes."""
        kwargs = kwargs or {}
        arguments = {argument.name: argument for argument in func._schema.arguments}
        given = dict(zip(arguments, args, strict=False)) | kwargs
        tensors = [(arguments[n], v) for n, v in given.items() if isinstance(v, Tensor)]
        name = func.overloadpacket.__name__
        allocates = name in EMPTY
        of_sizes = name.endswith("_like") or name.startswith("new_")  # values are not read
        for argument, tensor in tensors:
            if not of_sizes and argument.alias_info is None and self.unwritten_elements(tensor):
                raise Fault(f"{func} reads memory that nobody wrote")
        result = func(*args, **kwargs)
        self._kept.append(result)
        if allocates:
            storage = result.untyped_storage()
            self._written[storage.data_ptr()] = np.zeros(storage.nbytes(), np.bool_)
        for argument, tensor in tensors:
            if argument.is_write:
                self.written(tensor)[:] = True
        return result

    def written(self, tensor: Tensor) -> Array:
        """Which bytes from the first to the last element have values, to read or change."""
        begin, end = extent(tensor)
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self._written:
            return np.ones(end - begin, np.bool_)
        return self._written[storage][begin - storage : end - storage]

    def unwritten_elements(self, tensor: Tensor) -> int:
        """How many elements of a tensor have no values."""
        if type(tensor) is not Tensor or tensor.untyped_storage().data_ptr() not in self._written:
            return 0
        written = torch.from_numpy(self.written(tensor).copy()).view(-1, tensor.element_size())
        return int((~written.all(1)).as_strided(tensor.shape, tensor.stride()).sum())


def extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte, and of that behind the last one."""
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = tensor.data_ptr()
    return begin, begin + (span * tensor.element_size() if tensor.numel() else 0)


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, or its rows if they are far apart: the memory between them is not looked at."""
    begin, end = extent(tensor)
    if end - begin <= LARGE:
        yield tensor
        return
    axis = int(np.argmax(tensor.stride()))
    rows = tensor.unbind(axis)
    row_begin, row_end = extent(rows[0])
    if row_end - row_begin > tensor.stride(axis) * tensor.element_size() or end - begin > SPACING:
        raise Unsupported(f"a tensor of {end - begin} bytes")
    for row in rows:
        yield from parts(row)


def raw_bytes(tensor: Tensor) -> Array:
    """The bytes from the first to the last element, to read or change."""
    begin, end = extent(tensor)
    span = (end - begin) // tensor.element_size()
    flat = torch.as_strided(tensor.detach(), (span,), (1,))
    return np.asarray(flat.view(torch.uint8).numpy())
