"""Best-first search over a tree of softmaxes, for top-k, top-p and min-p.

No word below a node is more probable than the node itself. A node therefore needs to be expanded
only while it is at least as probable as the least probable word of the result: few nodes if most of
the probability lies in a few classes, nearly all if it is flat, as in an untrained layer. Once the
nodes of a position have more than a small part of all rows, all its words are evaluated in one
product: no search costs much more than that.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.decoding.expansion import ABSENT, Children, Expander, pack

MOST_COST = 1 / 16
"""What a position's search costs node by node, at most, relative to all words in one product."""
EXPANSION_COST, SOFTMAX_COST = 512, 24
"""Costs of expanding a node, and of one softmax among those of all words, in rows read."""
BLOCK_ELEMENTS = 1 << 23
"""Most log-probabilities of all words in memory at once."""


class TopK(NamedTuple):
    """The most probable words of each position in descending order, ties by the lowest word."""

    log_prob: Tensor  # [..., k] in at least fp32, in nats
    word: Tensor  # [..., k] int64

    def select(self, rows: Tensor) -> "TopK":
        """The words of some positions."""
        return TopK(self.log_prob[rows], self.word[rows])


class _Frontier:
    """Nodes [A, F] not expanded yet, for the A positions still searched; at first the roots.

    The log-probability is -∞ where there is no node.
    """

    def __init__(self, expander: Expander) -> None:
        self._expander = expander
        self.position = torch.arange(len(expander.hidden), device=expander.hidden.device)
        self.log_prob = expander.hidden.new_zeros(len(self.position), 1)
        self.node = torch.zeros_like(self.log_prob, dtype=torch.int64)
        self.cost = torch.zeros_like(self.position)  # so far

    def select(self, rows: Tensor) -> None:
        """Drops all positions but rows [A] bool."""
        found = (self.position, self.log_prob, self.node, self.cost)
        self.position, self.log_prob, self.node, self.cost = (tensor[rows] for tensor in found)

    def cost_with(self, chosen: Tensor) -> Tensor:
        """The cost [A] once the chosen nodes [A, F] bool are expanded."""
        cost = self._expander.tree.num_children[self.node] + EXPANSION_COST
        return self.cost + (cost * chosen).sum(dim=1)

    def expand(self, chosen: Tensor) -> TopK:
        """Expands the chosen nodes [A, F] bool, adds child nodes and returns the words found."""
        self.cost = self.cost_with(chosen)
        row, column = chosen.nonzero(as_tuple=True)
        node, above = self.node[row, column], self.log_prob[row, column]
        words, nodes = [], []
        for visit, log_prob, item, only_words in self._expander.expand(
            self.position[row], node, above
        ):
            items = item.expand(visit.numel(), -1)
            if only_words:
                words.append(Children(row[visit], log_prob, items))
                continue
            is_word = item >= 0
            words.append(Children(row[visit], log_prob[:, is_word], items[:, is_word]))
            nodes.append(Children(row[visit], log_prob[:, ~is_word], ~items[:, ~is_word]))
        log_prob = self.log_prob.masked_fill(chosen, -torch.inf)
        if nodes:
            new_log_prob, new_node = pack(nodes, like=self.log_prob)
            log_prob = torch.cat([log_prob, new_log_prob], dim=1)
            new_node = new_node.masked_fill(new_node == ABSENT, 0)
            self.node = torch.cat([self.node, new_node], dim=1)
        self.log_prob = log_prob
        return TopK(*pack(words, like=self.log_prob))


def topk(expander: Expander, k: int) -> TopK:
    """The k most probable words of each position, log_prob and word [P, k].

    Node n must be expanded unless k words are more probable than n. Such a word has been found
    already or lies below a node m that is more probable than n, which can hold at most P(m) / P(n)
    of them. The best node of each position is thus one to expand.
    """

    def needed(frontier: _Frontier, found: Tensor) -> tuple[Tensor, Tensor]:
        log_prob, column = frontier.log_prob.topk(min(k, frontier.log_prob.shape[1]), dim=1)
        num_found = torch.searchsorted(-found, -log_prob)
        ratio = (log_prob - log_prob[:, :1]).double().exp()
        num_others = (ratio.cumsum(dim=1) - ratio) / ratio
        chosen = (log_prob > -torch.inf) & (num_found + num_others < k)
        chosen = torch.zeros_like(frontier.node, dtype=torch.bool).scatter_(1, column, chosen)
        return chosen, torch.full_like(frontier.position, k)

    best = TopK(
        expander.hidden.new_empty(len(expander.hidden), k),
        torch.empty(len(expander.hidden), k, dtype=torch.int64, device=expander.hidden.device),
    )
    for position, words in _sets(expander, needed, max_words=k):
        best.log_prob[position], best.word[position] = words
    return best


def topk_of_all_words(
    expander: Expander, position: Tensor, k: int
) -> Iterator[tuple[Tensor, TopK]]:
    """Blocks of some positions [A], and their k most probable words, by one product."""
    for block, log_prob in _log_prob_of_all(expander, position):
        every = torch.arange(log_prob.shape[1], device=log_prob.device).expand(len(log_prob), -1)
        yield block, _best(TopK(log_prob, every), k)


def nuclei(expander: Expander, power: float, top_p: float) -> Iterator[tuple[Tensor, TopK]]:
    """The smallest sets of most probable words whose share of Z = Σ P^power reaches `top_p`.

    Yields positions [A] and their words [A, size]; smaller sets are padded with log_prob -∞.

    Z lies between `low`, the mass of the words found, and `high`, which adds the upper bounds of
    the nodes (which may be exact). Let j + 1 be the smallest number of words, most probable first,
    that reach top_p · high. These contain every word of the nucleus found so far; they are the
    nucleus if no node can hold a word as probable as the last of them and j words do not reach
    top_p · low. Otherwise, the nodes to expand are:

    - if the words found do not reach top_p · high: those without which they never will;
    - else those that can hold a word as probable as the last of the j + 1;
    - if there are none: the heaviest ones, with at least half of high - low.
    """
    exact = power == 1 and expander.is_plain

    def needed(frontier: _Frontier, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        node_log_weight = (
            power * frontier.log_prob.double() + expander.log_bound(power)[frontier.node]
        )
        sorted_log_prob = log_prob
        if bool((log_prob[:, 1:] > log_prob[:, :-1]).any()):
            sorted_log_prob = log_prob.sort(dim=1, descending=True).values
        sorted_log_prob = F.pad(sorted_log_prob, (0, 1), value=-torch.inf)
        log_weight = power * sorted_log_prob.double()
        largest = torch.cat([log_weight[:, :1], node_log_weight], dim=1).amax(dim=1, keepdim=True)
        words_mass = (log_weight[:, :-1] - largest).exp().cumsum(dim=1)
        mass = F.pad(words_mass, (1, 0))  # [A, M + 1], of the first 0 … M words
        node_mass = (node_log_weight - largest).exp()
        gap = node_mass.sum(dim=1, keepdim=True)
        high = mass[:, -1:] + gap
        low = high if exact else mass[:, -1:]

        j = (mass[:, 1:] < top_p * high).sum(dim=1, keepdim=True)
        reached = j < log_prob.shape[1]
        can_hold_word = reached & (frontier.log_prob >= sorted_log_prob.gather(1, j))
        settled = reached & ~can_hold_word.any(dim=1, keepdim=True)
        uncertain = settled & (mass.gather(1, j) >= top_p * low)
        max_rest = torch.where(reached, gap / 2, (1 - top_p) * high)  # of nodes not chosen
        heaviest = node_mass.sort(dim=1, descending=True).values
        remaining = heaviest.flip(1).cumsum(dim=1).flip(1)
        last = (remaining > max_rest).sum(dim=1, keepdim=True).clamp(min=1) - 1
        is_heavy = node_mass >= heaviest.gather(1, last)
        chosen = can_hold_word | ((~reached | uncertain) & is_heavy)
        return chosen & (frontier.log_prob > -torch.inf), j.squeeze(1) + 1

    return _sets(expander, needed)


def within_ratio(expander: Expander, power: float, min_p: float) -> Iterator[tuple[Tensor, TopK]]:
    """The words with P^power ≥ min_p · max P^power, 0 < min_p ≤ 1; yields as `nuclei` does.

    Expands a node only if it is at least that probable itself.
    """

    def needed(frontier: _Frontier, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        largest = torch.cat([log_prob, frontier.log_prob], dim=1).amax(dim=1, keepdim=True)
        cut = power * largest.double() + math.log(min_p)  # at least the final one
        chosen = power * frontier.log_prob.double() >= cut
        return chosen, (power * log_prob.double() >= cut).sum(dim=1)

    return _sets(expander, needed)


def _sets(
    expander: Expander,
    needed: Callable[[_Frontier, Tensor], tuple[Tensor, Tensor]],
    max_words: int | None = None,
) -> Iterator[tuple[Tensor, TopK]]:
    """Sets of most probable words, of at most `max_words`.

    `needed` returns, for the log-probabilities [A, M] of the words found, the nodes to expand
    [A, F] bool, and where there are none, the size of the set [A].
    """
    frontier, tree = _Frontier(expander), expander.tree
    most = MOST_COST * (tree.num_rows + SOFTMAX_COST * tree.num_nodes)
    words = frontier.expand(torch.ones_like(frontier.log_prob, dtype=torch.bool))
    while frontier.position.numel():
        words = words if max_words is None else _best(words, max_words)
        chosen, size = needed(frontier, words.log_prob)
        active = chosen.any(dim=1)
        done = ~active
        if bool(done.any()):
            yield frontier.position[done], first(_sorted(words.select(done)), size[done])
        many = active & (frontier.cost_with(chosen) > most)
        yield from _of_all_words(expander, frontier.position[many], needed, max_words)
        active &= ~many
        frontier.select(active)
        if frontier.position.numel():
            more = frontier.expand(chosen[active])
            both = zip(words.select(active), more, strict=True)
            words = TopK(*(torch.cat(tensors, dim=1) for tensors in both))


def _of_all_words(
    expander: Expander,
    position: Tensor,
    needed: Callable[[_Frontier, Tensor], tuple[Tensor, Tensor]],
    max_words: int | None,
) -> Iterator[tuple[Tensor, TopK]]:
    """The sets of `_sets` for position [A], from the log-probabilities of all words."""
    if max_words is not None:
        yield from topk_of_all_words(expander, position, max_words)
        return
    for block, log_prob in _log_prob_of_all(expander, position):
        words = TopK(*log_prob.sort(dim=1, descending=True, stable=True))
        frontier = _Frontier(expander)
        frontier.select(block)
        frontier.log_prob = torch.full_like(frontier.log_prob, -torch.inf)  # no node is left
        yield block, first(words, needed(frontier, words.log_prob)[1])


def _log_prob_of_all(expander: Expander, position: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of some positions, and the log-probabilities of all their words."""
    for block in torch.split(position, max(1, BLOCK_ELEMENTS // expander.tree.vocab_size)):
        if block.numel():
            yield block, expander.all_words(block)


def first(words: TopK, size: Tensor) -> TopK:
    """The first `size` [A] of some words in order, padded with log_prob -∞."""
    largest = int(size.max())
    log_prob, word = (each[:, :largest] for each in words)
    beyond = torch.arange(largest, device=size.device) >= size[:, None]
    return TopK(log_prob.masked_fill(beyond, -torch.inf), word)


def _best(words: TopK, k: int) -> TopK:
    """The k best of some words [A, M], or all of them, in order."""
    if words.word.shape[1] > k:
        values, column = words.log_prob.topk(k + 1, dim=1)
        last = values[:, k]
        if not bool(((last == values[:, k - 1]) & (last > -torch.inf)).any()):
            column = column[:, :k]
            words = TopK(words.log_prob.gather(1, column), words.word.gather(1, column))
    log_prob, word = _sorted(words)
    return TopK(log_prob[:, :k], word[:, :k])


def _sorted(words: TopK) -> TopK:
    """The words [A, M] in order."""
    word, order = words.word.sort(dim=1)
    log_prob = words.log_prob.gather(1, order)
    log_prob, order = log_prob.sort(dim=1, descending=True, stable=True)
    return TopK(log_prob, word.gather(1, order))
