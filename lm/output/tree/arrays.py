"""A tree as flat arrays, without weights: their checks, and those that follow from the others."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.tree import shapes


class TreeArrays(NamedTuple):
    """A tree as flat int64 arrays, in the order in which custom ops take them."""

    num_children: Tensor  # [I], number of children of each node
    first_row: Tensor  # [I], row of each node's first child
    row_of_node: Tensor  # [I], row that each node owns; -1 for the root
    node_of_row: Tensor  # [R], node whose child owns the row
    row_of_word: Tensor  # [N], row of each word
    level: Tensor  # [I], number of ancestors of each node; 0 for the root
    preorder: Tensor  # [I], rank of each node depth first: descendants follow without a gap
    preorder_stop: Tensor  # [I], rank after each node's last descendant
    column: Tensor  # [I], number of children of each node's ancestors, summed


class Shard(NamedTuple):
    """How a target's path in the whole tree leads to the rows of one shard of the weight.

    The `TreeArrays` of such a problem have `num_children`, `first_row`, `node_of_row` and `column`
    of the shard's rows, and 0 children for nodes with a single child in the whole tree.
    """

    node_of_row: Tensor  # [R] of the whole tree
    local_row: Tensor  # [R] int64, a row's number within the shard; -1 if it is in another one


def tree_arrays(num_children: Tensor, row_of_node: Tensor, row_of_word: Tensor) -> TreeArrays:
    """All arrays of the tree that three of them define.

    Raises:
        ValueError: if they define no tree numbered breadth first.
    """
    check_arrays(num_children, row_of_node, row_of_word)
    node_of_row = torch.repeat_interleave(torch.arange(len(num_children)), num_children)
    parent = torch.cat([torch.tensor([0]), node_of_row[row_of_node[1:]]])
    not_root = (row_of_node >= 0).to(torch.int64)
    level = shapes.sum_over_ancestors(parent, not_root)
    preorder, num_descendants = _depth_first(level, parent)
    return TreeArrays(
        num_children=num_children,
        first_row=num_children.cumsum(0) - num_children,
        row_of_node=row_of_node,
        node_of_row=node_of_row,
        row_of_word=row_of_word,
        level=level,
        preorder=preorder,
        preorder_stop=preorder + 1 + num_descendants,
        column=shapes.sum_over_ancestors(parent, num_children[parent] * not_root),
    )


def check_arrays(num_children: Tensor, row_of_node: Tensor, row_of_word: Tensor) -> None:
    """Raise a ValueError unless the arrays define a tree numbered breadth first."""
    num_nodes, num_words = num_children.numel(), row_of_word.numel()
    num_rows = num_words + num_nodes - 1
    if num_words < 1 or num_nodes < 1 or row_of_node.numel() != num_nodes:
        raise ValueError(
            f"not a tree: {num_words} words, {num_nodes} nodes, {row_of_node.numel()} rows of nodes"
        )
    if bool((num_children < 1).any()) or int(num_children.sum()) != num_rows:
        raise ValueError(f"not a tree: {int(num_children.sum())} children in all, {num_rows} rows")
    owned = torch.cat([row_of_node[1:], row_of_word])
    if int(row_of_node[0]) != -1 or bool(((owned < 0) | (owned >= num_rows)).any()):
        raise ValueError("not a tree: rows out of range")
    if bool((torch.bincount(owned, minlength=num_rows) != 1).any()):
        raise ValueError("not a tree: a row has several owners")
    first_row = num_children.cumsum(0) - num_children
    if bool((row_of_node >= first_row)[1:].any()):
        raise ValueError("not a tree: the parent of a node does not come before it")
    if bool((row_of_node[1:].diff() <= 0).any()):
        raise ValueError("not a tree: its nodes are not numbered breadth first")


def _depth_first(level: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Depth-first rank and number of descendants of each node, both [I]."""
    bounds = [0, *torch.bincount(level).cumsum(0).tolist()]
    levels = [slice(*bound) for bound in pairwise(bounds)][1:]
    size = torch.ones_like(parent)  # of the subtree
    for nodes in reversed(levels):
        size.index_add_(0, parent[nodes], size[nodes].clone())
    rank = torch.zeros_like(parent)
    for nodes in levels:
        before = size[nodes].cumsum(0) - size[nodes]  # nodes in the subtrees to the left
        first_sibling = torch.searchsorted(parent[nodes], parent[nodes])
        rank[nodes] = rank[parent[nodes]] + 1 + before - before[first_sibling]
    return rank, size - 1
