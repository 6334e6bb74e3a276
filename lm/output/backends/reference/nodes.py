"""The visited nodes of a batch, and the logits of their children."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Problem, compute_dtype, followed_by_zeros
from lm.output.backends.visits import Visits
from lm.output.tree.class_tree import TreeArrays

BLOCK_ELEMENTS = 1 << 20
"""Most logits in memory at once where they are not saved: 4 MB in fp32, for a CPU's cache."""
CUDA_BLOCK_ELEMENTS = 1 << 25
"""The same on CUDA, where the number of launches counts."""
CAST_ELEMENTS = 1 << 23
"""Most elements of rows in a lower precision cast at once."""


class Node(NamedTuple):
    """A visited node; its visits are an interval of the sorted positions."""

    level: int
    start: int  # of its visits
    stop: int
    first_row: int
    num_children: int
    offset: int  # of its columns among those of all visits

    @property
    def visits(self) -> slice:
        """Its sorted positions."""
        return slice(self.start, self.stop)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of visits and of children."""
        return self.stop - self.start, self.num_children

    def rows(self, children: slice) -> slice:
        """The rows of some of the children."""
        return slice(self.first_row + children.start, self.first_row + children.stop)

    def columns(self, flat: Tensor) -> Tensor:
        """The node's columns [visits, children] in the flat columns of all visits, a view."""
        stride, offset = (self.num_children, 1), flat.storage_offset() + self.offset
        return flat.as_strided(self.shape, stride, offset)

    def blocks(self, weight: Tensor, dtype: torch.dtype, *, whole: bool) -> Iterator[slice]:
        """The children in blocks.

        If there is memory for the logits of all children (`whole`), a block is limited only by its
        rows, where the weight must be cast to `dtype`.
        """
        limit = CUDA_BLOCK_ELEMENTS if weight.is_cuda else BLOCK_ELEMENTS
        step = self.num_children if whole else limit // (self.stop - self.start)
        if weight.dtype != dtype:
            step = min(step, CAST_ELEMENTS // weight.shape[1])
        step = max(1, step)
        for begin in range(0, self.num_children, step):
            yield slice(begin, min(begin + step, self.num_children))


def visited_nodes(visits: Visits, tree: TreeArrays) -> Iterator[Node]:
    """The visited nodes in the order of their rows: level by level, and depth first in each."""
    offset = 0
    for level, node_of_position in enumerate(visits.node):
        node, count = torch.unique_consecutive(node_of_position, return_counts=True)
        stop = count.cumsum(0)
        visited = node >= 0
        node, count, stop = node[visited], count[visited], stop[visited]
        arrays = (stop - count, stop, tree.first_row[node], tree.num_children[node])
        for start, end, row, width in zip(*(array.tolist() for array in arrays), strict=True):
            yield Node(level, start, end, row, width, offset)
            offset += (end - start) * width


def target_columns(visits: Visits, tree: TreeArrays) -> tuple[Tensor, Tensor, int]:
    """Index of each visit in the flat `Visits.node` [V], its target's column [V], and all columns.

    The columns of all visits are counted node by node.
    """
    visit = (visits.node.flatten() >= 0).nonzero().squeeze(1)
    width = tree.num_children[visits.node.flatten()[visit]]
    end = width.cumsum(0)
    column = end - width + visits.child.flatten()[visit]
    return visit, column, int(end[-1]) if visit.numel() else 0


def sorted_hidden(problem: Problem, visits: Visits) -> Tensor:
    """The hidden vectors [P, W] of the sorted positions, in the dtype that sums are formed in."""
    hidden = visits.sorted(problem.hidden).to(compute_dtype(problem.hidden.dtype))
    return followed_by_zeros(hidden, problem.weight.shape[1])


def write_logits(
    out: Tensor, hidden: Tensor, problem: Problem, node: Node, children: slice
) -> Tensor:
    """Write (1) for some children into `out` [visits, children]; return their rows [children, W].

    `hidden` [P, W] is `sorted_hidden`; the rows have its dtype.
    """
    rows = problem.weight[node.rows(children)].to(hidden.dtype)
    if problem.bias is None:
        torch.mm(hidden[node.visits], rows.T, out=out)
    else:
        bias = problem.bias[node.rows(children)].to(hidden.dtype)
        torch.addmm(bias, hidden[node.visits], rows.T, out=out)
    return rows
