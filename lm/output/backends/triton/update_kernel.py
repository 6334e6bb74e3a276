"""The Triton kernel of row-wise training: norms of rows' gradients, and updates of visited rows.

Letters and equations are those of `backward_kernels`. A program forms (6) for tiles of rows in
registers and uses them there, so that no gradient is in memory. The tiles are those of `_rows`:
blocks of a heavy node's children, all blocks of a light node, and sums of chunks. One program owns
all columns of a tile, one block after another. With g the gradient of a row r, f its factor and W
the columns,

    norm     ‖g‖² of every row, and their sum over the tile                        (10)
    SGD      r -= lr f g                                                           (11)
    Adagrad  s += f² ‖g‖² / W;  r -= lr f g / (√s + eps), with the ‖g‖² of (10)    (12)
    Adam     m += (1 - β1) (f g - m);  q = β2 q + (1 - β2) (f g)²;
             r -= lr' m / (√q / c + eps), lr' and c with the corrections of bias   (13)

as in `lm.output.rowwise.optimizers`. Which one it is follows from the pointers that are not None: s
is `total`, m `mean`, q `square`; (10) has no table. Without `sorted_hidden`, the table is a vector,
and g the gradient of a bias. Rows in bf16 are rounded at random in proportion to the distance.
"""

import triton
import triton.language as tl

from lm.output.backends.triton.backward_kernels import _bias_sums, _row_sums, _scaled
from lm.output.backends.triton.forward_kernel import _first_slot
from lm.output.backends.triton.launch import VARYING
from lm.output.backends.triton.row_kernel import _chunk_bias_sums, _chunk_sums


@triton.jit(do_not_specialize=VARYING)
def _update(
    numbers, seed, scale, sorted_hidden, table, total, mean, square, squares, sums,
    node, row_tiles, light_nodes, split_tiles, num_entries,
    first_row, num_children, column, errors, partial,
    P, row_programs, max_nodes, path_slots, sorted_units, weight_units,
    LIGHT: tl.constexpr, LIGHT_C: tl.constexpr, LIGHT_H: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, WEIGHT_ALIGN: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One of (10) to (13) for all rows of visited nodes; `numbers` are f and those of the rule."""
    num_slots = path_slots * 16
    columns = 1 if sorted_hidden is None else weight_units * WEIGHT_ALIGN
    inputs = (sorted_hidden, partial, sorted_units * 16, scale)
    rule = (numbers, table, total, mean, square, squares, sums, seed, columns)
    program = tl.program_id(0)
    i = program - row_programs
    if i < 0:
        for tile in range(program, tl.load(num_entries + 3), row_programs):
            entry = row_tiles + tile * 4
            flat, end, c0 = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2) * BLOCK_C
            n = tl.load(node + flat)
            width, slot = tl.load(num_children + n).to(tl.int32), _first_slot(column, n, flat // P)
            visits = (flat % P, end, slot, c0 + tl.arange(0, BLOCK_C), width, errors, num_slots)
            _update_tile(
                n, tl.load(first_row + n) + c0, width - c0, visits, None, inputs, rule,
                ACC=ACC, PRECISION=PRECISION, BLOCK_C=BLOCK_C, BLOCK_H=BLOCK_H, STEP=STEP,
            )  # fmt: skip
    elif i < max_nodes:
        if i < tl.load(num_entries + 1):
            flat = tl.load(light_nodes + i)
            n, begin = tl.load(node + flat), flat % P
            lane = tl.arange(0, LIGHT)
            nodes = tl.load(node + flat + lane, mask=begin + lane < P, other=-1)
            end = begin + tl.sum((nodes == n).to(tl.int32), axis=0)
            width, slot = tl.load(num_children + n).to(tl.int32), _first_slot(column, n, flat // P)
            for c0 in range(0, width, LIGHT_C):
                visits = (begin, end, slot, c0 + tl.arange(0, LIGHT_C), width, errors, num_slots)
                _update_tile(
                    n, tl.load(first_row + n) + c0, width - c0, visits, None, inputs, rule,
                    ACC=ACC, PRECISION=PRECISION, BLOCK_C=LIGHT_C, BLOCK_H=LIGHT_H, STEP=LIGHT,
                )  # fmt: skip
    elif i - max_nodes < tl.load(num_entries + 5):
        entry = split_tiles + (i - max_nodes) * 4
        n, c0 = tl.load(node + tl.load(entry)), tl.load(entry + 2) * BLOCK_C
        width, child = tl.load(num_children + n).to(tl.int32), tl.arange(0, BLOCK_C)
        chunks = (tl.load(entry + 3) + c0, tl.load(entry + 1), child, c0 + child < width, width)
        _update_tile(
            n, tl.load(first_row + n) + c0, width - c0, None, chunks, inputs, rule,
            ACC=ACC, PRECISION=PRECISION, BLOCK_C=BLOCK_C, BLOCK_H=LIGHT_H, STEP=STEP,
        )  # fmt: skip


@triton.jit
def _update_tile(
    n, first, num_rows, visits, chunks, inputs, rule,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The rows of node n from `first` on, whose gradients are sums of visits or of chunks."""
    hidden, partial, padded, scale = inputs
    numbers, table, total, mean, _, squares, sums, _, columns = rule
    child = tl.arange(0, BLOCK_C)
    inside = child < num_rows
    factor = tl.load(numbers)
    if total is not None:
        square = factor * factor * tl.load(squares + first + child, mask=inside, other=0.0)
        new = tl.load(total + first + child, mask=inside, other=0.0) + square / columns
        tl.debug_barrier()  # other threads have loaded the old sums
        tl.store(total + first + child, new, mask=inside)
        root = tl.sqrt(new).to(factor.dtype) + tl.load(numbers + 2)
        factor = (factor * tl.load(numbers + 1) / root)[:, None]
    elif table is not None and mean is None:
        factor = factor * tl.load(numbers + 1)
    if hidden is None:
        if chunks is None:
            gradient = _bias_sums(visits, ACC, STEP)
        else:
            gradient = _chunk_bias_sums(partial, chunks, ACC)
        gradient = _scaled(gradient, scale)
        norms = gradient * gradient
        if table is not None:
            tile = (first, child, inside, tl.arange(0, 1))
            _update_block(tile, gradient[:, None], factor, rule)
    else:
        norms = tl.zeros([BLOCK_C], ACC)
        for h0 in range(0, columns, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            if chunks is None:
                gradient = _row_sums(visits, (hidden, padded), h, ACC, PRECISION, STEP)
            else:
                gradient = _chunk_sums(partial, chunks, h, padded, ACC)
            gradient = _scaled(gradient, scale)
            if table is None:
                norms += tl.sum(gradient * gradient, axis=1)
            else:
                _update_block((first, child, inside, h), gradient, factor, rule)
    if table is None:
        tl.store(squares + first + child, norms, mask=inside)
        # a place for each tile, whatever the order of entries: a tile has 16 rows or ends its node
        tl.store(sums + first // 16 + n, tl.sum(tl.where(inside, norms, 0.0), axis=0))


@triton.jit
def _update_block(tile, gradient, factor, rule):
    """(11) to (13) for some columns h of rows."""
    first, child, inside, h = tile
    numbers, table, _, mean, square, _, _, seed, columns = rule
    offset = child[:, None] * columns + h[None, :]
    place = tl.full((), first, tl.int64) * columns + offset
    mask = inside[:, None] & (h < columns)[None, :]
    gradient = gradient.to(numbers.dtype.element_ty) * factor
    rows = tl.load(table + place, mask=mask, other=0.0).to(numbers.dtype.element_ty)
    if mean is None:
        rows -= gradient
    else:
        m = tl.load(mean + place, mask=mask, other=0.0)
        m += tl.load(numbers + 1) * (gradient - m)
        q = tl.load(square + place, mask=mask, other=0.0) * tl.load(numbers + 2)
        q += tl.load(numbers + 3) * gradient * gradient
        root = tl.sqrt(q) / tl.load(numbers + 5) + tl.load(numbers + 6)
        rows -= tl.load(numbers + 4) * m / root
    if table.dtype.element_ty == tl.bfloat16:
        rows = _rounded(rows, place, tl.load(seed))
    if h.shape[0] == 1:
        tl.debug_barrier()  # several threads load each number of a vector, and one stores it
    if mean is not None:
        tl.store(mean + place, m, mask=mask)
        tl.store(square + place, q, mask=mask)
    tl.store(table + place, rows.to(table.dtype.element_ty), mask=mask)


@triton.jit
def _rounded(rows, place, seed):
    """fp32 as bf16, up or down in proportion to the distance; non-finite remains so.

    The numbers at random are a hash of places and a seed: the finalizer of MurmurHash3.
    """
    x = place.to(tl.uint32) ^ seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    noise = (x >> 16).to(tl.int32)
    rows = tl.where(rows == rows, rows, float("nan"))  # of bits that do not overflow
    bits = (rows.to(tl.int32, bitcast=True) + noise) >> 16
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
