"""The loops over visited nodes, compiled by numba, and the products of tiles that they consist of.

The letters and equations are those of the reference backend. A *tile* is a small part of a matrix
whose numbers are in registers. Where it exceeds the matrix, the matrix's last rows are computed and
stored again, and columns are masked: one piece of code serves all sizes. Each result is a sum in an
order that does not depend on where its tile begins, so it is the same bit for bit however the work
is divided among threads.
"""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from lm.output.backends.compiled import vectors
from lm.output.backends.compiled.vectors import HAS_AVX512, INT, VECTOR_BYTES, Vectors

TILE = (4, 4) if HAS_AVX512 else (4, 3)
"""Vectors of a tile; processors have 32 or 16 registers for them."""
VISITS = 16
"""Visits whose hidden vectors stay in the first cache while a node's rows are read."""
TERMS = 64
"""Rows that are summed up at a time, for the same reason."""
CACHE_BYTES = 1 << 22
"""Gradients from this size on are not expected to be in a cache when they are used."""
VECTORS = "e0c309e6a5d0acde"
"""Of the SHA-256 of vectors.py. numba's cache of compiled code notices changes to this file alone,
so a change to the other one must be noted here."""
IS_CACHED = hashlib.sha256(Path(vectors.__file__).read_bytes()).hexdigest().startswith(VECTORS)
"""Whether compiled code is kept on disk."""


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function when it is first called; it runs without the interpreter's lock."""
    try:
        decorated: Callable[..., Any] = numba.njit(nogil=True, cache=IS_CACHED)(function)
    except RuntimeError:  # no folder for a cache can be written
        decorated = numba.njit(nogil=True)(function)
    return decorated


def _addresses(builder: Any, first: Any, stride: Any, num: int, last: Any) -> list[Any]:
    """Of `num` rows; of row number `last` again beyond it."""
    inside = [builder.icmp_signed("<", INT(i), last) for i in range(num)]
    rows = [builder.select(is_inside, INT(i), last) for i, is_inside in enumerate(inside)]
    return [builder.add(first, builder.mul(row, stride)) for row in rows]


def _pair(builder: Any, value: Any) -> tuple[Any, Any]:
    return builder.extract_value(value, 0), builder.extract_value(value, 1)


@intrinsic
def _dot_tile(typing, hidden, weight, num, starts, strides, out, last):
    """out[i, j] = hidden[i] · weight[j] for rows i and j of a tile.

    Args:
        hidden, weight: arrays, for their dtypes; `out` has that of hidden.
        num: the length of the vectors.
        starts, strides: addresses of the first rows of hidden and weight, and bytes between rows.
        out: address of out[0, 0], and bytes between its rows.
        last: the last i and the last j there are in the tile.
    """
    pair = types.UniTuple(types.int64, 2)
    signature = types.void(hidden, weight, types.int64, pair, pair, pair, pair)

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        emit = Vectors(context, builder, hidden.dtype)
        num, starts, strides, out, last = values[2], *(_pair(builder, v) for v in values[3:])
        h, w = (
            _addresses(builder, *place) for place in zip(starts, strides, TILE, last, strict=True)
        )

        ahead = builder.mul(strides[1], INT(TILE[1]))

        def step(index: Any, sums: list[Any], mask: Any) -> None:
            a = [emit.load(emit.pointer(x, hidden.dtype, index), hidden.dtype, mask) for x in h]
            for j, row in enumerate(w):
                b = emit.load(emit.pointer(row, weight.dtype, index), weight.dtype, mask)
                emit.prefetch(emit.pointer(builder.add(row, ahead), weight.dtype, index))
                for i in range(TILE[0]):
                    k = i * TILE[1] + j
                    sums[k] = emit.multiply_add(a[i], b, sums[k])

        sums = emit.sums(emit.row(num, [emit.zero] * (TILE[0] * TILE[1]), step))
        for i, row in enumerate(_addresses(builder, *out, TILE[0], last[0])):
            places = _addresses(builder, row, INT(emit.item_bytes), TILE[1], last[1])
            for j, place in enumerate(places):
                builder.store(sums[i * TILE[1] + j], emit.pointer(place, hidden.dtype))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _sum_tile(typing, factor, rows, out, num, starts, strides, to, last, left, added, streamed):
    """out[i, k] = Σ_n factor[i, n] · rows[n, k], or += it, for rows i and columns k of a tile.

    Args:
        factor, rows, out: arrays, for their dtypes; sums have that of factor.
        num: how many n there are.
        starts: addresses of factor[0, 0] and rows[0, 0].
        strides: bytes of factor from an i to the next, of factor and rows from an n to the next.
        to: address of out[0, 0], and bytes between its rows.
        last: the last i there is in the tile.
        left: how many columns there are from the tile's first one on.
        added: whether sums are added to `out`, which then has the dtype of factor.
        streamed: whether `out` is too large for the caches, and sums are not added.
    """
    integer, flag, pair = types.int64, types.boolean, types.UniTuple(types.int64, 2)
    three = types.UniTuple(integer, 3)
    signature = types.void(
        factor, rows, out, integer, pair, three, pair, integer, integer, flag, flag
    )

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        emit = Vectors(context, builder, factor.dtype)
        num, starts, strides, to, last, left, added, streamed = values[3:]
        factor_start, row_start = _pair(builder, starts)
        stride_i, stride_n, row_stride = (builder.extract_value(strides, i) for i in range(3))
        factors = _addresses(builder, factor_start, stride_i, TILE[0], last)
        outs = _addresses(builder, *_pair(builder, to), TILE[0], last)
        offsets = [INT(j * emit.lanes) for j in range(TILE[1])]

        def tile(masks: list[Any], *, streamed: bool = False) -> None:
            places = [emit.pointer(row, out.dtype, offset) for row in outs for offset in offsets]
            variables = emit.variables([emit.zero] * len(places))
            with builder.if_then(added):
                loaded = zip(places, masks * TILE[0], strict=True)
                emit.assign(variables, [emit.load(x, out.dtype, mask) for x, mask in loaded])
            sums = [builder.load(variable) for variable in variables]
            with emit.loop(num, 1, sums) as (n, carried):
                row = builder.add(row_start, builder.mul(n, row_stride))
                b = [
                    emit.load(emit.pointer(row, rows.dtype, offset), rows.dtype, mask)
                    for offset, mask in zip(offsets, masks, strict=True)
                ]
                for i, address in enumerate(factors):
                    place = builder.add(address, builder.mul(n, stride_n))
                    a = emit.broadcast(emit.pointer(place, factor.dtype), factor.dtype)
                    for j in range(TILE[1]):
                        k = i * TILE[1] + j
                        carried[k] = emit.multiply_add(a, b[j], carried[k])
            for value, place, mask in zip(sums, places, masks * TILE[0], strict=True):
                emit.store(value, place, out.dtype, mask, streamed=streamed)

        vector_bytes = emit.lanes * out.dtype.bitwidth // 8
        rest = builder.and_(builder.or_(*_pair(builder, to)), INT(vector_bytes - 1))
        is_aligned = builder.icmp_signed("==", rest, INT(0))
        full = builder.icmp_signed(">=", left, INT(TILE[1] * emit.lanes))
        with builder.if_else(full) as (whole, partly):
            with whole, builder.if_else(builder.and_(streamed, is_aligned)) as (past, through):
                with past:
                    tile([None] * TILE[1], streamed=True)
                with through:
                    tile([None] * TILE[1])
            with partly:
                tile([emit.mask(builder.sub(left, offset)) for offset in offsets])
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _exponentials(typing, row, address, num):
    """Replace `num` numbers z at an address by exp(z - m); their largest number m, and the sum.

    `row` is an array, for its dtype.
    """
    signature = types.UniTuple(row.dtype, 2)(row, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit = Vectors(context, builder, row.dtype)
        address, num = values[1:]
        lowest = emit.constant(-math.inf)

        def compare(index: Any, carried: list[Any], mask: Any) -> None:
            value = emit.load(emit.pointer(address, row.dtype, index), row.dtype, mask)
            value = value if mask is None else builder.select(mask, value, lowest)
            carried[0] = emit.maximum(carried[0], value)

        largest = emit.largest(emit.row(num, [lowest], compare)[0])
        shift = emit.everywhere(largest)

        def add(index: Any, carried: list[Any], mask: Any) -> None:
            place = emit.pointer(address, row.dtype, index)
            value = emit.exp(builder.fsub(emit.load(place, row.dtype, mask), shift))
            emit.store(value, place, row.dtype, mask)
            value = value if mask is None else builder.select(mask, value, emit.zero)
            carried[0] = builder.fadd(carried[0], value)

        (total,) = emit.sums(emit.row(num, [emit.zero], add))
        return context.make_tuple(builder, signature.return_type, [largest, total])

    return signature, generate


@intrinsic
def _scaled_row(typing, source, out, start, to, num, factor):
    """out[k] = factor · source[k] for `num` numbers from the addresses `start` and `to` on.

    `source` and `out` are arrays, for their dtypes; the factor has the dtype of sums.
    """
    integer = types.int64
    signature = types.void(source, out, integer, integer, integer, factor)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit = Vectors(context, builder, signature.args[5])
        start, to, num, factor = values[2:]
        scale = emit.everywhere(factor)

        def step(index: Any, _: list[Any], mask: Any) -> None:
            value = emit.load(emit.pointer(start, source.dtype, index), source.dtype, mask)
            value = builder.fmul(scale, value)
            emit.store(value, emit.pointer(to, out.dtype, index), out.dtype, mask)

        emit.row(num, [], step)
        return context.get_dummy_value()

    return signature, generate


@_compiled
def sort_rows(position, source, factor, out):
    """out[i] = factor[i] · source[position[i]], followed by zeros.

    Args:
        position: [P].
        source: [P, H].
        factor: [P] in the dtype of sums.
        out: [P, W], W ≥ H.
    """
    num = source.shape[1]
    for i in range(len(out)):
        start = source.ctypes.data + position[i] * source.strides[0]
        to = out.ctypes.data + i * out.strides[0]
        _scaled_row(source, out, start, to, num, factor[i])
        out[i, num:] = 0


@_compiled
def unsort_rows(position, source, factor, out):
    """out[position[i]] = factor[i] · source[i], as far as rows of `out` go; see `sort_rows`."""
    for i in range(len(out)):
        start = source.ctypes.data + i * source.strides[0]
        to = out.ctypes.data + position[i] * out.strides[0]
        _scaled_row(source, out, start, to, out.shape[1], factor[i])


@_compiled
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


@_compiled
def _dots(hidden, weight, num, n, starts, out):
    """The products of `num` hidden vectors with `n` rows; addresses as of `_dot_tile`."""
    strides = (hidden.strides[0], weight.strides[0])
    for j in range(0, n, TILE[1]):
        for i in range(0, num, TILE[0]):
            first = (starts[0] + i * strides[0], starts[1] + j * strides[1])
            to = (out[0] + i * out[1] + j * hidden.itemsize, out[1])
            last = (num - 1 - i, n - 1 - j)
            _dot_tile(hidden, weight, hidden.shape[1], first, strides, to, last)


@_compiled
def _sums(factor, rows, out, num, num_terms, starts, strides, to, added, streamed):
    """`num` rows of sums of `num_terms` rows; addresses and flags as of `_sum_tile`."""
    num_columns, columns = out.shape[1], TILE[1] * (VECTOR_BYTES // factor.itemsize)
    for k in range(0, num_columns, columns):
        for i in range(0, num, TILE[0]):
            first = (starts[0] + i * strides[0], starts[1] + k * rows.itemsize)
            place = (to[0] + i * to[1] + k * out.itemsize, to[1])
            last, left = num - 1 - i, num_columns - k
            _sum_tile(
                factor, rows, out, num_terms, first, strides, place, last, left, added, streamed
            )


@_compiled
def forward(nodes, begin, end, hidden, weight, bias, child, log_prob, error, d_hidden, widest):
    """(1) to (5) of the sorted positions from `begin` to `end`.

    Args:
        nodes: from `list_nodes`.
        hidden: [P, W] of the sorted positions; `bias` [R] and all results have its dtype.
        weight: [R, W].
        bias: [R], or [0] for none.
        child: [D, P].
        log_prob: [D, P], set for each visit.
        error: flat, set to the errors; or [0], and they are not saved.
        d_hidden: [P, W], to which (5) is added without d nll; or [0, W].
        widest: the most children of a node.
    """
    size, is_saved = hidden.itemsize, error.size > 0
    rows = error if is_saved else np.empty(VISITS * widest, hidden.dtype)
    for start, stop, row, n, offset, level in nodes:
        weight_address = weight.ctypes.data + row * weight.strides[0]
        for v in range(max(start, begin), min(stop, end), VISITS):
            num = min(VISITS, min(stop, end) - v)
            first = offset + (v - start) * n if is_saved else 0
            address = rows.ctypes.data + first * size
            starts = (hidden.ctypes.data + v * hidden.strides[0], weight_address)
            _dots(hidden, weight, num, n, starts, (address, n * size))
            for i in range(num):
                logits = rows[first + i * n : first + (i + 1) * n]
                if bias.size > 0:
                    logits += bias[row : row + n]
                target = child[level, v + i]
                logit = logits[target]
                largest, total = _exponentials(rows, address + i * n * size, n)
                log_q = logit - largest - math.log(total)
                log_prob[level, v + i] = log_q
                if is_saved:
                    logits *= 1 / total
                    logits[target] = math.expm1(log_q)
            if d_hidden.size > 0:
                strides = (n * size, size, weight.strides[0])
                to = (d_hidden.ctypes.data + v * d_hidden.strides[0], d_hidden.strides[0])
                for j in range(0, n, TERMS):
                    starts = (address + j * size, weight_address + j * weight.strides[0])
                    terms = min(TERMS, n - j)
                    _sums(rows, weight, d_hidden, num, terms, starts, strides, to, True, False)


@_compiled
def backward(nodes, begin, end, error, hidden, d_nll, d_weight, d_bias):
    """(6) of the rows from `begin` to `end`.

    Args:
        nodes: from `list_nodes`.
        error: as `forward` saves it.
        hidden: [P, W] of the sorted positions, multiplied by d_nll [P].
        d_weight: [R, W], of which the rows of visited nodes are set; or [0, W].
        d_bias: [R] in the dtype of hidden, to which gradients are added; or [0].
    """
    size = hidden.itemsize
    step = TERMS if d_weight.itemsize == size else len(hidden)  # rounded once
    is_large = d_weight.size * d_weight.itemsize > CACHE_BYTES
    for start, stop, row, n, offset, _ in nodes:
        first, num = max(row, begin), min(row + n, end) - max(row, begin)
        streamed = is_large and stop - start <= step
        to = (d_weight.ctypes.data + first * d_weight.strides[0], d_weight.strides[0])
        strides = (size, n * size, hidden.strides[0])
        for v in range(start, stop if d_weight.size > 0 else start, step):
            place = offset + (v - start) * n + first - row
            starts = (
                error.ctypes.data + place * size,
                hidden.ctypes.data + v * hidden.strides[0],
            )
            terms = min(step, stop - v)
            _sums(error, hidden, d_weight, num, terms, starts, strides, to, v > start, streamed)
        for v in range(start, stop if d_bias.size > 0 else start):
            place = offset + (v - start) * n - row
            for j in range(first, first + num):
                d_bias[j] += error[place + j] * d_nll[v]
