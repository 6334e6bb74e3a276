"""The fused Triton kernel of the last launch of the backward: rows that `_heavy` does not write.

Letters and equations are those of `backward_kernels`. `_rows` writes (6) of light groups, whose
errors one program reads once for (5) and (6); sums of chunks, in order; and 0 for rows of nodes
without visits. It is not part of `_heavy`, whose tiles take so many registers that fewer programs
would run at a time. Every row's gradient has one owner and is rounded once, and no float is added
atomically.
"""

import triton
import triton.language as tl

from lm.output.backends.triton.backward_kernels import (
    _load_errors,
    _node,
    _scaled,
    _store_biases,
    _store_block,
    _store_rows,
)
from lm.output.backends.triton.forward_kernel import _block, _padded
from lm.output.backends.triton.launch import VARYING
from lm.output.backends.triton.routing_kernels import _fields, _light_entry


@triton.jit(do_not_specialize=VARYING)
def _rows(
    inputs, errors_of, partial, outputs, tree, visited, node_of_row, routing, strides,
    P, R, max_groups, max_split_tiles,
    ACC: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """(5) and (6) for light groups, (6) of chunks; 0 for those of the R rows without visits."""
    LIGHT: tl.constexpr = META.light.v
    LIGHT_H: tl.constexpr = META.light.h
    BLOCK_C: tl.constexpr = META.rows
    visits_of = _fields(routing, P, strides.D)
    columns: tl.constexpr = META.columns
    light_h = tl.cdiv(columns, LIGHT_H)
    written = tree.first_row if outputs.written_row is None else outputs.written_row
    tile, h0 = tl.program_id(0) // light_h, (tl.program_id(0) % light_h) * LIGHT_H
    if tile < max_groups:
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
                outputs, tree, written, visits_of.node, _padded(META), columns, ACC, META,
            )  # fmt: skip
    else:
        before = (max_groups + max_split_tiles) * light_h
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
    H: tl.constexpr = META.hidden
    hidden_stride: tl.constexpr = _padded(META)
    weight_stride: tl.constexpr = META.columns
    D, num_slots = strides.D, strides.path_slots * 16
    position, node = visits_of.position, visits_of.node
    errors, scale = errors_of.errors, errors_of.scale
    d_hidden, d_weight, d_bias = outputs.d_hidden, outputs.d_weight, outputs.d_bias
    begin, group_row, child = flat % P, tl.arange(0, LIGHT), tl.arange(0, BLOCK_C)
    v = begin + group_row
    h = h0 + tl.arange(0, BLOCK_H)
    top, n = flat // P, tl.load(node + flat)
    nodes = tl.load(node + top * P + v, mask=v < P, other=-1)
    group = nodes == n
    nodes = tl.where(group, n, -1)
    p = tl.load(position + v, mask=group, other=0)
    x = _block(inputs.sorted_hidden, begin, group_row, group, h, h < hidden_stride, hidden_stride)
    if d_hidden is not None:
        total = _block(
            partial.partial_hidden, begin, group_row, group, h, h < hidden_stride, hidden_stride
        )  # fmt: skip
    for d in range(top, D):
        if d > top:
            nodes = tl.load(node + d * P + v, mask=group, other=-1)
            n = _first_node(nodes, v, node, d, P)
        while n >= 0:
            width, first, slot = _node(tree, n, d)
            row = tl.load(written + n)
            for c0 in range(0, width, BLOCK_C):
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
                    rows = tl.dot(tl.trans(error), x, input_precision=PRECISION, out_dtype=ACC)
                    rows = _scaled(rows, scale)
                    _store_block(
                        d_weight, row + c0, c < width, h, weight_stride, weight_stride, rows
                    )  # fmt: skip
            if d_bias is not None:  # noqa: SIM102 - the compiler decides the first alone
                if h0 == 0:
                    visits = (begin, group_row, nodes == n, slot, width)
                    _light_bias(d_bias, row, errors, visits, num_slots, scale, ACC, BLOCK_C)
            nodes = tl.where(nodes == n, -1, nodes)
            n = _first_node(nodes, v, node, d, P)
    if d_hidden is not None:
        _store_rows(d_hidden, p, group, h, H, H, _scaled(total, scale))


@triton.jit
def _light_bias(
    d_bias, row, errors, visits, num_slots, scale, ACC: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Σ e' of a node: apart from the products of (5) and (6), which have no registers for it."""
    begin, group_row, of_node, slot, width = visits
    for c0 in range(0, width, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        error = _load_errors(errors, begin, group_row, of_node, slot, c, width, num_slots)
        _store_biases(d_bias, row + c, c < width, tl.sum(error.to(ACC), axis=0), scale)


@triton.jit
def _first_node(nodes, v, node, d, P):
    """The first node that remains; -1 if none does."""
    s = tl.min(tl.where(nodes >= 0, v, P), axis=0)
    return tl.load(node + d * P + s, mask=s < P, other=-1)


@triton.jit
def _add_chunks(
    entry, h0, scale, partial, outputs, tree, written, node, padded, columns,
    ACC: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """The rows of a node whose visits were shared among programs."""
    BLOCK_C: tl.constexpr = min(META.rows, 32)
    n, num_chunks = tl.load(node + tl.load(entry)), tl.load(entry + 1)
    begin, partial_row = tl.load(entry + 2) * META.rows, tl.load(entry + 3)
    width, first = tl.load(tree.num_children + n).to(tl.int32), tl.load(written + n)
    h, child = h0 + tl.arange(0, META.light.h), tl.arange(0, BLOCK_C)
    for c0 in range(begin, tl.minimum(begin + META.rows, width), BLOCK_C):
        inside = c0 + child < width
        chunks = (partial_row + c0, num_chunks, child, inside, width)
        if outputs.d_weight is not None:
            total = _scaled(_chunk_sums(partial.partial_rows, chunks, h, padded, ACC), scale)
            _store_block(outputs.d_weight, first + c0, inside, h, columns, columns, total)
        if outputs.d_bias is not None:  # noqa: SIM102 - the compiler decides the first alone
            if h0 == 0:
                bias = _chunk_bias_sums(partial.partial_bias, chunks, ACC)
                _store_biases(outputs.d_bias, first + c0 + child, inside, bias, scale)


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
