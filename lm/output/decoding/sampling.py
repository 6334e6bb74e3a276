"""Sampling from a tree of softmaxes, exactly, by opening a few nodes for each position.

Decides how random numbers become words; which words top-k and top-p leave is decided in `search`.

At temperature T a word has probability P(w)^β / Z, with β = 1/T and Z = Σ P(w)^β over *all* words,
which is not what a temperature in each softmax of the tree would give. Write S_n = Σ q^β over the
words below node n, q being their probabilities given n, so that n ought to be drawn with weight
P(n)^β S_n. S_n is not known before everything below n has been opened, but S_n ≤ u_n
(`Opener.log_bound`). So every item known has a weight b that is its true weight or more:

    b_w = P(w)^β,    b_n = P(n)^β u_n.                                                     (1)

A trial draws an item i with probability b_i / Σ b. A word ends it. A node is opened: its children
have weights (1), and their total t ≤ b_n; with probability t / b_n the trial goes on to one of
them, drawn in proportion to the weights, and else it has failed. Multiplied along the path of a
word all totals and bounds cancel, so that a trial yields

    word w with probability P(w)^β / Σ b,                                                  (2)

whatever had been opened before. Hence trials repeated until one succeeds give P^β / Z exactly, even
though each trial knows what the failed ones have opened: t takes the place of b_n, so that failures
die out. For T = 1 bounds and totals agree (u_n = 1 = S_n), no trial fails, and a word costs one
visit for each node on its path.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.decoding.expansion import Exposed, Opener, pack
from lm.output.decoding.search import nuclei, topk


class Uniforms:
    """Random numbers in [0, 1), fp64; each position consumes its own, whatever the others do."""

    def __init__(
        self, num_positions: int, device: torch.device, generator: torch.Generator | None
    ) -> None:
        self._generator = generator
        self._numbers = torch.empty(0, num_positions, dtype=torch.float64, device=device)
        self._num_used = torch.zeros(num_positions, dtype=torch.int64, device=device)

    def draw(self, position: Tensor) -> Tensor:
        """The next number of each of some distinct positions [V] of the batch, one at least."""
        used = self._num_used[position]
        self._num_used[position] += 1
        if int(used.max()) == self._numbers.shape[0]:
            self._grow()
        return self._numbers[used, position]

    def _grow(self) -> None:
        """Twice as many numbers for each position as before."""
        num_rows, num_positions = self._numbers.shape
        device = self._numbers.device if self._generator is None else self._generator.device
        shape, dtype = (max(1, num_rows), num_positions), self._numbers.dtype
        new = torch.rand(shape, generator=self._generator, dtype=dtype, device=device)
        self._numbers = torch.cat([self._numbers, new.to(self._numbers.device)])


def draw(log_weight: Tensor, uniform: Tensor) -> Tensor:
    """A column for each row of log_weight [V, M] fp64 in proportion to the weights: inverse CDF.

    A uniform number below 1 times the total rounds to less than the total, so a column of weight 0
    is never drawn.
    """
    cumulative = (log_weight - log_weight.amax(dim=1, keepdim=True)).exp().cumsum(dim=1)
    point = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).squeeze(1)


def sample_topk(opener: Opener, uniforms: Uniforms, power: float, k: int, top_p: float) -> Tensor:
    """A word [P] of the k most probable, and of the nucleus among these (`top_p` of Σ P^power)."""
    best = topk(opener, k)
    log_weight = power * best.log_prob.double()
    if top_p < 1:
        before = F.pad(log_weight.softmax(dim=1).cumsum(dim=1)[:, :-1], (1, 0))
        log_weight = log_weight.masked_fill(before >= top_p, -torch.inf)
    position = torch.arange(opener.num_positions, device=best.word.device)
    column = draw(log_weight, uniforms.draw(opener.num_before + position))
    return best.word[position, column]


def sample_nucleus(opener: Opener, uniforms: Uniforms, power: float, top_p: float) -> Tensor:
    """A word [P] of the nucleus: the most probable words that make `top_p` of Σ P^power."""
    word = torch.empty(opener.num_positions, dtype=torch.int64, device=opener.hidden.device)
    for position, nucleus in nuclei(opener, power, top_p):
        column = draw(
            power * nucleus.log_prob.double(), uniforms.draw(opener.num_before + position)
        )
        word[position] = nucleus.word.gather(1, column[:, None]).squeeze(1)
    return word


class _Trial(NamedTuple):
    """What has been drawn for some positions [V]; `column` is the item's among the known items."""

    position: Tensor
    item: Tensor
    log_prob: Tensor
    log_weight: Tensor
    column: Tensor

    def where(self, mask: Tensor) -> "_Trial":
        return _Trial(*(tensor[mask] for tensor in self))


class RejectionSampler:
    """Draws words from P^power by trials (2).

    Known items of a position are the children of the root, and those of nodes opened later that
    have nodes among their children. A node of words alone only changes its weight; should it be
    drawn again, it is opened again. So a tree of two levels needs memory for its classes, not for
    the words that failed trials have met.
    """

    def __init__(self, opener: Opener, uniforms: Uniforms, power: float) -> None:
        self._opener, self._uniforms, self._power = opener, uniforms, power
        self._log_bound = opener.log_bound(power)
        position = torch.arange(opener.num_positions, device=opener.hidden.device)
        (root,) = opener.open(position, torch.zeros_like(position))
        self._log_prob = root.log_prob
        self._item = root.item.expand(opener.num_positions, -1)
        self._log_weight = self._weigh(self._log_prob, self._item)
        self._word = torch.empty_like(position)

    def sample(self) -> Tensor:
        """A word for each position, [P]."""
        position = torch.arange(self._opener.num_positions, device=self._word.device)
        while position.numel():
            column = draw(self._log_weight[position], self._uniform(position))
            position = self._go_on(self._known(position, column))
        return self._word

    def _uniform(self, position: Tensor) -> Tensor:
        return self._uniforms.draw(self._opener.num_before + position)

    def _known(self, position: Tensor, column: Tensor) -> _Trial:
        item, log_prob, log_weight = (
            known[position, column] for known in (self._item, self._log_prob, self._log_weight)
        )
        return _Trial(position, item, log_prob, log_weight, column)

    def _go_on(self, trial: _Trial) -> Tensor:
        """Carry trials through to a word or failure; returns the positions that have failed."""
        failed = [trial.position[:0]]
        while True:
            is_word = trial.item >= 0
            self._word[trial.position[is_word]] = trial.item[is_word]
            trial = trial.where(~is_word)
            if not trial.position.numel():
                return torch.cat(failed)
            trial, accepted = self._open(trial)
            failed.append(trial.position[~accepted])
            trial = trial.where(accepted)

    def _open(self, trial: _Trial) -> tuple[_Trial, Tensor]:
        """Open the nodes drawn: trials with a child in each node's place, and which may go on."""
        uniform = self._uniform(trial.position)
        accepted = torch.ones_like(uniform, dtype=torch.bool)
        below = _Trial(trial.position, *(torch.empty_like(tensor) for tensor in trial[1:]))
        exposed = []
        for visit, log_q, item in self._opener.open(trial.position, ~trial.item):
            opened, point = trial.where(visit), uniform[visit]
            log_prob = opened.log_prob[:, None] + log_q
            log_weight = self._weigh(log_prob, item)
            if self._power != 1:
                accepted[visit], point = self._accept(opened, log_weight, point)
                if bool((item < 0).any()):
                    self._log_weight[opened.position, opened.column] = -torch.inf
                    exposed.append(Exposed(opened.position, log_prob, item.expand_as(log_prob)))
            child = draw(log_weight, point)
            below.item[visit] = item[child]
            below.log_prob[visit] = log_prob.gather(1, child[:, None]).squeeze(1)
            below.log_weight[visit] = log_weight.gather(1, child[:, None]).squeeze(1)
            below.column[visit] = child + self._log_weight.shape[1]
        if exposed:
            self._expose(exposed)
        return below, accepted

    def _accept(self, opened: _Trial, log_weight: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Which trials [V] go on below a node whose children have log_weight [V, M].

        The total takes the place of the bound among the known items. The numbers of the trials that
        go on are returned too, made uniform again.
        """
        log_total = log_weight.logsumexp(dim=1)
        self._log_weight[opened.position, opened.column] = log_total
        accept = (log_total - opened.log_weight).exp().clamp(max=1)
        accepted = uniform < accept
        return accepted, torch.where(accepted, uniform / accept, 0)

    def _expose(self, exposed: list[Exposed]) -> None:
        """Add children to the known items.

        A position opens one node at a time, so that its new items begin in the first new column.
        """
        log_prob, item = pack(exposed, self._opener.num_positions, like=self._log_prob)
        self._log_weight = torch.cat([self._log_weight, self._weigh(log_prob, item)], dim=1)
        self._log_prob = torch.cat([self._log_prob, log_prob], dim=1)
        self._item = torch.cat([self._item, item], dim=1)

    def _weigh(self, log_prob: Tensor, item: Tensor) -> Tensor:
        """Logarithm of (1), fp64."""
        log_bound = torch.where(item < 0, self._log_bound[(~item).clamp(min=0)], 0)
        return self._power * log_prob.double() + log_bound
