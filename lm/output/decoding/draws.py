"""The distributions that words are drawn from, and how: see `rejection` for draws from all words.

Top-p restricts the draw to the nucleus, the smallest set of most probable words with a share p of
the sum Z over all words. Compiled loops draw words until one is in it, as at least every second one
is for p ≥ 1/2: that word has the distribution. (On a GPU, each word would be waited for.) Word w is
in it if the words before it, which are more probable, have less than p of Z. That is often known
from the nodes that are opened and the bounds of the others: for a probable word, as most drawn ones
are, once words with 1 - p of Z are known to come after it. So a draw opens few nodes, where the set
itself needs nearly all of a trained model's (half of the words for p = 0.9 are improbable).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from operator import index
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.decoding.expansion import Expander
from lm.output.decoding.rejection import draw
from lm.output.decoding.search import TopK
from lm.output.decoding.uniforms import Uniforms, derive_seeds

_MIN_TEMPERATURE = 1e-200
"""Lower temperatures count as 0: log-probabilities divided by them would overflow fp64."""
_MAX_TEMPERATURE = 1e25
"""Higher temperatures count as this one, at which all words but those excluded are as probable."""
NUM_DRAWS = 64
"""Words drawn at most; for p ≥ 1/10, all are outside with a probability of 0.1 % or less."""


class Finder(NamedTuple):
    """Functions that find and draw words, by operations of PyTorch or in compiled loops."""

    topk: Callable[[Expander, int], TopK]
    nuclei: Callable[[Expander, float, float], Iterator[tuple[Tensor, TopK]]]
    within_ratio: Callable[[Expander, float, float], Iterator[tuple[Tensor, TopK]]]
    draw_words: Callable[[Expander, Tensor, float], Tensor]
    draw_in_nuclei: Callable[[Expander, Tensor, float, float, int], Tensor] | None = None


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


def sample_words(expander: Expander, seeds: Tensor, sampling: Sampling, finder: Finder) -> Tensor:
    """A word for each position [P], at least one, with seeds [P] int64."""
    top_k, top_p, min_p = sampling.top_k, sampling.top_p, sampling.min_p
    if sampling.temperature < _MIN_TEMPERATURE:
        return finder.topk(expander, 1).word.squeeze(1)
    power = 1 / min(sampling.temperature, _MAX_TEMPERATURE)
    if top_k is not None and top_k < expander.tree.vocab_size:
        words = finder.topk(expander, top_k)
        sets = iter([(torch.arange(len(seeds), device=seeds.device), words)])
    elif top_p is not None and top_p < 1:
        if finder.draw_in_nuclei is not None and not min_p:
            word = finder.draw_in_nuclei(expander, seeds, power, top_p, NUM_DRAWS)
            left = (word < 0).nonzero().squeeze(1)
            if len(left):
                rest = expander.select(left)
                sets = finder.nuclei(rest, power, top_p)
                word[left] = _draw_from_sets(sets, derive_seeds(seeds[left], -1), power)
                expander.num_expanded += rest.num_expanded
            return word
        sets, top_p = finder.nuclei(expander, power, top_p), None
    elif min_p:
        sets = finder.within_ratio(expander, power, min_p)
    else:
        return finder.draw_words(expander, seeds, power)
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
