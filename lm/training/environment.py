"""The computer that a run is trained on: speed and the last digits of all figures depend on it."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import lm
from lm.device import read_fields

CPUINFO, STATUS = Path("/proc/cpuinfo"), Path("/proc/self/status")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instruction sets that decide how fast matrices are multiplied, and whether bf16 pays."""


def describe_environment() -> dict[str, str | int | None]:
    """Versions of the libraries, processor, threads and GPU, as written to `env.json`."""
    return {
        "sqrtlm": lm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": processor_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def process_bytes(field: str) -> int:
    """Bytes of this process that Linux reports: VmRSS now, VmHWM at most so far; 0 elsewhere."""
    return 1024 * int(read_fields(STATUS).get(field, "0 kB").split()[0])


def peak_memory() -> str | None:
    """The most memory that this process has held, and its tensors on a GPU; None if not known."""
    if not (peak := process_bytes("VmHWM")):
        return None
    text = f"{peak / 1e6:,.0f} MB"
    if torch.cuda.is_available() and (of_gpu := torch.cuda.max_memory_allocated()):
        text += f", {of_gpu / 1e6:,.0f} MB on the GPU"
    return text


def processor_name() -> str:
    """The model of the processor and those of `INSTRUCTIONS` that it has, separated by commas."""
    fields = read_fields(CPUINFO)
    model = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", "").split()
    return ", ".join([model, *(name for name in INSTRUCTIONS if name in flags)])
