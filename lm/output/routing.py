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

from lm.output.tree import TreeArrays


class Visits(NamedTuple):
    """The visits of a batch of P positions in a tree of depth D.

    Attributes:
        position: [P] int64, the positions sorted by their target's node, depth first; ignored ones
            last.
        node: [D, P] int64, the node that a sorted position visits on each level, the root's level
            first; -1 where it visits none.
        child: [D, P] int64, which child of the node lies on the target's path; 0 where there is
            none.
    """

    position: Tensor
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
    position = torch.sort(rank, stable=True).indices
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
    return Visits(position, torch.where(visited, node, -1), child)
