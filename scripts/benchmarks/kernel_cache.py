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
        program: [A] program of each load or store, ascending.
        touched: [A, 5] tensor, first row, end row, portion of columns, bytes of a row of it.
        num_portions: [4] portions of each tensor.
    """

    program: Ints
    touched: Ints
    num_portions: Ints


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
    none = np.full(int(num_lines.sum()), -1)
    cache = _Cache(none, none.copy(), np.zeros_like(none), np.array([-1, -1, 0]), capacity)
    start = np.searchsorted(trace.program, np.arange(trace.program.max(initial=-1) + 2))
    first_line = np.cumsum(num_lines) - num_lines
    missed = _play(trace, start, first_line, cache, num_concurrent, granule)
    return dict(enumerate(missed.tolist()))


@compiled
def _play(
    trace: Trace, start: Ints, first_line: Ints, cache: _Cache, num_concurrent: int, granule: int
) -> Ints:
    """Bytes missed by tensor [4]; `start` is where each program begins in the trace."""
    missed = np.zeros(len(trace.num_portions), dtype=np.int64)
    num_programs = len(start) - 1
    program = np.arange(min(num_concurrent, num_programs))  # of each slot, -1 after the last one
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
            tensor, begin, end, portion, row_bytes = trace.touched[place[slot]]
            place[slot] += 1
            for row in range(begin // granule, (end - 1) // granule + 1):
                line = first_line[tensor] + row * trace.num_portions[tensor] + portion
                if _use(cache, line, row_bytes * granule):
                    missed[tensor] += row_bytes * granule
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
