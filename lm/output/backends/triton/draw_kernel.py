"""The Triton kernel that draws words: the class, then the word, in one launch for many positions.

A program draws the word of one position by the trials that `loops.draw_loops` explains, with
equations (1) and (2) there, but forgets what rejected trials have opened: it keeps the weights of
the root's children alone. After `num_trials` of them a position is left to the caller. At
temperature 1 without excluded words, the first trial succeeds.

β is the power 1 / T. A node is opened in blocks of children: the logits z = W h + b, the logarithm
of the sum of exp(z), and the weights (1) relative to P(node)^β, whose logarithms, up to a constant,
β z + log u go to `log_weight`. Logarithms are formed in `ACC`, sums in fp64.
"""

import triton
import triton.language as tl

from lm.output.backends.triton.forward_kernel import _base


@triton.jit
def _shifted(bits, count: tl.constexpr):
    """The 64 bits, exclusive or with themselves shifted to the right."""
    return bits ^ (bits >> tl.full((), count, tl.uint64))


@triton.jit
def _uniform(seed, index):
    """Number `index` of a seed, fp64 in [0, 1), see `lm.output.decoding.draws`."""
    bits = seed + (index + 1).to(tl.uint64) * tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    bits = _shifted(bits, 30) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    bits = _shifted(bits, 27) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    bits = _shifted(bits, 31)
    return (bits >> tl.full((), 11, tl.uint64)).to(tl.float64) * (2.0**-53)


@triton.jit
def _log_bound(num_words_below, node, power, mask=None):
    """Log u of nodes, and 0 where the mask is not set."""
    below = tl.load(num_words_below + node, mask=mask, other=None if mask is None else 1)
    return tl.maximum(1.0 - power, 0.0) * tl.log(below.to(power.dtype))


@triton.jit
def _open(
    node, x_start, log_weight, layer, tree, power,
    W: tl.constexpr, ACC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the log-weights of a node's children; the log of their sum, the largest, finiteness.

    The sum is relative to P(node)^β.
    """
    BLOCK_C: tl.constexpr = TILE.c
    BLOCK_H: tl.constexpr = TILE.h
    first, width = tl.load(tree.first_row + node), tl.load(tree.num_children + node).to(tl.int32)
    block = tl.arange(0, BLOCK_C)
    m, total = tl.full((), float("-inf"), ACC), tl.full((), 0.0, tl.float64)
    largest, weight_total = tl.full((), float("-inf"), ACC), tl.full((), 0.0, tl.float64)
    lowest = tl.full((), float("inf"), ACC)
    for c0 in range(0, width, BLOCK_C):
        c = c0 + block
        inside = c < width
        row = (first + c).to(tl.int64)
        sums = tl.zeros([BLOCK_C, BLOCK_H], ACC)
        for h0 in range(0, W, BLOCK_H):
            h = h0 + tl.arange(0, BLOCK_H)
            x = tl.load(layer.hidden + x_start + h, mask=h < W, other=0.0).to(ACC)
            mask = inside[:, None] & (h < W)[None, :]
            w = tl.load(layer.weight + row[:, None] * W + h[None, :], mask=mask, other=0.0)
            sums += w.to(ACC) * x[None, :]
        z = tl.sum(sums, axis=1)
        if layer.bias is not None:
            z += tl.load(layer.bias + row, mask=inside, other=0.0).to(ACC)
        lowest = tl.minimum(lowest, tl.min(z, axis=0))  # outside of the node they are 0
        z = tl.where(inside, z, float("-inf"))
        m_new = tl.maximum(m, tl.max(z, axis=0))
        total = total * tl.exp(m - m_new).to(tl.float64)
        total += tl.sum(tl.exp(z - m_new).to(tl.float64), axis=0)
        m = m_new
        item = tl.load(tree.item_of_row + row, mask=inside, other=0)
        bound = _log_bound(tree.num_words_below, -1 - item, power, inside & (item < 0))
        weight = power.to(ACC) * z + bound.to(ACC)
        if layer.excluded is not None:
            out = tl.load(layer.excluded + row, mask=inside, other=0) != 0
            weight = tl.where(out, float("-inf"), weight)
        tl.store(log_weight + c, weight, mask=inside)
        new = tl.maximum(largest, tl.max(weight, axis=0))
        base = _base(new)  # all may be excluded so far
        weight_total = weight_total * tl.exp(largest - base).to(tl.float64)
        weight_total += tl.sum(tl.exp(weight - base).to(tl.float64), axis=0)
        largest = new
    lse = m + tl.log(total.to(ACC))
    some = tl.where(weight_total == 0.0, 1.0, weight_total)
    log_total = largest + tl.log(some.to(ACC)) - power.to(ACC) * lse
    finite = (lse - lse == 0.0) & (lowest - lowest == 0.0)
    tl.debug_barrier()  # what the other threads of this program stored must be visible
    return first, width, log_total, largest, weight_total, finite


@triton.jit
def _choose(log_weight, width, largest, weight_total, uniform, BLOCK_C: tl.constexpr):
    """The first child up to which the sum of the weights exceeds that share of all."""
    point = uniform * weight_total
    total = tl.full((), 0.0, tl.float64)
    chosen, last = width, tl.full((), 0, tl.int32)
    for c0 in range(0, width, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        weight = tl.load(log_weight + c, mask=c < width, other=float("-inf"))
        weight = tl.exp(weight - _base(largest)).to(tl.float64)
        above = (total + tl.cumsum(weight, axis=0) > point) & (weight > 0.0)
        chosen = tl.minimum(chosen, tl.min(tl.where(above, c, width), axis=0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, c, 0), axis=0))
        total += tl.sum(weight, axis=0)
    tl.debug_barrier()  # before other log-weights take the place of these
    return tl.where(chosen < width, chosen, last)  # roundings may leave the point above all


@triton.jit
def _draw(
    layer, tree, seeds, log_weight, word, power, width, num_trials,
    W: tl.constexpr, EXACT: tl.constexpr, ACC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The word [P], -1 if all trials are rejected, or -2 if a log-probability is not finite.

    `log_weight` [P, 2 width] is memory for the children of the root and of another node.
    """
    p = tl.program_id(0).to(tl.int64)
    seed, used = tl.load(seeds + p).to(tl.uint64, bitcast=True), tl.full((), 0, tl.int64)
    power = tl.load(power)
    of_root = log_weight + p * 2 * width
    of_node = of_root + width
    root = tl.full((), 0, tl.int64)
    _, num, _log_total, largest, total, finite = _open(
        root, p * W, of_root, layer, tree, power, W, ACC, TILE
    )
    found = tl.where(finite, -1, -2).to(tl.int64)
    trial = tl.full((), 0, tl.int32)
    while (found == -1) & (trial < num_trials):
        child = _choose(of_root, num, largest, total, _uniform(seed, used), TILE.c)
        used += 1
        item, goes_on = tl.load(tree.item_of_row + child), child >= 0
        while (item < 0) & goes_on:
            node = -1 - item
            first, n, node_log_total, node_largest, node_total, finite = _open(
                node, p * W, of_node, layer, tree, power, W, ACC, TILE
            )
            point = _uniform(seed, used)
            used += 1
            if not EXACT:
                bound = _log_bound(tree.num_words_below, node, power).to(ACC)
                share = tl.minimum(tl.exp(node_log_total - bound), 1.0).to(tl.float64)
                goes_on = point < share
                point = point / tl.where(goes_on, share, 1.0)
            goes_on = goes_on & finite
            found = tl.where(finite, found, -2)
            child = _choose(of_node, n, node_largest, node_total, point, TILE.c)
            item = tl.load(tree.item_of_row + first + child)
        found = tl.where(goes_on & (item >= 0), item, found)
        trial += 1
    tl.store(word + p, found)
