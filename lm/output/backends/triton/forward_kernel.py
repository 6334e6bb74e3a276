"""The fused Triton kernel of the forward: all visits of all levels in one launch.

Letters: P positions in the order of `Routing`, one of them v; D levels, one of them d; H the size
of hidden vectors; n a node, c its children, W_n their rows; e_v, q_v, lse_v, y_v and equations (1)
to (6) as in the reference backend.

A program owns a tile of visits of one node, and some of the node's children. It walks them in
blocks of `BLOCK_C`, with a running log-sum-exp (Milakov & Gimelshein 2018):

    z = W h + b,   m = max_block z,   k = exp(z - m)               (7)
    lse = log Σ_blocks exp(m) Σ k,   log q[y] = z[y] - lse         (8)

k, between 0 and 1, is saved for the backward in the dtype of `hidden` together with m:
`exp_logits` and `block_max`, of the size of positions × columns on a path. `num_splits` programs
share a tile, and each takes some of the children; they are neighbours and run at the same time, so
that the tile's hidden vectors are read from memory once. The last of all the programs that work on
a position combines its splits and levels, in a fixed order.

Every pointer is to elements with contiguous last dimension. H and the columns of the weight are
constants, so that addresses of a tile are one pointer and fixed distances. `visit_lse` has z[y],
then lse of each split; at last the first of them is that of all.
"""

import triton
import triton.language as tl

from lm.output.backends.triton.launch import VARYING
from lm.output.backends.triton.routing_kernels import _fields, _light_entry

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _block(matrix, first, row, row_mask, column, column_mask, stride):
    """[rows, columns] of a matrix from its row `first` on, 0 outside of the masks."""
    offset = row[:, None] * stride + column[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    return tl.load(matrix + tl.full((), first, tl.int64) * stride + offset, mask=mask, other=0.0)


@triton.jit
def _padded(META: tl.constexpr):
    """Columns of the sorted hidden vectors."""
    return (META.hidden + 15) // 16 * 16


@triton.jit
def _first_slot(column, n, d, mask=None):
    """Where a node's children begin among those of a path, which begin at multiples of 16."""
    return (tl.load(column + n, mask=mask, other=None if mask is None else 0) // 16 + d) * 16


@triton.jit
def _first_block(column, n, d, BLOCK_C: tl.constexpr, mask=None):
    """Where blocks of a node's children begin: each level may leave one partly empty."""
    return tl.load(column + n, mask=mask, other=None if mask is None else 0) // BLOCK_C + d


@triton.jit
def _base(m):
    """A finite number to subtract in place of a largest logit, so that -inf minus it is -inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit(do_not_specialize=VARYING)
def _forward(
    inputs, tree, saved, nll, routing, strides,
    P, max_heavy, num_splits,
    ACC: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """The nll [P], with lse and z[y] [D, P] of every visit."""
    LIGHT: tl.constexpr = META.light.v
    visits_of = _fields(routing, P, strides.D)
    tile, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    if tile < max_heavy:
        if tile < tl.load(visits_of.num_entries):
            _forward_tile(
                tl.load(visits_of.heavy_tiles + tile * 4), split, num_splits, inputs, tree, saved,
                nll, visits_of, strides, P, META.tile.v, ACC, META,
            )  # fmt: skip
    elif tile - max_heavy < tl.load(visits_of.num_entries + 1):
        flat, few = _light_entry(visits_of.light_nodes + (tile - max_heavy) * 4)
        if few:
            _forward_tile(
                flat, split, num_splits, inputs, tree, saved, nll, visits_of, strides, P,
                16, ACC, META,
            )  # fmt: skip
        elif LIGHT > 16:
            _forward_tile(
                flat, split, num_splits, inputs, tree, saved, nll, visits_of, strides, P,
                LIGHT, ACC, META,
            )  # fmt: skip


@triton.jit
def _forward_tile(
    flat, split, num_splits, inputs, tree, saved, nll, visits_of, strides, P,
    BLOCK_V: tl.constexpr, ACC: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """(7) and (8) for up to `BLOCK_V` visits of a node from `flat` on, for a split."""
    BLOCK_C: tl.constexpr = META.tile.c
    D, node = strides.D, visits_of.node
    num_slots, num_blocks = strides.path_slots * 16, strides.path_blocks
    target_logit = saved.visit_lse
    d, n = flat // P, tl.load(node + flat)
    v = flat % P + tl.arange(0, BLOCK_V)
    visits = tl.load(node + d * P + v, mask=v < P, other=-1) == n
    y = tl.load(visits_of.child + d * P + v, mask=visits, other=-1)
    width, first = tl.load(tree.num_children + n).to(tl.int32), tl.load(tree.first_row + n)
    share = tl.cdiv(tl.cdiv(width, BLOCK_C), num_splits) * BLOCK_C
    c_begin, c_end = split * share, tl.minimum((split + 1) * share, width)
    slot, block = _first_slot(tree.column, n, d), _first_block(tree.column, n, d, BLOCK_C)
    m = tl.full([BLOCK_V], float("-inf"), ACC)
    total = tl.zeros([BLOCK_V], ACC)
    row, c_block = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_C)
    bias = None if inputs.bias is None else _bias(inputs.bias, first, c_begin + c_block, width)
    if saved.exp_logits is not None:
        logits_of_tile = saved.exp_logits + (flat % P).to(tl.int64) * num_slots + slot
        max_of_tile = saved.block_max + (flat % P).to(tl.int64) * num_blocks + block
    for c0 in tl.range(c_begin, c_end, BLOCK_C, flatten=META.tile.flatten):
        c = c0 + c_block
        inside = c < width
        z = _logits(
            inputs, strides, flat % P, row, visits, first + c0, c_block, inside, ACC, META
        )  # fmt: skip
        if inputs.bias is not None:
            z += bias.to(ACC)[None, :]
            bias = _bias(inputs.bias, first, c + BLOCK_C, width)  # before the products of its block
        z_y = tl.sum(tl.where(c_block[None, :] == (y - c0)[:, None], z, 0.0), axis=1)
        in_block = visits & (y >= c0) & (y < c0 + BLOCK_C)
        tl.store(target_logit + d * P + v, z_y, mask=in_block)
        if c0 + BLOCK_C > width:
            z = tl.where((c_block < width - c0)[None, :], z, float("-inf"))
        m_block = tl.max(z, axis=1)
        k = tl.exp2((z - _base(m_block)[:, None]) * LOG2_E)  # fewer instructions than exp
        if saved.exp_logits is not None:
            tl.store(max_of_tile + row * num_blocks + c0 // BLOCK_C, m_block, mask=visits)
            place = logits_of_tile + row[:, None] * num_slots + c[None, :]
            in_path = visits[:, None] & (c < tl.cdiv(width, 16) * 16)[None, :]
            tl.store(place, k.to(saved.exp_logits.dtype.element_ty), mask=in_path)
        m_new = tl.maximum(m, m_block)
        base = _base(m_new)
        total = total * tl.exp(m - base) + tl.sum(k, axis=1) * tl.exp(m_block - base)
        m = m_new
    split_lse = m + tl.log(tl.where(total == 0.0, 1.0, total))  # -inf where there are no children
    partial_lse = saved.visit_lse + D * P
    tl.store(partial_lse + (split * D + d) * P + v, split_lse, mask=visits)
    p = tl.load(visits_of.position + v, mask=visits, other=0)
    _finish(v, p, visits, visits_of, saved.visit_lse, nll, P, D, num_splits, ACC)


@triton.jit
def _bias(bias, first, c, width):
    return tl.load(bias + first + c, mask=c < width, other=0.0)


@triton.jit
def _logits(
    inputs, strides, v, row, visits, first, child, inside, ACC: tl.constexpr, META: tl.constexpr
):  # fmt: skip
    """The W h of the visits v + row and the children first + child."""
    hidden_stride: tl.constexpr = _padded(META)
    weight_stride: tl.constexpr = META.columns
    z = tl.zeros([row.shape[0], child.shape[0]], ACC)
    # most rows of a heavy tile are visits: a mask would take more time than the loads it saves
    of_x = row >= 0 if row.shape[0] > META.light.v else visits
    for h0 in range(0, hidden_stride, META.tile.h):
        h = h0 + tl.arange(0, META.tile.h)
        x = _block(inputs.sorted_hidden, v, row, of_x, h, h < hidden_stride, hidden_stride)
        w = _block(inputs.weight, first, child, inside, h, h < weight_stride, weight_stride)
        z = tl.dot(
            x, tl.trans(w.to(x.dtype)), z, input_precision=META.precision, out_dtype=ACC
        )  # fmt: skip
    return z


@triton.jit
def _finish(v, p, visits, visits_of, visit_lse, nll, P, D, num_splits, ACC: tl.constexpr):
    """In the last program that arrives: lse of all splits and nll of all levels, in order."""
    target_logit, lse = visit_lse, visit_lse + D * P
    tl.debug_barrier()  # what the other threads of this program stored must be visible first
    before = tl.atomic_add(visits_of.num_missing + v, -1, mask=visits, sem="acq_rel")
    last = visits & (before == 1)
    tl.debug_barrier()
    total_nll = tl.zeros(v.shape, ACC)
    for d in range(0, D):
        present = last & (tl.load(visits_of.node + d * P + v, mask=last, other=-1) >= 0)
        m = tl.load(lse + d * P + v, mask=present, other=0.0, cache_modifier=".cg")
        total = tl.full(v.shape, 1.0, ACC)
        for split in range(1, num_splits):
            place = lse + (split * D + d) * P + v
            other = tl.load(place, mask=present, other=0.0, cache_modifier=".cg")
            m_new = tl.maximum(m, other)
            base = _base(m_new)
            total = total * tl.exp(m - base) + tl.exp(other - base)
            m = m_new
        combined = m + tl.log(total)
        z_y = tl.load(target_logit + d * P + v, mask=present, other=0.0, cache_modifier=".cg")
        tl.store(lse + d * P + v, combined, mask=present)  # in place of that of the first split
        total_nll += tl.where(present, combined - z_y, 0.0)
    tl.store(nll + p, total_nll, mask=last)
