"""The division of loops over nodes among threads: forward by positions, backward by rows.

The threads are those of PyTorch's OpenMP library, where there is one. After each parallel operation
of PyTorch they spin for some milliseconds, unless told otherwise, and would keep threads of our own
off the processors for as long.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lm.output.backends.compiled.memory import Array

LEAST_COLUMNS = 1 << 15
"""Columns of all visits from which on work is divided among threads."""
ROW_VISITS = 8
"""The time to write a row of a gradient, as a number of visits."""
_REGION = ctypes.CFUNCTYPE(None)  # ignores the pointer that OpenMP calls it with
_PROCESS = os.getpid()


def bounds_of(nodes: Array, num: int, *, by_rows: bool) -> list[int]:
    """Where the threads' parts of `num` positions or rows begin, and the end of the last one.

    A row costs its visits, and as much as `ROW_VISITS` to be written.
    """
    num_threads = torch.get_num_threads()
    num_visits, first_row, num_children = nodes[:, 1] - nodes[:, 0], nodes[:, 2], nodes[:, 3]
    if num_threads == 1 or int(num_visits @ num_children) < LEAST_COLUMNS:
        return [0, num]
    if not by_rows:
        return [num * i // num_threads for i in range(num_threads + 1)]
    cost = (num_visits + ROW_VISITS) * num_children
    before = cost.cumsum() - cost
    bounds = [0]
    for i in range(1, num_threads):
        share = int(cost.sum()) * i // num_threads
        node = int(before.searchsorted(share, side="right")) - 1
        inside = (share - before[node]) * num_children[node] // cost[node]
        bounds.append(int(first_row[node] + inside))
    return [*bounds, num]


def divide(bounds: list[int], loops: Callable[..., None], *arguments: Any) -> None:
    """Run loops for each part, given its begin and end, in a thread each."""
    parts = list(pairwise(bounds))
    if len(parts) == 1:
        loops(*parts[0], *arguments)
        return
    remaining, errors = iter(parts), []

    def work() -> Iterator[None]:
        try:
            yield  # so that handlers of signals raise their errors below
            for part in remaining:
                loops(*part, *arguments)
        except GeneratorExit:
            return
        except BaseException as error:
            errors.append(error)
        yield

    workers = [work() for _ in parts]
    for worker in workers:
        next(worker)
    _in_threads(map(next, workers).__next__, len(parts))
    for part in () if errors else remaining:  # a team can have fewer threads
        loops(*part, *arguments)
    if errors:
        del errors[1:]
        raise errors.pop()  # no cycle of references is left


def _in_threads(run: Callable[[], None], num_threads: int) -> None:
    """Call a function, which raises nothing, in this many threads or fewer, the caller's too."""
    start_team = _openmp(os.getpid())
    if start_team is not None:
        start_team(_REGION(run), None, num_threads, 0)
        return
    threads = _threads(os.getpid(), num_threads - 1)
    others = [threads.submit(run) for _ in range(num_threads - 1)]
    run()
    wait(others)


@cache
def _openmp(process: int) -> Callable[..., None] | None:
    """`GOMP_parallel` of the OpenMP library that PyTorch calls, GNU's or LLVM's, on Linux.

    None where there is none, and in a process that was forked after this module was imported:
    GNU's waits for its parent's threads there.
    """
    if process != _PROCESS or sys.platform != "linux":
        return None
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for name in (None, str(library)):  # None: the symbols of all, as PyTorch's calls find them
        with contextlib.suppress(OSError, AttributeError):
            start_team: Callable[..., None] = ctypes.CDLL(name).GOMP_parallel
            numbers = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            start_team.argtypes = [_REGION, *numbers]  # type: ignore[attr-defined]
            start_team.restype = None  # type: ignore[attr-defined]
            return start_team
    return None


@cache
def _threads(process: int, num: int) -> ThreadPoolExecutor:
    """Threads of a process; a forked one has none of its parent's."""
    return ThreadPoolExecutor(num, "sqrtlm")
