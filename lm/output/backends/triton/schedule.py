"""How the fused kernels share the visits of a batch among programs.

As in `lm.output.backends.visits`, shapes depend on sizes alone and the host reads nothing back.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.backends.visits import Visits
from lm.output.tree.class_tree import TreeArrays

LIGHT = 16
"""Most visits of a node that one program takes as a whole: the fewest rows of a matrix unit."""
MAX_SPLITS = 16
"""Most programs that share a tile: the last of them combines the results of all."""


class Schedule(NamedTuple):
    """Which programs work on which visits.

    A node is *heavy* if it has more than `LIGHT` visits, else *light*; nodes below a light one are
    light. Heavy nodes are worked on in tiles of neighbouring positions, each of which walks the
    heavy nodes of its positions. A light *group* is the visits of a light node below a heavy one
    and of all nodes below it: at most `LIGHT` positions, one program, which therefore owns the rows
    of all these nodes. The groups whose node has the most children come first, and the heavy nodes
    with the most visits. All tensors are int64.
    """

    stop: Tensor  # [D, P], where the visits of the node at `Visits.node` end
    light_level: Tensor  # [P], first level on which a position visits a light node; D for none
    light_first: Tensor  # [G], first position of each light group; P after the last one
    heavy_first: Tensor  # [K], heavy nodes' first visits in the flat `Visits.node`; then -1

    @classmethod
    def empty(cls, target: Tensor, num_nodes: int, depth: int) -> "Schedule":
        """Uninitialised memory for the schedule of targets [P] in a tree of I nodes."""
        (num_positions,) = target.shape
        groups, heavy = schedule_sizes(num_positions, num_nodes, depth)
        shapes = ((depth, num_positions), (num_positions,), (groups,), (heavy,))
        return cls(*(target.new_empty(shape) for shape in shapes))


def schedule_sizes(num_positions: int, num_nodes: int, depth: int) -> tuple[int, int]:
    """G and K of a `Schedule`, from sizes alone.

    There are at most as many groups as nodes or positions, and at most as many heavy nodes as
    their visits allow.
    """
    heavy = depth * (num_positions // (LIGHT + 1))
    return min(num_positions, num_nodes), min(heavy, num_nodes)


def schedule(visits: Visits, tree: TreeArrays) -> Schedule:
    """Share the visits of a batch among programs."""
    node = visits.node
    depth, num_positions = node.shape
    num_groups, num_heavy = schedule_sizes(num_positions, tree.preorder.numel(), depth)
    visited = node >= 0
    owner = node.clamp(min=0)
    start = torch.searchsorted(visits.rank, tree.preorder[owner])
    stop = torch.searchsorted(visits.rank, tree.preorder_stop[owner])
    light = visited & (stop - start <= LIGHT)
    place = torch.arange(num_positions, device=node.device)
    level = torch.arange(depth, device=node.device)[:, None]
    light_level = torch.where(light, level, depth).amin(0)
    width = torch.where(light & (level == light_level), tree.num_children[owner], 0).amax(0)
    top = light_level.clamp(max=depth - 1)[None]
    opens = (light_level < depth) & (start.gather(0, top)[0] == place)
    light_first = _compact(opens, width, num_groups, num_positions)
    heavy = (visited & ~light & (start == place)).flatten()
    heavy_first = _compact(heavy, (stop - start).flatten(), num_heavy, -1)
    return Schedule(stop, light_level, light_first, heavy_first)


def blocks_per_path(max_path_columns: int, depth: int, block_c: int) -> int:
    """Blocks of children on the longest path: each level may leave one of them partly empty."""
    return max_path_columns // block_c + depth


def splits_per_tile(max_path_columns: int, depth: int, block_c: int) -> int:
    """Programs that share a tile's children: one per block of a node of average width."""
    return max(1, min(-(-max_path_columns // (depth * block_c)), MAX_SPLITS))


def _compact(chosen: Tensor, weight: Tensor, size: int, fill: int) -> Tensor:
    """Where `chosen` holds [size], largest `weight` first; `fill` after the last one."""
    index = torch.where(chosen, chosen.cumsum(0) - 1, size)
    place = torch.arange(chosen.numel(), device=chosen.device)
    where = place.new_full((size + 1,), fill).scatter_(0, index, place)[:size]
    key = torch.where(where != fill, weight[where.clamp(0, max(chosen.numel() - 1, 0))], -1)
    return where[torch.sort(key, descending=True, stable=True).indices]
