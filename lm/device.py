"""Where a model computes: devices, CPU threads, and the memory available there."""

import ctypes
import logging
import os
from pathlib import Path
from typing import SupportsIndex

import torch

from data_prep.errors import UserError

PROC = Path("/proc")
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Memory of cgroups 2 and 1: files of limit and usage, and which usage is released on demand."""
GPU_SHARE = 0.8
"""Part of a GPU's free memory that the weights of a model may take; states and batches follow."""
KEPT_BYTES = 1 << 30
"""Most memory at the end of its heap that training keeps when it is freed."""
RETURNED_BYTES = 6 << 20
"""Size from which on blocks are returned that scoring frees."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Parameters of mallopt, from glibc's malloc.h."""
_log = logging.getLogger(__name__)


def choose_device(name: str, num_bytes: int) -> torch.device:
    """The device for a model whose weights have `num_bytes`.

    Args:
        name: `auto`, `cpu` or `cuda[:N]`; auto is the GPU with the most free memory if the model
            fits there, else the CPU.
        num_bytes: of the weights.

    Raises:
        UserError: if there is no such device.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(num_gpus)]
        if not free or num_bytes > GPU_SHARE * max(free):
            return torch.device("cpu")
        return torch.device("cuda", free.index(max(free)))
    kind, _, index = name.partition(":")
    if name != "cpu" and not (kind == "cuda" and (index.isdecimal() or name == "cuda")):
        raise UserError(f"device: expected auto, cpu or cuda[:N], got {name!r}")
    if kind == "cuda" and int(index or 0) >= num_gpus:
        raise UserError(f"device: {name} does not exist, there are {num_gpus} CUDA devices")
    return torch.device(name)


def set_num_threads(num_threads: int | None) -> None:
    """Set torch's CPU threads, at most one for each processor; None leaves torch's choice."""
    if num_threads is None:
        return
    if not isinstance(num_threads, SupportsIndex) or num_threads < 1:
        raise ValueError(f"threads must be an integer ≥ 1, got {num_threads!r}")
    has_affinity = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    if num_threads > processors:
        _log.warning("%d threads on %d processors: using %d", num_threads, processors, processors)
    torch.set_num_threads(min(num_threads, processors))


def keep_freed_memory() -> None:
    """Let this process keep memory that it frees for its next allocations, up to `KEPT_BYTES`.

    By default, glibc maps large blocks and unmaps them when they are freed, so that the system
    clears them again page by page: a tenth of the time of a training step. Without glibc, or where
    the user has set one of its variables MALLOC_…_, this does nothing.
    """
    # No block is a mapping of its own.
    _set_malloc({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: KEPT_BYTES})


def return_freed_memory() -> None:
    """Let this process return large blocks, from `RETURNED_BYTES` on, when it frees them.

    By default, glibc does so up to the first one that is freed, and then keeps blocks of that size:
    between batches of many sizes, gaps remain, 3 % of the memory of `lm score`. See
    `keep_freed_memory` for where this does nothing.
    """
    _set_malloc({M_MMAP_THRESHOLD: RETURNED_BYTES})


def _set_malloc(settings: dict[int, int]) -> None:
    """Set parameters of glibc's malloc, unless the user has set some or there is no glibc."""
    is_set = any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version") and not is_set:
        for setting in settings.items():
            library.mallopt(*setting)


def available_bytes(device: torch.device) -> int | None:
    """Memory that this process can have on a device; None where it is unknown.

    On a GPU it is the free memory. On a CPU it is what Linux can provide without swapping, within
    the limit of the cgroup, and what this process has already.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not (PROC / "meminfo").exists():
        return None
    resident = int((PROC / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    free = _read_fields(PROC / "meminfo")["MemAvailable:"] * 1024
    for limit_file, usage_file, reclaimable in CGROUPS:
        path = Path(limit_file)
        limit = path.read_text().strip() if path.exists() else "max"
        if limit.isdigit():
            usage = int(path.with_name(usage_file).read_text())
            usage -= _read_fields(path.with_name("memory.stat")).get(reclaimable, 0)
            free = min(free, int(limit) - usage)
    return max(free, 0) + resident


def _read_fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines `name number …`."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {line[0]: int(line[1]) for line in lines}
