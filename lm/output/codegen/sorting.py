"""Sorting by integers, and heaps, compiled into functions of other files."""

import numba
import numpy as np

BITS = 8
"""Digits of the radix sort, in bits."""


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


@numba.njit(nogil=True)
def push(key, value, num, new_key, new_value):
    """Add to a heap, whose least key comes first."""
    i = num
    while i > 0 and key[(i - 1) >> 1] > new_key:
        key[i], value[i] = key[(i - 1) >> 1], value[(i - 1) >> 1]
        i = (i - 1) >> 1
    key[i], value[i] = new_key, new_value


@numba.njit(nogil=True)
def replace_first(key, value, num, new_key, new_value):
    """Put another item in the place of a heap's first one."""
    i, child = 0, 1
    while child < num:
        if child + 1 < num and key[child + 1] < key[child]:
            child += 1
        if key[child] >= new_key:
            break
        key[i], value[i] = key[child], value[child]
        i, child = child, 2 * child + 1
    key[i], value[i] = new_key, new_value
