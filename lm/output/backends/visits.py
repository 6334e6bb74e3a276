"""From targets to visits: which (position, node) pairs a batch has, sorted by node.

The positions are sorted by the node of their target's word, depth first. The nodes below any node
are then neighbours, and so are their positions: on each level, the visits of a node are an interval
of the sorted positions. One sort serves all levels, and a backend reads each hidden vector once.

Everything runs on the device of the targets, with shapes that depend only on the number of
positions and the depth of the tree, so that the host reads nothing back.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.tree.arrays import Shard, TreeArrays


class Visits(NamedTuple):
    """The visits of a batch of P positions in a tree of depth D, int64."""

    position: Tensor  # [P], sorted by their target's node, depth first; ignored ones last
    node: Tensor  # [D, P], that a sorted position visits on each level, root first; -1 for none
    child: Tensor  # [D, P], which child of the node is on the target's path; 0 for none, -1 for
    # one in another shard


def sorted_upstream(upstream: Tensor, position: Tensor, node: Tensor) -> Tensor:
    """Upstream gradients [P] of the sorted positions; 0 for those without visits, even of inf."""
    return upstream.index_select(0, position).masked_fill((node < 0).all(0), 0)


def route(
    target: Tensor, tree: TreeArrays, depth: int, ignore_index: int, shard: Shard | None = None
) -> Visits:
    """The visits of all targets [P].

    A node with a single child is not visited: its softmax is 1 for any weights. Neither is a node
    without children in the shard.
    """
    node_of_row = tree.node_of_row if shard is None else shard.node_of_row
    valid = target != ignore_index
    row = tree.row_of_word[torch.where(valid, target, 0)]
    rank = torch.where(valid, tree.preorder[node_of_row[row]], tree.preorder.numel())
    for dtype in (torch.int32, torch.int16):  # a radix sort passes over bytes
        if tree.preorder.numel() <= torch.iinfo(dtype).max:
            rank = rank.to(dtype)
    position = torch.sort(rank, stable=True).indices
    row, valid = row[position], valid[position]
    rows = [row]
    for _ in range(depth - 1):
        rows.append(tree.row_of_node[node_of_row[rows[-1]]].clamp(min=0))
    level = torch.arange(depth, device=target.device)[:, None]
    climbs = tree.level[node_of_row[row]] - level
    path = torch.stack(rows).gather(0, climbs.clamp(min=0))
    node = node_of_row[path]
    child = path - tree.first_row[node]
    visited = (climbs >= 0) & valid & (tree.num_children[node] > (shard is None))
    if shard is not None:
        row = shard.local_row[path]
        child = torch.where(row >= 0, row - tree.first_row[node], -1)
    child = torch.where(visited, child, 0)
    return Visits(position, torch.where(visited, node, -1), child)
