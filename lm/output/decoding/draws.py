"""Exact sampling from a tree of softmaxes, expanding a few nodes per position.

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

Top-p restricts the draw to the nucleus, the smallest set of most probable words with a share p of
Z. The first drawn word that is in it has that distribution, and at least every second one is for
p ≥ 1/2. Word w is in it if the words before it, which are more probable, have less than p of Z.
That is often known from the nodes that are opened and bounds (1) of the others: for a probable
word, as most drawn ones are, once words with 1 - p of Z are known to come after it. So a draw opens
few nodes, where the set itself needs nearly all of a trained model's (half of the words for p = 0.9
are improbable).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from operator import index
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.decoding import compiled
from lm.output.decoding.expansion import Children, Expander, pack
from lm.output.decoding.search import TopK, nuclei, topk, within_ratio
from lm.output.decoding.uniforms import Uniforms, derive_seeds

_MIN_TEMPERATURE = 1e-200
"""Lower temperatures count as 0: log-probabilities divided by them would overflow fp64."""
_MAX_TEMPERATURE = 1e25
"""Higher temperatures count as this one, at which all words but those excluded are as probable."""
LEAST_SHARE = 0.5
"""Top-p from which on words are drawn until one is in the nucleus, on a CPU; on a GPU, each drawn
word would be waited for."""
NUM_DRAWS = 8
"""Words drawn at most; all are outside with a probability of 0.4 % or less."""


def word_ids(what: str, words: object) -> tuple[int, ...]:
    """Words given as integers: in a list, a tensor, an array or any other collection.

    Raises:
        ValueError: if they are none; `what` names them.
    """
    values = words.tolist() if hasattr(words, "tolist") else words
    if isinstance(values, Iterable):
        ids = list(values)
        if all(isinstance(word, SupportsIndex) for word in ids):
            return tuple(map(index, ids))
    raise ValueError(f"{what} must be token ids, got {words!r}")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution that words are drawn from, made of P(w) in this order.

    Words in `excluded` have probability 0, and the others are renormalised. Then:

    1. The repetition penalty θ replaces P(w) by P(w)^θ for words w that occurred before (each
       counts once), and renormalises.
    2. The temperature T replaces P(w) by P(w)^(1/T) and renormalises.
    3. `top_k` restricts the draw to the k most probable words.
    4. `top_p` restricts it to the smallest set of most probable words, among those left, with this
       share of their probability.
    5. `min_p` restricts it to words with P(w) ≥ min_p · max P.

    Example:
        >>> Sampling(temperature=0.8, min_p=0.05).top_k is None
        True

    Attributes:
        temperature: T ≥ 0; 0 gives the most probable word of step 1.
        top_k: at least 1; N or more, or None, restricts nothing.
        top_p: within (0, 1]; 1 or None restricts nothing.
        min_p: within [0, 1]; 0 or None restricts nothing.
        repetition_penalty: θ ≥ 1; 1 changes nothing.
        excluded: words that are never drawn, not all of them.

    Raises:
        ValueError: if an option is out of range.

    Source: repetition penalty: Keskar et al. 2019, section 4.1, with log-probabilities as scores;
    top-k: Fan, Lewis & Dauphin 2018; top-p: Holtzman et al. 2020; min-p: Nguyen et al. 2024.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    excluded: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            value, kind = getattr(self, name), Integral if name == "top_k" else Real
            may_be_none = name in ("top_k", "top_p", "min_p")
            if not (isinstance(value, kind) or (value is None and may_be_none)):
                expected = "an integer" if kind is Integral else "a number"
                raise ValueError(f"{name} must be {expected}, got {value!r}")
        object.__setattr__(self, "excluded", word_ids("excluded", self.excluded))
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be within (0, 1], got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be within [0, 1], got {self.min_p}")
        if not 1 <= self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty must be finite and at least 1, got {self.repetition_penalty}"
            )


def draw(log_weight: Tensor, uniform: Tensor) -> Tensor:
    """A column [V] for each row of log_weight [V, M] fp64, in proportion to the weights.

    Inverts the cumulative sum at uniform [V] in [0, 1). A column of weight 0 is never drawn: a
    number below 1 times the total rounds to less than the total.
    """
    cumulative = (log_weight - log_weight.amax(dim=1, keepdim=True)).exp().cumsum(dim=1)
    point = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).squeeze(1)


def sample_words(expander: Expander, seeds: Tensor, sampling: Sampling) -> Tensor:
    """A word for each position [P], at least one, with seeds [P] int64."""
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    if sampling.temperature < _MIN_TEMPERATURE:
        return topk(expander, 1).word.squeeze(1)
    power = 1 / min(sampling.temperature, _MAX_TEMPERATURE)
    if top_k is not None and top_k < expander.tree.vocab_size:
        sets = iter([(torch.arange(len(seeds), device=seeds.device), topk(expander, top_k))])
    elif top_p is not None and top_p < 1:
        if top_p >= LEAST_SHARE and not min_p and expander.hidden.device.type == "cpu":
            return _draw_from_nuclei(expander, seeds, power, top_p)
        sets, top_p = nuclei(expander, power, top_p), None
    elif min_p:
        sets = within_ratio(expander, power, min_p)
    elif compiled.is_usable(expander, "draws"):
        return compiled.draw_words(expander, seeds, power)
    else:
        return RejectionSampler(expander, Uniforms(seeds), power).sample()
    return _draw_from_sets(sets, seeds, power, top_p, min_p)


def _draw_from_sets(
    sets: Iterable[tuple[Tensor, TopK]],
    seeds: Tensor,
    power: float,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """A word for each position [P] from its set of most probable words."""
    word, uniforms = torch.empty_like(seeds), Uniforms(seeds)
    for position, words in sets:
        log_weight = power * words.log_prob.double()
        if top_p is not None and top_p < 1:
            before = F.pad(log_weight.softmax(dim=1).cumsum(dim=1)[:, :-1], (1, 0))
            log_weight = log_weight.masked_fill(before >= top_p, -torch.inf)
        if min_p:
            cut = log_weight[:, :1] + math.log(min_p)
            log_weight = log_weight.masked_fill(log_weight < cut, -torch.inf)
        column = draw(log_weight, uniforms.draw(position))
        word[position] = words.word.gather(1, column[:, None]).squeeze(1)
    return word


def _draw_from_nuclei(expander: Expander, seeds: Tensor, power: float, top_p: float) -> Tensor:
    """The first of `NUM_DRAWS` words drawn for a position [P] that is in its nucleus.

    Compiled loops open some nodes more than those on its path to tell whether it is, here all are
    opened that may have a word of the nucleus. If no word is in it, one of its words is drawn.
    """
    if compiled.is_usable(expander, "draws", searches=True):
        word = compiled.draw_words(expander, seeds, power, top_p, NUM_DRAWS)
    else:
        word = torch.full_like(seeds, -1)
        sampler = RejectionSampler(expander, Uniforms(seeds), power)
        for position, words in nuclei(expander, power, top_p):
            for _ in range(NUM_DRAWS):
                drawn = sampler.sample(position)
                is_same = (words.word == drawn[:, None]) & (words.log_prob > -torch.inf)
                is_found = is_same.any(dim=1)
                word[position[is_found]] = drawn[is_found]
                position, words = position[~is_found], words.select(~is_found)
    left = (word < 0).nonzero().squeeze(1)
    if len(left):
        rest = expander.select(left)
        sets = nuclei(rest, power, top_p)
        word[left] = _draw_from_sets(sets, derive_seeds(seeds[left], -1), power)
        expander.num_expanded += rest.num_expanded
    return word


class _Trial(NamedTuple):
    """The items drawn for some positions [V]; `column` is the index among the known items."""

    position: Tensor
    item: Tensor
    log_prob: Tensor
    log_weight: Tensor
    column: Tensor

    def select(self, rows: Tensor) -> "_Trial":
        return _Trial(*(tensor[rows] for tensor in self))


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

    def sample(self, positions: Tensor | None = None) -> Tensor:
        """A word for each of some positions [A] int64, or for all of them."""
        if positions is None:
            positions = torch.arange(len(self._word), device=self._word.device)
        position = positions
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
        return self._word[positions]

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
