"""Expanding nodes: evaluating the softmax of a node gives the log-probabilities of its children.

`search` and `draws` decide which nodes are expanded. A child is an *item*: word w is item w, node n
is item ~n = -1 - n. A penalty θ ≥ 1 multiplies the log-probabilities of some words of a position;
still, no word below a node is more probable than the node.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from lm.output.backends.base import check_parameters, compute_dtype, followed_by_zeros
from lm.output.backends.nodes import node_log_softmax, node_logits, visited_nodes
from lm.output.tree.class_tree import ClassTree

ABSENT = torch.iinfo(torch.int64).max
"""Item that pads shorter rows, with log-probability -∞; sorts after every word."""
LOWEST = -1e30
"""Log-probability of excluded words, and the least with a penalty, with which words are found."""


def checked_hidden(hidden: Tensor, weight: Tensor, tree: ClassTree, bias: Tensor | None) -> Tensor:
    """The hidden vectors [..., H] as [P, W], followed by zeros, in at least fp32."""
    check_parameters(hidden, weight, tree, bias)
    dtype = compute_dtype(torch.promote_types(hidden.dtype, weight.dtype))
    flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    return followed_by_zeros(flat, weight.shape[1])


def word_log_prob(hidden: Tensor, weight: Tensor, tree: ClassTree, bias: Tensor | None) -> Tensor:
    """Log-probabilities [P, N] of all words: all logits in one product, log-softmaxes summed."""
    logits = torch.split(node_logits(hidden, weight, bias), tree.num_children.tolist(), dim=1)
    zero = hidden.new_zeros(hidden.shape[0], 1)  # row -1 is the root, which adds 0
    log_q = torch.cat([*(node.log_softmax(dim=1) for node in logits), zero], dim=1)
    row, *above = tree.rows_on_path(torch.arange(tree.vocab_size, device=hidden.device)).T
    total = log_q[:, row]
    for row in above:
        total = total + log_q[:, row]
    return total


class Children(NamedTuple):
    """Children of one node, for some of its visits or to be added to rows of a batch."""

    row: Tensor  # [V'] int64, index of the visit or of the row
    log_prob: Tensor  # [V', M]
    item: Tensor  # [M] or [V', M] int64
    only_words: bool = False  # whether all of them are known to be words


class Penalty(NamedTuple):
    """Multiplies the log-probabilities of some words."""

    factor: float  # θ ≥ 1; ∞: the words are never found, as excluded ones
    row: Tensor  # [P, L] int64, rows of each position's words, which may repeat; -1 is skipped

    def applied(self, log_prob: Tensor) -> Tensor:
        """Log-probabilities of penalized words, at least `LOWEST`."""
        if math.isinf(self.factor):
            return torch.full_like(log_prob, LOWEST)
        return (self.factor * log_prob).clamp(min=LOWEST)


@dataclass
class Expander:
    """Expands nodes of a layer's tree for P positions."""

    hidden: Tensor  # [P, W]
    weight: Tensor
    tree: ClassTree
    bias: Tensor | None = None
    first_position: int = 0  # in the caller's batch, a block of which this is
    excluded: Tensor | None = None  # [K] int64, rows of words that are never found
    penalty: Penalty | None = None
    num_expanded: int = 0  # (position, node) pairs so far
    chosen: Tensor | None = None  # [P] int64, which of the caller's positions these are, if not all

    @property
    def is_plain(self) -> bool:
        """Whether the probabilities of the words below a node sum to that of the node."""
        return self.penalty is None and self.excluded is None

    def select(self, position: Tensor) -> "Expander":
        """The expander of some positions [A]."""
        penalty = self.penalty
        if penalty is not None:
            penalty = Penalty(penalty.factor, penalty.row[position])
        hidden, chosen = self.hidden[position], self.chosen
        chosen = position if chosen is None else chosen[position]
        return replace(self, hidden=hidden, penalty=penalty, num_expanded=0, chosen=chosen)

    def log_bound(self, power: float) -> Tensor:
        """Upper bound [I] fp64 of log Σ q^power over the words below each node.

        q are the probabilities of the words given the node. For power ≥ 1, Σ q^power ≤ Σ q = 1;
        for power < 1 the sum is largest for equal q (Jensen's inequality): (number of
        words)^(1 - power).
        """
        return max(0.0, 1 - power) * self.tree.num_words_below.double().log()

    def expand(self, position: Tensor, node: Tensor, log_prob: Tensor) -> list[Children]:
        """Expands node [V] of log_prob [V] at position [V]: the children of each distinct node.

        The host waits for the device a number of times that does not depend on how many nodes there
        are. A log-probability that is not finite raises a ValueError.
        """
        order = node.argsort(stable=True)
        found, finite = [], []
        for each in visited_nodes(node[order][None], self.tree):
            visit, rows = order[each.visits], each.rows
            bias = None if self.bias is None else self.bias[rows]
            log_q = node_log_softmax(self.hidden[position[visit]], self.weight[rows], bias)
            finite.append(log_q.isfinite().all(dim=1))
            children = log_prob[visit, None] + log_q
            if self.penalty is not None:
                is_penalized = _among(self.penalty.row[position[visit]], rows)
                children = torch.where(is_penalized, self.penalty.applied(children), children)
            if self.excluded is not None:
                children.masked_fill_(_among(self.excluded[None], rows), LOWEST)
            items, only_words = self.tree.item_of_row[rows], rows.start >= self.tree.num_node_rows
            found.append(Children(visit, children, items, only_words))
        self.num_expanded += node.numel()
        if found:
            self._check_finite(torch.cat(finite), position[order])
        return found

    def all_words(self, position: Tensor) -> Tensor:
        """Log-probabilities [V, N] of all words at position [V], as `expand` has them."""
        log_prob = word_log_prob(self.hidden[position], self.weight, self.tree, self.bias)
        self._check_finite(log_prob.isfinite().all(dim=1), position)
        self.num_expanded += position.numel() * self.tree.num_nodes
        if self.penalty is not None:
            word = self.tree.item_of_row[self.penalty.row[position]]
            index = (self.penalty.row[position] >= 0).nonzero(as_tuple=True)
            index = (index[0], word[index])
            log_prob[index] = self.penalty.applied(log_prob[index])
        if self.excluded is not None:
            log_prob[:, self.tree.item_of_row[self.excluded]] = LOWEST
        return log_prob

    def _check_finite(self, finite: Tensor, position: Tensor) -> None:
        if not bool(finite.all()):
            self.refuse(int(position[~finite][0]))

    def refuse(self, position: int) -> NoReturn:
        """Raise the ValueError for a position."""
        if self.chosen is not None:
            position = int(self.chosen[position])
        wrong = self.first_position + position
        raise ValueError(f"log-probabilities of position {wrong} are not finite")


def _among(row: Tensor, children: slice) -> Tensor:
    """Which of a node's children [V', M] are among the rows [V', L], as bool."""
    num = children.stop - children.start
    column = row - children.start
    column = column.where((column >= 0) & (column < num), num)
    among = torch.zeros(len(row), num + 1, dtype=torch.bool, device=row.device)
    return among.scatter_(1, column, True)[:, :num]


def pack(children: Sequence[Children], like: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenates children row by row: log_prob and item, both [rows of `like`, width].

    Shorter rows are padded with -∞ and `ABSENT`. `like` has the dtype and device of log_prob.
    """
    num_rows = len(like)
    used = torch.zeros(num_rows, dtype=torch.int64, device=like.device)
    columns = []
    for row, log_prob, *_ in children:
        num_items = log_prob.shape[1]
        columns.append(used[row, None] + torch.arange(num_items, device=like.device))
        used[row] += num_items
    width = int(used.max()) if children else 0
    packed_log_prob = like.new_full((num_rows, width), -torch.inf)
    packed_item = used.new_full((num_rows, width), ABSENT)
    for (row, log_prob, item, _), column in zip(children, columns, strict=True):
        packed_log_prob[row[:, None], column] = log_prob
        packed_item[row[:, None], column] = item
    return packed_log_prob, packed_item
