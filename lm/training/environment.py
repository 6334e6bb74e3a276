"""What a training ran on, for its logs: its speed and the last digits of all else depend on it."""

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Those that decide how fast matrices are multiplied, and whether bf16 pays."""


def processor_name() -> str:
    """The processor's model and its `INSTRUCTIONS`, as far as the system tells."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    fields = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    model = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", "").split()
    return ", ".join([model, *(name for name in INSTRUCTIONS if name in flags)])
