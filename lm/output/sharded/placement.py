"""Which rows of the weight a process holds.

Rows are dealt like cards: row r belongs to process r mod W, as its row r // W. The children of a
node are consecutive rows, so every node is split to within one row, and so is the whole weight; a
node of three children on eight processes has children on three of them, which differ from node to
node. No table says where a row is, and the rows of another number of processes are slices
`weight[rank::W]` of the same whole weight.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.tree import shapes
from lm.output.tree.class_tree import ClassTree, Shard, TreeArrays


class Placement(NamedTuple):
    """The rows of one process as backends take them."""

    rows: slice  # of the whole weight
    tree: TreeArrays  # see `Shard`
    shard: Shard
    depth: int
    max_path_columns: int  # of the process's rows


def place(tree: ClassTree, rank: int, world_size: int) -> Placement:
    """The rows of process `rank` of `world_size`.

    Example:
        >>> tree = ClassTree.two_level([0, 0, 1, 1, 1])  # rows: 2 classes, then 2 and 3 words
        >>> placement = place(tree, rank=1, world_size=2)
        >>> placement.rows, placement.tree.num_children.tolist()
        (slice(1, None, 2), [1, 1, 1])
    """
    with torch.device("cpu"):
        arrays = TreeArrays(*(array.cpu() for array in tree.arrays))
        rows = slice(rank, None, world_size)
        row = torch.arange(tree.num_rows)
        local_row = torch.where(row % world_size == rank, row // world_size, -1)
        node_of_row = arrays.node_of_row[rows].contiguous()
        held = torch.bincount(node_of_row, minlength=tree.num_nodes)
        num_children = torch.where(arrays.num_children > 1, held, 0)
        parent = torch.cat([torch.tensor([0]), arrays.node_of_row[arrays.row_of_node[1:]]])
        above = num_children[parent] * (arrays.row_of_node >= 0)
        column = shapes.sum_over_ancestors(parent, above)
        local = arrays._replace(
            num_children=num_children,
            first_row=held.cumsum(0) - held,
            node_of_row=node_of_row,
            column=column,
        )
        shard = Shard(arrays.node_of_row, local_row)
        return Placement(rows, local, shard, tree.depth, int((column + num_children).max()))


def columns_per_process(tree: ClassTree, target: Tensor, world_size: int) -> Tensor:
    """The work of each process for a batch, [W] int64: columns of all visits, of no matter whose.

    A column costs three products of H numbers, and a row read and a gradient written in the memory
    of the process.

    Args:
        target: words, of any shape.
    """
    totals = []
    for rank in range(world_size):
        local = place(tree, rank, world_size).tree
        path = tree.rows_on_path(target)
        node = tree.node_of_row[path.clamp(min=0)]
        totals.append(torch.where(path >= 0, local.num_children[node], 0).sum())
    return torch.stack(totals)
