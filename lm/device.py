"""Where a model computes: devices, processors, CPU threads, and the memory there."""

import ctypes
import logging
import os
import platform
from pathlib import Path
from typing import NamedTuple

import torch

from data_prep.errors import UserError

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Memory of cgroups 2 and 1: files of limit and usage, and which usage is released on demand."""
GPU_SHARE = 0.8
"""Part of a GPU's free memory that the weights of a model may take; states and batches follow."""
KEPT_BYTES = 1 << 30
"""Most memory at the end of its heap that training keeps when it is freed."""
RETURNED_BYTES = 6 << 20
"""Size from which on blocks are returned that scoring frees."""
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instruction sets that decide how fast matrices are multiplied, and whether bf16 pays."""
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
    return torch.device(kind, int(index)) if index else torch.device(kind)


class Launch(NamedTuple):
    """Processes of a run that a launcher has started."""

    launcher: str
    per_machine: int
    machines: int
    rank: int  # of this process


def launch() -> Launch | None:
    """What torchrun or SLURM's srun has started this process with; None without either.

    The script of a SLURM job and its only task are processes as any other.

    Raises:
        UserError: if the machines have different numbers of processes.
    """
    given = os.environ
    if given.keys() >= {"TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"}:
        name = "torchrun"
        numbers = "WORLD_SIZE", "GROUP_WORLD_SIZE", "RANK"
    elif given.keys() >= {"SLURM_NTASKS", "SLURM_PROCID"}:
        name = "SLURM"
        numbers = "SLURM_NTASKS", "SLURM_NNODES", "SLURM_PROCID"
        is_script = "SLURM_STEP_ID" not in given and given.get("ENVIRONMENT") == "BATCH"
        is_shell = given.get("SLURM_JOB_NAME") in ("bash", "interactive")
        if is_script or is_shell or given["SLURM_NTASKS"] == "1":
            return None
    else:
        return None
    processes, machines, rank = (int(given.get(each, "1")) for each in numbers)
    if processes % machines:
        problem = f"{name} has started {processes} processes on {machines} machines"
        raise UserError(f"{problem}: expected the same number on each")
    return Launch(name, processes // machines, machines, rank)


def set_num_threads(num_threads: int | None, num_processes: int = 1) -> None:
    """Set torch's CPU threads, at most one for each processor.

    Args:
        num_threads: of this process; None leaves torch's choice, within the share of a process.
        num_processes: processes that share the processors, if `num_threads` is None.

    Raises:
        UserError: if it is not a positive integer.
    """
    processors = num_processors()
    if num_threads is None:
        num_threads = min(torch.get_num_threads(), max(1, processors // num_processes))
    if type(num_threads) is not int or num_threads < 1:
        raise UserError(f"threads: expected a positive integer, got {num_threads!r}")
    if num_threads > processors:
        plural = "s" if processors > 1 else ""
        message = "%d threads on %d processor%s: using %d"
        _log.warning(message, num_threads, processors, plural, processors)
    torch.set_num_threads(min(num_threads, processors))


def num_processors() -> int:
    """Processors that this process may use, by its affinity and the quotas of its cgroups."""
    has_affinity = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for group in _cgroups("cpu"):
        quota = _read(group / "cpu.max").split() or [_read(group / "cpu.cfs_quota_us")]
        period = quota[-1] if len(quota) > 1 else _read(group / "cpu.cfs_period_us")
        if quota[0].isdigit() and period.isdigit():
            processors = min(processors, int(int(quota[0]) / int(period) + 0.5))
    return max(processors, 1)


def _cgroups(controller: str) -> list[Path]:
    """The folders of the cgroups, of versions 1 and 2, that limit this process: nested ones."""
    found = []
    for line in _read(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            # In a container, the path may be that outside of it, and its cgroup the root here.
            group = (CGROUPS / (controller if controllers else "")) / path.lstrip("/")
            found += [each for each in (group, *group.parents) if each.is_relative_to(CGROUPS)]
    return found


def _read(path: Path) -> str:
    """The content of a file, without the line end; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


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
    the limits of the cgroups, and what this process has already.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not (PROC / "meminfo").exists():
        return None
    resident = int((PROC / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    free = 1024 * int(_read_fields(PROC / "meminfo")["MemAvailable"].split()[0])
    for group in _cgroups("memory"):
        for limit_file, usage_file, reclaimable in MEMORY_FILES:
            limit, usage = _read(group / limit_file), _read(group / usage_file)
            if limit.isdigit():
                kept = int(_read_fields(group / "memory.stat", " ").get(reclaimable, 0))
                # Other groups may have paid the libraries of this process.
                used = max(int(usage or 0) - kept, resident)
                free = min(free, int(limit) - used)
    return max(free, 0) + resident


def process_bytes(field: str) -> int:
    """Bytes of this process that Linux reports: VmRSS now, VmHWM at most so far; 0 elsewhere."""
    return 1024 * int(_read_fields(PROC / "self" / "status").get(field, "0 kB").split()[0])


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
    fields = _read_fields(PROC / "cpuinfo")
    model = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", "").split()
    return ", ".join([model, *(name for name in INSTRUCTIONS if name in flags)])


def _read_fields(path: Path, separator: str = ":") -> dict[str, str]:
    """The values of a file of lines `name: value`, by name; none if it cannot be read."""
    pairs = (line.partition(separator) for line in _read(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
