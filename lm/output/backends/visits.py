"""From targets to visits: which (position, node) pairs a batch needs, laid out so that every node's
visits are neighbours.

The positions are sorted by the node of their target's word, depth first. The nodes below any node
are then neighbours, and so are their positions: on each level, the visits of a node are an interval
of the sorted positions. One sort serves all levels, and a backend reads each hidden vector once.

Runs on the device of the targets with shapes that depend on nothing but the number of positions and
the depth of the tree, so that nothing is read back by the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.tree.class_tree import TreeArrays

LIGHT = 16
"""Most visits of a node that one program of the fused kernels takes whole: the least rows of a
matrix unit.
"""


class Visits(NamedTuple):
    """The visits of a batch of P positions in a tree of depth D.

    Attributes:
        position: [P] int64, the positions sorted by their target's node, depth first; ignored ones
            last.
        rank: [P] int64, `preorder` of these nodes, I for ignored positions.
        node: [D, P] int64, the node that a sorted position visits on each level, the root's level
            first; -1 where it visits none.
        child: [D, P] int64, which child of the node lies on the target's path; 0 where there is
            none.
    """

    position: Tensor
    rank: Tensor
    node: Tensor
    child: Tensor


def route(target: Tensor, tree: TreeArrays, depth: int, ignore_index: int) -> Visits:
    """Lay out the visits of every target.

    A node with a single child is not visited: its softmax is 1, whatever the weights.

    Args:
        target: [P] int64, words, or `ignore_index` where nothing is to be predicted.
        tree: its arrays.
        depth: D, of the tree.
        ignore_index: value of the targets without visits.
    """
    kept = target != ignore_index
    row = tree.row_of_word[torch.where(kept, target, 0)]
    rank = torch.where(kept, tree.preorder[tree.node_of_row[row]], tree.preorder.numel())
    position = torch.sort(_narrowed(rank, tree.preorder.numel()), stable=True).indices
    row, kept = row[position], kept[position]
    rows = [row]
    for _ in range(depth - 1):
        rows.append(tree.row_of_node[tree.node_of_row[rows[-1]]].clamp(min=0))
    level = torch.arange(depth, device=target.device)[:, None]
    climbs = tree.level[tree.node_of_row[row]] - level
    path = torch.stack(rows).gather(0, climbs.clamp(min=0))
    node = tree.node_of_row[path]
    visited = (climbs >= 0) & kept & (tree.num_children[node] > 1)
    child = torch.where(visited, path - tree.first_row[node], 0)
    return Visits(position, rank[position], torch.where(visited, node, -1), child)


class Schedule(NamedTuple):
    """How the fused kernels share the visits of a batch among programs.

    A node is *heavy* if it has more than `LIGHT` visits, else *light*; nodes below a light one are
    light. Heavy nodes are worked on in tiles of neighbouring positions, each of which walks the
    heavy nodes of its positions. A light *group* is the visits of a light node below a heavy one,
    and of all nodes below it: at most `LIGHT` positions, one program, which so owns the rows of all
    these nodes.

    Attributes:
        stop: [D, P] int64, where the visits of the node at `Visits.node` end.
        light_level: [P] int64, first level on which a sorted position visits a light node; D if it
            visits none.
        light_first: [G] int64, first position of each light group, P after the last one; those
            whose node has the most children come first.
        heavy_first: [K] int64, where in the flat `Visits.node` the visits of each heavy node begin,
            -1 after the last one; those with the most visits come first.
    """

    stop: Tensor
    light_level: Tensor
    light_first: Tensor
    heavy_first: Tensor


def schedule_sizes(num_positions: int, num_nodes: int, depth: int) -> tuple[int, int]:
    """G and K, a matter of shapes alone: no more groups than nodes or positions, no more heavy
    nodes than have room for their visits.
    """
    heavy = depth * (num_positions // (LIGHT + 1))
    return min(num_positions, num_nodes), min(heavy, num_nodes)


def schedule(visits: Visits, tree: TreeArrays) -> Schedule:
    """Share the visits of a batch among programs, without reading anything back."""
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


def _narrowed(rank: Tensor, largest: int) -> Tensor:
    """The same numbers in the least dtype that holds `largest`: a radix sort passes over bytes."""
    for dtype in (torch.int16, torch.int32):
        if largest <= torch.iinfo(dtype).max:
            return rank.to(dtype)
    return rank


def _compact(chosen: Tensor, weight: Tensor, size: int, fill: int) -> Tensor:
    """Where `chosen` holds [size], largest `weight` first; `fill` after the last one."""
    index = torch.where(chosen, chosen.cumsum(0) - 1, size)
    place = torch.arange(chosen.numel(), device=chosen.device)
    where = place.new_full((size + 1,), fill).scatter_(0, index, place)[:size]
    own = torch.where(where != fill, weight[where.clamp(0, max(chosen.numel() - 1, 0))], -1)
    return where[torch.sort(own, descending=True, stable=True).indices]
