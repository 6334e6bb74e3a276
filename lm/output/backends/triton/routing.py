"""How the visits of a batch are sorted and shared among programs, on the device.

As in `lm.output.backends.visits`, positions are sorted by the node of their target's word, depth
first, so that the visits of a node are an interval of the sorted positions on its level. A node is
*heavy* if it has more visits than a program of the light kernels takes, else *light*; nodes below a
light one are light. Shapes depend on sizes alone and the host reads nothing back.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Problem
from lm.output.backends.triton.tile_shapes import Tile, Tiles

RUN_SIZES, MOST_RUNS = (32, 128, 512), 64
"""Lengths of sorted runs: the first that takes all positions, or the last. Each key is searched for
in every run, so that more than `MOST_RUNS` are sorted by PyTorch instead.
"""
MERGE, PLAN = Tile(32, 32, 0, 8, 1, step=2), Tile(128, 16, 256, 4, 1, step=3)
"""Tile shapes of `_merge` and `_plan`, whose docstrings define the dimensions."""
HEADER, NUM_LISTS, ALL_VALID, NUM_VALID = 32, 8, 8, 9
"""Lengths of the header and of the lengths in it, and the indices of two more numbers."""
FILLING_PROGRAMS = 64
"""Number of programs beyond which d_weight gets no faster."""
MAX_CHUNKS, LEAST_CHUNKS, CHUNKED_COLUMNS = 12, 4, 1 << 16
"""Most and fewest programs among which the visits of a node are divided if every position visits
it; fewer still where the partial sums would have more rows than `CHUNKED_COLUMNS`.
"""


class Routing(NamedTuple):
    """Visits and lists of the work of programs: tensors on the host, pointers in kernels.

    The fields share one int32 buffer, in this order. `flat` is the index d · P + v of a visit. The
    first three lists are columns of one matrix and the last three of another, so that P and D
    determine where each begins. The lists have the largest length that a batch of this size can
    require; `num_entries` has their actual lengths in the order of the fields, then the number of
    rows of partial sums.
    """

    num_entries: Any  # [8], of which the last is unused
    all_valid: Any  # [], whether all targets are words or ignored
    num_valid: Any  # [], how many are words
    position: Any  # [P], sorted by their target's node, depth first; ignored ones last
    light_level: Any  # [P], first level on which a position visits a light node; D for none
    rank: Any  # [P], of the node of a position's target
    num_missing: Any  # [P], programs that have not yet computed what the nll is the sum of
    node: Any  # [D · P], that a sorted position visits on each level, root first; -1 for none
    child: Any  # [D · P], which child of the node is on the target's path; 0 for none
    heavy_tiles: Any  # [D · P], flat of the first visit of each tile of visits of a heavy node
    light_nodes: Any  # [D · P], flat of the first visit of each light node; -1 - flat: ≤ 16 visits
    light_groups: Any  # [D · P], those of them below no other light node
    row_tiles: Any  # [., 4]: flat, end of visits, block of children, unused
    chunk_tiles: Any  # [., 4]: flat, end of visits, block of children, row of sums
    split_tiles: Any  # [., 4]: flat, number of sums, block of children, row of the first

    @classmethod
    def of(cls, memory: Tensor, num_positions: int, depth: int) -> "Routing":
        """The tensors in memory of `memory_size` numbers."""
        size, visits = _padded(num_positions), depth * num_positions
        rest = len(memory) - HEADER - 4 * size - 6 * visits
        header, places, node, child, of_visits, tiles = memory.split_with_sizes(
            [HEADER, 4 * size, visits, visits, 4 * visits, rest]
        )
        position, light_level, rank, num_missing = places.view(4, size)[:, :num_positions]
        heavy_tiles, light_nodes, light_groups, _ = of_visits.view(-1, 4).unbind(1)
        row_tiles, chunk_tiles, split_tiles = tiles.view(-1, 3, 4).unbind(1)
        return cls(
            header[:NUM_LISTS], header[ALL_VALID], header[NUM_VALID], position, light_level,
            rank, num_missing, node, child, heavy_tiles, light_nodes, light_groups, row_tiles,
            chunk_tiles, split_tiles,
        )  # fmt: skip


class Sizes(NamedTuple):
    """Most entries of each list, and most rows of partial sums."""

    heavy_tiles: int
    light_nodes: int
    light_groups: int
    row_tiles: int
    chunk_tiles: int
    split_tiles: int
    partial_rows: int


def memory_size(problem: Problem, most: Sizes) -> int:
    """The numbers that the `Routing` of a problem takes.

    Padded by a few that differ between tile shapes, by which `Plan.fits` tells other plans' memory.
    """
    positions, visits = problem.num_positions, problem.depth * problem.num_positions
    tiles = at_least(at_least(most.row_tiles, most.chunk_tiles), most.split_tiles)
    tiles += most.heavy_tiles
    return HEADER + 4 * _padded(positions) + 6 * visits + 12 * tiles


def _padded(num_positions: int) -> int:
    return -(-num_positions // HEADER) * HEADER


def sizes(problem: Problem, tiles: Tiles) -> Sizes:
    """The sizes of a `Routing`.

    With w children and v visits of a node, Σ v w over all nodes is at most positions × columns on a
    path; a heavy node has ⌈v / chunk⌉ ⌈w / block⌉ tiles of rows, and is split if v > chunk.
    """
    num_nodes, num_rows = problem.tree.num_children.numel(), problem.tree.node_of_row.numel()
    positions, columns = problem.num_positions, problem.max_path_columns
    visits, light, block = problem.depth * positions, tiles.light.v, tiles.heavy.c
    chunk = chunk_size(problem, tiles)
    num_heavy, num_split = at_most(visits // (light + 1), num_nodes), visits // (chunk + 1)
    products, any_split = positions * columns // chunk, at_most(num_split, 1)
    rows_of_split = at_most(num_rows, num_split * columns)
    return Sizes(
        heavy_tiles=visits // min(light + 1, tiles.forward.v // 2),
        light_nodes=at_most(visits, num_nodes),
        light_groups=at_most(positions, num_nodes),
        row_tiles=at_most(num_rows, num_heavy * columns) // block + num_heavy,
        chunk_tiles=any_split
        * (products // block + visits // chunk + rows_of_split // block + num_split),
        split_tiles=any_split * (products // block + num_split),
        partial_rows=any_split * 2 * products,
    )


def chunk_size(problem: Problem, tiles: Tiles) -> int:
    """Most visits of a node that one program of d_weight adds up.

    A program that added up all visits of the root would be the last to finish, by far. Its chunks
    fill the device, with as few programs as that takes: the best choice, or level with it, of those
    timed on an H100 for 33k to 10M words. A program of an update walks
    all columns, so that there are at least a few chunks.
    """
    tile = tiles.heavy
    programs = -(-problem.max_path_columns // tile.c) * -(-problem.weight.shape[1] // tile.h)
    least = min(LEAST_CHUNKS, CHUNKED_COLUMNS // max(problem.max_path_columns, 1))
    chunks = max(1, least, min(FILLING_PROGRAMS // max(programs, 1), MAX_CHUNKS))
    return at_least(tiles.chunk, -(-problem.num_positions // chunks))


def at_most(one: Any, other: Any) -> int:
    """`min`; of symbolic sizes within `torch.compile`, without a guard on which of them it is."""
    if isinstance(one, int) and isinstance(other, int):
        return min(one, other)
    least: int = torch.sym_min(one, other)  # type: ignore[no-untyped-call]
    return least


def at_least(one: Any, other: Any) -> int:
    """`max`, without a guard as `at_most`."""
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    most: int = torch.sym_max(one, other)  # type: ignore[no-untyped-call]
    return most
