"""The loops over visited nodes, compiled by numba.

The letters and equations are those of the reference backend.
"""

import numpy as np

from lm.output.backends.compiled.column_loops import (
    add_blocks_to_bias,
    forward_blocks,
    is_many,
    new_space,
    pair_blocks,
)
from lm.output.backends.compiled.columns import BLOCK
from lm.output.backends.compiled.compilation import compiler
from lm.output.backends.compiled.row_operations import (
    LINE_BYTES,
    add_scaled_row,
    paired_rows,
    scaled_row,
    stream,
)
from lm.output.backends.compiled.tile_loops import (
    STREAMED_BYTES,
    TERMS,
    dots,
    row_sums,
    softmaxes,
    streamed_row_sums,
    streamed_sums,
    sums,
)

EMITTED = "41666ec6c59763c9"
"""See `compiler`."""
VISITS = 16
"""Visits whose hidden vectors stay in the first cache while a node's rows are read."""
CACHE_BYTES = 1 << 22
"""Gradients from this size on are not expected to be in a cache when they are used."""
compiled = compiler(EMITTED)


@compiled
def sort_rows(begin, end, position, source, factor, out):
    """out[i] = factor[i] · source[position[i]], followed by zeros, for i from `begin` to `end`.

    Args:
        position: [P].
        source: [P, H].
        factor: [P] in the dtype of sums, or [0] for ones.
        out: [P, W], W ≥ H.
    """
    num = source.shape[1]
    for i in range(begin, end):
        start = source.ctypes.data + position[i] * source.strides[0]
        to = out.ctypes.data + i * out.strides[0]
        scale = factor[i] if len(factor) > 0 else factor.dtype.type(1)
        scaled_row(source, out, start, to, num, scale)
        out[i, num:] = 0


@compiled
def unsort_rows(begin, end, position, source, factor, out):
    """out[position[i]] = factor[i] · source[i], as far as rows of `out` go; see `sort_rows`."""
    for i in range(begin, end):
        start = source.ctypes.data + i * source.strides[0]
        to = out.ctypes.data + position[i] * out.strides[0]
        scaled_row(source, out, start, to, out.shape[1], factor[i])


@compiled
def list_nodes(node, first_row, num_children):
    """The visited nodes, in the order of their rows, of `node` [D, P], see `Visits`.

    Returns:
        [M, 6] int64: first visit and end, first row, number of children, number of columns of the
        nodes before, level.
    """
    num_levels, num_positions = node.shape
    found = np.empty((node.size, 6), np.int64)
    num, columns = 0, 0
    for level in range(num_levels):
        start = 0
        for end in range(1, num_positions + 1):
            which = node[level, start]
            if end < num_positions and node[level, end] == which:
                continue
            if which >= 0:
                children = num_children[which]
                found[num] = (start, end, first_row[which], children, columns, level)
                columns += (end - start) * children
                num += 1
            start = end
    return found[:num].copy()


@compiled
def _set_unvisited(nodes, begin, end, d_hidden):
    """Zeros in place of the rows from `begin` to `end` of positions that do not visit the root."""
    visits_root = len(nodes) > 0 and nodes[0, 5] == 0
    if d_hidden.size > 0:
        d_hidden[max(begin, nodes[0, 1] if visits_root else 0) : end] = 0


@compiled
def forward(
    begin, end, nodes, unsorted, hidden, weight, bias, child, log_prob, error, d_hidden, widest
):
    """(1) to (5) of the sorted positions from `begin` to `end`.

    Args:
        nodes: from `list_nodes`.
        unsorted: the positions and what else `sort_rows` reads.
        hidden: [P, ≥ W], set to that of the sorted positions; `bias` [R] and all results have its
            dtype.
        weight: [R, W].
        bias: [R], or zeros [widest] for none.
        child: [D, P].
        log_prob: [D, P], set for each visit.
        error: flat, set to the errors; or [0], and they are not saved.
        d_hidden: [P, W], set to (5) without d nll; or [0, W].
        widest: the most children of a node.
    """
    size, is_saved, has_bias = hidden.itemsize, error.size > 0, len(bias) == len(weight)
    rows = error if is_saved else np.empty(VISITS * widest, hidden.dtype)
    row_strides = (hidden.strides[0], weight.strides[0])
    sort_rows(begin, end, *unsorted, hidden)
    _set_unvisited(nodes, begin, end, d_hidden)
    for start, stop, row, n, offset, level in nodes:
        weight_address = weight.ctypes.data + row * weight.strides[0]
        bias_address = bias.ctypes.data + (row * size if has_bias else 0)
        for v in range(max(start, begin), min(stop, end), VISITS):
            num = min(VISITS, min(stop, end) - v)
            first = offset + (v - start) * n if is_saved else 0
            address = rows.ctypes.data + first * size
            starts = (hidden.ctypes.data + v * hidden.strides[0], weight_address)
            dots(hidden, weight, weight.shape[1], num, n, starts, row_strides, (address, n * size))
            place, visits = (address, n * size), slice(v, v + num)
            targets, found = child[level, visits], log_prob[level, visits]
            softmaxes(rows, rows, place, place, num, n, bias_address, targets, found, is_saved)
            if d_hidden.size > 0:
                strides = (n * size, size, weight.strides[0])
                to = (d_hidden.ctypes.data + v * d_hidden.strides[0], d_hidden.strides[0])
                for j in range(0, n, TERMS):
                    starts = (address + j * size, weight_address + j * weight.strides[0])
                    terms, added = min(TERMS, n - j), level > 0 or j > 0
                    sums(rows, weight, d_hidden, num, terms, starts, strides, to, added, None)


@compiled
def forward_bf16(
    begin, end, nodes, unsorted, hidden, weight, bias, child, log_prob, error, d_hidden, widest
):
    """`forward` with products of bf16 numbers: hidden vectors, rows, and errors rounded to bf16.

    `hidden` has bf16, `weight` bf16 or fp32, the others fp32. Many visits of a node are computed by
    `forward_blocks`, whose sums have another order: the last bits depend on how many there are.
    """
    is_saved, has_bias = error.size > 0, len(bias) == len(weight)
    is_low = weight.itemsize == 2 and weight.shape[1] % 2 == 0  # whole pairs
    rows = error if is_saved else np.empty(BLOCK * widest, np.float32)
    low_rows = np.zeros((0 if is_low else widest, hidden.shape[1]), np.uint16)
    widest_of_few = 0
    for start, stop, _, n, _, _ in nodes:
        widest_of_few = max(widest_of_few, 0 if is_many(stop - start, n) else n)
    low_errors = np.zeros((VISITS, widest_of_few + widest_of_few % 2), np.uint16)
    space = new_space(widest, hidden.shape[1])
    sort_rows(begin, end, *unsorted, hidden)
    _set_unvisited(nodes, begin, end, d_hidden)
    for m in range(len(nodes)):
        start, stop, row, n, offset, level = nodes[m]
        if max(start, begin) >= min(stop, end):
            continue
        address, stride, size = _row_address(weight, row), weight.strides[0], weight.shape[1]
        ahead = (nodes[m + 1, 2] - row) * stride if is_low and m + 1 < len(nodes) else 0
        if not is_low:
            for j in range(n):
                to, one = _row_address(low_rows, j), np.float32(1)
                scaled_row(weight, low_rows, address + j * stride, to, size, one)
            address, stride = low_rows.ctypes.data, low_rows.strides[0]
        node = start, stop, n, offset if is_saved else -1, level > 0
        of_rows = address, stride, size
        bias_address = bias.ctypes.data + (row * 4 if has_bias else 0)
        visits = child[level], log_prob[level]
        if is_many(stop - start, n):
            forward_blocks(
                node, begin, end, hidden, of_rows, bias_address, *visits, rows, d_hidden, space
            )
        else:
            _forward_few(
                node,
                begin,
                end,
                hidden,
                of_rows,
                bias_address,
                *visits,
                rows,
                d_hidden,
                low_errors,
                ahead,
            )


@compiled
def _forward_few(node, begin, end, hidden, row, bias, child, log_prob, rows, d_hidden, low, ahead):
    """`forward_blocks` for a node of few visits, whose errors are [visits, n].

    Args:
        low: space for errors in bf16, zeros at first.
        ahead: bytes from the node's rows to those that are needed next.
    """
    start, stop, n, offset, is_added = node
    end = min(stop, end)
    for v in range(max(start, begin), end, VISITS):
        num, first = min(VISITS, end - v), offset + (v - start) * n if offset >= 0 else 0
        place = rows.ctypes.data + first * 4, n * 4
        starts, strides = (_row_address(hidden, v), row[0]), (hidden.strides[0], row[1])
        dots(hidden, hidden, row[2], num, n, starts, strides, place)
        low_place, visits = (low.ctypes.data, low.strides[0]), slice(v, v + num)
        targets, found = child[visits], log_prob[visits]
        softmaxes(rows, low, place, low_place, num, n, bias, targets, found, offset >= 0)
        if n % 2:
            low[:, n] = 0
        if d_hidden.size > 0:
            of_errors = (low.strides[0], 2, row[1])
            to = (_row_address(d_hidden, v), d_hidden.strides[0])
            distance = ahead if v + VISITS >= end else 0
            for j in range(0, n, 2 * TERMS):
                starts = (low.ctypes.data + 2 * j, row[0] + j * row[1])
                terms, added = min(2 * TERMS, n - j), is_added or j > 0
                sums(low, hidden, d_hidden, num, terms, starts, of_errors, to, added, distance)


@compiled
def _is_streamed(d_weight):
    """Whether a gradient is written past the caches: a large one without gaps between its rows."""
    row_bytes = d_weight.shape[1] * d_weight.itemsize
    return len(d_weight) * row_bytes > CACHE_BYTES and d_weight.strides[0] == row_bytes


@compiled
def _buffer(d_weight):
    """For `streamed_sums`; empty if the gradient is not streamed."""
    num_bytes = max(STREAMED_BYTES, d_weight.shape[1] * d_weight.itemsize + 2 * LINE_BYTES)
    return np.empty(num_bytes if _is_streamed(d_weight) else 0, np.uint8)


@compiled
def zero_gaps(begin, end, nodes, out):
    """Zeros in the rows of `out` [R, W] from `begin` to `end` that belong to no node.

    `out` is a gradient without gaps between its rows.
    """
    row_bytes, before = out.shape[1] * out.itemsize, 0
    zeros = np.zeros(STREAMED_BYTES + LINE_BYTES if _is_streamed(out) else 0, np.uint8)
    for i in range(len(nodes) + 1):
        first, num = (nodes[i, 2], nodes[i, 3]) if i < len(nodes) else (len(out), 0)
        start, stop, before = max(before, begin), min(first, end), first + num
        if len(zeros) == 0:
            out[start:stop] = 0
            continue
        to, num_bytes = out.ctypes.data + start * row_bytes, (stop - start) * row_bytes
        here = zeros.ctypes.data + (to - zeros.ctypes.data) % LINE_BYTES
        for j in range(0, num_bytes, STREAMED_BYTES):
            stream(here, to + j, min(STREAMED_BYTES, num_bytes - j))


@compiled
def backward(begin, end, nodes, error, hidden, d_nll, d_weight, d_bias):
    """(6) of the rows from `begin` to `end`.

    Args:
        nodes: from `list_nodes`.
        error: as `forward` saves it.
        hidden: [P, ≥ W] of the sorted positions, multiplied by d_nll [P].
        d_weight: [R, W], of which the rows of visited nodes are set; or [0, W].
        d_bias: [R] in the dtype of hidden, to which gradients are added; or [0].
    """
    size = hidden.itemsize
    step = TERMS if d_weight.itemsize == size else len(hidden)  # rounded once
    buffer = _buffer(d_weight)
    for start, stop, row, n, offset, _ in nodes:
        first, num = max(row, begin), min(row + n, end) - max(row, begin)
        if num <= 0:
            continue
        streamed = len(buffer) > 0 and stop - start <= step
        to = (d_weight.ctypes.data + first * d_weight.strides[0], d_weight.strides[0])
        strides = (size, n * size, hidden.strides[0])
        for v in range(start, stop if d_weight.size > 0 else start, step):
            place = offset + (v - start) * n + first - row
            starts = (
                error.ctypes.data + place * size,
                hidden.ctypes.data + v * hidden.strides[0],
            )
            terms = min(step, stop - v)
            if streamed:
                streamed_sums(error, hidden, d_weight, num, terms, starts, strides, to[0], buffer)
            else:
                sums(error, hidden, d_weight, num, terms, starts, strides, to, v > start, None)
        _add_to_bias(d_bias, error, d_nll, start, stop, first, num, offset - row, n)


@compiled
def backward_bf16(begin, end, nodes, error, hidden, d_nll, d_weight, d_bias):
    """`backward` with products of bf16 numbers: hidden vectors, and errors times d_nll.

    `hidden` has bf16 and is not multiplied by d_nll.
    """
    is_rounded = d_weight.itemsize == 2
    step = len(hidden) + BLOCK if is_rounded else 2 * TERMS
    step -= step % BLOCK
    buffer = _buffer(d_weight)
    most_visits, most_rows = 0, 0
    for start, stop, row, n, _, _ in nodes:
        most_visits = max(most_visits, min(stop - start, step))
        most_rows = max(most_rows, min(row + n, end) - max(row, begin))
    pairs = np.empty((most_visits + 1) // 2 * most_rows * 2, np.uint16)
    for start, stop, row, n, offset, _ in nodes:
        first, num = max(row, begin), min(row + n, end) - max(row, begin)
        if num <= 0:
            continue
        streamed = len(buffer) > 0 and stop - start <= step
        to = (_row_address(d_weight, first), d_weight.strides[0])
        node, in_blocks = (start, stop, n, offset), is_many(stop - start, n)
        for v in range(start, stop if d_weight.size > 0 else start, step):
            terms = min(step, stop - v)
            starts = (pairs.ctypes.data, _row_address(hidden, v))
            if in_blocks:
                pair_blocks(error, d_nll, pairs, node, first - row, num, v, terms)
                strides = (2 * (terms + terms % 2), 2, hidden.strides[0])
            else:
                _pair_rows(error, d_nll, pairs, node, first - row, num, v, terms)
                strides = (4, 2 * num, hidden.strides[0])
            if streamed:
                streamed_row_sums(
                    pairs, hidden, d_weight, num, terms, starts, strides, to[0], buffer
                )
            else:
                row_sums(pairs, hidden, d_weight, num, terms, starts, strides, to, v > start, None)
        if in_blocks and d_bias.size > 0:
            add_blocks_to_bias(d_bias, error, d_nll, node, first, first - row, num)
        elif not in_blocks:
            _add_to_bias(d_bias, error, d_nll, start, stop, first, num, offset - row, n)


@compiled
def _pair_rows(error, d_nll, pairs, node, first, num, v, terms):
    """`pair_blocks` for a node of few visits: [terms / 2, num] pairs."""
    start, _, n, offset = node
    for m in range(0, terms, 2):
        place = error.ctypes.data + 4 * (offset + (v + m - start) * n + first)
        is_pair = m + 1 < terms
        other = place + 4 * n if is_pair else place
        factor = d_nll[v + m + 1] if is_pair else np.float32(0)
        to = pairs.ctypes.data + 2 * m * num
        paired_rows(error, place, other, to, num, d_nll[v + m], factor)


@compiled
def _row_address(rows, i):
    """The address of a row."""
    return rows.ctypes.data + i * rows.strides[0]


@compiled
def _add_to_bias(d_bias, error, d_nll, start, stop, first, num, offset, n):
    """(6) of the biases of `num` rows from `first` on, whose errors begin at offset + row."""
    for v in range(start, stop if d_bias.size > 0 else start):
        place = error.ctypes.data + error.itemsize * (offset + (v - start) * n + first)
        to = d_bias.ctypes.data + d_bias.itemsize * first
        add_scaled_row(error, d_bias, place, to, num, d_nll[v])
