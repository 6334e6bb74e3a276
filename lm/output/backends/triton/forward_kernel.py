"""The fused Triton kernel of the forward: every visit of every level in one launch.

Letters: P positions, sorted as `routing` lays them out, one of them v; D levels, one of them d; H
the size of hidden vectors; n a node, c its children, W_n their rows; e_v, q_v, lse_v, y_v, (1)–(6)
as in `reference`.

A program owns a tile of neighbouring positions and walks the nodes they visit; of each
node, blocks of `BLOCK_C` children, with a running log-sum-exp (Milakov & Gimelshein 2018):

    z = W h + b,   m = max_block z,   k = exp(z - m)               (7)
    lse = log Σ_blocks exp(m) Σ k,   log q[y] = z[y] - lse         (8)

k, between 0 and 1, is kept for `kernels_backward` in the dtype of `hidden` together with m: `kept`
and `block_max`, a matter of positions × columns on a path, √N-small. Several programs (`SPLITS`)
share a tile, each taking a part of every node's children; whichever of all the
programs that work on a position arrives last adds up its splits and levels, in a fixed order.

The order of the work is made for the second-level cache. The programs of a tile are neighbours and
run at the same time, so that its hidden vectors come from memory once; a program that walked all
children itself would find them thrown out by those of other tiles. Every other tile walks its nodes
backwards: a node with visits in two tiles is then the last of both, or the first.
`scripts/kernel_bytes` plays all this through a cache.

Every pointer is to elements with contiguous last dimension. H and strides come in units of `ALIGN`
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
def _end_of(left, v, end, backwards):
    """The first position of those left, or the last one; -1 if none is left."""
    last = tl.max(tl.where(left, v, -1), axis=0)
    first = tl.min(tl.where(left, v, end), axis=0)
    return tl.where(backwards, last, tl.minimum(first, last))


@triton.jit
def _first_block(column, n, d, BLOCK_C: tl.constexpr):
    """Where a node's blocks begin among those of a path: a part of a block is lost per level."""
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
    kept, block_max, part, picked, lse, arrived, nll,
    P, D, num_tiles, num_blocks, h_units,
    hidden_stride, weight_stride,
    SPLITS: tl.constexpr, LIGHT: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """nll [P], with lse and z[y] (`picked`) [D, P] of every visit."""
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    if tile < num_tiles:
        begin = tile * BLOCK_V
        _forward_tile(
            hidden, weight, bias,
            position, node, child, light_level, first_row, num_children, column,
            kept, block_max, part, picked, lse, arrived, nll,
            begin, tl.minimum(begin + BLOCK_V, P), 0, split, tile % 2 == 1,
            P, D, num_blocks, h_units, hidden_stride, weight_stride,
            True, SPLITS, KEEP, ACC, PRECISION, ALIGN, BLOCK_V, BLOCK_C, BLOCK_H,
        )  # fmt: skip
    else:
        begin = tl.load(light_first + tile - num_tiles).to(tl.int32)
        if begin < P:
            top = tl.load(light_level + begin).to(tl.int32)
            _forward_tile(
                hidden, weight, bias,
                position, node, child, light_level, first_row, num_children, column,
                kept, block_max, part, picked, lse, arrived, nll,
                begin, tl.load(stop + top * P + begin).to(tl.int32), top, split, False,
                P, D, num_blocks, h_units, hidden_stride, weight_stride,
                False, SPLITS, KEEP, ACC, PRECISION, ALIGN, LIGHT, BLOCK_C, BLOCK_H,
            )  # fmt: skip


@triton.jit
def _forward_tile(
    hidden, weight, bias,
    position, node, child, light_level, first_row, num_children, column,
    kept, block_max, part, picked, lse, arrived, nll,
    begin, end, top, split, backwards,
    P, D, num_blocks, h_units, hidden_stride, weight_stride,
    HEAVY: tl.constexpr, SPLITS: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The heavy or the light nodes, from level `top` on, of positions begin … end; of each node's
    children the part that belongs to `split`.
    """
    v = begin + tl.arange(0, BLOCK_V)
    in_tile = v < end
    p = tl.load(position + v, mask=in_tile, other=0)
    for d in range(top, D):
        nodes = tl.load(node + d * P + v, mask=in_tile, other=-1)
        left = _active(node, light_level, v, in_tile, d, P, HEAVY)
        s = _end_of(left, v, end, backwards)
        while s >= 0:
            n = tl.load(node + d * P + s)
            _forward_node(
                hidden, weight, bias, child, first_row, num_children, column,
                kept, block_max, part, picked,
                n, d, v, p, left & (nodes == n), split,
                P, D, num_blocks, h_units, hidden_stride, weight_stride,
                SPLITS, KEEP, ACC, PRECISION, ALIGN, BLOCK_V, BLOCK_C, BLOCK_H,
            )  # fmt: skip
            left = left & (nodes != n)
            s = _end_of(left, v, end, backwards)
    _finish(node, light_level, part, picked, lse, arrived, nll, v, p, in_tile, P, D, SPLITS, ACC)


@triton.jit
def _forward_node(
    hidden, weight, bias, child, first_row, num_children, column,
    kept, block_max, part, picked,
    n, d, v, p, visits, split,
    P, D, num_blocks, h_units, hidden_stride, weight_stride,
    SPLITS: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr,
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
            own = _rows(hidden, p, visits, h, h < H, hidden_stride * ALIGN)
            w = _rows(weight, first + c, inside, h, h < H, weight_stride * ALIGN).to(own.dtype)
            z = tl.dot(own, tl.trans(w), z, input_precision=PRECISION, out_dtype=ACC)
        if bias is not None:
            z += tl.load(bias + first + c, mask=inside, other=0.0).to(ACC)[None, :]
        z_y += tl.sum(tl.where(c[None, :] == y[:, None], z, 0.0), axis=1)
        z = tl.where(inside[None, :], z, float("-inf"))
        m_block = tl.max(z, axis=1)
        k = tl.exp(z - _base(m_block)[:, None])
        if KEEP:
            place = v.to(tl.int64) * num_blocks + block
            tl.store(block_max + place, m_block, mask=visits)
            k_place = (place * BLOCK_C)[:, None] + tl.arange(0, BLOCK_C)[None, :]
            tl.store(kept + k_place, k.to(kept.dtype.element_ty), mask=visits[:, None])
        m_new = tl.maximum(m, m_block)
        base = _base(m_new)
        total = total * tl.exp(m - base) + tl.sum(k, axis=1) * tl.exp(m_block - base)
        m = m_new
        block += 1
    own_lse = m + tl.log(tl.where(total == 0.0, 1.0, total))  # -inf where there are no children
    tl.store(part + (split * D + d) * P + v, own_lse, mask=visits)
    tl.store(picked + d * P + v, z_y, mask=visits & (y >= c_begin) & (y < c_end))


@triton.jit
def _finish(
    node, light_level, part, picked, lse, arrived, nll,
    v, p, in_tile, P, D, SPLITS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Where this program is the last to arrive: lse of all splits, nll of all levels, in order."""
    tl.debug_barrier()  # what the other threads of this program stored must be out first
    programs = tl.where(tl.load(light_level + v, mask=in_tile, other=D) < D, 2 * SPLITS, SPLITS)
    before = tl.atomic_add(arrived + v, 1, mask=in_tile, sem="acq_rel")
    last = in_tile & (before + 1 == programs)
    tl.debug_barrier()
    own_nll = tl.zeros(v.shape, ACC)
    for d in range(0, D):
        visits = last & (tl.load(node + d * P + v, mask=last, other=-1) >= 0)
        m = tl.load(part + d * P + v, mask=visits, other=0.0, cache_modifier=".cg")
        total = tl.full(v.shape, 1.0, ACC)
        for split in range(1, SPLITS):
            place = part + (split * D + d) * P + v
            other = tl.load(place, mask=visits, other=0.0, cache_modifier=".cg")
            m_new = tl.maximum(m, other)
            base = _base(m_new)
            total = total * tl.exp(m - base) + tl.exp(other - base)
            m = m_new
        own_lse = m + tl.log(total)
        z_y = tl.load(picked + d * P + v, mask=visits, other=0.0, cache_modifier=".cg")
        tl.store(lse + d * P + v, own_lse, mask=visits)
        own_nll += tl.where(visits, own_lse - z_y, 0.0)
    tl.store(nll + p, own_nll, mask=last)
