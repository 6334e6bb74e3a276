"""The fused Triton kernels of the backward, three launches.

Letters and equations are those of `forward_kernel`. `_errors` forms the error (4) times its
upstream gradient once, from what was saved and without a product,

    e' = d nll / s · (k exp(m - lse) - onehot(y)),   at y: expm1(log q[y])        (9)

and rounds it to the dtype of hidden, so that all products that follow read both operands from
memory. s is the largest |d nll| in fp16, whose range d nll would leave, and else 1. What is read is
2 bytes per visit and column in half precision; computing it again from rows would take 5 products
instead of 3.

`_heavy` gives heavy nodes' share of (5), for a tile of positions and of columns, and the chunks of
(6): sums over some visits of a node that has so many that one program would be the last to finish.
`_rows` writes the gradients of all rows: (6) of other heavy nodes; light groups, whose rows one
program reads once for both (5) and (6); chunks added up, in order; 0 for rows of nodes without
visits. Heavy nodes are limited by what the second-level cache delivers and light ones by memory, so
that they take less time together than one after another. Every row's gradient has one owner and is
rounded once, and no float is added atomically.
"""

import triton
import triton.language as tl

from lm.output.backends.triton.forward_kernel import _block, _first_block, _first_slot


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


@triton.jit
def _errors(
    d_nll, scale,
    position, node, child, num_children, column,
    exp_logits, block_max, lse, target_logit, errors,
    P, D, path_slots, path_blocks, d_nll_stride,
    ACC: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(9) for a tile of positions and all their visits."""
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    p = tl.load(position + v, mask=v < P, other=0).to(tl.int64)
    upstream = tl.load(d_nll + p * d_nll_stride, mask=v < P, other=0.0).to(ACC)
    if scale is not None:
        upstream = upstream / _factor(scale)
    for d in range(0, D):
        n = tl.load(node + d * P + v, mask=v < P, other=-1)
        visits = n >= 0
        width = tl.load(num_children + n, mask=visits, other=0).to(tl.int32)
        y = tl.load(child + d * P + v, mask=visits, other=-1)
        visit_lse = tl.load(lse + d * P + v, mask=visits, other=0.0)
        log_q = tl.load(target_logit + d * P + v, mask=visits, other=0.0) - visit_lse
        at_target = _expm1(log_q) * upstream
        block = v.to(tl.int64) * path_blocks + _first_block(column, n, d, BLOCK_C, visits)
        slot = v.to(tl.int64) * (path_slots * 16) + _first_slot(column, n, d, visits)
        for c0 in range(0, tl.max(width, 0), BLOCK_C):
            m = tl.load(block_max + block + c0 // BLOCK_C, mask=visits & (c0 < width), other=0.0)
            c = c0 + tl.arange(0, BLOCK_C)
            in_path = c[None, :] < (tl.cdiv(width, 16) * 16)[:, None]
            place = slot[:, None] + c[None, :]
            k = tl.load(exp_logits + place, mask=in_path, other=0.0).to(ACC)
            error = k * (tl.exp(m - visit_lse) * upstream)[:, None]
            error = tl.where(c[None, :] == y[:, None], at_target[:, None], error)
            tl.store(errors + place, error.to(errors.dtype.element_ty), mask=in_path)


@triton.jit
def _factor(scale):
    """The s of (9), from the largest |d nll|."""
    return tl.maximum(tl.load(scale), 1.1754944e-38)


@triton.jit
def _load_errors(errors, first, row, visits, slot, c, width, num_slots):
    """The e' [visits, children] of a node, of the visits first + row."""
    in_path = c < tl.cdiv(width, 16) * 16
    return _block(errors + slot, first, row, visits, c, in_path, num_slots)


@triton.jit
def _heavy(
    scale, sorted_hidden, weight,
    position, node, light_level, chunk_tiles, num_entries,
    first_row, num_children, column, errors,
    d_hidden, partial_hidden, partial_rows, partial_bias,
    P, D, row_programs, path_slots, h_units, sorted_units, weight_units,
    ACC: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, WEIGHT_ALIGN: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Chunks of (6), then heavy nodes' (5)."""
    num_slots, padded = path_slots * 16, sorted_units * 16
    num_h = tl.cdiv(padded, BLOCK_H)
    if tl.program_id(0) < row_programs:
        for i in range(tl.program_id(0), tl.load(num_entries + 4) * num_h, row_programs):
            _heavy_rows(
                chunk_tiles + i // num_h * 4, (i % num_h) * BLOCK_H, (sorted_hidden, padded),
                node, P, (num_children, column), (errors, num_slots, None),
                outputs=(None, partial_rows, partial_bias, padded),
                ACC=ACC, PRECISION=PRECISION, BLOCK_C=BLOCK_C, BLOCK_H=BLOCK_H, STEP=STEP,
            )  # fmt: skip
    elif d_hidden is not None:
        i = tl.program_id(0) - row_programs
        _heavy_hidden(
            i // num_h * BLOCK_V, (i % num_h) * BLOCK_H,
            (weight, h_units * ALIGN, weight_units * WEIGHT_ALIGN, padded),
            (position, node, light_level, P, D), (first_row, num_children, column),
            (errors, num_slots, scale), (d_hidden, partial_hidden),
            ACC=ACC, PRECISION=PRECISION, BLOCK_V=BLOCK_V, BLOCK_H=BLOCK_H, STEP=STEP,
        )  # fmt: skip


@triton.jit
def _heavy_rows(
    entry, h0, inputs, node, P, tree, errors_of, outputs,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Σ e' hᵀ over visits of a node, for a block of its children.

    Written to the rows where those of the node begin, `written_row` [I], or that the entry names.
    """
    hidden, hidden_stride = inputs
    num_children, column = tree
    errors, num_slots, scale = errors_of
    written_row, matrix, biases, columns = outputs
    flat, end, c0 = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2) * BLOCK_C
    d, begin, n = flat // P, flat % P, tl.load(node + flat)
    first = tl.load(entry + 3 if written_row is None else written_row + n) + c0
    width, slot = tl.load(num_children + n).to(tl.int32), _first_slot(column, n, d)
    h = h0 + tl.arange(0, BLOCK_H)
    c = c0 + tl.arange(0, BLOCK_C)
    row = tl.arange(0, STEP)
    if matrix is not None:
        total = tl.zeros([BLOCK_C, BLOCK_H], ACC)
        for v0 in range(begin, end, STEP):
            v = v0 + row
            x = _block(hidden, v0, row, v < end, h, h < hidden_stride, hidden_stride)
            error = _load_errors(errors, v0, row, v < end, slot, c, width, num_slots)
            total = tl.dot(
                tl.trans(error), x, total, input_precision=PRECISION, out_dtype=ACC
            )  # fmt: skip
        _store_block(matrix, first, c < width, h, columns, columns, _scaled(total, scale))
    if biases is not None:  # noqa: SIM102 - the compiler decides the first alone
        if h0 == 0:
            bias = tl.zeros([BLOCK_C], ACC)
            for v0 in range(begin, end, STEP):
                v = v0 + row
                error = _load_errors(errors, v0, row, v < end, slot, c, width, num_slots)
                bias += tl.sum(error.to(ACC), axis=0)
            _store_biases(biases, first + tl.arange(0, BLOCK_C), c < width, bias, scale)


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
    """The same for neighbouring rows from the first one on."""
    row = tl.arange(0, row_mask.shape[0])
    mask = row_mask[:, None] & (h < H)[None, :]
    place = matrix + tl.full((), first, tl.int64) * stride + (row[:, None] * stride + h[None, :])
    tl.store(place, values.to(matrix.dtype.element_ty), mask=mask)


@triton.jit
def _store_biases(d_bias, row, mask, total, scale):
    tl.store(d_bias + row, _scaled(total, scale).to(d_bias.dtype.element_ty), mask=mask)


@triton.jit
def _heavy_hidden(
    begin, h0, inputs, visits_of, tree, errors_of, outputs,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """(5) over heavy nodes: final for positions that visit no light node, partial for others.

    Every other tile walks its nodes backwards: a node with visits in two tiles is then the last of
    both, or the first.
    """
    weight, H, weight_stride, hidden_stride = inputs
    position, node, light_level, P, D = visits_of
    first_row, num_children, column = tree
    errors, num_slots, scale = errors_of
    d_hidden, partial_hidden = outputs
    tile_row, child = tl.arange(0, BLOCK_V), tl.arange(0, STEP)
    v = begin + tile_row
    h = h0 + tl.arange(0, BLOCK_H)
    num_heavy = tl.load(light_level + v, mask=v < P, other=0)
    total = tl.zeros([BLOCK_V, BLOCK_H], ACC)
    for d in range(0, D):
        nodes = tl.load(node + d * P + v, mask=d < num_heavy, other=-1)
        s = _next(nodes, v, begin, BLOCK_V)
        while s >= 0:
            n = tl.load(node + d * P + s)
            width, first = tl.load(num_children + n).to(tl.int32), tl.load(first_row + n)
            slot = _first_slot(column, n, d)
            for c0 in range(0, width, STEP):
                c = c0 + child
                error = _load_errors(
                    errors, begin, tile_row, nodes == n, slot, c, width, num_slots
                )  # fmt: skip
                w = _block(
                    weight, first + c0, child, c < width, h, h < weight_stride, weight_stride
                ).to(error.dtype)  # fmt: skip
                total = tl.dot(error, w, total, input_precision=PRECISION, out_dtype=ACC)
            nodes = tl.where(nodes == n, -1, nodes)
            s = _next(nodes, v, begin, BLOCK_V)
    light = num_heavy < D
    p = tl.load(position + v, mask=v < P, other=0)
    _store_rows(d_hidden, p, (v < P) & (light == 0), h, H, H, _scaled(total, scale))
    light = (v < P) & light
    _store_block(partial_hidden, begin, light, h, hidden_stride, hidden_stride, total)


@triton.jit
def _next(nodes, v, begin, BLOCK_V: tl.constexpr):
    """A position whose node remains, the last one in every other tile; -1 if none remains."""
    last = tl.max(tl.where(nodes >= 0, v, -1), axis=0)
    first = tl.min(tl.where(nodes >= 0, v, begin + BLOCK_V), axis=0)
    return tl.where((begin // BLOCK_V) % 2 == 1, last, tl.minimum(first, last))


@triton.jit
def _rows(
    scale, sorted_hidden, weight,
    position, node, row_tiles, light_groups, split_tiles, num_entries, visited,
    first_row, num_children, column, node_of_row, errors,
    d_hidden, d_weight, d_bias, written_row, partial_hidden, partial_rows, partial_bias,
    P, D, R, row_programs, max_groups, max_split_tiles, path_slots, h_units, sorted_units,
    weight_units,
    LIGHT: tl.constexpr, LIGHT_C: tl.constexpr, LIGHT_H: tl.constexpr, LIGHT_STAGES: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, WEIGHT_ALIGN: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """(6) for all rows, and (5) for light groups; 0 for the R rows without visits.

    `written_row` [I] is where the gradients of each node's rows begin.
    """
    H, columns, num_slots = h_units * ALIGN, weight_units * WEIGHT_ALIGN, path_slots * 16
    padded = sorted_units * 16
    num_h, light_h = tl.cdiv(columns, BLOCK_H), tl.cdiv(columns, LIGHT_H)
    written = first_row if written_row is None else written_row
    program = tl.program_id(0) - row_programs
    tile, h0 = program // light_h, (program % light_h) * LIGHT_H
    if program < 0:
        for i in range(tl.program_id(0), tl.load(num_entries + 3) * num_h, row_programs):
            _heavy_rows(
                row_tiles + i // num_h * 4, (i % num_h) * BLOCK_H, (sorted_hidden, padded),
                node, P, (num_children, column), (errors, num_slots, scale),
                outputs=(written, d_weight, d_bias, columns),
                ACC=ACC, PRECISION=PRECISION, BLOCK_C=BLOCK_C, BLOCK_H=BLOCK_H, STEP=STEP,
            )  # fmt: skip
    elif tile < max_groups:
        if tile < tl.load(num_entries + 2):
            _light_group(
                tl.load(light_groups + tile), h0, (sorted_hidden, weight, H, columns, padded),
                (position, node, P, D), written, (first_row, num_children, column),
                (errors, num_slots, scale), (partial_hidden, d_hidden, d_weight, d_bias),
                LIGHT=LIGHT, STAGES=LIGHT_STAGES, ACC=ACC, PRECISION=PRECISION, BLOCK_C=LIGHT_C,
                BLOCK_H=LIGHT_H,
            )  # fmt: skip
    elif tile < max_groups + max_split_tiles:
        if tile - max_groups < tl.load(num_entries + 5):
            _add_chunks(
                split_tiles + (tile - max_groups) * 4, h0, node, num_children, written,
                (partial_rows, partial_bias, padded, scale), (d_weight, d_bias, columns),
                ACC=ACC, BLOCK_C=BLOCK_C, BLOCK_H=LIGHT_H,
            )  # fmt: skip
    else:
        before = row_programs + (max_groups + max_split_tiles) * light_h
        first, step = tl.program_id(0) - before, tl.num_programs(0) - before
        for r0 in range(first * BLOCK_C, R, step * BLOCK_C):
            r = r0 + tl.arange(0, BLOCK_C)
            owner = tl.load(node_of_row + r, mask=r < R, other=0)
            empty = tl.load(visited + owner, mask=r < R, other=1) == 0
            if tl.sum(empty.to(tl.int32), axis=0) > 0:
                _write_zeros(r, empty, (d_weight, d_bias, columns), BLOCK_C, LIGHT_H)


@triton.jit
def _light_group(
    flat, h0, inputs, visits_of, written, tree, errors_of, outputs,
    LIGHT: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """(5), added to the share of heavy nodes, and (6) for the visits of a light node and below."""
    hidden, weight, H, weight_stride, hidden_stride = inputs
    position, node, P, D = visits_of
    first_row, num_children, column = tree
    errors, num_slots, scale = errors_of
    partial_hidden, d_hidden, d_weight, d_bias = outputs
    begin, group_row, child = flat % P, tl.arange(0, LIGHT), tl.arange(0, BLOCK_C)
    v = begin + group_row
    h = h0 + tl.arange(0, BLOCK_H)
    top = flat // P
    group = tl.load(node + top * P + v, mask=v < P, other=-1) == tl.load(node + flat)
    p = tl.load(position + v, mask=group, other=0)
    x = _block(hidden, begin, group_row, group, h, h < hidden_stride, hidden_stride)
    total = tl.zeros([LIGHT, BLOCK_H], ACC)
    for d in range(top, D):
        nodes = tl.load(node + d * P + v, mask=group, other=-1)
        s = tl.min(tl.where(nodes >= 0, v, P), axis=0)
        while s < P:
            n = tl.load(node + d * P + s)
            width, first = tl.load(num_children + n).to(tl.int32), tl.load(first_row + n)
            slot, row = _first_slot(column, n, d), tl.load(written + n)
            for c0 in tl.range(0, width, BLOCK_C, num_stages=STAGES):
                c = c0 + child
                error = _load_errors(
                    errors, begin, group_row, nodes == n, slot, c, width, num_slots
                )  # fmt: skip
                if d_hidden is not None:
                    w = _block(
                        weight, first + c0, child, c < width, h, h < weight_stride, weight_stride
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
            partial_hidden, begin, group_row, group, h, h < hidden_stride, hidden_stride
        )  # fmt: skip
        _store_rows(d_hidden, p, group, h, H, H, _scaled(total, scale))


@triton.jit
def _add_chunks(
    entry, h0, node, num_children, written, partial, outputs,
    ACC: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The rows of a node whose visits were shared among programs."""
    partial_rows, partial_bias, padded, scale = partial
    d_weight, d_bias, columns = outputs
    n, num_chunks = tl.load(node + tl.load(entry)), tl.load(entry + 1)
    c0, partial_row = tl.load(entry + 2) * BLOCK_C, tl.load(entry + 3)
    child = tl.arange(0, BLOCK_C)
    width, row = tl.load(num_children + n).to(tl.int32), tl.load(written + n) + c0
    inside = c0 + child < width
    if d_weight is not None:
        h = h0 + tl.arange(0, BLOCK_H)
        total = tl.zeros([BLOCK_C, BLOCK_H], ACC)
        for chunk in range(0, num_chunks):
            first = partial_row + c0 + chunk * width
            total += _block(partial_rows, first, child, inside, h, h < padded, padded)
        _store_block(d_weight, row, inside, h, columns, columns, _scaled(total, scale))
    if d_bias is not None:  # noqa: SIM102 - the compiler decides the first alone
        if h0 == 0:
            bias = tl.zeros([BLOCK_C], ACC)
            for chunk in range(0, num_chunks):
                place = partial_bias + partial_row + c0 + chunk * width + child
                bias += tl.load(place, mask=inside, other=0.0)
            _store_biases(d_bias, row + child, inside, bias, scale)


@triton.jit
def _write_zeros(r, empty, outputs, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr):
    d_weight, d_bias, columns = outputs
    if d_weight is not None:
        for h0 in range(0, columns, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            zeros = tl.zeros([BLOCK_R, BLOCK_H], d_weight.dtype.element_ty)
            _store_rows(d_weight, r, empty, h, columns, columns, zeros)
    if d_bias is not None:
        tl.store(d_bias + r, tl.zeros([BLOCK_R], d_bias.dtype.element_ty), mask=empty)
