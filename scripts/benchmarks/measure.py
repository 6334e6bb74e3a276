"""Instruments of the benchmarks: clocks, memory, kernels, the rates of a device and the floor."""

import ctypes
import errno
import math
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lm.device import process_bytes
from lm.output import ClassTree
from lm.output.backends.visits import route
from scripts.benchmarks.methods import Method, Problem
from scripts.benchmarks.reporting import Row

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest relative difference of two losses that should be equal."""
CLEAR_REFS = Path("/proc/self/clear_refs")
"""File of Linux that resets the peak memory of this process."""
Result = TypeVar("Result")
FIGURES = ("seconds_median", "seconds_min", "ratio_to_floor", "peak_bytes", "loss")
"""Fields of a row that a refused method does not have."""
PROFILED = 3
"""Steps whose mean the times of kernels are."""
NAME_CHARACTERS = 60
"""Characters of the name of a kernel in a log: those of PyTorch are long."""


def step_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Run a step and return its seconds.

    On a GPU, by its events, from when it is idle, with unrelated data in its L2 cache. On a CPU,
    those of the processor with one thread, and with more of them the wall clock's: the host of a
    virtual machine takes longer than its processors to supply pages. A step of PyTorch's full
    softmax that maps 80,000 pages takes 0.55 s of the processor and 0.88 s in all.
    """
    if device.type != "cuda":
        read = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = read()
        step()
        return read() - begin
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    _unrelated_data().zero_()
    start.record()
    step()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


@cache
def _unrelated_data() -> Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


class Work(NamedTuple):
    """Bytes read or written, and multiply–adds × 2, of a step or per second."""

    bytes: float
    flops: float


def best_rates(device: torch.device, dtype: torch.dtype) -> Work:
    """The best of several large copies (bytes read and written) and of several matrix products."""
    size, side = ((1 << 29), 8192) if device.type == "cuda" else ((1 << 26), 2048)
    source, copy = torch.ones(2, size, device=device).unbind()
    factor = torch.randn(side, side, device=device, dtype=dtype)
    product = torch.empty_like(factor)
    copies, products = [], []
    for _ in range(6):
        copies.append(step_seconds(lambda: copy.copy_(source), device))
        products.append(step_seconds(lambda: torch.mm(factor, factor, out=product), device))
    fastest_copy, fastest_product = min(copies[1:]), min(products[1:])
    return Work(2 * 4 * size / fastest_copy, 2 * side**3 / fastest_product)


@contextmanager
def memory_limit(num_bytes: float, device: torch.device) -> Iterator[None]:
    """Let allocations beyond `num_bytes` fail, in this process and on its GPU.

    RLIMIT_DATA counts private writable memory only. RLIMIT_AS would also count mapped libraries and
    the address space that CUDA reserves.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = before if num_bytes == math.inf else int(num_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def in_new_process(function: Callable[..., Result], *arguments: Any) -> tuple[Result | None, int]:
    """Call a function in a new process, which prints errors to stderr.

    Returns its result, None if the process ended without one, and the exit code.
    """
    context = get_context("forkserver")  # has imported torch, has computed nothing
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, arguments))
    process.start()
    sender.close()
    result: Result | None = None
    with receiver, suppress(EOFError):  # raised if the process ends without a result
        result = receiver.recv()
    process.join()
    return result, process.exitcode or 0


def _send_result(results: Connection, function: Callable[..., object], arguments: Any) -> None:
    results.send(function(*arguments))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, as reported by torch, numpy or the operating system."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in ("allocate memory", "bad_alloc"))


def peak_bytes(method: Method) -> int | None:
    """Most memory that one step holds in addition to what was held before.

    As counted by the allocator of a GPU or by the Linux kernel; None on other systems.
    """
    if method.hidden.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        method.step()
        return torch.cuda.max_memory_allocated() - before
    if not CLEAR_REFS.exists():
        method.step()
        return None
    ctypes.CDLL(None).malloc_trim(0)  # otherwise the step reuses what other methods have freed
    CLEAR_REFS.write_text("5")
    before = process_bytes("VmRSS")
    method.step()
    return process_bytes("VmHWM") - before


def least_work(problem: Problem, tree: ClassTree) -> Work:
    """Least work with which a tree predicts the targets and trains.

    Each hidden vector, and each row of a node on a target's path, is read once in the forward and
    once in the backward pass, and its gradient is written once.
    """
    node = route(problem.target, tree.arrays, tree.depth, ignore_index=-100).node
    node = node[node >= 0]
    rows = int(tree.num_children[torch.unique(node)].sum())
    columns = int(tree.num_children[node].sum())
    size, hidden = problem.hidden_size, problem.hidden
    row_bytes, hidden_bytes = (size * x.element_size() for x in (problem.rows, hidden))
    num_bytes = 3 * (rows * row_bytes + problem.num_positions * hidden_bytes)
    return Work(num_bytes, 6 * columns * size)


def kernels(step: Callable[[], object], after: Callable[[], object] = lambda: None) -> list[Row]:
    """The kernels, copies and fills of a step on a GPU: number and seconds, the longest first.

    The mean of a few steps, `after` each of which something else is called. A CUDA graph is not
    profiled: pass a step that runs as it is.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(PROFILED):
            step()
            after()
        torch.cuda.synchronize()
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            seconds[event.name[:NAME_CHARACTERS]].append(event.time_range.elapsed_us() / 1e6)
    rows = [
        {"kernel": name, "launches": len(each) / PROFILED, "seconds": sum(each) / PROFILED}
        for name, each in seconds.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


def make_row(method: Method, peak: Work) -> Row:
    """The figures of a method, as the log has them."""
    seconds, problem = method.seconds, method.problem
    floor = method.tree and least_work(problem, method.tree)
    median = statistics.median(seconds) if seconds else None
    floor_seconds = floor and max(floor.bytes / peak.bytes, floor.flops / peak.flops)
    trees = [name for name, tree in problem.trees.items() if tree is method.tree and method.exact]
    return {
        "vocab_size": problem.vocab_size,
        "hidden": problem.hidden_size,
        "positions": problem.num_positions,
        "method": method.name,
        "backend": method.backend,
        "label": method.label,
        "tree": trees[0] if trees else None,
        "refused": method.refused,
        "seconds_median": median,
        "seconds_min": min(seconds, default=None),
        "rounds": len(seconds),
        "ratio_to_floor": median / floor_seconds if median and floor_seconds else None,
        "loss": None if method.refused else float(method.last_loss),
        "peak_bytes": method.peak_bytes,
        "gradient_bytes": None if method.refused else method.gradient_bytes,
        "floor_bytes": floor and floor.bytes,
        "floor_flops": floor and floor.flops,
        "bytes_per_second": peak.bytes,
        "flops_per_second": peak.flops,
        "cutoffs": problem.cutoffs if method.name == "adaptive" else None,
    }
