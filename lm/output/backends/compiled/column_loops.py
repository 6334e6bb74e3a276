"""Many visits of a node, in blocks whose lanes are visits: part of the loops over nodes."""

import math

import numba
import numpy as np

from lm.output.backends.compiled.columns import (
    BLOCK,
    BLOCK_ROWS,
    dot_columns,
    error_columns,
    exp_columns,
    paired_columns,
    transposed_pairs,
)
from lm.output.backends.compiled.row_operations import add_scaled_row
from lm.output.backends.compiled.tile_loops import TERMS, visit_sums
from lm.output.backends.compiled.tiles import ROWS, dot_rows


@numba.njit(nogil=True)
def is_many(num_visits, num_children):
    """Whether a node's visits are computed in blocks: one is full, as are `BLOCK_ROWS`."""
    return num_visits >= BLOCK and num_children >= BLOCK_ROWS


@numba.njit(nogil=True)
def block_of(visit, num_visits, n):
    """Where a visit of a node with `n` children is among errors: see `forward_blocks`.

    Returns:
        the index of its error of the first child, the indices from a child to the next, and how
        many visits follow in its block, with itself.
    """
    first = visit - visit % BLOCK
    width = min(BLOCK, num_visits - first)
    return first * n + visit - first, width, width - (visit - first)


@numba.njit(nogil=True)
def new_space(widest, size):
    """Memory for `forward_blocks`: hidden vectors, errors in bf16, and four numbers of each visit.

    These are the largest logit, the total, its inverse, and the target's logit less the largest.
    Lanes without a visit have any numbers.
    """
    hidden = np.empty((size // 2, BLOCK), np.float32)
    return (
        hidden,
        np.empty((widest + 1) // 2 * BLOCK * 2, np.uint16),
        np.empty((4, BLOCK), np.float32),
    )


@numba.njit(nogil=True)
def forward_blocks(node, begin, end, hidden, row, bias, child, log_prob, rows, d_hidden, space):
    """What `node_loops.forward_bf16` computes for a node of many visits.

    Block b has the visits from 32 b on: w = 32, in the last one fewer. Its errors begin 32 b n
    after the node's, and that of child j and visit i of the block is j w + i after them. Threads
    may begin and end within a block, and write their own lanes.

    Args:
        node: first visit and end, number of children, index of the first error, or -1 if they are
            not saved, and whether sums are added to `d_hidden`.
        begin, end: the positions.
        hidden: [P, ≥ W] in bf16.
        row: address of the first row in bf16, bytes to the next, and W. If W is odd, a 0 follows
            each row.
        bias: address of the first bias.
        child, log_prob: [P].
        rows: in which errors are saved, or memory for the logits of one block, [n, BLOCK].
        d_hidden: [P, W] or [0, W].
        space: see `new_space`.
    """
    start, stop, n, offset, added = node
    pairs, low, numbers = space
    largest, totals, factor, logit = numbers
    v = max(start, begin)
    while v < min(stop, end):
        place, width, num = block_of(v - start, stop - start, n)
        if offset < 0:
            place, width = 0, BLOCK
        place, num = place + max(offset, 0), min(num, min(stop, end) - v)
        address, stride = rows.ctypes.data + 4 * place, 4 * width
        vectors = hidden.ctypes.data + v * hidden.strides[0]
        transposed_pairs(vectors, hidden.strides[0], num, len(pairs), pairs.ctypes.data)
        largest[:] = -np.inf
        for j in range(0, n, BLOCK_ROWS):
            j = min(j, n - BLOCK_ROWS)  # what is left is computed again with rows before it
            dot_columns(
                pairs.ctypes.data,
                (row[2] + 1) // 2,
                row[0] + j * row[1],
                row[1],
                bias + 4 * j,
                address + j * stride,
                stride,
                num,
                largest.ctypes.data,
            )
        for i in range(num):
            logit[i] = rows[place + child[v + i] * width + i] - largest[i]
        totals[:] = 0
        for j in range(0, n, TERMS):  # sums of sums, which are more exact
            few = min(TERMS, n - j)
            at = address + j * stride
            exp_columns(at, stride, num, few, largest.ctypes.data, totals.ctypes.data)
        for i in range(num):
            log_prob[v + i] = logit[i] - math.log(totals[i])
            rows[place + child[v + i] * width + i] -= totals[i]
            factor[i] = 1 / totals[i]
        if offset >= 0:
            error_columns(address, stride, num, n, factor.ctypes.data, low.ctypes.data)
        if d_hidden.size > 0:
            _add_products(low, hidden, d_hidden, v, num, n, row, added)
        v += num


@numba.njit(nogil=True)
def _add_products(low, hidden, d_hidden, v, num, n, row, added):
    """(5) of a block's visits from v on."""
    strides = (4, 2 * BLOCK, row[1])
    to = (d_hidden.ctypes.data + v * d_hidden.strides[0], d_hidden.strides[0])
    for j in range(0, n, 2 * TERMS):
        starts = (low.ctypes.data + 2 * BLOCK * j, row[0] + j * row[1])
        terms, is_added = min(2 * TERMS, n - j), added or j > 0
        visit_sums(low, hidden, d_hidden, num, terms, starts, strides, to, is_added, None)


@numba.njit(nogil=True)
def pair_blocks(error, d_nll, pairs, node, first, num, v, terms):
    """The errors of `terms` visits from v on times d nll: [num, terms] in bf16.

    If `terms` is odd, a 0 follows those of each row.

    Args:
        error, d_nll: as of `node_loops.backward_bf16`; v - start is a multiple of `BLOCK`.
        pairs: set to them.
        node: first visit and end, number of children, index of the first error.
        first, num: children.
    """
    start, stop, n, offset = node
    out_stride = 2 * (terms + terms % 2)
    for i in range(0, terms, BLOCK):
        place, width, _ = block_of(v + i - start, stop - start, n)
        address = error.ctypes.data + 4 * (offset + place + first * width)
        visits, factor = min(width, terms - i), d_nll.ctypes.data + 4 * (v + i)
        out = pairs.ctypes.data + 2 * i
        paired_columns(address, 4 * width, visits, num, factor, out, out_stride)


@numba.njit(nogil=True)
def add_blocks_to_bias(d_bias, error, d_nll, node, row, first, num):
    """(6) of the biases of `num` rows, those of the node's children from `first` on."""
    start, stop, n, offset = node
    found = np.empty(num, np.float32)
    for v in range(start, stop, BLOCK):
        place, width, _ = block_of(v - start, stop - start, n)
        address = error.ctypes.data + 4 * (offset + place + first * width)
        factor = d_nll.ctypes.data + 4 * v
        for j in range(0, num, ROWS):
            at, out = address + 4 * width * j, found.ctypes.data + 4 * j
            dot_rows(d_nll, error, width, factor, at, 4 * width, out, num - 1 - j)
        to = d_bias.ctypes.data + 4 * row
        add_scaled_row(found, d_bias, found.ctypes.data, to, num, np.float32(1))
