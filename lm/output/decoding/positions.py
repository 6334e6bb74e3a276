"""What decoding works on: positions of a batch, the layer's parameters, words that are left out."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.backends.nodes import node_logits
from lm.output.backends.verify import Kind
from lm.output.inputs import check_parameters, compute_dtype, followed_by_zeros
from lm.output.tree.class_tree import ClassTree

LEAST = -1e30
"""Least log-probability with a penalty, whose product with a power is finite."""


def checked_hidden(hidden: Tensor, weight: Tensor, tree: ClassTree, bias: Tensor | None) -> Tensor:
    """The hidden vectors [..., H] as [P, W], followed by zeros, in at least fp32."""
    check_parameters(hidden, weight, tree, bias)
    dtype = compute_dtype(torch.promote_types(hidden.dtype, weight.dtype))
    if bias is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
    flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    return followed_by_zeros(flat, weight.shape[1])


def word_log_prob(hidden: Tensor, weight: Tensor, tree: ClassTree, bias: Tensor | None) -> Tensor:
    """Log-probabilities [P, N] of all words: all logits in one product, log-softmaxes summed.

    The number of operations does not depend on the number of nodes, and grows with the logarithm of
    the depth.
    """
    arrays, num_positions = tree.arrays, hidden.shape[0]
    logits = node_logits(hidden, weight, bias)
    lengths = arrays.num_children.repeat(num_positions)

    def of_nodes(values: Tensor, reduction: str) -> Tensor:
        """The maximum or sum [P, I] of the values [P, R] of each node's children."""
        flat = values.flatten()
        reduced = torch.segment_reduce(flat, reduction, lengths=lengths, unsafe=True)
        return reduced.view(num_positions, tree.num_nodes)

    node_of_row = arrays.node_of_row
    shifted = logits - of_nodes(logits.detach(), "max").index_select(1, node_of_row)
    lse = of_nodes(shifted.exp(), "sum").log()
    row = arrays.row_of_node[1:]
    parent = node_of_row[row]
    above = shifted.index_select(1, row) - lse.index_select(1, parent)
    above, ancestor = F.pad(above, (1, 0)), F.pad(parent, (1, 0))  # the root's log-probability is 0
    for _ in range((max(tree.depth, 2) - 2).bit_length()):  # sums over 2, 4, 8 … nodes of a path
        above, ancestor = above + above.index_select(1, ancestor), ancestor[ancestor]
    log_prob = shifted + (above - lse).index_select(1, node_of_row)
    return log_prob.index_select(1, arrays.row_of_word)


class Penalty(NamedTuple):
    """Multiplies the log-probabilities of some words."""

    factor: float  # θ ≥ 1
    row: Tensor  # [P, L] int64, rows of each position's words, which may repeat; -1 is skipped

    def applied(self, log_prob: Tensor) -> Tensor:
        """Log-probabilities of penalized words, at least `LEAST`; the product is one of fp64."""
        return (self.factor * log_prob.double()).clamp(min=LEAST).to(log_prob.dtype)


@dataclass
class Positions:
    """P positions and the layer whose words are searched or drawn there."""

    hidden: Tensor  # [P, W]
    weight: Tensor
    tree: ClassTree
    bias: Tensor | None = None
    shape: tuple[int, ...] = ()  # of the caller's batch, to name a position in a message
    excluded: Tensor | None = None
    """Rows of words that are never found: [K] int64, or [P, K] those of each position, or -1."""
    penalty: Penalty | None = None
    num_opened: int = 0  # (position, node) pairs whose softmax was evaluated, but by the kernel
    chosen: Tensor | None = None  # [P] int64, which of the caller's positions these are, if not all

    @property
    def is_plain(self) -> bool:
        """Whether the probabilities of the words below a node sum to that of the node."""
        return self.penalty is None and self.excluded is None

    @property
    def kind(self) -> Kind:
        """The dtypes, for which code is compiled."""
        weight = self.weight.dtype
        return Kind(self.hidden.dtype, weight, weight if self.bias is None else self.bias.dtype)

    def select(self, position: Tensor) -> "Positions":
        """Some positions [A]."""
        penalty = self.penalty
        if penalty is not None:
            penalty = Penalty(penalty.factor, penalty.row[position])
        excluded, chosen = self.excluded, self.chosen
        if excluded is not None and excluded.dim() > 1:
            excluded = excluded[position]
        chosen = position if chosen is None else chosen[position]
        changed: dict[str, Any] = {"excluded": excluded, "penalty": penalty, "chosen": chosen}
        return replace(self, hidden=self.hidden[position], num_opened=0, **changed)

    def all_words(self, position: Tensor) -> Tensor:
        """Log-probabilities [V, N] of all words at position [V], after exclusion and penalty.

        The host waits for the device, to refuse log-probabilities that are not finite.
        """
        log_prob = word_log_prob(self.hidden[position], self.weight, self.tree, self.bias)
        lowest, highest = log_prob.aminmax(dim=1)
        self.check_finite(lowest.isfinite() & highest.isfinite(), position)
        self.num_opened += position.numel() * self.tree.num_nodes
        if self.penalty is not None:
            index = self._words_of(self.penalty.row[position])
            log_prob[index] = self.penalty.applied(log_prob[index])
        excluded = self.excluded
        if excluded is not None and excluded.dim() > 1:
            log_prob[self._words_of(excluded[position])] = -torch.inf
        elif excluded is not None:
            log_prob[:, self.tree.item_of_row[excluded]] = -torch.inf
        return log_prob

    def _words_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Where the words of rows [V, L], -1 is skipped, are in log-probabilities [V, N]."""
        place = (rows >= 0).nonzero(as_tuple=True)
        return place[0], self.tree.item_of_row[rows[place]]

    def check_finite(self, finite: Tensor, position: Tensor) -> None:
        """Raise the ValueError for the first position [V] that is not finite [V]."""
        if not bool(finite.all()):
            self.refuse(int(position[~finite][0]))

    def refuse(self, position: int) -> NoReturn:
        """Raise the ValueError for a position."""
        if self.chosen is not None:
            position = int(self.chosen[position])
        wrong = torch.tensor(position, device="cpu")
        index = torch.unravel_index(wrong, self.shape) if self.shape else (wrong,)
        where = ", ".join(str(int(each)) for each in index)
        raise ValueError(f"log-probabilities of position {where} are not finite")
