"""What the sizes of a batch decide: tile shapes, memory, and the numbers that kernels take.

A plan is made once for each combination of sizes, dtypes and device, so that a step asks the device
nothing and computes nothing twice. Groups of arguments of kernels are NamedTuples.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lm.output.backends.base import Problem
from lm.output.backends.triton.launch import SLOT, Meta, capability, instruments
from lm.output.backends.triton.routing import (
    RUN_SIZES,
    Sizes,
    at_least,
    at_most,
    chunk_size,
    memory_size,
    sizes,
)
from lm.output.backends.triton.tile_shapes import Tile, Tiles, tf32, tiles
from lm.output.inputs import compute_dtype
from lm.output.tree.arrays import TreeArrays

FILLING_TILES = 8192
"""Programs from which on more of them would not make the forward faster."""
MAX_SPLITS = 16
"""Most programs that share a tile in the forward."""
MAX_PLANS = 256
"""Plans that are kept; then all are made anew."""


class Memory(NamedTuple):
    """What the forward saves: the batch, and the results of (7) and (8) of `forward_kernel`.

    Without a backward there are no slots and blocks. Values of visits [D · P] are undefined where
    there is none.
    """

    routing: Tensor  # of a `Routing`
    visited: Tensor  # [I] int8, whether a node has visits
    sorted_hidden: Tensor  # [≥ P, H up to a multiple of 16]: hidden by sorted position, then zeros
    exp_logits: Tensor  # [P, slots] in the dtype of hidden, k of the children on a path
    block_max: Tensor  # [P, blocks], m
    visit_lse: Tensor  # [(1 + splits) · D, P]: z[y]; lse; what is left of the lse of other splits

    @property
    def results(self) -> "Results":
        """What the kernels of the backward read."""
        return Results(self.exp_logits, self.block_max, self.visit_lse)


class InParts(NamedTuple):
    """The targets alone: the backward takes the batch in parts, each with a forward of its own."""

    target: Tensor  # [P]


class Inputs(NamedTuple):
    """What the logits are products of."""

    sorted_hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None = None


class Results(NamedTuple):
    """The last fields of a `Memory`; None if they are not written."""

    exp_logits: Tensor | None
    block_max: Tensor | None
    visit_lse: Tensor


class Paths(NamedTuple):
    """From a word to the nodes on its path, by `TreeArrays` and `Shard`."""

    row_of_word: Tensor
    node_of_row: Tensor
    local_row: Tensor | None
    row_of_node: Tensor
    level: Tensor
    first_row: Tensor
    num_children: Tensor


class Children(NamedTuple):
    """From a node to its rows and its columns on a path, by `TreeArrays`."""

    first_row: Tensor
    num_children: Tensor
    column: Tensor

    @classmethod
    def of(cls, tree: TreeArrays) -> "Children":
        """The columns of a tree that the kernels of products read."""
        return cls(tree.first_row, tree.num_children, tree.column)


class Strides(NamedTuple):
    """The numbers of a tree. Each is specialised, so that the compiler knows what divides it."""

    D: int
    path_slots: int  # columns of `Memory.exp_logits`, in units of `SLOT`
    path_blocks: int  # columns of `Memory.block_max`


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the sizes of a batch decide."""

    tiles: Tiles
    errors_tile: Tile  # of `_errors`, which reads blocks as the forward writes them
    num_positions: int
    num_nodes: int
    most: Sizes  # of the lists of the routing
    chunk: int  # see `chunk_size`
    num_splits: int  # programs that share a tile in the forward
    routing_size: int
    padded_rows: int  # rows of `Memory.sorted_hidden`, of which a tile may begin at the last visit
    padded_size: int  # its columns
    strides: Strides
    dtype: torch.dtype  # that sums are formed in
    precision: str
    columns: tuple[int, int]  # of hidden and of the weight
    metas: dict[Tile, Meta] = field(default_factory=dict)  # made so far

    def meta(self, tile: Tile) -> Meta:
        """The constants of a kernel."""
        found = self.metas.get(tile)
        if found is None:
            of = self.tiles
            found = Meta(tile, of.light, of.forward.v, of.heavy.c, self.precision, *self.columns)
            self.metas[tile] = found
        return found

    @cached_property
    def sort_tile(self) -> Tile:
        """The tile of `_sort`."""
        return Tile(self.runs[1], 0, 0, 8, 1)

    @cached_property
    def acc(self) -> Any:
        """`dtype` in kernels."""
        import triton.language as tl

        return tl.float64 if self.dtype == torch.float64 else tl.float32

    @cached_property
    def runs(self) -> tuple[int, int]:
        """Number and length of the runs of keys that `_sort` takes."""
        size = next((size for size in RUN_SIZES if size >= self.num_positions), RUN_SIZES[-1])
        return max(1, -(-self.num_positions // size)), size

    def new(self, problem: Problem, *, has_gradient: bool) -> Memory:
        """Uninitialised memory."""
        hidden, positions = problem.hidden, self.num_positions
        slots, blocks = self.strides.path_slots * SLOT, self.strides.path_blocks
        visit_lse = ((1 + self.num_splits) * self.strides.D, positions)
        return Memory(
            routing=hidden.new_empty(self.routing_size, dtype=torch.int32),
            visited=hidden.new_empty(self.num_nodes, dtype=torch.int8),
            sorted_hidden=hidden.new_empty(self.padded_rows, self.padded_size),
            exp_logits=hidden.new_empty(positions, slots if has_gradient else 0),
            block_max=hidden.new_empty(positions, blocks if has_gradient else 0, dtype=self.dtype),
            visit_lse=hidden.new_empty(visit_lse, dtype=self.dtype),
        )

    def fits(self, memory: Memory) -> bool:
        """Whether a forward of this plan, with a backward, left the memory.

        With other tile shapes the lists are longer or shorter, or the blocks.
        """
        found = memory.routing.numel(), memory.block_max.shape[1]
        return found == (self.routing_size, self.strides.path_blocks)


_plans: dict[tuple[Any, ...], Plan] = {}


def plan_for(problem: Problem) -> Plan:
    """The plan of a problem; within `torch.compile`, sizes may be symbols."""
    hidden, weight, tree = problem.hidden, problem.weight, problem.tree
    if type(hidden) not in (Tensor, Parameter):
        return _new_plan(problem)
    key = (
        hidden.shape, weight.shape, tree.row_of_word.numel(), tree.num_children.numel(),
        tree.node_of_row.numel(), problem.depth, problem.max_path_columns,
        hidden.dtype, weight.dtype, hidden.device,
        hidden.dtype == torch.float32 and tf32(), instruments()[1:],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = _new_plan(problem)
    return plan


def _new_plan(problem: Problem) -> Plan:
    hidden, columns, depth = problem.hidden, problem.weight.shape[1], problem.depth
    shape = tiles_for(problem)
    most, hidden_size = sizes(problem, shape), hidden.shape[1]
    return Plan(
        tiles=shape,
        errors_tile=shape.errors._replace(c=shape.forward.c),
        num_positions=problem.num_positions,
        num_nodes=problem.tree.num_children.numel(),
        most=most,
        chunk=chunk_size(problem, shape),
        num_splits=_num_splits(problem, shape),
        routing_size=memory_size(problem, most),
        padded_rows=problem.num_positions + shape.forward.v,
        padded_size=-(-hidden_size // SLOT) * SLOT,
        strides=Strides(
            D=depth,
            path_slots=path_slots(problem) // SLOT,
            path_blocks=problem.max_path_columns // shape.forward.c + depth,
        ),
        dtype=compute_dtype(hidden.dtype),
        precision="tf32" if hidden.dtype == torch.float32 and tf32() else "ieee",
        columns=(hidden_size, columns),
    )


def tiles_for(problem: Problem) -> Tiles:
    """The tile shapes for a problem on its device."""
    shape = instruments().tiles
    if shape is not None:
        return shape
    dtypes, device = (problem.hidden.dtype, problem.weight.dtype), problem.hidden.device
    tensor_cores = dtypes[0] == torch.float32 and tf32()
    align, width = alignment(problem), problem.max_path_columns // problem.depth
    return tiles(dtypes, capability(device), align, width, tensor_cores=tensor_cores)


def alignment(problem: Problem) -> tuple[int, int]:
    """The largest powers of two up to 16 that divide H, and the number of columns of the weight.

    They decide how many elements of a row are loaded at once, and so the tile shapes: rows of 300
    halves are not multiples of 16, but of 4.
    """
    return math.gcd(problem.hidden.shape[1], 16), math.gcd(problem.weight.shape[1], 16)


def path_slots(problem: Problem) -> int:
    """Columns of `Memory.exp_logits`: each level may leave some of its last ones empty."""
    return (problem.max_path_columns // SLOT + problem.depth) * SLOT


def _num_splits(problem: Problem, shape: Tiles) -> Any:
    """Programs that share a tile of a problem in the forward.

    As many as fill a device, each with up to two blocks of children of a node of average width. Of
    those timed on an H100 for 33k to 10M words this is the best choice, or level with it.
    """
    given = instruments().num_splits
    if given is not None:
        return given
    tile, depth = shape.forward, problem.depth
    if problem.max_path_columns <= 3 * depth * tile.c:
        return 1
    visits, num_nodes = depth * problem.num_positions, problem.tree.num_children.numel()
    num_tiles = at_most(visits, num_nodes) + visits // tile.v
    most = at_most(-(-problem.max_path_columns // (2 * depth * tile.c)), MAX_SPLITS)
    return at_least(at_most(most, -(-FILLING_TILES // at_least(num_tiles, 1))), 1)
