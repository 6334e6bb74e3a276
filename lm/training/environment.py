"""The computer that a run is trained on: speed and the last digits of all figures depend on it."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

import lm

CPUINFO = Path("/proc/cpuinfo")
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


def processor_name() -> str:
    """The model of the processor and those of `INSTRUCTIONS` that it has, separated by commas."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    pairs = [line.partition(":") for line in lines]
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    model = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", "").split()
    return ", ".join([model, *(name for name in INSTRUCTIONS if name in flags)])
