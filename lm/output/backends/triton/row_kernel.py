"""The fused Triton kernel of the last launch of the backward: the gradient of every row.

Letters and equations are those of `backward_kernels`. `_rows` writes (6) of heavy nodes that are
not split into chunks; of light groups, whose rows one program reads once for both (5) and (6); sums
of chunks, in order; and 0 for rows of nodes without visits. Heavy nodes are limited by what the
second-level cache delivers and light ones by memory, so that they take less time together than one
after another. Every row's gradient has one owner and is rounded once, and no float is added
atomically.
"""

import triton
import triton.language as tl

from lm.output.backends.triton.backward_kernels import (
    _heavy_rows,
    _load_errors,
    _num_items,
    _scaled,
    _store_biases,
    _store_block,
    _store_rows,
)
from lm.output.backends.triton.forward_kernel import (
    _block,
    _first_slot,
    _padded,
)
from lm.output.backends.triton.launch import VARYING
from lm.output.backends.triton.routing_kernels import _fields, _light_entry


@triton.jit(do_not_specialize=VARYING)
def _rows(
    inputs, errors_of, partial, outputs, tree, visited, node_of_row, routing, strides,
    P, R, row_programs, max_groups, max_split_tiles,
    ACC: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """(6) for all rows, and (5) for light groups; 0 for the R rows without visits."""
    LIGHT: tl.constexpr = META.light.v
    LIGHT_H: tl.constexpr = META.light.h
    BLOCK_C: tl.constexpr = META.tile.c
    visits_of = _fields(routing, P, strides.D)
    columns = strides.weight_units * META.weight_align
    light_h = tl.cdiv(columns, LIGHT_H)
    written = tree.first_row if outputs.written_row is None else outputs.written_row
    program = tl.program_id(0) - row_programs
    tile, h0 = program // light_h, (program % light_h) * LIGHT_H
    if program < 0:
        rows = (written, outputs.d_weight, outputs.d_bias, columns)
        num_items = tl.load(visits_of.num_entries + 3) * _num_items(rows, BLOCK_C, META)
        for i in range(tl.program_id(0), num_items, row_programs):
            _heavy_rows(
                visits_of.row_tiles, i, inputs.sorted_hidden, errors_of.errors, errors_of.scale,
                tree, visits_of.node, strides, P, rows, BLOCK_C, ACC, META,
            )  # fmt: skip
    elif tile < max_groups:
        if tile < tl.load(visits_of.num_entries + 2):
            flat, few = _light_entry(visits_of.light_groups + tile * 4)
            if few:
                _light_group(
                    flat, h0, inputs, errors_of, partial, outputs, tree, written, visits_of,
                    strides, P, 16, ACC, META,
                )  # fmt: skip
            elif LIGHT > 16:
                _light_group(
                    flat, h0, inputs, errors_of, partial, outputs, tree, written, visits_of,
                    strides, P, LIGHT, ACC, META,
                )  # fmt: skip
    elif tile < max_groups + max_split_tiles:
        if tile - max_groups < tl.load(visits_of.num_entries + 5):
            _add_chunks(
                visits_of.split_tiles + (tile - max_groups) * 12, h0, errors_of.scale, partial,
                outputs, tree, written, visits_of.node, _padded(strides, META), columns, ACC, META,
            )  # fmt: skip
    else:
        before = row_programs + (max_groups + max_split_tiles) * light_h
        first, step = tl.program_id(0) - before, tl.num_programs(0) - before
        for r0 in range(first * BLOCK_C, R, step * BLOCK_C):
            r = r0 + tl.arange(0, BLOCK_C)
            owner = tl.load(node_of_row + r, mask=r < R, other=0)
            empty = tl.load(visited + owner, mask=r < R, other=1) == 0
            if tl.sum(empty.to(tl.int32), axis=0) > 0:
                _write_zeros(r, empty, outputs, columns, BLOCK_C, LIGHT_H)


@triton.jit
def _light_group(
    flat, h0, inputs, errors_of, partial, outputs, tree, written, visits_of, strides, P,
    LIGHT: tl.constexpr, ACC: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """(5), added to the share of heavy nodes, and (6) for the visits of a light node and below."""
    BLOCK_C: tl.constexpr = META.light.c
    BLOCK_H: tl.constexpr = META.light.h
    PRECISION: tl.constexpr = META.precision
    D, H, hidden_stride = strides.D, strides.h_units * META.align, _padded(strides, META)
    num_slots, weight_stride = strides.path_slots * 16, strides.weight_units * META.weight_align
    position, node = visits_of.position, visits_of.node
    errors, scale = errors_of.errors, errors_of.scale
    d_hidden, d_weight, d_bias = outputs.d_hidden, outputs.d_weight, outputs.d_bias
    begin, group_row, child = flat % P, tl.arange(0, LIGHT), tl.arange(0, BLOCK_C)
    v = begin + group_row
    h = h0 + tl.arange(0, BLOCK_H)
    top = flat // P
    group = tl.load(node + top * P + v, mask=v < P, other=-1) == tl.load(node + flat)
    p = tl.load(position + v, mask=group, other=0)
    x = _block(inputs.sorted_hidden, begin, group_row, group, h, h < hidden_stride, hidden_stride)
    total = tl.zeros([LIGHT, BLOCK_H], ACC)
    for d in range(top, D):
        nodes = tl.load(node + d * P + v, mask=group, other=-1)
        s = tl.min(tl.where(nodes >= 0, v, P), axis=0)
        while s < P:
            n = tl.load(node + d * P + s)
            width, first = tl.load(tree.num_children + n).to(tl.int32), tl.load(tree.first_row + n)
            slot, row = _first_slot(tree.column, n, d), tl.load(written + n)
            for c0 in tl.range(0, width, BLOCK_C, num_stages=META.light.stages):
                c = c0 + child
                error = _load_errors(
                    errors, begin, group_row, nodes == n, slot, c, width, num_slots
                )  # fmt: skip
                if d_hidden is not None:
                    w = _block(
                        inputs.weight, first + c0, child, c < width, h, h < weight_stride,
                        weight_stride,
                    ).to(error.dtype)  # fmt: skip
                    total = tl.dot(error, w, total, input_precision=PRECISION, out_dtype=ACC)
                if d_weight is not None:
                    rows = tl.dot(
                        tl.trans(error), x, input_precision=PRECISION, out_dtype=ACC
                    )  # fmt: skip
                    rows = _scaled(rows, scale)
                    _store_block(
                        d_weight, row + c0, c < width, h, weight_stride, weight_stride, rows
                    )  # fmt: skip
                if d_bias is not None:  # noqa: SIM102 - the compiler decides the first alone
                    if h0 == 0:
                        bias = tl.sum(error.to(ACC), axis=0)
                        _store_biases(d_bias, row + c, c < width, bias, scale)
            nodes = tl.where(nodes == n, -1, nodes)
            s = tl.min(tl.where(nodes >= 0, v, P), axis=0)
    if d_hidden is not None:
        total += _block(
            partial.partial_hidden, begin, group_row, group, h, h < hidden_stride, hidden_stride
        )  # fmt: skip
        _store_rows(d_hidden, p, group, h, H, H, _scaled(total, scale))


@triton.jit
def _add_chunks(
    entry, h0, scale, partial, outputs, tree, written, node, padded, columns,
    ACC: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """The rows of a node whose visits were shared among programs."""
    BLOCK_C: tl.constexpr = META.tile.c
    n, num_chunks = tl.load(node + tl.load(entry)), tl.load(entry + 1)
    c0, partial_row = tl.load(entry + 2) * BLOCK_C, tl.load(entry + 3)
    child = tl.arange(0, BLOCK_C)
    width, row = tl.load(tree.num_children + n).to(tl.int32), tl.load(written + n) + c0
    inside = c0 + child < width
    chunks = (partial_row + c0, num_chunks, child, inside, width)
    if outputs.d_weight is not None:
        h = h0 + tl.arange(0, META.light.h)
        total = _scaled(_chunk_sums(partial.partial_rows, chunks, h, padded, ACC), scale)
        _store_block(outputs.d_weight, row, inside, h, columns, columns, total)
    if outputs.d_bias is not None:  # noqa: SIM102 - the compiler decides the first alone
        if h0 == 0:
            bias = _chunk_bias_sums(partial.partial_bias, chunks, ACC)
            _store_biases(outputs.d_bias, row + child, inside, bias, scale)


@triton.jit
def _chunk_sums(partial_rows, chunks, h, padded, ACC: tl.constexpr):
    """The sum of a node's chunks, for some children and columns h."""
    first, num_chunks, child, inside, width = chunks
    total = tl.zeros([child.shape[0], h.shape[0]], ACC)
    for chunk in range(0, num_chunks):
        place = first + chunk * width
        total += _block(partial_rows, place, child, inside, h, h < padded, padded)
    return total


@triton.jit
def _chunk_bias_sums(partial_bias, chunks, ACC: tl.constexpr):
    first, num_chunks, child, inside, width = chunks
    total = tl.zeros([child.shape[0]], ACC)
    for chunk in range(0, num_chunks):
        place = partial_bias + first + chunk * width + child
        total += tl.load(place, mask=inside, other=0.0)
    return total


@triton.jit
def _write_zeros(r, empty, outputs, columns, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr):
    d_weight, d_bias = outputs.d_weight, outputs.d_bias
    if d_weight is not None:
        for h0 in range(0, columns, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            zeros = tl.zeros([BLOCK_R, BLOCK_H], d_weight.dtype.element_ty)
            _store_rows(d_weight, r, empty, h, columns, columns, zeros)
    if d_bias is not None:
        tl.store(d_bias + r, tl.zeros([BLOCK_R], d_bias.dtype.element_ty), mask=empty)
