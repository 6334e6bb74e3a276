"""Opening nodes of a tree of softmaxes: evaluating one where it is wanted exposes its children.

Decides how a node is evaluated and what its children are called; which nodes are opened is decided
in `search` and `sampling`.

A child is an *item*: word w is item w, node n is item ~n = -1 - n.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.backends.base import compute_dtype
from lm.output.tree.class_tree import ClassTree

ABSENT = torch.iinfo(torch.int64).max
"""Fills rows shorter than others, with log-probability -∞; sorts behind every word."""
_CAST_ELEMENTS = 1 << 23
"""Most elements of half-precision rows cast to fp32 at once."""


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """hidden Wᵀ + b in at least fp32, [P, rows], for hidden [P, H] and rows [rows, H].

    Half-precision rows are cast in portions, which come from one split: its gradient is written
    once.
    """
    dtype = compute_dtype(torch.promote_types(hidden.dtype, weight.dtype))
    hidden, bias = hidden.to(dtype), None if bias is None else bias.to(dtype)
    if weight.dtype == dtype:
        return F.linear(hidden, weight, bias)
    portions = torch.split(weight, max(1, _CAST_ELEMENTS // weight.shape[1]))
    product = torch.cat([hidden @ rows.to(dtype).T for rows in portions], dim=1)
    return product if bias is None else product + bias


class _Layout(NamedTuple):
    """What is read off a tree once: the item of each row [R], the words below each node [I]."""

    item_of_row: Tensor
    num_words_below: Tensor


_layouts: WeakKeyDictionary[ClassTree, _Layout] = WeakKeyDictionary()


def _layout(tree: ClassTree) -> _Layout:
    """The layout of a tree, formed when first asked for and when the tree has changed device."""
    layout = _layouts.get(tree)
    if layout is None or layout.item_of_row.device != tree.row_of_word.device:
        layout = _layouts[tree] = _Layout(_item_of_row(tree), _num_words_below(tree))
    return layout


def _item_of_row(tree: ClassTree) -> Tensor:
    item = torch.empty_like(tree.node_of_row)
    item[tree.row_of_word] = torch.arange(tree.vocab_size, device=item.device)
    item[tree.row_of_node[1:]] = ~torch.arange(1, tree.num_nodes, device=item.device)
    return item


def _num_words_below(tree: ClassTree) -> Tensor:
    """Each node's own words are counted for the node and for all that are above it."""
    node = torch.arange(tree.num_nodes, device=tree.num_children.device)
    own = torch.bincount(tree.node_of_row[tree.row_of_word], minlength=tree.num_nodes)
    total = torch.zeros_like(own)
    while node.numel():
        total.index_add_(0, node, own)
        row = tree.row_of_node[node]
        node, own = tree.node_of_row[row[row >= 0]], own[row >= 0]
    return total


class Opened(NamedTuple):
    """One node, opened for V' of the visits that were asked for.

    Attributes:
        visit: [V'] int64, which visits.
        log_prob: [V', children], of the children given the node.
        item: [children] int64.
    """

    visit: Tensor
    log_prob: Tensor
    item: Tensor


class Opener:
    """Opens nodes of one layer's tree for a batch of positions, and counts them.

    Attributes:
        hidden: [P, H].
        tree: the softmaxes.
        dtype: of the log-probabilities, at least fp32.
        num_before: positions of the batch that come before these, where it is done in blocks.
        num_opened: (position, node) pairs opened so far.

    Args:
        weight: [R, H].
        bias: [R] or None.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tree: ClassTree,
        num_before: int = 0,
    ) -> None:
        self.hidden = hidden
        self.tree = tree
        self.dtype = compute_dtype(torch.promote_types(hidden.dtype, weight.dtype))
        self.num_opened = 0
        self._weight = weight
        self._bias = bias
        self.num_before = num_before
        self._item_of_row = _layout(tree).item_of_row

    @property
    def num_positions(self) -> int:
        return self.hidden.shape[0]

    def log_bound(self, power: float) -> Tensor:
        """The most that log Σ q^power can be, over the words below each node; [I] fp64.

        The q are the words' probabilities given the node. For power ≥ 1 Σ q^power ≤ Σ q = 1; else
        the sum is largest for equal q (Jensen), where it is (number of words)^(1 - power).
        """
        num_words = _layout(self.tree).num_words_below.double()
        return max(0.0, 1 - power) * num_words.log()

    def open(self, position: Tensor, node: Tensor) -> Iterator[Opened]:
        """Evaluate a node [V] at a position [V] for each visit; a matrix product for each node.

        Raises:
            ValueError: if a log-probability is not finite.
        """
        order = node.argsort(stable=True)
        nodes, num_visits = torch.unique_consecutive(node[order], return_counts=True)
        firsts, widths = self.tree.first_row[nodes].tolist(), self.tree.num_children[nodes].tolist()
        groups = torch.split(order, num_visits.tolist())
        for visit, first, width in zip(groups, firsts, widths, strict=True):
            own = position[visit]
            rows = slice(first, first + width)
            bias = None if self._bias is None else self._bias[rows]
            log_prob = torch.log_softmax(logits(self.hidden[own], self._weight[rows], bias), dim=1)
            finite = log_prob.isfinite().all(dim=1)
            if not bool(finite.all()):
                wrong = self.num_before + int(own[~finite][0])
                raise ValueError(f"log-probabilities of position {wrong} are not finite")
            self.num_opened += visit.numel()
            yield Opened(visit, log_prob, self._item_of_row[rows])


class Exposed(NamedTuple):
    """What a node exposes in some rows of a batch: row [V'], log_prob [V', M], item [V', M]."""

    row: Tensor
    log_prob: Tensor
    item: Tensor


def pack(exposed: Sequence[Exposed], num_rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """log_prob and item [num_rows, width]: all that is exposed in each row, then -∞ and absent."""
    used = torch.zeros(num_rows, dtype=torch.int64, device=like.device)
    columns = []
    for row, log_prob, _ in exposed:
        num_items = log_prob.shape[1]
        columns.append(used[row, None] + torch.arange(num_items, device=like.device))
        used[row] += num_items
    width = int(used.max()) if exposed else 0
    packed_log_prob = like.new_full((num_rows, width), -torch.inf)
    packed_item = used.new_full((num_rows, width), ABSENT)
    for (row, log_prob, item), column in zip(exposed, columns, strict=True):
        packed_log_prob[row[:, None], column] = log_prob
        packed_item[row[:, None], column] = item
    return packed_log_prob, packed_item
