"""The fused Triton kernel of the forward: all visits of all levels in one launch.

Letters: P positions in the order of `visits`, one of them v; D levels, one of them d; H the size of
hidden vectors; n a node, c its children, W_n their rows; e_v, q_v, lse_v, y_v and equations (1) to
(6) as in the reference backend.

A program owns a tile of neighbouring positions and walks the nodes that they visit; of each node,
blocks of `BLOCK_C` children, with a running log-sum-exp (Milakov & Gimelshein 2018):

    z = W h + b,   m = max_block z,   k = exp(z - m)               (7)
    lse = log Σ_blocks exp(m) Σ k,   log q[y] = z[y] - lse         (8)

k, between 0 and 1, is saved for the backward in the dtype of `hidden` together with m:
`exp_logits` and `block_max`, of the size of positions × columns on a path. Several programs
(`SPLITS`) share a tile, and each takes some of every node's children; the last of all the programs
that work on a position combines its splits and levels, in a fixed order.

The order of the work is made for the second-level cache. The programs of a tile are neighbours and
run at the same time, so that its hidden vectors are read from memory once; a program that walked
all children itself would find them evicted by those of other tiles. Every other tile walks its
nodes backwards: a node with visits in two tiles is then the last of both, or the first.

Every pointer is to elements with contiguous last dimension. H and strides are in units of `ALIGN`
elements: that many are loaded at once.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(matrix, row, row_mask, column, column_mask, stride):
    """[rows, columns] of a matrix, 0 outside of the masks; 64-bit offsets."""
    offset = row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(matrix + offset, mask=row_mask[:, None] & column_mask[None, :], other=0.0)


@triton.jit
def _active(node, light_level, v, in_tile, d, P, HEAVY: tl.constexpr):
    """Which positions of a tile visit a heavy (or light) node on level d."""
    visits = tl.load(node + d * P + v, mask=in_tile, other=-1) >= 0
    heavy = d < tl.load(light_level + v, mask=in_tile, other=0)
    return in_tile & visits & (heavy == HEAVY)


@triton.jit
def _next(active, v, begin, end):
    """The first active position from `begin` on; `end` if there is none."""
    return tl.min(tl.where(active & (v >= begin), v, end), axis=0)


@triton.jit
def _end_of(remaining, v, end, backwards):
    """The first remaining position, or the last one if `backwards`; -1 if none remains."""
    last = tl.max(tl.where(remaining, v, -1), axis=0)
    first = tl.min(tl.where(remaining, v, end), axis=0)
    return tl.where(backwards, last, tl.minimum(first, last))


@triton.jit
def _first_block(column, n, d, BLOCK_C: tl.constexpr):
    """Where a node's blocks begin among those of a path: each level may leave one partly empty."""
    return tl.load(column + n) // BLOCK_C + d


@triton.jit
def _base(m):
    """A finite number to subtract in place of a largest logit, so that -inf minus it is -inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _forward(
    hidden, weight, bias,
    position, node, child, stop, light_level, light_first,
    first_row, num_children, column,
    exp_logits, block_max, partial_lse, target_logit, lse, num_arrived, nll,
    P, D, num_tiles, num_blocks, h_units,
    hidden_stride, weight_stride,
    SPLITS: tl.constexpr, LIGHT: tl.constexpr, SAVE: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The nll [P], with lse and z[y] (`target_logit`) [D, P] of every visit."""
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    if tile < num_tiles:
        begin = tile * BLOCK_V
        _forward_tile(
            hidden=hidden, weight=weight, bias=bias,
            position=position, node=node, child=child, light_level=light_level,
            first_row=first_row, num_children=num_children, column=column,
            exp_logits=exp_logits, block_max=block_max, partial_lse=partial_lse,
            target_logit=target_logit, lse=lse, num_arrived=num_arrived, nll=nll,
            begin=begin, end=tl.minimum(begin + BLOCK_V, P), top=0,
            split=split, backwards=tile % 2 == 1,
            P=P, D=D, num_blocks=num_blocks, h_units=h_units,
            hidden_stride=hidden_stride, weight_stride=weight_stride,
            HEAVY=True, SPLITS=SPLITS, SAVE=SAVE, ACC=ACC, PRECISION=PRECISION, ALIGN=ALIGN,
            BLOCK_V=BLOCK_V, BLOCK_C=BLOCK_C, BLOCK_H=BLOCK_H,
        )  # fmt: skip
    else:
        begin = tl.load(light_first + tile - num_tiles).to(tl.int32)
        if begin < P:
            top = tl.load(light_level + begin).to(tl.int32)
            _forward_tile(
                hidden=hidden, weight=weight, bias=bias,
                position=position, node=node, child=child, light_level=light_level,
                first_row=first_row, num_children=num_children, column=column,
                exp_logits=exp_logits, block_max=block_max, partial_lse=partial_lse,
                target_logit=target_logit, lse=lse, num_arrived=num_arrived, nll=nll,
                begin=begin, end=tl.load(stop + top * P + begin).to(tl.int32), top=top,
                split=split, backwards=False,
                P=P, D=D, num_blocks=num_blocks, h_units=h_units,
                hidden_stride=hidden_stride, weight_stride=weight_stride,
                HEAVY=False, SPLITS=SPLITS, SAVE=SAVE, ACC=ACC, PRECISION=PRECISION, ALIGN=ALIGN,
                BLOCK_V=LIGHT, BLOCK_C=BLOCK_C, BLOCK_H=BLOCK_H,
            )  # fmt: skip


@triton.jit
def _forward_tile(
    hidden, weight, bias,
    position, node, child, light_level, first_row, num_children, column,
    exp_logits, block_max, partial_lse, target_logit, lse, num_arrived, nll,
    begin, end, top, split, backwards,
    P, D, num_blocks, h_units, hidden_stride, weight_stride,
    HEAVY: tl.constexpr, SPLITS: tl.constexpr, SAVE: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The heavy or the light nodes, from level `top` on, of positions begin … end, for a split."""
    v = begin + tl.arange(0, BLOCK_V)
    in_tile = v < end
    p = tl.load(position + v, mask=in_tile, other=0)
    for d in range(top, D):
        nodes = tl.load(node + d * P + v, mask=in_tile, other=-1)
        remaining = _active(node, light_level, v, in_tile, d, P, HEAVY)
        s = _end_of(remaining, v, end, backwards)
        while s >= 0:
            n = tl.load(node + d * P + s)
            _forward_node(
                hidden=hidden, weight=weight, bias=bias, child=child,
                first_row=first_row, num_children=num_children, column=column,
                exp_logits=exp_logits, block_max=block_max, partial_lse=partial_lse,
                target_logit=target_logit,
                n=n, d=d, v=v, p=p, visits=remaining & (nodes == n), split=split,
                P=P, D=D, num_blocks=num_blocks, h_units=h_units,
                hidden_stride=hidden_stride, weight_stride=weight_stride,
                SPLITS=SPLITS, SAVE=SAVE, ACC=ACC, PRECISION=PRECISION, ALIGN=ALIGN,
                BLOCK_V=BLOCK_V, BLOCK_C=BLOCK_C, BLOCK_H=BLOCK_H,
            )  # fmt: skip
            remaining = remaining & (nodes != n)
            s = _end_of(remaining, v, end, backwards)
    _finish(
        node=node, light_level=light_level, partial_lse=partial_lse, target_logit=target_logit,
        lse=lse, num_arrived=num_arrived, nll=nll, v=v, p=p, in_tile=in_tile,
        P=P, D=D, SPLITS=SPLITS, ACC=ACC,
    )  # fmt: skip


@triton.jit
def _forward_node(
    hidden, weight, bias, child, first_row, num_children, column,
    exp_logits, block_max, partial_lse, target_logit,
    n, d, v, p, visits, split,
    P, D, num_blocks, h_units, hidden_stride, weight_stride,
    SPLITS: tl.constexpr, SAVE: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """(7) and (8) for one node and those positions of the tile that visit it."""
    H = h_units * ALIGN
    width, first = tl.load(num_children + n).to(tl.int32), tl.load(first_row + n)
    share = tl.cdiv(tl.cdiv(width, BLOCK_C), SPLITS) * BLOCK_C
    c_begin, c_end = split * share, tl.minimum((split + 1) * share, width)
    y = tl.load(child + d * P + v, mask=visits, other=-1).to(tl.int32)
    block = _first_block(column, n, d, BLOCK_C) + c_begin // BLOCK_C
    m = tl.full([BLOCK_V], float("-inf"), ACC)
    total = tl.zeros([BLOCK_V], ACC)
    z_y = tl.zeros([BLOCK_V], ACC)
    for c0 in range(c_begin, c_end, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        inside = c < width
        z = tl.zeros([BLOCK_V, BLOCK_C], ACC)
        for h0 in range(0, H, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            x = _rows(hidden, p, visits, h, h < H, hidden_stride * ALIGN)
            w = _rows(weight, first + c, inside, h, h < H, weight_stride * ALIGN).to(x.dtype)
            z = tl.dot(x, tl.trans(w), z, input_precision=PRECISION, out_dtype=ACC)
        if bias is not None:
            z += tl.load(bias + first + c, mask=inside, other=0.0).to(ACC)[None, :]
        z_y += tl.sum(tl.where(c[None, :] == y[:, None], z, 0.0), axis=1)
        z = tl.where(inside[None, :], z, float("-inf"))
        m_block = tl.max(z, axis=1)
        k = tl.exp(z - _base(m_block)[:, None])
        if SAVE:
            place = v.to(tl.int64) * num_blocks + block
            tl.store(block_max + place, m_block, mask=visits)
            k_place = (place * BLOCK_C)[:, None] + tl.arange(0, BLOCK_C)[None, :]
            tl.store(exp_logits + k_place, k.to(exp_logits.dtype.element_ty), mask=visits[:, None])
        m_new = tl.maximum(m, m_block)
        base = _base(m_new)
        total = total * tl.exp(m - base) + tl.sum(k, axis=1) * tl.exp(m_block - base)
        m = m_new
        block += 1
    split_lse = m + tl.log(tl.where(total == 0.0, 1.0, total))  # -inf where there are no children
    tl.store(partial_lse + (split * D + d) * P + v, split_lse, mask=visits)
    tl.store(target_logit + d * P + v, z_y, mask=visits & (y >= c_begin) & (y < c_end))


@triton.jit
def _finish(
    node, light_level, partial_lse, target_logit, lse, num_arrived, nll,
    v, p, in_tile, P, D, SPLITS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """In the last program that arrives: lse of all splits and nll of all levels, in order."""
    tl.debug_barrier()  # what the other threads of this program stored must be visible first
    programs = tl.where(tl.load(light_level + v, mask=in_tile, other=D) < D, 2 * SPLITS, SPLITS)
    before = tl.atomic_add(num_arrived + v, 1, mask=in_tile, sem="acq_rel")
    last = in_tile & (before + 1 == programs)
    tl.debug_barrier()
    total_nll = tl.zeros(v.shape, ACC)
    for d in range(0, D):
        visits = last & (tl.load(node + d * P + v, mask=last, other=-1) >= 0)
        m = tl.load(partial_lse + d * P + v, mask=visits, other=0.0, cache_modifier=".cg")
        total = tl.full(v.shape, 1.0, ACC)
        for split in range(1, SPLITS):
            place = partial_lse + (split * D + d) * P + v
            other = tl.load(place, mask=visits, other=0.0, cache_modifier=".cg")
            m_new = tl.maximum(m, other)
            base = _base(m_new)
            total = total * tl.exp(m - base) + tl.exp(other - base)
            m = m_new
        visit_lse = m + tl.log(total)
        z_y = tl.load(target_logit + d * P + v, mask=visits, other=0.0, cache_modifier=".cg")
        tl.store(lse + d * P + v, visit_lse, mask=visits)
        total_nll += tl.where(visits, visit_lse - z_y, 0.0)
    tl.store(nll + p, total_nll, mask=last)
