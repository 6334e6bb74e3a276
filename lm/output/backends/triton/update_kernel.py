"""The Triton kernel of row-wise training: norms of rows' gradients, and updates of visited rows.

Letters and equations are those of `backward_kernels`. A program forms (6) for tiles of rows in
registers and uses them there, so that no gradient is in memory. With g the gradient of a row r, f
its factor and W the columns,

    norm     ‖g‖² of every row, and their sum over the tile                        (10)
    SGD      r -= lr f g                                                           (11)
    Adagrad  s += f² ‖g‖² / W;  r -= lr f g / (√s + eps), with the ‖g‖² of (10)    (12)
    Adam     m += (1 - β1) (f g - m);  q = β2 q + (1 - β2) (f g)²;
             r -= lr' m / (√q / c + eps), lr' and c with the corrections of bias   (13)

as in `lm.output.rowwise.optimizers`. Which one it is follows from the pointers that are not None: s
is `total`, m `mean`, q `square`; (10) has no table. Where `squares` has not got the ‖g‖² of (12), a
program forms them before it updates a tile. (10) takes weight and bias together, an update one of
them: without `sorted_hidden`, the table is a vector, and g the gradient of a bias. Rows in bf16 are
rounded at random in proportion to the distance.

An item of a program is a block of `row_tiles` or `split_tiles` of a `Routing`, or part of a light
node's children. A program walks the columns of one block of children after another. Most light
nodes have few visits, whose errors it then keeps for all columns. Rows and state are loaded before
the product, and many small programs run at a time, because the kernel is limited by memory.
"""

import triton
import triton.language as tl

from lm.output.backends.triton.backward_kernels import _bias_sums, _load_errors, _row_sums, _scaled
from lm.output.backends.triton.forward_kernel import _block, _first_slot, _padded
from lm.output.backends.triton.launch import VARYING
from lm.output.backends.triton.routing_kernels import _fields, _light_entry
from lm.output.backends.triton.row_kernel import _chunk_bias_sums, _chunk_sums


@triton.jit(do_not_specialize=VARYING)
def _update(
    rule, inputs, errors_of, partial, tree, routing, strides,
    P, num_shares,
    ACC: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """One of (10) to (13) for all rows of visited nodes; `numbers` are f and those of the rule."""
    TILE_C: tl.constexpr = META.rows
    BLOCK_C: tl.constexpr = META.tile.c
    STEP: tl.constexpr = META.tile.step
    visits_of, num_slots = _fields(routing, P, strides.D), strides.path_slots * 16
    node, errors = visits_of.node, errors_of.errors
    hidden, padded, scale = inputs.sorted_hidden, _padded(META), errors_of.scale
    factors = (hidden, padded, errors, num_slots, partial, scale)
    columns = 1 if hidden is None else META.columns
    blocks: tl.constexpr = TILE_C // BLOCK_C
    heavy = tl.load(visits_of.num_entries + 3) * blocks
    tiled = heavy + tl.load(visits_of.num_entries + 5) * blocks
    num_items = tiled + tl.load(visits_of.num_entries + 1) * num_shares
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        if item < tiled:
            if item < heavy:
                entry = visits_of.row_tiles + item // blocks * 12
            else:
                entry = visits_of.split_tiles + (item - heavy) // blocks * 12
            flat, end = tl.load(entry), tl.load(entry + 1)
            n = tl.load(node + flat)
            width = tl.load(tree.num_children + n).to(tl.int32)
            c0 = tl.load(entry + 2) * TILE_C + item % blocks * BLOCK_C
            stop = tl.minimum(c0 + BLOCK_C, width)
            if item >= heavy and c0 < stop:
                child = tl.arange(0, BLOCK_C)
                chunks = (tl.load(entry + 3) + c0, end, child, c0 + child < width, width)
                _update_tile(
                    n, tl.load(tree.first_row + n) + c0, width - c0, None, None, chunks, factors,
                    rule, columns, STEP, ACC, META,
                )  # fmt: skip
                stop = c0
        else:
            flat, _ = _light_entry(visits_of.light_nodes + (item - tiled) // num_shares * 4)
            n, v = tl.load(node + flat), flat % P + tl.arange(0, META.light.v)
            nodes = tl.load(node + flat // P * P + v, mask=v < P, other=-1)
            end = flat % P + tl.sum((nodes == n).to(tl.int32), axis=0)
            width = tl.load(tree.num_children + n).to(tl.int32)
            size = tl.cdiv(tl.cdiv(width, BLOCK_C), num_shares) * BLOCK_C
            c0 = (item - tiled) % num_shares * size
            stop = tl.minimum(c0 + size, width)
        begin, slot = flat % P, _first_slot(tree.column, n, flat // P)
        first, i = tl.load(tree.first_row + n), tl.arange(0, STEP)
        for block in range(c0, stop, BLOCK_C):
            c = block + tl.arange(0, BLOCK_C)
            if end - begin <= STEP:
                error = _load_errors(errors, begin, i, begin + i < end, slot, c, width, num_slots)
                _update_tile(
                    n, first + block, width - block, (error, begin, end), None, None, factors,
                    rule, columns, STEP, ACC, META,
                )  # fmt: skip
            else:
                _update_tile(
                    n, first + block, width - block, None, (begin, end, slot, c, width), None,
                    factors, rule, columns, META.tile.v, ACC, META,
                )  # fmt: skip


@triton.jit
def _update_tile(
    n, first, num_rows, few, many, chunks, factors, rule, columns,
    STEP: tl.constexpr, ACC: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """The rows of node n from `first` on, of gradients that are sums of visits or of chunks."""
    BLOCK_C: tl.constexpr = META.tile.c
    hidden, numbers, squares = factors[0], rule.numbers, rule.squares
    child, factor, source = tl.arange(0, BLOCK_C), tl.load(numbers), (few, many, chunks)
    inside = child < num_rows
    if rule.total is not None:
        old = tl.load(rule.total + first + child, mask=inside, other=0.0)
    if hidden is None:
        gradient = _bias_gradient(source, factors, ACC, STEP)
        norms = gradient * gradient
    elif rule.total is not None and squares is not None:
        norms = tl.load(squares + first + child, mask=inside, other=0.0)
    elif rule.table is None or rule.total is not None:
        norms = tl.zeros([BLOCK_C], ACC)
        for h0 in tl.range(0, columns, META.tile.h, num_stages=1):
            h = h0 + tl.arange(0, META.tile.h)
            gradient = _gradient(source, factors, h, ACC, META.precision, STEP)
            norms += tl.sum(gradient * gradient, axis=1)
    # a place for each tile, whatever the order of items: a tile has ≥ 16 rows or ends its node
    place = first // 16 + n
    if rule.bias_sums is not None:
        if hidden is not None:
            gradient = _bias_gradient(source, factors, ACC, STEP)
        tl.store(rule.bias_sums + place, tl.sum(tl.where(inside, gradient * gradient, 0.0), axis=0))
    if rule.sums is not None:
        tl.store(squares + first + child, norms, mask=inside)
        tl.store(rule.sums + place, tl.sum(tl.where(inside, norms, 0.0), axis=0))
    if rule.table is not None:
        if rule.total is not None:
            new = old + factor * factor * norms / columns
            root = tl.sqrt(new).to(factor.dtype) + tl.load(numbers + 2)
            factor = (factor * tl.load(numbers + 1) / root)[:, None]
        elif rule.mean is None:
            factor = factor * tl.load(numbers + 1)
        else:
            factor = (
                factor, tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3),
                tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6),
            )  # fmt: skip
        noise_seed = 0 if rule.seed is None else tl.load(rule.seed)
        state = (rule.table, rule.mean, rule.square, columns)
        if hidden is None:
            tile = (first, child, inside, tl.arange(0, 1))
            _update_block(
                tile, gradient[:, None], source, factors, factor, noise_seed, state,
                ACC, META.precision, STEP,
            )  # fmt: skip
        else:
            for h0 in tl.range(0, columns, META.tile.h, num_stages=1):
                tile = (first, child, inside, h0 + tl.arange(0, META.tile.h))
                _update_block(
                    tile, None, source, factors, factor, noise_seed, state, ACC, META.precision,
                    STEP,
                )  # fmt: skip
        if rule.total is not None:
            tl.debug_barrier()  # other threads have loaded the old sums
            tl.store(rule.total + first + child, new, mask=inside)


@triton.jit
def _gradient(source, factors, h, ACC: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr):
    """(6) for the children of a tile and columns h."""
    few, many, chunks = source
    hidden, padded, errors, num_slots, partial, scale = factors
    if chunks is not None:
        gradient = _chunk_sums(partial.partial_rows, chunks, h, padded, ACC)
    elif few is not None:
        error, begin, end = few
        row = tl.arange(0, STEP)
        x = _block(hidden, begin, row, begin + row < end, h, h < padded, padded)
        gradient = tl.dot(tl.trans(error), x, input_precision=PRECISION, out_dtype=ACC)
    else:
        begin, end, slot, c, width = many
        visits = (begin, end, slot, c, width, errors, num_slots)
        gradient = _row_sums(visits, (hidden, padded), h, ACC, PRECISION, STEP)
    return _scaled(gradient, scale)


@triton.jit
def _bias_gradient(source, factors, ACC: tl.constexpr, STEP: tl.constexpr):
    few, many, chunks = source
    _, _, errors, num_slots, partial, scale = factors
    if chunks is not None:
        gradient = _chunk_bias_sums(partial.partial_bias, chunks, ACC)
    elif few is not None:
        gradient = tl.sum(few[0].to(ACC), axis=0)
    else:
        begin, end, slot, c, width = many
        gradient = _bias_sums((begin, end, slot, c, width, errors, num_slots), ACC, STEP)
    return _scaled(gradient, scale)


@triton.jit
def _update_block(
    tile, gradient, source, factors, factor, seed, state,
    ACC: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """(11) to (13) for some columns h of rows; without a gradient, that of the tile's source."""
    first, child, inside, h = tile
    table, mean, square, columns = state
    start = tl.full((), first, tl.int64) * columns
    place = child[:, None] * columns + h[None, :]
    mask = inside[:, None] & (h < columns)[None, :]
    rows = tl.load(table + start + place, mask=mask, other=0.0)
    if mean is not None:
        m = tl.load(mean + start + place, mask=mask, other=0.0)
        q = tl.load(square + start + place, mask=mask, other=0.0)
    if gradient is None:
        gradient = _gradient(source, factors, h, ACC, PRECISION, STEP)
    if mean is None:
        rows = rows.to(factor.dtype) - gradient.to(factor.dtype) * factor
    else:
        f, one_less_beta1, beta2, one_less_beta2, rate, correction, eps = factor
        gradient = gradient.to(f.dtype) * f
        m += one_less_beta1 * (gradient - m)
        q = q * beta2 + one_less_beta2 * gradient * gradient
        rows = rows.to(f.dtype) - rate * m / (tl.sqrt(q) / correction + eps)
    if table.dtype.element_ty == tl.bfloat16:
        pair = start.to(tl.uint32) + (child[:, None] * columns + h[None, :] // 2).to(tl.uint32)
        rows = _round_stochastically(rows, pair, (h % 2)[None, :], seed)
    if h.shape[0] == 1:
        tl.debug_barrier()  # several threads load each number of a vector, and one stores it
    if mean is not None:
        tl.store(mean + start + place, m, mask=mask)
        tl.store(square + start + place, q, mask=mask)
    tl.store(table + start + place, rows.to(table.dtype.element_ty), mask=mask)


@triton.jit
def _round_stochastically(rows, pair, half, seed):
    """fp32 as bf16, up or down in proportion to the distance; non-finite remains so.

    The numbers at random are halves of hashes of a seed and of pairs of neighbouring columns: the
    finalizer of MurmurHash3.
    """
    x = pair ^ seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    noise = tl.where(half == 0, x & 0xFFFF, x >> 16).to(tl.int32)
    rows = tl.where(rows == rows, rows, float("nan"))  # of bits that do not overflow
    bits = (rows.to(tl.int32, bitcast=True) + noise) >> 16
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
