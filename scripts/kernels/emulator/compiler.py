"""Triton kernels compiled for an architecture of NVIDIA GPUs, without a GPU."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch


def compiled(kernel: Any, capability: int, *args: Any, **kwargs: Any) -> Any:
    """The compiled kernel of a launch; this process can launch no kernel on a GPU afterwards.

    Args:
        kernel: a function decorated with `triton.jit`.
        capability: compute capability x 10 of the architecture.
        args: arguments of the launch. Tensors may be anywhere; their memory is taken to be aligned
            to 16 bytes.
        kwargs: further arguments, and options of the compiler.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    def mocked(value: Any) -> Any:
        if isinstance(value, tuple) and any(isinstance(each, torch.Tensor) for each in value):
            return rebuilt(value, map(mocked, value))
        return MockTensor(value.dtype) if isinstance(value, torch.Tensor) else value

    device = SimpleNamespace(  # the part of a driver of Triton that compiling needs
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,  # a number by which kernels are kept
        get_current_stream=lambda device: 0,
    )
    driver.set_active(device)
    named = {name: mocked(value) for name, value in kwargs.items()}
    return kernel.warmup(*map(mocked, args), grid=(1,), **named)


def rebuilt(group: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """A tuple or NamedTuple with other values."""
    return type(group)(*values) if hasattr(group, "_fields") else tuple(values)
