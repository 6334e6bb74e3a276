"""Sorting by integers, compiled into functions of other files."""

import numba
import numpy as np

BITS = 8
"""Of a rank that is sorted by at a time."""


@numba.njit(nogil=True)
def sort_by_rank(rank, largest, position):
    """The positions in the order of their ranks, equal ones in their own: a radix sort."""
    order, other = np.arange(len(rank)), np.empty(len(rank), np.int64)
    end = np.empty(1 << BITS, np.int64)
    for shift in range(0, 64, BITS):
        if shift and not largest >> shift:
            break
        end[:] = 0
        for p in order:
            end[rank[p] >> shift & len(end) - 1] += 1
        begin = np.cumsum(end) - end
        for p in order:
            digit = rank[p] >> shift & len(end) - 1
            other[begin[digit]] = p
            begin[digit] += 1
        order, other = other, order
    position[:] = order
