"""Exact draws from a tree of softmaxes, expanding a few nodes per position.

At temperature T word w has probability P(w)^β / Z with β = 1/T and Z = Σ P(w)^β over *all* words,
which differs from applying the temperature in each softmax of the tree. Let S_n = Σ q^β over the
words below node n, where q are their probabilities given n. The exact weight of n is P(n)^β S_n,
but S_n is known only once everything below n has been expanded. It has an upper bound u_n
(`Expander.log_bound`), so every known item has a weight b that is at least the exact one:

    b_w = P(w)^β,    b_n = P(n)^β u_n.                                                     (1)

A trial draws item i with probability b_i / Σ b. A word ends the trial. A node is expanded: its
children have weights (1) with total t ≤ b_n; with probability t / b_n the trial continues with one
of them, drawn in proportion to the weights, otherwise it is rejected. Along the path of a word all
totals and bounds cancel, so a trial yields

    word w with probability P(w)^β / Σ b,                                                  (2)

whatever has been expanded before. So trials repeated until one succeeds sample P^β / Z exactly, and
each uses what the rejected ones have expanded: t replaces b_n. For T = 1 no trial is rejected
(u_n = 1 = S_n), and only the nodes on the path of the word are expanded.

A repetition penalty θ gives words that occurred before the weight P^(βθ) instead of P^β. Since
θ ≥ 1 the bounds (1) remain valid, and nothing else changes; at T = 1 trials may then be rejected.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.decoding.expansion import Children, Expander, pack
from lm.output.decoding.uniforms import Uniforms


def draw(log_weight: Tensor, uniform: Tensor) -> Tensor:
    """A column [V] for each row of log_weight [V, M] fp64, in proportion to the weights.

    Inverts the cumulative sum at uniform [V] in [0, 1). A column of weight 0 is never drawn: a
    number below 1 times the total rounds to less than the total.
    """
    cumulative = (log_weight - log_weight.amax(dim=1, keepdim=True)).exp().cumsum(dim=1)
    point = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).squeeze(1)


class _Trial(NamedTuple):
    """The items drawn for some positions [V]; `column` is the index among the known items."""

    position: Tensor
    item: Tensor
    log_prob: Tensor
    log_weight: Tensor
    column: Tensor

    def select(self, rows: Tensor) -> "_Trial":
        return _Trial(*(tensor[rows] for tensor in self))


def draw_words(expander: Expander, seeds: Tensor, power: float) -> Tensor:
    """A word for each position [P], drawn from P^power; seeds [P] int64."""
    return RejectionSampler(expander, Uniforms(seeds), power).sample()


class RejectionSampler:
    """Draws words from P^power by trials (2).

    The known items of a position are the children of the root and of those nodes expanded later
    that have nodes among their children. A node with words alone only changes its weight; if drawn
    again, it is expanded again. A tree of two levels thus takes memory for its classes, not for the
    words met by rejected trials.
    """

    def __init__(self, expander: Expander, uniforms: Uniforms, power: float) -> None:
        self._expander, self._uniforms, self._power = expander, uniforms, power
        self._log_bound = expander.log_bound(power)
        self._exact = power == 1 and expander.is_plain
        position = torch.arange(len(expander.hidden), device=expander.hidden.device)
        root_log_prob = expander.hidden.new_zeros(len(position))
        (root,) = expander.expand(position, torch.zeros_like(position), root_log_prob)
        self._log_prob, self._item = root.log_prob, root.item.expand(len(position), -1)
        self._log_weight = self._weigh(self._log_prob, self._item)
        self._word = torch.empty_like(position)

    def sample(self) -> Tensor:
        """A word for each position [P]."""
        position = torch.arange(len(self._word), device=self._word.device)
        while position.numel():
            column = draw(self._log_weight[position], self._uniforms.draw(position))
            known = (self._item, self._log_prob, self._log_weight)
            item, log_prob, log_weight = (tensor[position, column] for tensor in known)
            self._word[position] = item  # nodes are replaced below
            trial = _Trial(position, item, log_prob, log_weight, column).select(item < 0)
            rejected = [position[:0]]
            while trial.position.numel():
                trial, accepted = self._expand(trial)
                rejected.append(trial.position[~accepted])
                self._word[trial.position] = trial.item
                trial = trial.select(accepted & (trial.item < 0))
            position = torch.cat(rejected)
        return self._word

    def _expand(self, trial: _Trial) -> tuple[_Trial, Tensor]:
        """Replaces each trial's node by one of its children; also, which trials are accepted."""
        uniform = self._uniforms.draw(trial.position)
        accepted = torch.ones_like(uniform, dtype=torch.bool)
        below = _Trial(trial.position, *(torch.empty_like(tensor) for tensor in trial[1:]))
        new_items = []
        expansions = self._expander.expand(trial.position, ~trial.item, trial.log_prob)
        for visit, log_prob, item, only_words in expansions:
            parent, point = trial.select(visit), uniform[visit]
            log_weight = self._weigh(log_prob, item)
            if not self._exact:
                log_total = log_weight.logsumexp(dim=1)
                self._log_weight[parent.position, parent.column] = log_total  # was a bound
                share = (log_total - parent.log_weight).exp().clamp(max=1)
                accepted[visit] = point < share
                point = torch.where(accepted[visit], point / share, 0)  # uniform again
                if not only_words and bool((item < 0).any()):
                    self._log_weight[parent.position, parent.column] = -torch.inf
                    new_items.append(Children(parent.position, log_prob, item))
            child = draw(log_weight, point)
            below.item[visit] = item[child]
            below.log_prob[visit] = log_prob.gather(1, child[:, None]).squeeze(1)
            below.log_weight[visit] = log_weight.gather(1, child[:, None]).squeeze(1)
            # A position expands one node at a time: its new items start at the first new column.
            below.column[visit] = child + self._log_weight.shape[1]
        if new_items:
            log_prob, item = pack(new_items, like=self._log_prob)
            self._log_weight = torch.cat([self._log_weight, self._weigh(log_prob, item)], dim=1)
            self._log_prob = torch.cat([self._log_prob, log_prob], dim=1)
            self._item = torch.cat([self._item, item], dim=1)
        return below, accepted

    def _weigh(self, log_prob: Tensor, item: Tensor) -> Tensor:
        """Logarithm of (1), fp64."""
        log_bound = torch.where(item < 0, self._log_bound[(~item).clamp(min=0)], 0)
        return self._power * log_prob.double() + log_bound
