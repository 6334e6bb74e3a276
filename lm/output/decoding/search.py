"""Best-first search over a tree of softmaxes: the most probable words without looking at all.

No word below a node is more probable than the node, so a node needs to be opened only while it is
at least as probable as the last word that still counts. Decides which nodes are opened, for the k
most probable words and for the nucleus of top-p.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.decoding.expansion import ABSENT, Exposed, Opener, pack


class TopK(NamedTuple):
    """The most probable words of each position in descending order, ties by the lowest word.

    Attributes:
        log_prob: [..., k].
        word: [..., k] int64.
    """

    log_prob: Tensor
    word: Tensor


class _Frontier:
    """Nodes exposed and not opened yet, of the A positions still searched; at first the roots.

    Attributes:
        position: [A] int64.
        log_prob: [A, F]; -∞ where there is no node.
        node: [A, F] int64.
    """

    def __init__(self, opener: Opener) -> None:
        device, num_positions = opener.hidden.device, opener.num_positions
        self._opener = opener
        self.position = torch.arange(num_positions, device=device)
        self.log_prob = torch.zeros(num_positions, 1, dtype=opener.dtype, device=device)
        self.node = torch.zeros(num_positions, 1, dtype=torch.int64, device=device)

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the positions alone, rows [A] bool."""
        self.position = self.position[rows]
        self.log_prob = self.log_prob[rows]
        self.node = self.node[rows]

    def open(self, chosen: Tensor, most: int | None = None) -> TopK:
        """Open the chosen nodes [A, F] bool: nodes below join the frontier, words are returned.

        Args:
            most: return no more than so many words of a node, the most probable.
        """
        row, column = chosen.nonzero(as_tuple=True)
        above = self.log_prob[row, column]
        words, nodes = [], []
        for visit, log_q, item in self._opener.open(self.position[row], self.node[row, column]):
            log_prob = above[visit, None] + log_q
            is_word = item >= 0
            below = TopK(log_prob[:, is_word], item[is_word].expand(visit.numel(), -1))
            words.append(Exposed(row[visit], *(below if most is None else _best(below, most))))
            node = ~item[~is_word].expand(visit.numel(), -1)
            nodes.append(Exposed(row[visit], log_prob[:, ~is_word], node))
        self.log_prob = self.log_prob.masked_fill(chosen, -torch.inf)
        num_rows = self.position.numel()
        log_prob, node = pack(nodes, num_rows, like=self.log_prob)
        node = node.masked_fill(node == ABSENT, 0)
        self.log_prob = torch.cat([self.log_prob, log_prob], dim=1)
        self.node = torch.cat([self.node, node], dim=1)
        return TopK(*pack(words, num_rows, like=self.log_prob))


def topk(opener: Opener, k: int) -> TopK:
    """The k most probable words [P, k], opening only nodes that are as probable as the k-th."""
    frontier = _Frontier(opener)
    shape = (opener.num_positions, k)
    log_prob = frontier.log_prob.new_full(shape, -torch.inf)
    best = TopK(log_prob, frontier.node.new_full(shape, ABSENT))
    while True:
        chosen = _certain(frontier.log_prob, best.log_prob[frontier.position], k)
        alive = chosen.any(dim=1)
        if not bool(alive.any()):
            return best
        frontier.keep(alive)
        words = frontier.open(chosen[alive], most=k)
        position = frontier.position
        merged = _best(_beside(_rows(best, position), words), k)
        best.log_prob[position], best.word[position] = merged


def _certain(node_log_prob: Tensor, best_log_prob: Tensor, k: int) -> Tensor:
    """Nodes [A, F] bool that best-first search is bound to open; the best of each position is one.

    It opens node n unless k words are more probable than n. Such a word is exposed already or lies
    below a node m that is more probable than n, which can hold P(m) / P(n) of them at most.
    """
    log_prob, column = node_log_prob.topk(min(k, node_log_prob.shape[1]), dim=1)
    num_words = torch.searchsorted(-best_log_prob, -log_prob)
    share = (log_prob - log_prob[:, :1]).double().exp()
    num_hidden_words = (share.cumsum(dim=1) - share) / share
    certain = (log_prob > -torch.inf) & (num_words + num_hidden_words < k)
    return torch.zeros_like(node_log_prob, dtype=torch.bool).scatter_(1, column, certain)


def nuclei(opener: Opener, power: float, top_p: float) -> Iterator[tuple[Tensor, TopK]]:
    """The smallest sets of most probable words whose share of Σ P^power reaches `top_p`.

    Yields:
        as they are found, positions [A] int64 and their words [A, size]; rows of smaller sets end
        in log_prob -∞.
    """
    frontier, log_bound = _Frontier(opener), opener.log_bound(power)
    words = frontier.open(torch.ones_like(frontier.log_prob, dtype=torch.bool))
    while frontier.position.numel():
        log_weight = power * frontier.log_prob.double() + log_bound[frontier.node]
        chosen, size = _undecided(frontier.log_prob, log_weight, words.log_prob, power, top_p)
        alive = chosen.any(dim=1)
        done = ~alive
        if bool(done.any()):
            yield frontier.position[done], _first(_rows(words, done), size[done])
        frontier.keep(alive)
        if frontier.position.numel():
            words = _beside(_rows(words, alive), frontier.open(chosen[alive]))


def _undecided(
    node_log_prob: Tensor,
    node_log_weight: Tensor,
    word_log_prob: Tensor,
    power: float,
    top_p: float,
) -> tuple[Tensor, Tensor]:
    """Nodes to open [A, F] bool, and, for the positions without any, the size of the nucleus [A].

    Z = Σ P^power lies between low, the mass of the words exposed, and high, which adds the bounds
    of the nodes (exact for power 1). Let j + 1 be the least number of words, in order, that reach
    top_p · high. They contain every word of the nucleus that is exposed, and are the nucleus once
    no node can hold a word as probable as the last of them and j words do not reach top_p · low.
    Until then are opened: if no number of words reaches it, the nodes without which none ever will;
    else the nodes that can hold such a word; if there are none, the larger half of high - low.
    """
    sorted_log_prob = word_log_prob.sort(dim=1, descending=True).values
    sorted_log_prob = F.pad(sorted_log_prob, (0, 1), value=-torch.inf)
    log_weight = power * sorted_log_prob.double()
    largest = torch.cat([log_weight[:, :1], node_log_weight], dim=1).amax(dim=1, keepdim=True)
    words_mass = (log_weight[:, :-1] - largest).exp().cumsum(dim=1)
    mass = F.pad(words_mass, (1, 0))  # [A, M + 1], of the first 0 … M words
    node_mass = (node_log_weight - largest).exp()
    gap = node_mass.sum(dim=1, keepdim=True)
    high = mass[:, -1:] + gap
    low = high if power == 1 else mass[:, -1:]

    j = (mass[:, 1:] < top_p * high).sum(dim=1, keepdim=True)
    reached = j < word_log_prob.shape[1]
    within_reach = reached & (node_log_prob >= sorted_log_prob.gather(1, j))
    settled = reached & ~within_reach.any(dim=1, keepdim=True)
    uncertain = settled & (mass.gather(1, j) >= top_p * low)
    left = torch.where(reached, gap / 2, (1 - top_p) * high)
    chosen = within_reach | ((~reached | uncertain) & _heaviest(node_mass, left))
    return chosen & (node_log_prob > -torch.inf), j.squeeze(1) + 1


def _heaviest(mass: Tensor, left: Tensor) -> Tensor:
    """The heaviest nodes [A, F] bool, at least one: the others do not exceed `left` [A, 1]."""
    descending = mass.sort(dim=1, descending=True).values
    from_here_on = descending.flip(1).cumsum(dim=1).flip(1)
    needed = (from_here_on > left).sum(dim=1, keepdim=True).clamp(min=1)
    return mass >= descending.gather(1, needed - 1)


def _best(words: TopK, k: int) -> TopK:
    """The k best of some words [A, M], or all of them, in order."""
    if words.word.shape[1] > k:
        values, column = words.log_prob.topk(k + 1, dim=1)
        last = values[:, k]
        if not bool(((last == values[:, k - 1]) & (last > -torch.inf)).any()):
            column = column[:, :k]
            words = TopK(words.log_prob.gather(1, column), words.word.gather(1, column))
    return _first(words, k)


def _first(words: TopK, size: int | Tensor) -> TopK:
    """The first `size` words in order, for one size or a size [A] for each row."""
    word, order = words.word.sort(dim=1)
    log_prob = words.log_prob.gather(1, order)
    log_prob, order = log_prob.sort(dim=1, descending=True, stable=True)
    word = word.gather(1, order)
    if isinstance(size, int):
        return TopK(log_prob[:, :size], word[:, :size])
    longest = int(size.max())
    beyond = torch.arange(longest, device=size.device) >= size[:, None]
    return TopK(log_prob[:, :longest].masked_fill(beyond, -torch.inf), word[:, :longest])


def _rows(words: TopK, rows: Tensor) -> TopK:
    return TopK(words.log_prob[rows], words.word[rows])


def _beside(left: TopK, right: TopK) -> TopK:
    log_prob, word = (torch.cat(both, dim=1) for both in zip(left, right, strict=True))
    return TopK(log_prob, word)
