"""Nodes of the tree that a batch visits, and the softmax of one node over its children."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.backends.base import Problem
from lm.output.backends.visits import route
from lm.output.inputs import check_words, compute_dtype, followed_by_zeros
from lm.output.tracing import not_compiled
from lm.output.tree.arrays import TreeArrays
from lm.output.tree.class_tree import ClassTree

BLOCK_ELEMENTS = 1 << 20
"""Most logits in memory at once where they are not saved: 4 MB in fp32, for a CPU's cache."""
CUDA_BLOCK_ELEMENTS = 1 << 25
"""Most logits in memory at once on CUDA, where the number of launches counts."""
CAST_ELEMENTS = 1 << 23
"""Most elements of rows in a lower precision cast at once: 32 MB in fp32."""


class Node(NamedTuple):
    """A visited node; its visits are an interval of the sorted positions."""

    level: int
    visits: slice
    rows: slice  # of its children

    def blocks(self, weight: Tensor, dtype: torch.dtype, *, whole: bool) -> list[slice]:
        """The rows in blocks, whose logits (if not `whole`) and cast rows fit in memory."""
        start, stop = self.rows.start, self.rows.stop
        limit = CUDA_BLOCK_ELEMENTS if weight.is_cuda else BLOCK_ELEMENTS
        step = stop - start if whole else limit // (self.visits.stop - self.visits.start)
        if weight.dtype != dtype:
            step = min(step, CAST_ELEMENTS // weight.shape[1])
        begins = range(start, stop, max(1, step))
        return [slice(begin, min(begin + begins.step, stop)) for begin in begins]


def visited_nodes(node: Tensor, tree: TreeArrays | ClassTree) -> list[Node]:
    """The nodes `node` [D, P] that sorted positions visit on each level, -1 for none, by row."""
    nodes = []
    for level, node_of_position in enumerate(node):
        index, count = torch.unique_consecutive(node_of_position, return_counts=True)
        stop = count.cumsum(0)
        visited = index >= 0
        index, count, stop = index[visited], count[visited], stop[visited]
        first, width = tree.first_row[index], tree.num_children[index]
        arrays = (array.tolist() for array in (stop - count, stop, first, first + width))
        for start, end, row, end_row in zip(*arrays, strict=True):
            nodes.append(Node(level, slice(start, end), slice(row, end_row)))
    return nodes


def split_rows(
    weight: Tensor, bias: Tensor | None, sizes: int | list[int]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Rows and their biases in portions of some sizes, as views.

    One split writes the gradient of a table once; slices would write it once per node.
    """
    rows = torch.split(weight, sizes)
    biases = [None] * len(rows) if bias is None else torch.split(bias, sizes)
    return zip(rows, biases, strict=True)


def with_rows(
    nodes: list[Node], weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[Node, Tensor, Tensor | None]]:
    """Each node with its children's rows and biases."""
    sizes, end = [], 0
    for node in nodes:
        sizes += [node.rows.start - end, node.rows.stop - node.rows.start]
        end = node.rows.stop
    portions = list(split_rows(weight, bias, [*sizes, len(weight) - end]))[1::2]
    return ((node, *rows) for node, rows in zip(nodes, portions, strict=True))


def sorted_hidden(problem: Problem, position: Tensor) -> Tensor:
    """The hidden vectors [P, W] of the sorted positions, in the dtype that sums are formed in."""
    dtype = compute_dtype(problem.hidden.dtype)
    hidden = problem.hidden.index_select(0, position).to(dtype)
    return followed_by_zeros(hidden, problem.weight.shape[1])


def node_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits W h + b [V, children] of a node, in the dtype of hidden [V, W].

    Rows [children, W] in another dtype are cast a few at a time, in one split.
    """
    dtype, step = hidden.dtype, max(1, CAST_ELEMENTS // weight.shape[1])
    bias = None if bias is None else bias.to(dtype)
    if weight.dtype == dtype or len(weight) <= step:
        return F.linear(hidden, weight.to(dtype), bias)
    blocks = split_rows(weight, bias, step)
    return torch.cat([F.linear(hidden, r.to(dtype), b) for r, b in blocks], dim=1)


def node_log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The log-probabilities [V, children] of a node's children; arguments as of `node_logits`."""
    return torch.log_softmax(node_logits(hidden, weight, bias), dim=1)


@not_compiled
def lse_by_level(target: Tensor, problem: Problem) -> Tensor:
    """The log-sum-exp [D, P] of each softmax on the targets' paths, by plain operations of PyTorch.

    See `HierarchicalSoftmax.lse_by_level`.
    """
    check_words("target", target, problem.vocab_size, problem.ignore_index)
    position, node, _ = route(target, problem.tree, problem.depth, problem.ignore_index)
    hidden = sorted_hidden(problem, position)
    nodes = visited_nodes(node, problem.tree)
    rows = with_rows(nodes, problem.weight, problem.bias)
    with torch.autocast(hidden.device.type, enabled=False):
        lse = [node_logits(hidden[each.visits], w, b).logsumexp(1) for each, w, b in rows]
    visit = (node.flatten() >= 0).nonzero().squeeze(1)
    by_level = hidden.new_zeros(node.numel()) + hidden[:0].sum()  # differentiable without a visit
    by_level = by_level.index_copy(0, visit, torch.cat([by_level[:0], *lse])).view(node.shape)
    return by_level.index_copy(1, position, by_level)
