"""The fused Triton kernels of the first two of three launches of the backward.

Letters and equations are those of `forward_kernel`. `_errors` forms the error (4) times its
upstream gradient once, from what was saved and without a product,

    e' = d nll / s · (k exp(m - lse) - onehot(y)),   at y: expm1(log q[y])        (9)

and rounds it to the dtype of hidden, so that all products that follow read both operands from
memory. s is the largest |d nll| in fp16, whose range d nll would leave, and else 1. What is read is
2 bytes per visit and column in half precision; computing it again from rows would take 5 products
instead of 3.

`_heavy` gives heavy nodes' share of (5), for a tile of positions and of columns, and their (6), in
chunks where a node has so many visits that one program would be the last to finish: sums over some
of them. `row_kernel` has light nodes and adds the chunks, `update_kernel` uses (6) without writing
it.
"""

import triton
import triton.language as tl

from lm.output.backends.triton.forward_kernel import _block, _first_block, _first_slot, _padded
from lm.output.backends.triton.launch import VARYING
from lm.output.backends.triton.routing_kernels import _fields


@triton.jit
def _expm1(x):
    """exp(x) - 1 for x <= 0, without cancellation: the series near 0."""
    series = 1.0 + x / 9.0
    series = 1.0 + x / 8.0 * series
    series = 1.0 + x / 7.0 * series
    series = 1.0 + x / 6.0 * series
    series = 1.0 + x / 5.0 * series
    series = 1.0 + x / 4.0 * series
    series = 1.0 + x / 3.0 * series
    series = 1.0 + x / 2.0 * series
    return tl.where(x > -0.1, x * series, tl.exp(x) - 1.0)


@triton.jit(do_not_specialize=VARYING)
def _errors(
    d_nll, saved, errors_of, tree, routing, strides,
    P, d_nll_stride,
    ACC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(9) for a tile of positions and all their visits."""
    BLOCK_C: tl.constexpr = TILE.c
    D, visits_of = strides.D, _fields(routing, P, strides.D)
    target_logit, lse = saved.visit_lse, saved.visit_lse + D * P
    v = tl.program_id(0) * TILE.v + tl.arange(0, TILE.v)
    p = tl.load(visits_of.position + v, mask=v < P, other=0).to(tl.int64)
    upstream = tl.load(d_nll + p * d_nll_stride, mask=v < P, other=0.0).to(ACC)
    if errors_of.scale is not None:
        upstream = upstream / _factor(errors_of.scale)
    for d in range(0, D):
        n = tl.load(visits_of.node + d * P + v, mask=v < P, other=-1)
        visits = n >= 0
        width = tl.load(tree.num_children + n, mask=visits, other=0).to(tl.int32)
        y = tl.load(visits_of.child + d * P + v, mask=visits, other=-1)
        visit_lse = tl.load(lse + d * P + v, mask=visits, other=0.0)
        log_q = tl.load(target_logit + d * P + v, mask=visits, other=0.0) - visit_lse
        at_target = _expm1(log_q) * upstream
        block = v.to(tl.int64) * strides.path_blocks
        block += _first_block(tree.column, n, d, BLOCK_C, visits)
        slot = v.to(tl.int64) * (strides.path_slots * 16) + _first_slot(tree.column, n, d, visits)
        for c0 in range(0, tl.max(width, 0), BLOCK_C):
            of_block = saved.block_max + block + c0 // BLOCK_C
            m = tl.load(of_block, mask=visits & (c0 < width), other=0.0)
            c = c0 + tl.arange(0, BLOCK_C)
            in_path = c[None, :] < (tl.cdiv(width, 16) * 16)[:, None]
            place = slot[:, None] + c[None, :]
            k = tl.load(saved.exp_logits + place, mask=in_path, other=0.0).to(ACC)
            error = k * (tl.exp(m - visit_lse) * upstream)[:, None]
            error = tl.where(c[None, :] == y[:, None], at_target[:, None], error)
            error = error.to(errors_of.errors.dtype.element_ty)
            tl.store(errors_of.errors + place, error, mask=in_path)


@triton.jit
def _factor(scale):
    """The s of (9), from the largest |d nll|."""
    return tl.maximum(tl.load(scale), 1.1754944e-38)


@triton.jit
def _load_errors(errors, first, row, visits, slot, c, width, num_slots):
    """The e' [visits, children] of a node, of the visits first + row."""
    in_path = c < tl.cdiv(width, 16) * 16
    return _block(errors + slot, first, row, visits, c, in_path, num_slots)


@triton.jit(do_not_specialize=VARYING)
def _heavy(
    inputs, errors_of, partial, outputs, tree, routing, strides,
    P, chunk_programs, row_programs,
    ACC: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """Chunks of (6), heavy nodes' (5), then (6) of heavy nodes whose visits are not shared."""
    visits_of, num_h = _fields(routing, P, strides.D), tl.cdiv(_padded(META), META.tile.h)
    num_hidden = 0 if outputs.d_hidden is None else tl.cdiv(P, META.tile.v) * num_h
    i = tl.program_id(0) - chunk_programs
    if i < 0:
        chunks = (None, partial.partial_rows, partial.partial_bias, _padded(META))
        num_items = tl.load(visits_of.num_entries + 4) * _num_items(chunks, 16, META)
        for item in range(tl.program_id(0), num_items, chunk_programs):
            _heavy_rows(
                visits_of.chunk_tiles, item, inputs.sorted_hidden, errors_of.errors, None, tree,
                visits_of.node, strides, P, chunks, 16, ACC, META,
            )  # fmt: skip
    elif i < num_hidden:
        if outputs.d_hidden is not None:
            _heavy_hidden(
                i // num_h * META.tile.v, (i % num_h) * META.tile.h, inputs, errors_of, tree,
                visits_of, strides, P, outputs.d_hidden, partial.partial_hidden, ACC, META,
            )  # fmt: skip
    elif outputs.d_weight is not None or outputs.d_bias is not None:
        written = tree.first_row if outputs.written_row is None else outputs.written_row
        rows = (written, outputs.d_weight, outputs.d_bias, META.columns)
        num_items = tl.load(visits_of.num_entries + 3) * _num_items(rows, META.tile.c, META)
        for item in range(i - num_hidden, num_items, row_programs):
            _heavy_rows(
                visits_of.row_tiles, item, inputs.sorted_hidden, errors_of.errors, errors_of.scale,
                tree, visits_of.node, strides, P, rows, META.tile.c, ACC, META,
            )  # fmt: skip


@triton.jit
def _num_items(outputs, PART: tl.constexpr, META: tl.constexpr):
    """What programs do for an entry: tiles of columns, then biases of `PART` children each."""
    _, _, biases, columns = outputs
    num_h = tl.cdiv(columns, META.tile.h)
    return num_h if biases is None else num_h + META.tile.c // PART


@triton.jit
def _heavy_rows(
    entries, i, sorted_hidden, errors, scale, tree, node, strides, P, outputs,
    PART: tl.constexpr, ACC: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """Item i of Σ e' hᵀ and Σ e' over visits of a node, for a block of its children.

    Written to the rows where those of the node begin, `written_row` [I], or that the entry names.
    """
    BLOCK_C: tl.constexpr = META.tile.c
    STEP: tl.constexpr = META.tile.step
    hidden_stride, num_slots = _padded(META), strides.path_slots * 16
    written_row, matrix, biases, columns = outputs
    num_items = _num_items(outputs, PART, META)
    entry, item = entries + i // num_items * 12, i % num_items
    flat, end, c0 = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2) * BLOCK_C
    d, begin, n = flat // P, flat % P, tl.load(node + flat)
    first = tl.load(entry + 3 if written_row is None else written_row + n) + c0
    width, slot = tl.load(tree.num_children + n).to(tl.int32), _first_slot(tree.column, n, d)
    part = item - tl.cdiv(columns, META.tile.h)
    if part < 0:
        if matrix is not None:
            h, c = item * META.tile.h + tl.arange(0, META.tile.h), c0 + tl.arange(0, BLOCK_C)
            total = _row_sums(
                (begin, end, slot, c, width, errors, num_slots), (sorted_hidden, hidden_stride), h,
                ACC, META.precision, STEP,
            )  # fmt: skip
            _store_block(matrix, first, c < width, h, columns, columns, _scaled(total, scale))
    elif biases is not None:
        child = part * PART + tl.arange(0, PART)
        visits = (begin, end, slot, c0 + child, width, errors, num_slots)
        bias = _bias_sums(visits, ACC, 4096 // PART)
        _store_biases(biases, first + child, c0 + child < width, bias, scale)


@triton.jit
def _row_sums(visits, inputs, h, ACC: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr):
    """Σ e' hᵀ over the visits of a node, for children c and columns h."""
    begin, end, slot, c, width, errors, num_slots = visits
    hidden, stride = inputs
    row = tl.arange(0, STEP)
    total = tl.zeros([c.shape[0], h.shape[0]], ACC)
    for v0 in range(begin, end, STEP):
        v = v0 + row
        x = _block(hidden, v0, row, v < end, h, h < stride, stride)
        error = _load_errors(errors, v0, row, v < end, slot, c, width, num_slots)
        total = tl.dot(tl.trans(error), x, total, input_precision=PRECISION, out_dtype=ACC)
    return total


@triton.jit
def _bias_sums(visits, ACC: tl.constexpr, STEP: tl.constexpr):
    """Σ e', likewise."""
    begin, end, slot, c, width, errors, num_slots = visits
    row = tl.arange(0, STEP)
    total = tl.zeros([STEP, c.shape[0]], ACC)
    for v0 in range(begin, end, STEP):
        error = _load_errors(errors, v0, row, v0 + row < end, slot, c, width, num_slots)
        total += error.to(ACC)
    return tl.sum(total, axis=0)


@triton.jit
def _scaled(total, scale):
    if scale is not None:
        total = total * _factor(scale)
    return total


@triton.jit
def _store_rows(matrix, row, row_mask, h, H, stride, values):
    place = row.to(tl.int64)[:, None] * stride + h[None, :]
    mask = row_mask[:, None] & (h < H)[None, :]
    tl.store(matrix + place, values.to(matrix.dtype.element_ty), mask=mask)


@triton.jit
def _store_block(matrix, first, row_mask, h, H, stride, values):
    """Store neighbouring rows from the first one on."""
    row = tl.arange(0, row_mask.shape[0])
    mask = row_mask[:, None] & (h < H)[None, :]
    place = matrix + tl.full((), first, tl.int64) * stride + (row[:, None] * stride + h[None, :])
    tl.store(place, values.to(matrix.dtype.element_ty), mask=mask)


@triton.jit
def _store_biases(d_bias, row, mask, total, scale):
    tl.store(d_bias + row, _scaled(total, scale).to(d_bias.dtype.element_ty), mask=mask)


@triton.jit
def _heavy_hidden(
    begin, h0, inputs, errors_of, tree, visits_of, strides, P, d_hidden, partial_hidden,
    ACC: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """(5) over heavy nodes: final for positions that visit no light node, partial for others.

    Every other tile walks its nodes backwards: a node with visits in two tiles is then the last of
    both, or the first.
    """
    BLOCK_V: tl.constexpr = META.tile.v
    BLOCK_H: tl.constexpr = META.tile.h
    STEP: tl.constexpr = META.tile.step
    H: tl.constexpr = META.hidden
    hidden_stride: tl.constexpr = _padded(META)
    weight_stride: tl.constexpr = META.columns
    D, num_slots = strides.D, strides.path_slots * 16
    position, node, light_level = visits_of.position, visits_of.node, visits_of.light_level
    tile_row, child = tl.arange(0, BLOCK_V), tl.arange(0, STEP)
    v = begin + tile_row
    h = h0 + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_V, BLOCK_H], ACC)
    for d in range(0, D):
        num_heavy = tl.load(light_level + v, mask=v < P, other=0)
        nodes = tl.load(node + d * P + v, mask=v < P, other=-1)
        nodes = tl.where(d < num_heavy, nodes, -1)
        n = _next(nodes, v, begin, node + d * P, BLOCK_V)
        while n >= 0:
            width, first, slot = _node(tree, n, d)
            others = tl.where(nodes == n, -1, nodes)
            next_n = _next(others, v, begin, node + d * P, BLOCK_V)  # before the products of n
            for c0 in range(0, width, STEP):
                c = c0 + child
                error = _load_errors(
                    errors_of.errors, begin, tile_row, nodes == n, slot, c, width, num_slots
                )  # fmt: skip
                w = _block(
                    inputs.weight, first + c0, child, c < width, h, h < weight_stride, weight_stride
                ).to(error.dtype)  # fmt: skip
                total = tl.dot(error, w, total, input_precision=META.precision, out_dtype=ACC)
            nodes, n = others, next_n
    # loaded again: what is kept during the loops, and 64-bit rows, fill registers
    light = (v < P) & (tl.load(light_level + v, mask=v < P, other=D) < D)
    _store_block(partial_hidden, begin, light, h, hidden_stride, hidden_stride, total)
    heavy = (v < P) & (tl.load(light_level + v, mask=v < P, other=0) == D)
    p = tl.load(position + v, mask=heavy, other=0)
    _store_rows(d_hidden, p, heavy, h, H, H, _scaled(total, errors_of.scale))


@triton.jit
def _next(nodes, v, begin, node, BLOCK_V: tl.constexpr):
    """A node that remains, of the last position in every other tile; -1 if none remains."""
    last = tl.max(tl.where(nodes >= 0, v, -1), axis=0)
    first = tl.min(tl.where(nodes >= 0, v, begin + BLOCK_V), axis=0)
    s = tl.where((begin // BLOCK_V) % 2 == 1, last, tl.minimum(first, last))
    return tl.load(node + s, mask=s >= 0, other=-1)


@triton.jit
def _node(tree, n, d):
    """Number of children of a node, first row and first slot."""
    width, first = tl.load(tree.num_children + n).to(tl.int32), tl.load(tree.first_row + n)
    return width, first, _first_slot(tree.column, n, d)
