"""From targets to visits: which (position, node) pairs a batch needs, sorted by node.

Runs on the device of the targets with shapes that depend on nothing but the number of positions and
the depth of the tree, so that nothing is read back by the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Visits(NamedTuple):
    """The visits of a batch, V = positions × depth of them, sorted by node; absent ones come last.

    Attributes:
        order: [V] int64, place of each visit in the unsorted layout [depth, positions].
        child: [V] int64, which child of the node lies on the target's path.
        num_visits: [I] int64, visits of each node; they stand one node after another.
    """

    order: Tensor
    child: Tensor
    num_visits: Tensor


def route(
    target: Tensor,
    num_children: Tensor,
    first_row: Tensor,
    row_of_node: Tensor,
    node_of_row: Tensor,
    row_of_word: Tensor,
    depth: int,
    ignore_index: int,
) -> Visits:
    """Lay out the visits of every target.

    A node with a single child is not visited: its softmax is 1, whatever the weights.

    Args:
        target: [P] int64, words, or `ignore_index` where nothing is to be predicted.
        num_children, first_row, row_of_node, node_of_row, row_of_word, depth: the tree
            (`ClassTree`).
        ignore_index: value of the targets without visits.
    """
    num_nodes = num_children.numel()
    on_path = target != ignore_index
    row = row_of_word[torch.where(on_path, target, 0)]
    nodes, children = [], []
    for _ in range(depth):
        node = node_of_row[row]
        nodes.append(torch.where(on_path & (num_children[node] > 1), node, num_nodes))
        children.append(row - first_row[node])
        row = row_of_node[node]
        on_path = on_path & (row >= 0)
        row = row.clamp(min=0)
    node, order = torch.sort(torch.cat(nodes), stable=True)
    starts = torch.searchsorted(node, torch.arange(num_nodes + 1, device=node.device))
    return Visits(order, torch.cat(children)[order], starts.diff())
