"""What the sizes of a batch decide: tile shapes, memory, and the numbers that kernels take.

A plan is made once for each combination of sizes, dtypes and device, so that a step asks the device
nothing and computes nothing twice. Memory of one dtype is allocated at once and divided.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lm.output.backends.base import Problem
from lm.output.backends.triton.launch import SLOT, capability, instruments
from lm.output.backends.triton.routing import (
    NUM_LISTS,
    Routing,
    Sizes,
    at_least,
    at_most,
    chunk_size,
    sizes,
)
from lm.output.backends.triton.tile_shapes import Tiles, tf32, tiles

FILLING_TILES = 2048
"""Programs from which on more of them would not make the forward faster."""
MAX_SPLITS = 16
"""Most programs that share a tile in the forward."""
MAX_PLANS = 256
"""Plans that are kept; then all are made anew."""
ALIGNED = 32
"""Tensors that share memory begin at multiples of so many elements, as kernels expect."""


class Saved(NamedTuple):
    """What the forward saves: the batch, and the results of (7) and (8) of `forward_kernel`.

    Without a backward there are no slots and blocks. Values [D · P] are undefined where there is no
    visit.
    """

    routing: Routing
    lse: Tensor  # [D · P]
    target_logit: Tensor  # [D · P]
    block_max: Tensor  # [P · blocks], m
    exp_logits: Tensor  # [P, slots] in the dtype of hidden, k of the children on a path
    sorted_hidden: Tensor  # [P, H up to a multiple of 16]: hidden by sorted position, then zeros


class Division(NamedTuple):
    """How memory is divided into tensors that begin at multiples of `ALIGNED` elements."""

    pieces: list[int]  # lengths of tensors, each followed by that of a gap
    total: int

    @classmethod
    def of(cls, *lengths: int) -> "Division":
        """The division into tensors of some lengths; there is no gap behind the last one."""
        gaps = [*((-length) % ALIGNED for length in lengths[:-1]), 0]
        pieces = [size for pair in zip(lengths, gaps, strict=True) for size in pair]
        return cls(pieces, sum(pieces))

    def tensors(self, memory: Tensor) -> Sequence[Tensor]:
        """The tensors, as views."""
        return memory.split_with_sizes(self.pieces)[::2]


class Plan(NamedTuple):
    """What the sizes of a batch decide."""

    tiles: Tiles
    sizes: Sizes  # of the lists of the routing
    chunk: int  # see `chunk_size`
    num_splits: int  # programs that share a tile in the forward
    padded_size: int  # columns of `Saved.sorted_hidden`
    slots: int  # columns of `Saved.exp_logits`
    numbers: dict[str, Any]  # arguments of kernels that are no tensors, by name
    integers: Division  # into the tensors of a `Routing` but `visited`; heavy tiles are last
    sums: tuple[Division, Division]  # into those of a `Saved`: with a backward and without
    scratch: Division  # into the integers that only the forward reads

    def new(self, problem: Problem, dtype: torch.dtype, *, has_gradient: bool) -> list[Tensor]:
        """Uninitialised memory for a `Saved` whose sums have a dtype, as `unflatten` takes it."""
        hidden, target, positions = problem.hidden, problem.target, problem.num_positions
        sums = self.sums[0 if has_gradient else 1]
        return [
            target.new_empty(self.integers.total, dtype=torch.int32),
            target.new_empty(self.numbers["num_nodes"], dtype=torch.int8),
            hidden.new_empty(sums.total, dtype=dtype),
            hidden.new_empty(positions, self.slots if has_gradient else 0),
            hidden.new_empty(positions, self.padded_size),
        ]

    def unflatten(self, memory: Sequence[Tensor]) -> Saved:
        """What a forward saved, given its memory."""
        integers, visited, sums, exp_logits, sorted_hidden = memory
        divided = self.integers.tensors(integers)
        position, node, child, light_level, num_entries, *lists, heavy_tiles = divided
        of_visits = (position, node, child, light_level, visited)
        routing = Routing(*of_visits, num_entries, heavy_tiles, *lists)
        has_gradient = sums.numel() == self.sums[0].total
        lse, logit, block_max = self.sums[0 if has_gradient else 1].tensors(sums)
        return Saved(routing, lse, logit, block_max, exp_logits, sorted_hidden)

    def fits(self, memory: Sequence[Tensor]) -> bool:
        """Whether a forward of this plan, with a backward, left the memory.

        Other tile shapes have other numbers of heavy tiles, which follow the last gap, or of
        blocks.
        """
        found = [memory[0].numel(), memory[2].numel()]
        return found == [self.integers.total, self.sums[0].total]


def arguments(plan: Plan, problem: Problem, saved: Saved) -> dict[str, Any]:
    """What the kernels of a batch take, by name.

    The problem (hidden, target, bias and rows of the weight are contiguous), its tree, what the
    forward saved, and the numbers of the plan.
    """
    return {
        **problem._asdict(),
        **problem.tree._asdict(),
        **saved._asdict(),
        **saved.routing._asdict(),
        **plan.numbers,
    }


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
    import triton.language as tl

    hidden, weight, positions = problem.hidden, problem.weight, problem.num_positions
    shape = tiles_for(problem)
    lists, align, weight_align = sizes(problem, shape), *alignment(problem)
    slots, blocks = path_slots(problem), problem.max_path_columns // shape.forward.c + problem.depth
    padded_size = -(-hidden.shape[1] // SLOT) * SLOT
    tree = problem.tree
    numbers = {
        "P": positions,
        "D": problem.depth,
        "N": problem.vocab_size,
        "num_nodes": tree.num_children.numel(),
        "path_slots": slots // SLOT,
        "path_blocks": blocks,
        "LIGHT": shape.light.v,
        "ACC": tl.float64 if hidden.dtype == torch.float64 else tl.float32,
        "PRECISION": "tf32" if hidden.dtype == torch.float32 and tf32() else "ieee",
        "ALIGN": align,
        "WEIGHT_ALIGN": weight_align,
        "NUM_LISTS": NUM_LISTS,
        "h_units": hidden.shape[1] // align,
        "sorted_units": padded_size // SLOT,
        "weight_units": weight.shape[1] // weight_align,
    }
    visits = problem.depth * positions
    of_visits = (positions, visits, visits, positions)
    of_tiles = (4 * size for size in (lists.row_tiles, lists.chunk_tiles, lists.split_tiles))
    of_lists = (lists.light_nodes, lists.light_groups, *of_tiles, lists.heavy_tiles)
    return Plan(
        tiles=shape,
        sizes=lists,
        chunk=chunk_size(problem, shape),
        num_splits=_num_splits(problem, shape),
        padded_size=padded_size,
        slots=slots,
        numbers=numbers,
        integers=Division.of(*of_visits, NUM_LISTS, *of_lists),
        sums=(
            Division.of(visits, visits, positions * blocks),
            Division.of(visits, visits, 0),
        ),
        scratch=Division.of(positions, positions, 1),
    )


def tiles_for(problem: Problem) -> Tiles:
    """The tile shapes for a problem on its device."""
    shape = instruments().tiles
    if shape is not None:
        return shape
    dtypes, device = (problem.hidden.dtype, problem.weight.dtype), problem.hidden.device
    tensor_cores = dtypes[0] == torch.float32 and tf32()
    return tiles(dtypes, capability(device), alignment(problem), tensor_cores=tensor_cores)


def alignment(problem: Problem) -> tuple[int, int]:
    """The largest powers of two up to 16 that divide H, and the number of columns of the weight.

    Kernels take both in units of so many elements, so that the compiler knows what divides them:
    rows of 300 halves are not multiples of 16, but of 4.
    """
    return math.gcd(problem.hidden.shape[1], 16), math.gcd(problem.weight.shape[1], 16)


def path_slots(problem: Problem) -> int:
    """Columns of `Saved.exp_logits`: each level may leave some of its last ones empty."""
    return (problem.max_path_columns // SLOT + problem.depth) * SLOT


def _num_splits(problem: Problem, shape: Tiles) -> Any:
    """Programs that share a tile of a problem in the forward.

    As many as fill a device, each with two blocks of children of a node of average width or more.
    Of those timed on an H100 for 33k to 10M words this is the best choice.
    """
    given = instruments().num_splits
    if given is not None:
        return given
    tile, depth = shape.forward, problem.depth
    visits, num_nodes = depth * problem.num_positions, problem.tree.num_children.numel()
    num_tiles = at_most(visits, num_nodes) + visits // tile.v
    most = at_most(-(-problem.max_path_columns // (depth * tile.c)) // 2, MAX_SPLITS)
    return at_least(at_most(most, -(-FILLING_TILES // at_least(num_tiles, 1))), 1)
