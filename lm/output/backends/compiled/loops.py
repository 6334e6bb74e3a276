"""The loops of a forward and a backward, which `passes` calls.

Targets are routed to visits, visits listed by node; `forward` computes (1) to (5) of the reference
backend, whose letters these are, a node at a time, and `backward` (6). Arrays of bf16 and fp16 have
the numbers' bits, see `codegen.vectors`.
"""

import numpy as np

from lm.output.codegen.compilation import compiled
from lm.output.codegen.row_operations import (
    add_scaled_row,
    paired_rows,
    row_address,
    scaled_row,
    softmaxes,
)
from lm.output.codegen.sorting import sort_by_rank
from lm.output.codegen.tiles import (
    LINE_BYTES,
    STREAMED_BYTES,
    TERMS,
    dots,
    row_sums,
    stream,
    streamed_row_sums,
    streamed_sums,
    sums,
)

VISITS = 16
"""Visits whose hidden vectors stay in the first cache while rows are read; of bf16 twice these."""
CACHE_BYTES = 1 << 22
"""Gradients from this size on are not expected to be in a cache when they are used."""


@compiled
def route(target, ignore_index, tree, position, node, child):
    """Set position [P], node and child [D, P], see `Visits`, given `TreeArrays`.

    Returns whether all targets [P] are words or ignored; nothing is set otherwise.
    """
    row_of_node, node_of_row, row_of_word = tree.row_of_node, tree.node_of_row, tree.row_of_word
    level, preorder = tree.level, tree.preorder
    rank = np.empty(len(target), np.int64)
    for p in range(len(target)):
        word = target[p]
        if word == ignore_index:
            rank[p] = len(preorder)
        elif 0 <= word < len(row_of_word):
            rank[p] = preorder[node_of_row[row_of_word[word]]]
        else:
            return False
    sort_by_rank(rank, len(preorder), position)
    node[:] = -1
    child[:] = 0
    for i in range(len(position)):
        word = target[position[i]]
        row = -1 if word == ignore_index else row_of_word[word]
        while row >= 0:
            n = node_of_row[row]
            if tree.num_children[n] > 1:
                node[level[n], i] = n
                child[level[n], i] = row - tree.first_row[n]
            row = row_of_node[n]
    return True


@compiled
def list_nodes(node, first_row, num_children):
    """The visited nodes, in the order of their rows, of `node` [D, P], see `Visits`.

    [M, 6] int64: first visit and end, first row, number of children, number of columns of the nodes
    before, level.
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
def gather_rows(begin, end, position, source, factor, out):
    """out[i] = factor[i] · source[position[i]], followed by zeros, for i from `begin` to `end`.

    `factor` is [P] in the dtype of sums, or [0] for ones.
    """
    num = source.shape[1]
    for i in range(begin, end):
        scale = factor[i] if len(factor) > 0 else factor.dtype.type(1)
        scaled_row(source, out, row_address(source, position[i]), row_address(out, i), num, scale)
        out[i, num:] = 0


@compiled
def forward(
    begin, end, nodes, unsorted, hidden, weight, bias, child, log_prob, error, d_hidden, widest
):
    """(1) to (5) of the sorted positions from `begin` to `end`.

    Args:
        nodes: from `list_nodes`, of which none has more than `widest` children.
        unsorted: the positions and what else `gather_rows` reads.
        hidden: [P, ≥ W], set to that of the sorted positions; `bias` [R] and all results have its
            dtype.
        bias: [R], or zeros [widest] for none.
        log_prob: [D, P], set for each visit of `child` [D, P].
        error: flat, set to the errors; or [0], and they are not saved.
        d_hidden: [P, W], set to (5) without d nll; or [0, W].
    """
    is_saved, has_bias = error.size > 0, len(bias) == len(weight)
    rows = error if is_saved else np.empty(VISITS * widest, hidden.dtype)
    gather_rows(begin, end, *unsorted, hidden)
    _set_unvisited(nodes, begin, end, d_hidden)
    for start, stop, row, n, offset, level in nodes:
        node = start, stop, n, offset if is_saved else -1, level > 0
        of_rows = row_address(weight, row), weight.strides[0], weight.shape[1]
        of_bias = bias.ctypes.data + (row * bias.itemsize if has_bias else 0)
        of_visits = child[level], log_prob[level], rows, d_hidden
        _forward_node(node, begin, end, hidden, weight, of_rows, of_bias, of_visits, rows, 0, None)


@compiled
def forward_bf16(
    begin, end, nodes, unsorted, hidden, weight, bias, child, log_prob, error, d_hidden, widest
):
    """`forward` with `hidden` in bf16, `weight` in bf16 or fp32, the others in fp32.

    Factors of products are rounded to bf16.
    """
    is_saved, has_bias = error.size > 0, len(bias) == len(weight)
    is_low = weight.itemsize == 2 and weight.shape[1] % 2 == 0  # whole pairs
    rows = error if is_saved else np.empty(2 * VISITS * widest, np.float32)
    low_rows = np.zeros((0 if is_low else widest, hidden.shape[1]), np.uint16)
    low_errors = np.empty(2 * VISITS * (widest + widest % 2), np.uint16)
    gather_rows(begin, end, *unsorted, hidden)
    _set_unvisited(nodes, begin, end, d_hidden)
    for m in range(len(nodes)):
        start, stop, row, n, offset, level = nodes[m]
        if max(start, begin) >= min(stop, end):
            continue
        address, stride, size = row_address(weight, row), weight.strides[0], weight.shape[1]
        ahead = (nodes[m + 1, 2] - row) * stride if is_low and m + 1 < len(nodes) else 0
        if not is_low:
            for j in range(n):
                to, one = row_address(low_rows, j), np.float32(1)
                scaled_row(weight, low_rows, address + j * stride, to, size, one)
            address, stride = row_address(low_rows, 0), low_rows.strides[0]
        node = start, stop, n, offset if is_saved else -1, level > 0
        of_rows = address, stride, size
        of_bias = bias.ctypes.data + (row * 4 if has_bias else 0)
        of_visits = child[level], log_prob[level], rows, d_hidden
        low = low_errors, n + n % 2
        _forward_node(node, begin, end, hidden, hidden, of_rows, of_bias, of_visits, *low, ahead)


@compiled
def _forward_node(node, begin, end, hidden, weight, row, bias, visits, low, low_stride, ahead):
    """(1) to (5) for the visits of a node between `begin` and `end`; errors are [visits, n].

    Args:
        visits: child, log_prob, rows and d_hidden.
        weight: an array of the dtype of the rows at `row`.
        low: the rows; or for products of bf16 numbers, memory for the errors in bf16.
        low_stride: 0; or the numbers of a visit in `low`.
        ahead: None; or bytes from the node's rows to those that are needed next.
    """
    start, stop, n, offset, is_added = node
    child, log_prob, rows, d_hidden = visits
    end, size, low_size = min(stop, end), rows.itemsize, low.itemsize
    few, step = (VISITS, TERMS) if low_stride == 0 else (2 * VISITS, 2 * TERMS)
    for v in range(max(start, begin), end, few):
        num, first = min(few, end - v), offset + (v - start) * n if offset >= 0 else 0
        place = rows.ctypes.data + first * size, n * size
        starts, strides = (row_address(hidden, v), row[0]), (hidden.strides[0], row[1])
        dots(hidden, weight, row[2], num, n, starts, strides, place)
        low_place = place if low_stride == 0 else (low.ctypes.data + 0, low_stride * low_size)
        targets, found = child[v : v + num], log_prob[v : v + num]
        softmaxes(rows, low, place, low_place, num, n, bias, targets, found, offset >= 0)
        for i in range(num if low_stride > 0 and n % 2 else 0):
            low[i * low_stride + n] = 0
        if d_hidden.size > 0:
            strides = low_place[1], low_size, row[1]
            to = (row_address(d_hidden, v), d_hidden.strides[0])
            for j in range(0, n, step):
                starts = (low_place[0] + j * low_size, row[0] + j * row[1])
                terms, added = min(step, n - j), is_added or j > 0
                if ahead is None:
                    sums(low, weight, d_hidden, num, terms, starts, strides, to, added, None)
                else:
                    further = ahead if v + few >= end else 0
                    sums(low, weight, d_hidden, num, terms, starts, strides, to, added, further)


@compiled
def _set_unvisited(nodes, begin, end, d_hidden):
    """Zeros in place of the rows from `begin` to `end` of positions that do not visit the root."""
    visits_root = len(nodes) > 0 and nodes[0, 5] == 0
    if d_hidden.size > 0:
        d_hidden[max(begin, nodes[0, 1] if visits_root else 0) : end] = 0


@compiled
def add_levels(position, log_prob, nll):
    """Set nll [P] to -Σ log_prob [D, P] of the sorted positions."""
    for i in range(len(position)):
        total = log_prob[0, i]
        for level in range(1, len(log_prob)):
            total += log_prob[level, i]
        nll[position[i]] = -total


@compiled
def scatter_rows(begin, end, position, source, factor, out):
    """out[position[i]] = factor[i] · source[i], as far as rows of `out` go; see `gather_rows`."""
    for i in range(begin, end):
        to = row_address(out, position[i])
        scaled_row(source, out, row_address(source, i), to, out.shape[1], factor[i])


@compiled
def backward(begin, end, nodes, error, hidden, d_nll, d_weight, d_bias):
    """(6) of the rows from `begin` to `end`, given `nodes` and `error` of `forward`.

    Args:
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
        to = (row_address(d_weight, first), d_weight.strides[0])
        strides = (size, n * size, hidden.strides[0])
        for v in range(start, stop if d_weight.size > 0 else start, step):
            place = offset + (v - start) * n + first - row
            starts = (error.ctypes.data + place * size, row_address(hidden, v))
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
    step = len(hidden) if d_weight.itemsize == 2 else 2 * TERMS  # rounded once
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
        to = (row_address(d_weight, first), d_weight.strides[0])
        strides = (4, 2 * num, hidden.strides[0])
        for v in range(start, stop if d_weight.size > 0 else start, step):
            terms = min(step, stop - v)
            starts = (pairs.ctypes.data + 0, row_address(hidden, v))
            place = offset + (v - start) * n + first - row
            _pair_rows(error, d_nll, pairs, place, n, num, v, terms)
            if streamed:
                streamed_row_sums(
                    pairs, hidden, d_weight, num, terms, starts, strides, to[0], buffer
                )
            else:
                row_sums(pairs, hidden, d_weight, num, terms, starts, strides, to, v > start, None)
        _add_to_bias(d_bias, error, d_nll, start, stop, first, num, offset - row, n)


@compiled
def _pair_rows(error, d_nll, pairs, first, n, num, v, terms):
    """Set `pairs` [⌈terms / 2⌉, num] to errors times d_nll in bf16, two visits side by side.

    They are those of `terms` visits from v on and of `num` of the node's n children, and begin at
    `first`. If `terms` is odd, zeros are next to the last ones.
    """
    for m in range(0, terms, 2):
        place = error.ctypes.data + 4 * (first + m * n)
        is_pair = m + 1 < terms
        other = place + 4 * n if is_pair else place
        factor = d_nll[v + m + 1] if is_pair else np.float32(0)
        to = pairs.ctypes.data + 2 * m * num
        paired_rows(error, place, other, to, num, d_nll[v + m], factor)


@compiled
def _add_to_bias(d_bias, error, d_nll, start, stop, first, num, offset, n):
    """(6) of the biases of `num` rows from `first` on, whose errors begin at offset + row."""
    for v in range(start, stop if d_bias.size > 0 else start):
        place = error.ctypes.data + error.itemsize * (offset + (v - start) * n + first)
        to = d_bias.ctypes.data + d_bias.itemsize * first
        add_scaled_row(error, d_bias, place, to, num, d_nll[v])


@compiled
def zero_gaps(begin, end, nodes, out):
    """Zeros in the rows of `out` [R, W] from `begin` to `end` that belong to no visited node.

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
def _is_streamed(d_weight):
    """Whether a gradient is written past the caches: a large one without gaps between its rows."""
    row_bytes = d_weight.shape[1] * d_weight.itemsize
    return len(d_weight) * row_bytes > CACHE_BYTES and d_weight.strides[0] == row_bytes


@compiled
def _buffer(d_weight):
    """For `streamed_sums`; empty if the gradient is not streamed."""
    num_bytes = max(STREAMED_BYTES, d_weight.shape[1] * d_weight.itemsize + 2 * LINE_BYTES)
    return np.empty(num_bytes if _is_streamed(d_weight) else 0, np.uint8)
