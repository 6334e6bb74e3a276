"""The work of the peers in `performance_model`: their operations, with bytes and multiply-adds.

Products of cuBLAS are taken to read as whole tiles of 256 × 256 do: 128 × 256 by clusters of two
that share what they load. Where such tiles are fewer than processors, several programs share one
and their sums are added in another launch, as the fused kernels do with chunks of visits. Other
operations read and write each element once. Issue slots, waits and partly filled waves of peers
are left out, in their favour. Products have as many stages as fit, four or three.

`grouped` does what the fused kernels do as well: it writes zeros for rows without visits, since
gradients are dense. Rows in fp32 are cast to bf16, and gradients back, as under autocast. Grouped
products of torch and of CUTLASS load rows that begin at multiples of 16 bytes. Where rows of the
weight do not, they are copied to padded ones, once, and their gradients back; hidden vectors are
padded when they are gathered, logits when they are allocated.
"""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from lm.output.backends.base import Problem
from scripts.benchmarks.peers import usual_cutoffs

ITEM, SINGLE, ALIGNED = 2, 4, 16
"""Bytes of a number, of a number of sums, and that divide strides of grouped products."""
PROCESSORS = 132
"""Processors of an H200; a tile of 256 × 256 takes two."""
CCE_KEPT = 0.2
"""Share of blocks whose gradients cut-cross-entropy does not skip, as its authors estimate."""


class Operation(NamedTuple):
    """One or more launches."""

    name: str
    launches: int
    memory: float = 0  # bytes from and to memory
    loaded: float = 0  # bytes from the second-level cache
    flops: float = 0
    stages: int = 1  # of the pipeline in which loads and products overlap


STAGES, CCE_STAGES = 4, 3
"""Stages of products: tiles of 128 × 64 and 256 × 64 in bf16 fit into shared memory four times."""


def loss_operations(problem: Problem, *, fused: bool) -> Iterator[Operation]:
    """What follows and precedes the loss of every position, by the fused kernels or by a peer.

    Forward: the sum of the nll; for peers also targets compared, their number, at least one, and
    the division. Backward: a one; for peers its division. Its expansion is a view. Under autocast
    with rows in fp32, hidden vectors are cast as well, and their gradients back.
    """
    yield Operation("mean", 1 if fused else 5)
    yield Operation("d_nll", 1 if fused else 2)
    if problem.weight.element_size() > ITEM:
        casts = (SINGLE + ITEM) * problem.hidden.numel()
        yield Operation("cast hidden", 1, casts)
        yield Operation("cast d_hidden", 1, casts)


def _cast_rows(problem: Problem, numbers: float) -> Iterator[Operation]:
    """Rows in fp32 as bf16 ones, and gradients back."""
    if problem.weight.element_size() > ITEM:
        yield Operation("cast rows", 1, (SINGLE + ITEM) * numbers)
        yield Operation("cast d_rows", 1, (SINGLE + ITEM) * numbers)


def _product(
    name: str, m: float, n: float, k: float, *, tile: tuple[int, int] = (256, 256)
) -> Operation:
    """[m, k] × [k, n] → [m, n]."""
    blocks_m, blocks_n = math.ceil(m / tile[0]), math.ceil(n / tile[1])
    loaded = ITEM * k * (m * blocks_n + n * blocks_m)
    operands, splits = ITEM * (m * k + k * n + m * n), PROCESSORS // (2 * blocks_m * blocks_n)
    if splits < 2:
        return Operation(name, 1, operands, loaded, 2 * m * n * k, STAGES)
    sums = 2 * SINGLE * splits * m * n
    return Operation(name, 2, operands + sums, loaded + sums / 2, 2 * m * n * k, STAGES)


def _three_products(name: str, m: float, n: float, k: float) -> Iterator[Operation]:
    """Forward and both gradients of logits [m, n] = [m, k] × [k, n]."""
    yield _product(f"{name} logits", m, n, k)
    yield _product(f"{name} d_hidden", m, k, n)
    yield _product(f"{name} d_weight", n, k, m)


def _softmax(name: str, numbers: float, launches: int = 2, passes: int = 3) -> Operation:
    """Log-sum-exp of logits, then their error: each pass reads or writes all of them."""
    return Operation(f"{name} softmax", launches, passes * ITEM * numbers, passes * ITEM * numbers)


def grouped(problem: Problem) -> Iterator[Operation]:
    """Positions sorted by class, grouped products, one elementwise kernel forward and backward."""
    tree, (num_positions, size) = problem.tree, problem.hidden.shape
    num_classes = int(tree.num_children[0])
    vectors = num_positions * size * ITEM
    yield Operation("sort by class", 12)
    yield Operation("gather hidden", 1, 2 * vectors)
    yield from _three_products("root", num_positions, num_classes, size)
    yield _softmax("root", num_positions * num_classes)
    yield from _class_products(problem)
    yield Operation("add d_hidden", 1, 3 * vectors)


def _class_products(problem: Problem) -> Iterator[Operation]:
    tree, (num_positions, size) = problem.tree, problem.hidden.shape
    word_class = tree.node_of_row[tree.row_of_word[problem.target]] - 1
    num_classes = int(tree.num_children[0])
    visits = word_class.bincount(minlength=num_classes).double()
    width = tree.num_children[1:][visits > 0].double()
    visits = visits[visits > 0]
    rows, logits = float(width.sum()), float((visits * width).sum())
    memory = ITEM * (size * (rows + num_positions) + logits)

    def operation(name: str, m: Tensor, n: Tensor, k: Tensor) -> Operation:
        blocks_m, blocks_n = (m / 256).ceil(), (n / 256).ceil()
        loaded = float((ITEM * k * (m * blocks_n + n * blocks_m)).sum())
        padded = float(((m / 64).ceil() * 64 * (n / 64).ceil() * 64 * k).sum())
        return Operation(f"class {name}", 1, memory, loaded, 2 * padded, STAGES)

    item = problem.weight.element_size()
    zeros = item * size * (problem.weight.shape[0] - num_classes - rows)
    if zeros:
        yield Operation("zeros", 1, zeros)
    yield from _cast_rows(problem, size * (rows + num_classes))
    if item == ITEM and problem.weight.stride(0) * ITEM % ALIGNED:
        copied = ITEM * size * (rows + num_classes)
        yield Operation("pad weight", 1, 2 * copied)
        yield Operation("unpad d_weight", 1, 2 * copied)
    sizes = width.new_full(width.shape, size)
    yield operation("logits", visits, width, sizes)
    yield operation("d_hidden", visits, sizes, width)
    yield operation("d_weight", width, sizes, visits)
    yield _softmax("class", logits)


def cce(problem: Problem) -> Iterator[Operation]:
    """Cut-cross-entropy's tiles: logits again in the backward, gradients added tile by tile."""
    num_positions, size = problem.hidden.shape
    num_words = problem.tree.row_of_word.numel()
    once = ITEM * size * (num_positions + num_words)
    forward = _product("logits", num_positions, num_words, size, tile=(256, 128))
    yield forward._replace(memory=once, stages=CCE_STAGES)
    yield Operation("target logits", 1, 2 * ITEM * size * num_positions)
    yield from _cast_rows(problem, size * num_words)
    again = _product("backward", num_positions, num_words, size, tile=(128, 128))
    added = ITEM * size * 2 * num_positions * num_words / 128  # of every tile, to both gradients
    yield again._replace(
        memory=2 * once,
        loaded=again.loaded + CCE_KEPT * (2 * added + added),  # operands, and sums read
        flops=again.flops * (1 + 2 * CCE_KEPT),
        stages=CCE_STAGES,
    )
    yield Operation("zeros", 3, once)


def adaptive(problem: Problem) -> Iterator[Operation]:
    """AdaptiveLogSoftmaxWithLoss of torch; words are numbered by frequency."""
    num_positions, size = problem.hidden.shape
    num_words = problem.tree.row_of_word.numel()
    cutoffs = usual_cutoffs(num_words)
    divisor = min(4, int(size ** (1 / len(cutoffs))))
    head = cutoffs[0] + len(cutoffs)
    yield from _cast_rows(problem, size * head)
    yield from _three_products("head", num_positions, head, size)
    yield _softmax("head", num_positions * head, launches=4, passes=4)
    for cluster, (first, stop) in enumerate(pairwise([*cutoffs, num_words]), 1):
        inside = int(((problem.target >= first) & (problem.target < stop)).sum())
        narrow, name = size // divisor**cluster, f"tail {cluster}"
        yield from _cast_rows(problem, narrow * (size + stop - first))
        yield Operation(f"{name} positions", 12, 6 * ITEM * size * inside)
        yield from _three_products(f"{name} projection", inside, narrow, size)
        yield from _three_products(name, inside, stop - first, narrow)
        yield _softmax(name, inside * (stop - first), launches=4, passes=4)


PEERS: dict[str, Callable[[Problem], Iterator[Operation]]] = {
    "grouped": grouped,
    "cce": cce,
    "adaptive": adaptive,
}
"""Peers by name."""
