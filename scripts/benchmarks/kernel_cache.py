"""A second-level cache that the loads and stores of the fused kernels are played through.

The cache evicts the least recently used line; what misses it must come from memory. As many
programs run concurrently as fit on a GPU, and each in turn makes one load or store. Every launch
begins with an empty cache. A line is `granule` neighbouring rows of one portion of columns; a line
of which a tile touches a part is read as a whole.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.compiled import compiled

Ints = NDArray[np.int64]
OLDEST, NEWEST, USED = range(3)
"""Places in `_Cache.ends`."""


class Trace(NamedTuple):
    """What one launch touches.

    Attributes:
        kernel: Name of the kernel.
        program: [A] program of each load or store, ascending.
        touched: [A, 4] tensor, first row, end row, portion of columns.
        row_bytes: [4] bytes of a row of a portion of each tensor.
        num_portions: [4] portions of each tensor.
        last_bytes: [4] bytes of a row of the last portion.
    """

    kernel: str
    program: Ints
    touched: Ints
    row_bytes: Ints
    num_portions: Ints
    last_bytes: Ints


class _Layout(NamedTuple):
    """How many bytes the portions of each tensor have, and where its lines are.

    Attributes:
        row_bytes, num_portions, last_bytes: As in `Trace`.
        first_line: [4] number of each tensor's first line.
    """

    row_bytes: Ints
    num_portions: Ints
    last_bytes: Ints
    first_line: Ints


class _Cache(NamedTuple):
    """Lines in the order of their last use, as a doubly linked list.

    Attributes:
        older, newer: [lines] neighbours in the list, -1 for none.
        held: [lines] bytes in the cache, 0 for a line outside of it.
        ends: [3] oldest line, newest line, bytes used.
        capacity: Bytes that the cache holds.
    """

    older: Ints
    newer: Ints
    held: Ints
    ends: Ints
    capacity: int


def traffic(trace: Trace, capacity: int, num_concurrent: int, granule: int) -> dict[int, int]:
    """Bytes of each tensor that miss a cache.

    Args:
        trace: Of a launch.
        capacity: Bytes that the cache holds.
        num_concurrent: Programs that run concurrently.
        granule: Rows of a line.
    """
    num_lines = np.zeros(len(trace.num_portions), dtype=np.int64)
    for tensor in range(len(num_lines)):
        ends = trace.touched[trace.touched[:, 0] == tensor, 2]
        num_lines[tensor] = -(-int(ends.max(initial=0)) // granule) * trace.num_portions[tensor]
    first_line = np.cumsum(num_lines) - num_lines
    layout = _Layout(trace.row_bytes, trace.num_portions, trace.last_bytes, first_line)
    none = np.full(int(num_lines.sum()), -1)
    ends = np.array([-1, -1, 0])
    cache = _Cache(none, none.copy(), np.zeros_like(none), ends, capacity)
    start = np.searchsorted(trace.program, np.arange(trace.program.max(initial=-1) + 2))
    missed = _play(start, trace.touched, layout, cache, num_concurrent, granule)
    return dict(enumerate(missed.tolist()))


@compiled
def _play(
    start: Ints, touched: Ints, layout: _Layout, cache: _Cache, num_concurrent: int, granule: int
) -> Ints:
    """Bytes missed by tensor [4].

    Args:
        start: [programs + 1], where the loads and stores of each program begin in `touched`.
        touched: [A, 4], as in `Trace`.
        layout: Of the tensors.
        cache: Empty.
        num_concurrent: Programs that run concurrently.
        granule: Rows of a line.
    """
    missed = np.zeros(len(layout.num_portions), dtype=np.int64)
    num_programs = len(start) - 1
    program = np.arange(min(num_concurrent, num_programs))  # of each slot, -1 when none is left
    place = start[program]
    num_started = num_running = len(program)
    while num_running > 0:
        for slot in range(len(program)):
            while program[slot] >= 0 and place[slot] == start[program[slot] + 1]:
                if num_started < num_programs:
                    program[slot], place[slot] = num_started, start[num_started]
                    num_started += 1
                else:
                    program[slot] = -1
                    num_running -= 1
            if program[slot] < 0:
                continue
            tensor, begin, end, portion = touched[place[slot]]
            place[slot] += 1
            num_portions = layout.num_portions[tensor]
            in_last = portion == num_portions - 1
            size = granule * (layout.last_bytes[tensor] if in_last else layout.row_bytes[tensor])
            for row in range(begin // granule, (end - 1) // granule + 1):
                line = layout.first_line[tensor] + row * num_portions + portion
                if _use(cache, line, size):
                    missed[tensor] += size
    return missed


@compiled
def _use(cache: _Cache, line: int, size: int) -> bool:
    """Use a line of `size` bytes; whether it missed the cache."""
    missed = bool(cache.held[line] == 0)
    if not missed:
        _unlink(cache, line)
    elif size <= cache.capacity:
        while cache.ends[USED] + size > cache.capacity:
            oldest = cache.ends[OLDEST]
            cache.ends[USED] -= cache.held[oldest]
            cache.held[oldest] = 0
            _unlink(cache, oldest)
        cache.held[line] = size
        cache.ends[USED] += size
    if cache.held[line] > 0:
        _append(cache, line)
    return missed


@compiled
def _unlink(cache: _Cache, line: int) -> None:
    older, newer = cache.older[line], cache.newer[line]
    if older >= 0:
        cache.newer[older] = newer
    else:
        cache.ends[OLDEST] = newer
    if newer >= 0:
        cache.older[newer] = older
    else:
        cache.ends[NEWEST] = older


@compiled
def _append(cache: _Cache, line: int) -> None:
    newest = cache.ends[NEWEST]
    cache.older[line], cache.newer[line] = newest, -1
    if newest >= 0:
        cache.newer[newest] = line
    else:
        cache.ends[OLDEST] = line
    cache.ends[NEWEST] = line
