"""Triton kernels compiled for an architecture of NVIDIA GPUs, without a GPU."""

from typing import Any

import torch


class _Device:
    """The part of a driver of Triton that compiling needs: a device without hardware."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        """The architecture to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """A number; kernels are kept by it."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """A stream that nothing is launched on."""
        return 0


def compiled(kernel: Any, capability: int, *args: Any, **kwargs: Any) -> Any:
    """The compiled kernel of a launch; this process can launch no kernel on a GPU afterwards.

    Args:
        kernel: a function decorated with `triton.jit`.
        capability: compute capability x 10 of the architecture.
        args: arguments of the launch. Tensors may be anywhere; their memory is taken to be aligned
            to 16 bytes.
        kwargs: further arguments, and options of the compiler.
    """
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    def mocked(value: Any) -> Any:
        return MockTensor(value.dtype) if isinstance(value, torch.Tensor) else value

    driver.set_active(_Device(capability))
    named = {name: mocked(value) for name, value in kwargs.items()}
    return kernel.warmup(*map(mocked, args), grid=(1,), **named)
