"""The fused Triton kernels of the backward, three launches.

Letters and equations are those of `forward_kernel`. The error (4) of a block is computed from what
was saved, without a second product:

    e = k exp(m - lse) - onehot(y),   at y: expm1(log q[y])        (9)

What is saved is 2 bytes per visit and column in half precision. Computing it again would read the
heavy rows once more and take 5 products instead of 3 for heavy nodes, which are bound by them. A
light program that computed errors itself would have to hold all of H at a time.

`_d_hidden` gives heavy nodes' share of (5): a program takes a tile of positions and of columns of
H. `_d_weight` gives (6) for heavy nodes: a program takes a block of children and adds over all
their visits. `_d_light` gives both for light groups: one program reads their rows once and writes
their gradients once. So every row's gradient has one owner and is rounded once, and no float is
added atomically.
"""

import triton
import triton.language as tl

from lm.output.backends.triton.forward_kernel import _active, _end_of, _first_block, _next, _rows


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
def _product(a, b, total, PRECISION: tl.constexpr, ACC: tl.constexpr):
    """The product a b, added to `total` unless that is None."""
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def _error(
    exp_logits, block_max, lse, target_logit, child,
    v, visits, d, block, c0, P, num_blocks, ACC: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(9): [positions, BLOCK_C] of a block that begins with child c0; 0 where not visited."""
    y = tl.load(child + d * P + v, mask=visits, other=-1).to(tl.int32)
    visit_lse = tl.load(lse + d * P + v, mask=visits, other=0.0)
    log_q = tl.load(target_logit + d * P + v, mask=visits, other=0.0) - visit_lse
    place = v.to(tl.int64) * num_blocks + block
    m = tl.load(block_max + place, mask=visits, other=0.0)
    column = tl.arange(0, BLOCK_C)
    k = tl.load(
        exp_logits + (place * BLOCK_C)[:, None] + column[None, :], mask=visits[:, None], other=0.0
    ).to(ACC)
    q = k * tl.exp(m - visit_lse)[:, None]
    return tl.where((c0 + column)[None, :] == y[:, None], _expm1(log_q)[:, None], q)


@triton.jit
def _d_hidden(
    d_nll, weight,
    position, node, child, light_level, first_row, num_children, column,
    exp_logits, block_max, lse, target_logit,
    d_hidden, partial,
    P, D, num_blocks, h_units, weight_stride,
    ACC: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """(5) over heavy nodes: final for positions that visit no light node, `partial` for others."""
    H = h_units * ALIGN
    num_h = tl.cdiv(H, BLOCK_H)
    tile = tl.program_id(0) // num_h
    begin, backwards = tile * BLOCK_V, tile % 2 == 1
    h = (tl.program_id(0) % num_h) * BLOCK_H + tl.arange(0, BLOCK_H)
    end = tl.minimum(begin + BLOCK_V, P)
    v = begin + tl.arange(0, BLOCK_V)
    in_tile = v < end
    p = tl.load(position + v, mask=in_tile, other=0)
    total = tl.zeros([BLOCK_V, BLOCK_H], ACC)
    for d in range(0, D):
        nodes = tl.load(node + d * P + v, mask=in_tile, other=-1)
        remaining = _active(node, light_level, v, in_tile, d, P, True)
        s = _end_of(remaining, v, end, backwards)
        while s >= 0:
            n = tl.load(node + d * P + s)
            visits = remaining & (nodes == n)
            width, first = tl.load(num_children + n).to(tl.int32), tl.load(first_row + n)
            block = _first_block(column, n, d, BLOCK_C)
            for c0 in range(0, width, BLOCK_C):
                error = _error(
                    exp_logits=exp_logits, block_max=block_max, lse=lse, target_logit=target_logit,
                    child=child, v=v, visits=visits, d=d, block=block + c0 // BLOCK_C, c0=c0,
                    P=P, num_blocks=num_blocks, ACC=ACC, BLOCK_C=BLOCK_C,
                )  # fmt: skip
                c = c0 + tl.arange(0, BLOCK_C)
                w = _rows(weight, first + c, c < width, h, h < H, weight_stride * ALIGN)
                error = error.to(exp_logits.dtype.element_ty)
                total = _product(error, w.to(error.dtype), total, PRECISION, ACC)
            remaining = remaining & (nodes != n)
            s = _end_of(remaining, v, end, backwards)
    total = total * tl.load(d_nll + p, mask=in_tile, other=0.0).to(ACC)[:, None]
    light = tl.load(light_level + v, mask=in_tile, other=D) < D
    inside = in_tile[:, None] & (h < H)[None, :]
    out = p.to(tl.int64)[:, None] * H + h[None, :]
    tl.store(d_hidden + out, total.to(d_hidden.dtype.element_ty), mask=inside & ~light[:, None])
    place = v.to(tl.int64)[:, None] * H + h[None, :]
    tl.store(partial + place, total, mask=inside & light[:, None])


@triton.jit
def _d_weight(
    d_nll, scale, hidden,
    position, node, child, stop, heavy_first, tile_stop, first_row, num_children, column,
    node_of_row, visited,
    exp_logits, block_max, lse, target_logit,
    d_weight, d_bias,
    P, R, num_heavy, num_blocks, h_units, hidden_stride, weight_stride,
    ACC: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr, SEARCH: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """(6) for the rows of heavy nodes, and 0 for the rows of nodes without visits.

    Programs take tiles (heavy node, block of children, columns of H) in turn; `tile_stop` [K] is
    the number of tiles up to the end of each node.
    """
    H = h_units * ALIGN
    num_h = tl.cdiv(H, BLOCK_H)
    num_tiles = tl.load(tile_stop + num_heavy - 1, mask=num_heavy > 0, other=0).to(tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        k = 0
        for bit in tl.static_range(SEARCH):
            step = 1 << (SEARCH - 1 - bit)
            probe = tl.load(
                tile_stop + k + step - 1, mask=k + step <= num_heavy, other=num_tiles + 1
            )
            k += tl.where(probe <= tile, step, 0)
        local = tile - tl.load(tile_stop + k - 1, mask=k > 0, other=0).to(tl.int32)
        flat = tl.load(heavy_first + k)
        d, s = (flat // P).to(tl.int32), (flat % P).to(tl.int32)
        n, s_stop = tl.load(node + flat), tl.load(stop + flat).to(tl.int32)
        width, first = tl.load(num_children + n).to(tl.int32), tl.load(first_row + n)
        c0 = (local // num_h) * BLOCK_C
        h0 = (local % num_h) * BLOCK_H
        block = _first_block(column, n, d, BLOCK_C) + c0 // BLOCK_C
        _write_rows(
            d_nll=d_nll, scale=scale, hidden=hidden, position=position, child=child,
            exp_logits=exp_logits, block_max=block_max, lse=lse, target_logit=target_logit,
            d_weight=d_weight, d_bias=d_bias,
            s=s, s_stop=s_stop, d=d, block=block, c0=c0, width=width, first=first, h0=h0,
            P=P, H=H, num_blocks=num_blocks,
            hidden_stride=hidden_stride * ALIGN, weight_stride=weight_stride * ALIGN,
            ACC=ACC, PRECISION=PRECISION, BLOCK_V=BLOCK_V, BLOCK_C=BLOCK_C, BLOCK_H=BLOCK_H,
        )  # fmt: skip
    for r0 in range(tl.program_id(0), tl.cdiv(R, BLOCK_R), tl.num_programs(0)):
        r = r0 * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
        owner = tl.load(node_of_row + r, mask=r < R, other=0)
        empty = (r < R) & (tl.load(visited + owner, mask=r < R, other=1) == 0)
        if tl.sum(empty.to(tl.int32), axis=0) > 0:
            _write_zeros(
                d_weight, d_bias, r, empty, H, weight_stride * ALIGN, BLOCK_R, BLOCK_H
            )  # fmt: skip


@triton.jit
def _write_rows(
    d_nll, scale, hidden, position, child,
    exp_logits, block_max, lse, target_logit, d_weight, d_bias,
    s, s_stop, d, block, c0, width, first, h0, P, H, num_blocks, hidden_stride, weight_stride,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Σ over the visits s … s_stop of e (d nll h)ᵀ, for one block of children, stored once."""
    h = h0 + tl.arange(0, BLOCK_H)
    c = c0 + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_C, BLOCK_H], ACC)
    bias_total = tl.zeros([BLOCK_C], ACC)
    for v0 in range(s, s_stop, BLOCK_V):
        v = v0 + tl.arange(0, BLOCK_V)
        visits = v < s_stop
        p = tl.load(position + v, mask=visits, other=0)
        error = _error(
            exp_logits=exp_logits, block_max=block_max, lse=lse, target_logit=target_logit,
            child=child, v=v, visits=visits, d=d, block=block, c0=c0,
            P=P, num_blocks=num_blocks, ACC=ACC, BLOCK_C=BLOCK_C,
        )  # fmt: skip
        error *= tl.load(d_nll + p, mask=visits, other=0.0).to(ACC)[:, None]
        x = _rows(hidden, p, visits, h, h < H, hidden_stride)
        total = _product(tl.trans(error.to(x.dtype)), x, total, PRECISION, ACC)
        bias_total += tl.sum(error, axis=0)
    _store_rows(
        d_weight=d_weight, d_bias=d_bias, scale=scale, total=total, bias_total=bias_total,
        first=first, c=c, width=width, h0=h0, h=h, H=H, stride=weight_stride,
    )  # fmt: skip


@triton.jit
def _store_rows(d_weight, d_bias, scale, total, bias_total, first, c, width, h0, h, H, stride):
    """One block of rows' gradients, and those of their biases once among the columns of H."""
    if scale is not None:
        factor = tl.load(scale)
        total, bias_total = total * factor, bias_total * factor
    place = (first + c).to(tl.int64)[:, None] * stride + h[None, :]
    inside = (c < width)[:, None] & (h < H)[None, :]
    if d_weight is not None:
        tl.store(d_weight + place, total.to(d_weight.dtype.element_ty), mask=inside)
    if d_bias is not None:
        out = bias_total.to(d_bias.dtype.element_ty)
        tl.store(d_bias + first + c, out, mask=c < tl.where(h0 == 0, width, 0))


@triton.jit
def _write_zeros(
    d_weight, d_bias, r, empty, H, weight_stride, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    if d_weight is not None:
        for h0 in range(0, H, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            zeros = tl.zeros([BLOCK_R, BLOCK_H], d_weight.dtype.element_ty)
            inside = empty[:, None] & (h < H)[None, :]
            tl.store(d_weight + r[:, None] * weight_stride + h[None, :], zeros, mask=inside)
    if d_bias is not None:
        tl.store(d_bias + r, tl.zeros([BLOCK_R], d_bias.dtype.element_ty), mask=empty)


@triton.jit
def _d_light(
    d_nll, scale, hidden, weight,
    position, node, child, stop, light_level, light_first, first_row, num_children, column,
    exp_logits, block_max, lse, target_logit,
    partial, d_hidden, d_weight, d_bias, written_row,
    P, D, num_blocks, h_units, hidden_stride, weight_stride,
    LIGHT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """(5), added to `partial`, and (6) for one light group and some columns of H.

    `written_row` [I] is where the gradients of each node's rows begin; None if at its rows.
    """
    H = h_units * ALIGN
    num_h = tl.cdiv(H, BLOCK_H)
    begin = tl.load(light_first + tl.program_id(0) // num_h).to(tl.int32)
    h0 = (tl.program_id(0) % num_h) * BLOCK_H
    if begin < P:
        h = h0 + tl.arange(0, BLOCK_H)
        top = tl.load(light_level + begin).to(tl.int32)
        end = tl.load(stop + top * P + begin).to(tl.int32)
        v = begin + tl.arange(0, LIGHT)
        in_tile = v < end
        p = tl.load(position + v, mask=in_tile, other=0)
        v_d_nll = tl.load(d_nll + p, mask=in_tile, other=0.0).to(ACC)
        x = _rows(hidden, p, in_tile, h, h < H, hidden_stride * ALIGN)
        total = tl.zeros([LIGHT, BLOCK_H], ACC)
        for d in range(top, D):
            active = _active(node, light_level, v, in_tile, d, P, False)
            s = _next(active, v, begin, end)
            while s < end:
                n = tl.load(node + d * P + s)
                s_stop = tl.minimum(tl.load(stop + d * P + s).to(tl.int32), end)
                visits = active & (v >= s) & (v < s_stop)
                width, first = tl.load(num_children + n).to(tl.int32), tl.load(first_row + n)
                written = first if written_row is None else tl.load(written_row + n)
                block = _first_block(column, n, d, BLOCK_C)
                for c0 in range(0, width, BLOCK_C):
                    c = c0 + tl.arange(0, BLOCK_C)
                    error = _error(
                        exp_logits=exp_logits, block_max=block_max, lse=lse, BLOCK_C=BLOCK_C,
                        target_logit=target_logit, child=child, v=v, visits=visits, d=d,
                        block=block + c0 // BLOCK_C, c0=c0, P=P, num_blocks=num_blocks, ACC=ACC,
                    )  # fmt: skip
                    if d_hidden is not None:
                        w = _rows(weight, first + c, c < width, h, h < H, weight_stride * ALIGN)
                        total = _product(error.to(x.dtype), w.to(x.dtype), total, PRECISION, ACC)
                    if d_weight is not None or d_bias is not None:
                        error *= v_d_nll[:, None]
                        rows = _product(tl.trans(error.to(x.dtype)), x, None, PRECISION, ACC)
                        _store_rows(
                            d_weight=d_weight, d_bias=d_bias, scale=scale, total=rows,
                            bias_total=tl.sum(error, axis=0), first=written, c=c, width=width,
                            h0=h0, h=h, H=H, stride=weight_stride * ALIGN,
                        )  # fmt: skip
                s = _next(active, v, s_stop, end)
        if d_hidden is not None:
            inside = in_tile[:, None] & (h < H)[None, :]
            heavy_place = partial + v.to(tl.int64)[:, None] * H + h[None, :]
            heavy = tl.load(heavy_place, mask=inside, other=0.0)
            if scale is not None:
                v_d_nll *= tl.load(scale)
            out = (total * v_d_nll[:, None] + heavy).to(d_hidden.dtype.element_ty)
            tl.store(d_hidden + p.to(tl.int64)[:, None] * H + h[None, :], out, mask=inside)
