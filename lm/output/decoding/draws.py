"""The distributions that words are drawn from, and how.

At T = 1 one child after another is drawn from the root down: the class, then the word. At other
temperatures compiled loops (on a CPU with numba) and, from 1/8 to 8, the kernel for GPUs draw by
trials that open few nodes, see `loops.draw_loops`; else operations of PyTorch evaluate all words.

Top-p restricts the draw to the nucleus, the smallest set of most probable words with a share p of
the sum Z over all words. Compiled loops draw words until one is in it, as at least every second one
is for p ≥ 1/2: that word has the distribution. (On a GPU, each trial would synchronise with the
host.) Word w is in it if the words before it, which are more probable, have less than p of Z. That
is often known from the nodes that are opened and the bounds of the others: for a probable word, as
most drawn ones are, once words with 1 - p of Z are known to come after it. So a draw opens few
nodes, where the set itself needs nearly all of a trained model's (half of the words for p = 0.9 are
improbable).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from numbers import Integral, Real
from operator import index
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor

from lm.output.backends.nodes import node_log_softmax, visited_nodes, with_rows
from lm.output.backends.verify import Kind
from lm.output.decoding.positions import Positions
from lm.output.decoding.search import BLOCK_ELEMENTS, TopK, all_words, every, nuclei, nucleus
from lm.output.tree.class_tree import ClassTree

_MIN_TEMPERATURE = 1e-200
"""Lower temperatures count as 0: log-probabilities divided by them would overflow fp64."""
# of SplitMix64, see `derive_seeds`
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def derive_seeds(seeds: Tensor, index: Tensor | int) -> Tensor:
    """Seed number `index` of each seed: int64 of the broadcast shape of both.

    Number j of seed s is mix(s + (j + 1) γ). It depends neither on the device nor on what else is
    drawn, so that positions with seeds of their own are independent of each other.

    Source: SplitMix64 of Steele, Lea & Flood 2014, figure 16.

    Example:
        >>> derive_seeds(torch.tensor(0), torch.arange(2)).tolist()
        [-2152535657050944081, 7960286522194355700]
    """
    number = torch.as_tensor(index, device=seeds.device) + 1
    bits = seeds + number * _GAMMA  # 64-bit products wrap around
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        bits = (bits ^ _shift_right(bits, shift)) * factor
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """The 64 bits shifted, with zeros from the left."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


class Uniforms:
    """Uniform random numbers in [0, 1), fp64: a sequence for each position's seed, [P] int64."""

    def __init__(self, seeds: Tensor) -> None:
        self.seeds = seeds
        self._num_used = torch.zeros_like(seeds)

    def draw(self, position: Tensor) -> Tensor:
        """The next number [V] for each of V distinct positions [V] int64."""
        used = self._num_used[position]
        self._num_used[position] += 1
        bits = derive_seeds(self.seeds[position], used)
        return _shift_right(bits, 11).double() * 2.0**-53  # the upper 53 bits


class Finder(NamedTuple):
    """Functions that find and draw words: operations of PyTorch, compiled loops or a kernel."""

    topk: Callable[[Positions, int], TopK]
    nuclei: Callable[[Positions, float, float], Iterator[tuple[Tensor, TopK]]]
    within_ratio: Callable[[Positions, float, float], Iterator[tuple[Tensor, TopK]]]
    draw_words: Callable[[Positions, Tensor, float, float], Tensor]


def word_ids(what: str, words: object) -> tuple[int, ...]:
    """Words given as integers: in a list, a tensor, an array or any other collection.

    Raises:
        ValueError: if they are none; `what` names them.
    """
    values = words.tolist() if hasattr(words, "tolist") else words
    if isinstance(values, Iterable):
        ids = list(values)
        if all(type(word) is int for word in ids):
            return tuple(ids)
        if all(isinstance(word, SupportsIndex) and not isinstance(word, bool) for word in ids):
            return tuple(map(index, ids))
    shape, dtype = getattr(words, "shape", None), getattr(words, "dtype", None)
    shown = repr(words) if shape is None else f"{list(shape)} {dtype}"
    raise ValueError(f"{what} must be a list of token ids, got {shown[:80]}")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution that words are drawn from, made of P(w) in this order.

    1. The repetition penalty θ replaces P(w) by P(w)^θ for words w that occurred before (each
       counts once). Words in `excluded` have probability 0. The probabilities are renormalised.
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
            convert: Any = index if kind is Integral else float
            may_be_none = name in ("top_k", "top_p", "min_p")
            if not (isinstance(value, kind) or (value is None and may_be_none)):
                expected = "an integer" if kind is Integral else "a number"
                raise ValueError(f"{name} must be {expected}, got {value!r}")
            if value is not None:  # of a fraction, or numpy's
                object.__setattr__(self, name, convert(value))
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

    def changed(self, options: dict[str, Any], function: str, others: str) -> "Sampling":
        """A copy with fields replaced by a function's options; a ValueError lists what it takes."""
        names = self.__dataclass_fields__.keys()
        if unknown := options.keys() - names:
            known = ", ".join([others, *names])
            raise ValueError(f"{function} has no argument {min(unknown)}; its arguments: {known}")
        return replace(self, **options) if options else self


def sample_words(positions: Positions, seeds: Tensor, sampling: Sampling, finder: Finder) -> Tensor:
    """A word for each position [P], at least one, with seeds [P] int64."""
    top_k, min_p = sampling.top_k, sampling.min_p
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    if sampling.temperature < _MIN_TEMPERATURE:
        return finder.topk(positions, 1).word.squeeze(1)
    power = 1 / sampling.temperature
    if top_k is not None and top_k < positions.tree.vocab_size:
        words = finder.topk(positions, top_k)
        words = nucleus(words, power, top_p) if top_p < 1 else words
        sets = iter([(every(positions), words)])
    elif not min_p:
        return finder.draw_words(positions, seeds, power, top_p)
    elif top_p < 1:
        sets = finder.nuclei(positions, power, top_p)
    else:
        sets = finder.within_ratio(positions, power, min_p)
    return draw_from_sets(sets, seeds, power, min_p)


def draw_from_sets(
    sets: Iterable[tuple[Tensor, TopK]], seeds: Tensor, power: float, min_p: float | None = None
) -> Tensor:
    """A word for each position [P] from its set of most probable words."""
    word, uniforms = torch.empty_like(seeds), Uniforms(seeds)
    for position, words in sets:
        log_weight = power * words.log_prob.double()
        if min_p:
            cut = log_weight[:, :1] + math.log(min_p)
            log_weight = log_weight.masked_fill(log_weight < cut, -torch.inf)
        column = draw(log_weight, uniforms.draw(position))
        word[position] = words.word.gather(1, column[:, None]).squeeze(1)
    return word


def draw(log_weight: Tensor, uniform: Tensor) -> Tensor:
    """A column [V] for each row of log_weight [V, M] fp64, in proportion to the weights.

    Inverts the cumulative sum at uniform [V] in [0, 1). A column of weight 0 is never drawn: a
    number below 1 times the total rounds to less than the total.
    """
    cumulative = (log_weight - log_weight.amax(dim=1, keepdim=True)).exp().cumsum(dim=1)
    point = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).squeeze(1)


def draw_words(positions: Positions, seeds: Tensor, power: float, top_p: float = 1.0) -> Tensor:
    """A word for each position [P], drawn from P^power or its nucleus; seeds [P] int64."""
    if top_p < 1:
        return draw_from_sets(nuclei(positions, power, top_p), seeds, power)
    uniforms = Uniforms(seeds)
    if power == 1 and positions.is_plain:
        return _draw_along_path(positions, uniforms)
    word = torch.empty_like(seeds)
    for block, log_prob in all_words(positions, every(positions)):
        word[block] = draw(power * log_prob.double(), uniforms.draw(block))
    return word


def _draw_along_path(positions: Positions, uniforms: Uniforms) -> Tensor:
    """A word for each position [P], drawn from P by one child after another from the root down.

    The host waits for the device a few times per level. Logits of whole paths fit in a block.
    """
    hidden, tree = positions.hidden, positions.tree
    word, step = torch.empty_like(uniforms.seeds), max(1, BLOCK_ELEMENTS // tree.max_path_columns)
    for position in torch.split(every(positions), step):
        node = torch.zeros_like(position)
        while position.numel():
            positions.num_opened += position.numel()
            node, order = node.sort(stable=True)
            position, uniform = position[order], uniforms.draw(position)[order]
            found, finite = [], []
            nodes = visited_nodes(node[None], tree)
            for each, rows, bias in with_rows(nodes, positions.weight, positions.bias):
                log_q = node_log_softmax(hidden[position[each.visits]], rows, bias)
                finite.append(log_q.isfinite().all(dim=1))
                found.append(draw(log_q.double(), uniform[each.visits]) + each.rows.start)
            positions.check_finite(torch.cat(finite), position)
            item = tree.item_of_row[torch.cat(found)]
            word[position] = item  # nodes are replaced below
            position, node = position[item < 0], ~item[item < 0]
    return word


def tiny_positions(num: int, device: torch.device, kind: Kind) -> Positions:
    """Positions of a small layer, at which compiled code is compared with this file's functions."""
    tree, generator = ClassTree.two_level(torch.arange(300) % 17), torch.Generator().manual_seed(0)
    shapes = ((num, 40), (tree.num_rows, 40), (tree.num_rows,))
    layer = [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes]
    hidden, weight, bias = (x.to(device, dtype) for x, dtype in zip(layer, kind[:3], strict=True))
    return Positions(hidden, weight, tree.to(device), bias)


def wrong_words(found: Callable[[Positions, Tensor, float], Tensor], at: Positions) -> str | None:
    """What is wrong with words that are drawn at temperature 1, or None."""
    seeds = every(at)
    num = int((found(at, seeds, 1.0) != draw_words(at, seeds, 1.0)).sum())
    return None if num <= 1 else f"{num} of {len(seeds)} words differ"  # rounding may change one
