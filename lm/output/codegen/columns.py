"""Products and softmaxes of many visits of a node, in blocks: a lane of a vector is a visit.

The sums over a hidden vector and over a node's children are then sums of vectors: no vector is
reduced to one number. Factors are in bf16, in pairs next to each other in memory, all else is in
fp32. A *block* is the numbers of `BLOCK` visits or fewer, those of a child next to each other:
`start` is its address, `stride` the bytes from a child to the next, `visits` how many visits there
are, and `num` how many children. What each visit has one number of, [BLOCK], is an address too.
"""

from math import log  # by name: torch.fx replaces those of `math` while it traces
from typing import Any

import numpy as np
from numba import njit, types

from lm.output.codegen.compilation import emitted
from lm.output.codegen.rows import add_scaled_row
from lm.output.codegen.tiles import ROWS, TERMS, dot_rows, visit_sums
from lm.output.codegen.vectors import INT, Vectors, addresses

BLOCK = 32
"""Visits of a block, those of two vectors."""
BLOCK_ROWS = 12
"""Rows that a block of hidden vectors is multiplied with at a time: 24 vectors of sums."""
NUMBER = types.float32


class _Block:
    """The vectors of a block. Lanes from `visits` on are read as 0 and not written."""

    def __init__(self, builder: Any, start: Any, stride: Any, visits: Any) -> None:
        self.builder, self.start, self.stride = builder, start, stride
        self.emit = Vectors(builder, NUMBER)
        self.lanes = [INT(first) for first in range(0, BLOCK, self.emit.lanes)]
        self.masks = [self.emit.mask(builder.sub(visits, first)) for first in self.lanes]

    def vectors(self, address: Any) -> list[Any]:
        """A number of each visit, of all lanes, from an address on."""
        return [self.emit.load(place, NUMBER) for place in self.places(address)]

    def places(self, address: Any) -> list[Any]:
        """Pointers to the vectors at an address."""
        return [self.emit.pointer(address, NUMBER, first) for first in self.lanes]

    def child(self, j: Any) -> list[Any]:
        """Pointers to the numbers of a child."""
        return self.places(self.builder.add(self.start, self.builder.mul(j, self.stride)))

    def load(self, j: Any) -> list[Any]:
        """The numbers of a child."""
        both = zip(self.child(j), self.masks, strict=True)
        return [self.emit.load(place, NUMBER, mask) for place, mask in both]

    def store(self, j: Any, values: list[Any]) -> None:
        """Set the numbers of a child."""
        for value, place, mask in zip(values, self.child(j), self.masks, strict=True):
            self.emit.store(value, place, NUMBER, mask)


@emitted
def transposed_pairs(builder, start, stride, visits, num, out):
    """out[k, i] = pair k of hidden vector i; lanes beyond the last vector repeat it.

    `num` is how many pairs hidden vectors have, a multiple of 16; `out` is [num, BLOCK].
    """
    last = builder.sub(visits, INT(1))
    block = _Block(builder, out, INT(4 * BLOCK), INT(BLOCK))
    emit = block.emit
    rows = addresses(builder, start, stride, BLOCK, last)
    with emit.loop(num, emit.lanes, []) as (k, _):
        columns = []
        for first in range(0, BLOCK, emit.lanes):
            few = rows[first : first + emit.lanes]
            loaded = [emit.load(emit.pointer(row, NUMBER, k), NUMBER) for row in few]
            columns.append(emit.transposed(loaded))
        for i, values in enumerate(zip(*columns, strict=True)):
            block.store(builder.add(k, INT(i)), list(values))


@emitted
def dot_columns(builder, pairs, num, row, row_stride, bias, start, stride, visits, largest):
    """z[j, i] = row j · hidden vector i + bias[j] for `BLOCK_ROWS` rows, and the largest of each i.

    `pairs` are the hidden vectors, of `num` pairs each: see `transposed_pairs`.
    """
    block = _Block(builder, start, stride, visits)
    emit, vectors = block.emit, len(block.lanes)
    rows = [builder.add(row, builder.mul(row_stride, INT(j))) for j in range(BLOCK_ROWS)]
    sums = [emit.zero] * (BLOCK_ROWS * vectors)
    with emit.loop(num, 1, sums) as (k, carried):
        hidden = block.vectors(builder.add(pairs, builder.mul(k, INT(4 * BLOCK))))
        for j, address in enumerate(rows):
            pair = emit.everywhere(builder.load(emit.pointer(address, NUMBER, k), align=2))
            for i, vector in enumerate(hidden, vectors * j):
                carried[i] = emit.dot(vector, pair, carried[i])
    most = block.vectors(largest)
    for j in range(BLOCK_ROWS):
        added = emit.broadcast(emit.pointer(bias, NUMBER, INT(j)), NUMBER)
        z = [builder.fadd(x, added) for x in sums[vectors * j : vectors * (j + 1)]]
        block.store(INT(j), z)
        most = [emit.maximum(a, b) for a, b in zip(most, z, strict=True)]
    for value, pointer in zip(most, block.places(largest), strict=True):
        emit.store(value, pointer, NUMBER)


@emitted
def exp_columns(builder, start, stride, visits, num, largest, totals):
    """exp(z - largest) in place of the logits z, and their sums added to totals."""
    block = _Block(builder, start, stride, visits)
    emit, shifts = block.emit, block.vectors(largest)
    sums = [emit.zero] * len(shifts)
    with emit.loop(num, 1, sums) as (j, carried):
        both = zip(block.load(j), shifts, strict=True)
        values = [emit.exp(builder.fsub(z, shift)) for z, shift in both]
        block.store(j, values)
        carried[:] = [builder.fadd(a, b) for a, b in zip(carried, values, strict=True)]
    for before, value, pointer in zip(
        block.vectors(totals), sums, block.places(totals), strict=True
    ):
        emit.store(builder.fadd(before, value), pointer, NUMBER)


@emitted
def error_columns(builder, start, stride, visits, num, factor, pairs):
    """Errors x / total in place of x, from which the caller has subtracted the total at the target.

    `factor` is 1 / total. `pairs` [⌈num / 2⌉, BLOCK] are set to the errors of a child and of the
    next one, or 0 after the last, rounded to bf16.
    """
    block = _Block(builder, start, stride, visits)
    emit, factors = block.emit, block.vectors(factor)
    low = _Block(builder, pairs, INT(2 * BLOCK), INT(BLOCK))

    def errors(j: Any) -> list[Any]:
        values = [builder.fmul(x, a) for x, a in zip(block.load(j), factors, strict=True)]
        block.store(j, values)
        return values

    whole = builder.and_(num, INT(-2))
    with emit.loop(whole, 2, []) as (j, _):
        both = zip(errors(j), errors(builder.add(j, INT(1))), strict=True)
        low.store(j, [emit.paired(a, b) for a, b in both])
    with builder.if_then(builder.icmp_signed("<", whole, num)):
        low.store(whole, [emit.paired(a, emit.zero) for a in errors(whole)])


@emitted
def paired_columns(builder, start, stride, visits, num, factor, out, out_stride):
    """out[j, i] = factor[i] · x[j, i] in bf16, and 0 for one more i if their number is odd."""
    block = _Block(builder, start, stride, visits)
    emit = block.emit
    even = builder.and_(builder.add(visits, INT(1)), INT(-2))
    stored = [emit.mask(builder.sub(even, first)) for first in block.lanes]
    loaded = zip(block.places(factor), block.masks, strict=True)
    factors = [emit.load(pointer, NUMBER, mask) for pointer, mask in loaded]
    with emit.loop(num, 1, []) as (j, _):
        row = builder.add(out, builder.mul(j, out_stride))
        parts = zip(block.load(j), factors, block.lanes, stored, strict=True)
        for x, a, first, mask in parts:
            pointer = emit.pointer(row, types.uint16, first)
            emit.store(builder.fmul(x, a), pointer, types.uint16, mask)


@njit(nogil=True)
def is_many(num_visits, num_children):
    """Whether a node's visits are computed in blocks: one is full, as are `BLOCK_ROWS`."""
    return num_visits >= BLOCK and num_children >= BLOCK_ROWS


@njit(nogil=True)
def block_of(visit, num_visits, n):
    """Where a visit of a node with `n` children is among errors: see `forward_blocks`.

    Its index for the first child, the indices from a child to the next, and how many visits follow
    in its block, with itself.
    """
    first = visit - visit % BLOCK
    width = min(BLOCK, num_visits - first)
    return first * n + visit - first, width, width - (visit - first)


@njit(nogil=True)
def new_space(widest, size):
    """Memory for `forward_blocks`: hidden vectors, errors in bf16, and four numbers of each visit.

    These are the largest logit, the total, its inverse, and the target's logit less the largest.
    Lanes without a visit have any numbers.
    """
    hidden, numbers = np.empty((size // 2, BLOCK), np.float32), np.empty((4, BLOCK), np.float32)
    return hidden, np.empty((widest + 1) // 2 * BLOCK * 2, np.uint16), numbers


@njit(nogil=True)
def forward_blocks(node, begin, end, hidden, row, bias, child, log_prob, rows, d_hidden, space):
    """What `loops.forward_bf16` computes for a node of many visits.

    Block b has the visits from 32 b on: w = 32, in the last one fewer. Its errors begin 32 b n
    after the node's, and that of child j and visit i of the block is j w + i after them. Threads
    may begin and end within a block, and write their own lanes.

    Args:
        node: first visit and end, number of children, index of the first error, or -1 if they are
            not saved, and whether sums are added to `d_hidden`.
        row: address of the first row in bf16, bytes to the next, and W. If W is odd, a 0 follows
            each row.
        bias: address of the first bias.
        rows: in which errors are saved, or memory for the logits of one block, [n, BLOCK].
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
            at, to = row[0] + j * row[1], address + j * stride
            dot_columns(
                pairs.ctypes.data, (row[2] + 1) // 2, at, row[1], bias + 4 * j, to, stride, num,
                largest.ctypes.data,
            )  # fmt: skip
        for i in range(num):
            logit[i] = rows[place + child[v + i] * width + i] - largest[i]
        totals[:] = 0
        for j in range(0, n, TERMS):  # sums of sums, which are more exact
            few = min(TERMS, n - j)
            at = address + j * stride
            exp_columns(at, stride, num, few, largest.ctypes.data, totals.ctypes.data)
        for i in range(num):
            log_prob[v + i] = logit[i] - log(totals[i])
            rows[place + child[v + i] * width + i] -= totals[i]
            factor[i] = 1 / totals[i]
        if offset >= 0:
            error_columns(address, stride, num, n, factor.ctypes.data, low.ctypes.data)
        if d_hidden.size > 0:
            strides = 4, 2 * BLOCK, row[1]
            out = d_hidden.ctypes.data + v * d_hidden.strides[0], d_hidden.strides[0]
            for j in range(0, n, 2 * TERMS):
                starts = low.ctypes.data + 2 * BLOCK * j, row[0] + j * row[1]
                terms, more = min(2 * TERMS, n - j), added or j > 0
                visit_sums(low, hidden, d_hidden, num, terms, starts, strides, out, more, None)
        v += num


@njit(nogil=True)
def pair_blocks(error, d_nll, pairs, node, first, num, v, terms):
    """Set `pairs` [num, terms] to the errors in bf16 of `terms` visits from v on times d nll.

    They are those of `num` children of a node from `first` on, whose first visit, end, number of
    children and index of the first error are `node`. v - start is a multiple of `BLOCK`. If `terms`
    is odd, a 0 follows those of each row.
    """
    start, stop, n, offset = node
    out_stride = 2 * (terms + terms % 2)
    for i in range(0, terms, BLOCK):
        place, width, _ = block_of(v + i - start, stop - start, n)
        address = error.ctypes.data + 4 * (offset + place + first * width)
        visits, factor = min(width, terms - i), d_nll.ctypes.data + 4 * (v + i)
        out = pairs.ctypes.data + 2 * i
        paired_columns(address, 4 * width, visits, num, factor, out, out_stride)


@njit(nogil=True)
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
