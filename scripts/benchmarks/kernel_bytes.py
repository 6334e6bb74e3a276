#!/usr/bin/env python
"""Count what the fused kernels read and write, forward and backward, against the floor.

By formula, from a batch's visits and the tile shapes; tests check the formula against the
interpreter's own loads and stores. Three counts:

  all     every load and store of every program
  cache   what of these misses a second-level cache of 50 MB (an H200's), and one of half of it
          (what remains if both halves hold the same): the loads and stores, in the kernels' own
          order, played through a cache (kernel_cache)
  memory  every element once per launch: what an unlimited cache would leave

The floor is what no implementation with dense gradients of what is visited can avoid: each visited
row read forward and backward and its gradient written once, likewise each hidden vector. A dense
gradient also writes zeros for rows that nobody visits; they are counted, and told apart.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from bench_method import zipf  # noqa: E402
from kernel_cache import Launches, traffic  # noqa: E402

from lm.output import ClassTree  # noqa: E402
from lm.output.backends.triton.tile_shapes import Tile, Tiles, tiles  # noqa: E402
from lm.output.backends.visits import Schedule, Visits, route, schedule  # noqa: E402

SINGLE = 4
"""Bytes of what is summed in fp32."""
CACHES = {"cache": 50_000_000, "half_cache": 25_000_000}
"""Bytes of second-level cache."""
SIDE_BY_SIDE = 2 * 132
"""Programs that run at a time: two on each processor of an H200."""
GRANULE = 16
"""Rows of a line of the cache."""
ROWS = [(33_278, 650), (267_735, 1024), (800_000, 1024), (10_000_000, 300)]


class Count(NamedTuple):
    """Bytes of one tensor in one launch.

    Attributes:
        kernel, tensor: which.
        memory: every element once.
        all: every load and store.
    """

    kernel: str
    tensor: str
    memory: int
    all: int


class Batch:
    """Numbers of visits by node that the formulas are made of.

    Args:
        visits, plan: a batch.
        tree: of it.
        block_c: children in a block.
    """

    def __init__(self, visits: Visits, plan: Schedule, tree: ClassTree, block_c: int) -> None:
        self.visits, self.plan, self.tree, self.block_c = visits, plan, tree, block_c
        depth, self.num_positions = visits.node.shape
        level = torch.arange(depth)[:, None]
        self.visited = visits.node >= 0
        self.heavy = self.visited & (level < plan.light_level)
        self.light = self.visited & ~self.heavy
        self.has_light = plan.light_level < depth

    def rows(self, chosen: Tensor) -> int:
        """Children of the nodes chosen, each node once."""
        return int(self.tree.num_children[self.visits.node[chosen].unique()].sum())

    def positions(self, chosen: Tensor) -> int:
        """Positions with a chosen visit."""
        return int(chosen.any(0).sum())

    def blocks(self, chosen: Tensor) -> int:
        """Blocks of children, over the chosen visits."""
        width = self.tree.num_children[self.visits.node[chosen]]
        return int((-(-width // self.block_c)).sum())

    def rows_by_tile(self, tile: int) -> int:
        """Children of heavy nodes, once for each tile of positions that visits them."""
        place = torch.arange(self.num_positions) // tile
        key = self.visits.node * (self.num_positions // tile + 1) + place
        nodes = key[self.heavy].unique() // (self.num_positions // tile + 1)
        return int(self.tree.num_children[nodes].sum())


def counts(batch: Batch, size: int, item: int, shape: Tiles) -> list[Count]:
    """The tensors whose bytes grow with rows or with positions × H or × columns.

    Args:
        batch: the visits.
        size: H.
        item: bytes of an element of hidden and weight.
        shape: the tiles.
    """
    return [
        *_forward(batch, size, item, shape.forward),
        *_d_hidden(batch, size, item, shape.d_hidden),
        *_d_weight(batch, size, item, shape.d_weight),
        *_d_light(batch, size, item, shape.d_light),
    ]


def _forward(batch: Batch, size: int, item: int, tile: Tile) -> list[Count]:
    blocks, rows = batch.blocks(batch.visited), batch.rows(batch.visited)
    all_rows = batch.rows_by_tile(tile.v) + batch.rows(batch.light)
    vectors = batch.positions(batch.visited)
    kept = blocks * batch.block_c * item
    return [
        Count("_forward", "weight", rows * size * item, all_rows * size * item),
        Count("_forward", "hidden", vectors * size * item, blocks * size * item),
        Count("_forward", "kept", kept, kept),
        Count("_forward", "block_max", blocks * SINGLE, blocks * SINGLE),
    ]


def _kept(kernel: str, blocks: int, block_c: int, item: int, times: int) -> list[Count]:
    """What was kept, read once for each portion of H."""
    kept, block_max = blocks * block_c * item, blocks * SINGLE
    return [
        Count(kernel, "kept", kept, kept * times),
        Count(kernel, "block_max", block_max, block_max * times),
    ]


def _d_hidden(batch: Batch, size: int, item: int, tile: Tile) -> list[Count]:
    final = (batch.num_positions - int(batch.has_light.sum())) * size * item
    partial = int(batch.has_light.sum()) * size * SINGLE
    rows = batch.rows(batch.heavy) * size * item
    all_rows = batch.rows_by_tile(tile.v) * size * item
    return [
        Count("_d_hidden", "weight", rows, all_rows),
        *_kept("_d_hidden", batch.blocks(batch.heavy), batch.block_c, item, -(-size // tile.h)),
        Count("_d_hidden", "d_hidden", final, final),
        Count("_d_hidden", "partial", partial, partial),
    ]


def _d_weight(batch: Batch, size: int, item: int, tile: Tile) -> list[Count]:
    blocks = batch.blocks(batch.heavy)
    hidden = batch.positions(batch.heavy) * size * item
    rows = batch.rows(batch.heavy) * size * item
    zeros = (batch.tree.num_rows - batch.rows(batch.visited)) * size * item
    owners = batch.tree.num_rows * 8
    return [
        Count("_d_weight", "hidden", hidden, blocks * size * item),
        *_kept("_d_weight", blocks, batch.block_c, item, -(-size // tile.h)),
        Count("_d_weight", "d_weight", rows + zeros, rows + zeros),
        Count("_d_weight", "node_of_row", owners, owners),
    ]


def _d_light(batch: Batch, size: int, item: int, tile: Tile) -> list[Count]:
    rows = batch.rows(batch.light) * size * item
    vectors = int(batch.has_light.sum()) * size
    return [
        Count("_d_light", "weight", rows, rows),
        Count("_d_light", "hidden", vectors * item, vectors * item),
        *_kept("_d_light", batch.blocks(batch.light), batch.block_c, item, -(-size // tile.h)),
        Count("_d_light", "partial", vectors * SINGLE, vectors * SINGLE),
        Count("_d_light", "d_hidden", vectors * item, vectors * item),
        Count("_d_light", "d_weight", rows, rows),
    ]


def formed_again(batch: Batch, counted: list[Count], size: int, item: int) -> int:
    """Memory bytes if nothing were kept: heavy rows are read once more, for their own gradient."""
    kept = sum(each.memory for each in counted if each.tensor in ("kept", "block_max"))
    rows = batch.rows(batch.heavy) * size * item
    return sum(each.memory for each in counted) - kept + rows


def operations(batch: Batch, size: int) -> tuple[int, int]:
    """Multiply-adds x 2 with what is kept, and if it were formed again.

    Once for a light group, whose program makes both gradients of it, twice for a heavy node.
    """
    heavy, light = (
        2 * size * int(batch.tree.num_children[batch.visits.node[chosen]].sum())
        for chosen in (batch.heavy, batch.light)
    )
    return 3 * (heavy + light), 5 * heavy + 4 * light


def floor_bytes(batch: Batch, size: int, item: int) -> int:
    """Visited rows and hidden vectors: read twice, their gradients written once."""
    return 3 * (batch.rows(batch.visited) + batch.num_positions) * size * item


def through_cache(
    launches: Launches, counted: list[Count], capacity: int, granule: int = GRANULE
) -> int:
    """Bytes from and to memory behind a cache of `capacity` bytes.

    What is touched once is not played, but added.
    """
    once = {"d_hidden", "partial", "node_of_row"}
    rest = sum(each.memory for each in counted if each.tensor in once)
    return rest + sum(
        sum(traffic(trace, capacity, SIDE_BY_SIDE, granule).values()) for trace in launches
    )


def row(
    vocab_size: int, size: int, positions: int, capability: int, classes: str
) -> dict[str, float | int | str]:
    """One line of the table: two levels, bf16, inverse-rank targets.

    Args:
        vocab_size, size, positions: N, H, P.
        capability: compute capability x 10.
        classes: "random": √N classes of words dealt at random, of which nearly every one is
            visited, as with classes by meaning; "ranks": of neighbouring frequency rank.
    """
    num_classes = round(vocab_size**0.5)
    ranks = torch.arange(vocab_size) * num_classes // vocab_size
    dealt = torch.randperm(vocab_size) if classes == "random" else torch.arange(vocab_size)
    tree = ClassTree.two_level(ranks[dealt])
    target, _ = zipf(vocab_size, positions)
    visits = route(target, tree.arrays, tree.depth, -100)
    shape = tiles(torch.bfloat16, capability, math.gcd(size, 16))
    batch = Batch(visits, schedule(visits, tree.arrays), tree, shape.block_c)
    counted = counts(batch, size, 2, shape)
    least = floor_bytes(batch, size, 2)
    memory, everything = sum(c.memory for c in counted), sum(c.all for c in counted)
    zeros = (tree.num_rows - batch.rows(batch.visited)) * size * 2
    launches = Launches(visits, batch.plan, tree, size, 2, shape)
    missed = {
        name: zeros + through_cache(launches, counted, capacity)
        for name, capacity in CACHES.items()
    }
    return {
        "classes": classes,
        "N": vocab_size,
        "H": size,
        "positions": positions,
        "sm": capability,
        "rows_visited": batch.rows(batch.visited),
        "floor_mb": round(least / 1e6),
        "memory_mb": round(memory / 1e6),
        "of_it_zeros_mb": round(zeros / 1e6),
        "memory_ratio": round(memory / least, 2),
        **{f"{name}_mb": round(value / 1e6) for name, value in missed.items()},
        **{f"{name}_ratio": round(value / least, 2) for name, value in missed.items()},
        "all_mb": round(everything / 1e6),
        "all_ratio": round(everything / least, 2),
        "formed_again_mb": round(formed_again(batch, counted, size, 2) / 1e6),
        "gflop": round(operations(batch, size)[0] / 1e9, 1),
        "formed_again_gflop": round(operations(batch, size)[1] / 1e9, 1),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--positions", type=int, default=16_384)
    parser.add_argument("--sm", type=int, default=90)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for classes in ("random", "ranks"):
        for vocab_size, size in ROWS:
            rows.append(row(vocab_size, size, options.positions, options.sm, classes))
            if len(rows) == 1:
                print("  ".join(rows[0]))
            print("  ".join(str(value) for value in rows[-1].values()), flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main()
