"""Bytes that the fused kernels read and write, forward and backward, against the floor.

Computed by formula from a batch's visits and the tile shapes; tests compare the formula with the
loads and stores of Triton's interpreter. Three counts:

  all     every load and store of every program
  cache   what of these misses a second-level cache of 50 MB (an H200's), and one of half that size
          (what remains if both halves hold the same): the loads and stores, in the kernels' order,
          played through a cache (kernel_cache)
  memory  every element once per launch: what remains with an unlimited cache

The floor is what no implementation with dense gradients of the visited rows can avoid: each visited
row read forward and backward and its gradient written once, and the same for each hidden vector. A
dense gradient also has zeros for rows that are not visited; they are counted, and shown separately.
"""

import math
from itertools import product
from typing import Any, NamedTuple

import torch

from lm.output import ClassTree
from lm.output.backends.triton.tile_shapes import tiles
from scripts.benchmarks.kernel_cache import missed_bytes
from scripts.benchmarks.kernel_traces import Batch, Launches
from scripts.benchmarks.methods import zipf
from scripts.benchmarks.reporting import Table, benchmark_parser

SINGLE = 4
"""Bytes of a number that sums are formed in."""
CACHES = {"cache": 50_000_000, "half_cache": 25_000_000}
"""Bytes of second-level cache."""
NUM_CONCURRENT = 2 * 132
"""Programs that run concurrently: two on each processor of an H200."""
GRANULE = 16
"""Rows of a line of the cache."""
SIZES = [(33_278, 650), (267_735, 1024), (800_000, 1024), (10_000_000, 300)]


class Count(NamedTuple):
    """Bytes of one tensor in one launch of a kernel: every element once, every load and store."""

    kernel: str
    tensor: str
    memory: int
    all: int


def counts(batch: Batch) -> list[Count]:
    """Bytes of the tensors that grow with rows, positions × H or positions × columns."""
    shape, row_bytes = batch.shape, batch.row_bytes
    blocks, heavy_blocks = batch.blocks(batch.visited), batch.blocks(batch.heavy)
    rows, heavy_rows, light_rows = map(batch.rows, (batch.visited, batch.heavy, batch.light))
    vectors, heavy_vectors = batch.positions(batch.visited), batch.positions(batch.heavy)
    with_light = batch.num_with_light
    partial = with_light * batch.hidden_size * SINGLE
    final = (batch.num_positions - with_light) * row_bytes
    written = heavy_rows * row_bytes + zero_bytes(batch)
    owners = batch.tree.num_rows * 8
    forward_rows = batch.rows_by_tile(shape.forward.v) + light_rows
    d_hidden_rows = batch.rows_by_tile(shape.d_hidden.v)
    return [
        Count("_forward", "weight", rows * row_bytes, forward_rows * row_bytes),
        Count("_forward", "hidden", vectors * row_bytes, blocks * row_bytes),
        *_exp_logits("_forward", batch, blocks),
        Count("_d_hidden", "weight", heavy_rows * row_bytes, d_hidden_rows * row_bytes),
        *_exp_logits("_d_hidden", batch, heavy_blocks, shape.d_hidden.h),
        Count("_d_hidden", "d_hidden", final, final),
        Count("_d_hidden", "partial", partial, partial),
        Count("_d_weight", "hidden", heavy_vectors * row_bytes, heavy_blocks * row_bytes),
        *_exp_logits("_d_weight", batch, heavy_blocks, shape.d_weight.h),
        Count("_d_weight", "d_weight", written, written),
        Count("_d_weight", "node_of_row", owners, owners),
        Count("_d_light", "weight", light_rows * row_bytes, light_rows * row_bytes),
        Count("_d_light", "hidden", with_light * row_bytes, with_light * row_bytes),
        *_exp_logits("_d_light", batch, batch.blocks(batch.light), shape.d_light.h),
        Count("_d_light", "partial", partial, partial),
        Count("_d_light", "d_hidden", with_light * row_bytes, with_light * row_bytes),
        Count("_d_light", "d_weight", light_rows * row_bytes, light_rows * row_bytes),
    ]


def _exp_logits(kernel: str, batch: Batch, blocks: int, block_h: int | None = None) -> list[Count]:
    """What the forward saves, touched once for each portion of H, or once if there are none."""
    block_bytes = {"exp_logits": batch.shape.block_c * batch.element_bytes, "block_max": SINGLE}
    times = -(-batch.hidden_size // block_h) if block_h else 1
    return [
        Count(kernel, tensor, blocks * size, blocks * size * times)
        for tensor, size in block_bytes.items()
    ]


def zero_bytes(batch: Batch) -> int:
    """Zeros in the gradient of rows that are not visited."""
    return (batch.tree.num_rows - batch.rows(batch.visited)) * batch.row_bytes


def floor_bytes(batch: Batch) -> int:
    """Visited rows and hidden vectors: read twice, their gradients written once."""
    return 3 * (batch.rows(batch.visited) + batch.num_positions) * batch.row_bytes


def through_cache(
    launches: Launches, counted: list[Count], capacity: int, granule: int = GRANULE
) -> int:
    """Bytes from and to memory behind a cache of `capacity` bytes.

    Tensors that are touched once are not played through the cache, but added.
    """
    once = {"d_hidden", "partial", "node_of_row"}
    rest = sum(each.memory for each in counted if each.tensor in once)
    return rest + sum(
        missed_bytes(programs, capacity, NUM_CONCURRENT, granule) for programs in launches
    )


def row(
    vocab_size: int, hidden_size: int, num_positions: int, capability: int, classes: str
) -> dict[str, Any]:
    """One line of the table: two levels, bf16, inverse-rank targets; compute capability × 10.

    The √N classes are "random", of which nearly every one is visited, as with classes by meaning,
    or "ranks": words of neighbouring frequency rank.
    """
    word_class = torch.arange(vocab_size) * round(vocab_size**0.5) // vocab_size
    if classes == "random":
        word_class = word_class[torch.randperm(vocab_size)]
    tree = ClassTree.two_level(word_class)
    target, _ = zipf(vocab_size, num_positions)
    shape = tiles(torch.bfloat16, capability, math.gcd(hidden_size, 16))
    batch = Batch(target, tree, hidden_size, 2, shape)
    counted = counts(batch)
    floor, zeros = floor_bytes(batch), zero_bytes(batch)
    launches = Launches(batch)
    moved = {"memory": sum(c.memory for c in counted), "all": sum(c.all for c in counted)}
    for name, capacity in CACHES.items():
        moved[name] = zeros + through_cache(launches, counted, capacity)
    return {
        "classes": classes,
        "N": vocab_size,
        "H": hidden_size,
        "positions": num_positions,
        "sm": capability,
        "rows_visited": batch.rows(batch.visited),
        "floor_mb": round(floor / 1e6),
        "of_it_zeros_mb": round(zeros / 1e6),
        **{f"{name}_mb": round(value / 1e6) for name, value in moved.items()},
        **{f"{name}_ratio": round(value / floor, 2) for name, value in moved.items()},
    }


def main() -> None:
    """Print the table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--positions", type=int, default=16_384)
    parser.add_argument("--sm", type=int, default=90)
    options = parser.parse_args()
    torch.manual_seed(0)
    table = Table(log=options.json)
    for classes, size in product(("random", "ranks"), SIZES):
        table.add(row(*size, options.positions, options.sm, classes))


if __name__ == "__main__":
    main()
