"""What `bench_output_layer` measures: time, memory, launches, the floor, the machine's ceilings.

Decides how a step is timed and what counts as memory and as least work; runs no comparison and
prints nothing.
"""

import ctypes
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_method import Method, Problem
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lm.output import ClassTree
from lm.output.backends.triton import backend as fused
from lm.output.backends.visits import route

Clock = Callable[[Callable[[], object]], Callable[[], float]]
"""Runs a step; what it returns tells the seconds, to be asked once other steps are under way."""


class CpuClock:
    """Times a step by the clock on the wall."""

    def __call__(self, step: Callable[[], object]) -> Callable[[], float]:
        """Run the step; the result tells its seconds."""
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        return lambda: seconds


class CudaClock:
    """Times a step by events of a GPU, which begins idle and with other data in its L2 cache."""

    def __init__(self) -> None:
        self.other_data = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def __call__(self, step: Callable[[], object]) -> Callable[[], float]:
        """Run the step; the result waits until the device is through and tells the seconds."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self.other_data.zero_()
        start.record()
        step()
        stop.record()

        def seconds() -> float:
            stop.synchronize()
            return start.elapsed_time(stop) / 1e3

        return seconds


class Ceilings(NamedTuple):
    """What the machine does at best: bytes moved and multiply-adds × 2, per second."""

    bytes: float
    flops: float


def ceilings(clock: Clock, device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Rates of a large copy (bytes read and written) and of a large matrix product, the best of
    several.
    """
    size, side = ((1 << 29), 8192) if device.type == "cuda" else ((1 << 26), 2048)
    source, copy = torch.ones(2, size, device=device).unbind()
    left = torch.randn(side, side, device=device, dtype=dtype)
    product = torch.empty_like(left)
    copies, products = [], []
    for _ in range(6):
        copies.append(clock(lambda: copy.copy_(source)))
        products.append(clock(lambda: torch.mm(left, left, out=product)))
    fastest_copy, fastest_product = (min(t() for t in times[1:]) for times in (copies, products))
    return Ceilings(2 * 4 * size / fastest_copy, 2 * side**3 / fastest_product)


def free_bytes(device: torch.device, limit: float) -> float:
    """Memory that is free, but no more than `limit`; infinity where neither is known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return min(limit, torch.cuda.mem_get_info()[0] + unused)
    meminfo = Path("/proc/meminfo")
    return min(limit, told_bytes(meminfo, "MemAvailable") if meminfo.exists() else math.inf)


def peak_bytes(method: Method) -> int | None:
    """Most memory that one step holds beyond what was held before, as the allocator of a GPU or the
    kernel of Linux counts it; None elsewhere.
    """
    if method.hidden.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        method.step()
        return torch.cuda.max_memory_allocated() - before
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        method.step()
        return None
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # or the step would use again what other methods left behind
    reset.write_text("5")
    before = told_bytes(status, "VmRSS")
    method.step()
    return told_bytes(status, "VmHWM") - before


def told_bytes(file: Path, field: str) -> int:
    """Bytes that a line `field: … kB` of a file in /proc tells."""
    line = next(line for line in file.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class Floor(NamedTuple):
    """Least work of a forward and backward: bytes moved, and multiply-adds × 2."""

    bytes: int
    flops: int


def least_work(problem: Problem, tree: ClassTree) -> Floor:
    """The floor of a tree on the problem's targets."""
    node = route(problem.target, tree.arrays, tree.depth, ignore_index=-100).node
    node = node[node >= 0]
    rows = int(tree.num_children[node.unique()].sum())
    columns = int(tree.num_children[node].sum())
    vectors = rows + problem.num_positions
    return Floor(
        3 * vectors * problem.hidden_size * problem.element_bytes,
        6 * columns * problem.hidden_size,
    )


def launches(method: Method) -> dict[str, list[str]]:
    """Names of what the forward and the backward of a step launch: on a GPU all kernels, copies and
    fills, else the interpreted kernels.
    """
    launched = launched_on_gpu if method.hidden.is_cuda else interpreted
    losses: list[Tensor] = []
    forward = launched(lambda: losses.append(method.loss(method.hidden, method.target)))
    backward = launched(losses[0].backward)
    method.free()
    return {"forward": forward, "backward": backward}


def launched_on_gpu(half: Callable[[], object]) -> list[str]:
    """Names of what half a step launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        half()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]


def interpreted(half: Callable[[], object]) -> list[str]:
    """Names of the kernels that half a step would launch, as it asks for them."""
    names: list[str] = []
    launch = fused._launch

    def note(kernel: Any, *args: Any, **arguments: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *args, **arguments)

    fused._launch = note
    try:
        half()
    finally:
        fused._launch = launch
    return names
