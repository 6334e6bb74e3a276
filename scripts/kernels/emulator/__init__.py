"""Compiled Triton kernels on a CPU, with checks for races and memory errors: see ../README.md."""

from .access import Fault
from .execution import Emulator
from .ptx import Unsupported

__all__ = ["Emulator", "Fault", "Unsupported"]
