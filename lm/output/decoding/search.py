"""The most probable words: top-k, nuclei and min-p, from the log-probabilities of all words.

On a CPU, `compiled` finds the same in loops that open few nodes.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.decoding.positions import Positions

BLOCK_ELEMENTS, CUDA_BLOCK_ELEMENTS = 1 << 23, 1 << 26
"""Most log-probabilities of all words in memory at once."""


class TopK(NamedTuple):
    """The most probable words of each position in descending order, ties by the lowest word."""

    log_prob: Tensor  # [..., k] in at least fp32, in nats
    word: Tensor  # [..., k] int64


def every(positions: Positions) -> Tensor:
    """The numbers of all positions, [P]."""
    return torch.arange(len(positions.hidden), device=positions.hidden.device)


def all_words(positions: Positions, position: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of some positions [A], and the log-probabilities of all their words."""
    most = CUDA_BLOCK_ELEMENTS if position.is_cuda else BLOCK_ELEMENTS
    for block in torch.split(position, max(1, most // positions.tree.vocab_size)):
        if block.numel():
            yield block, positions.all_words(block)


def topk(positions: Positions, k: int) -> TopK:
    """The k most probable words of each position, log_prob and word [P, k]."""
    log_prob = positions.hidden.new_empty(len(positions.hidden), k)
    word = torch.empty_like(log_prob, dtype=torch.int64)
    for block, words in topk_of(positions, every(positions), k):
        log_prob[block], word[block] = words
    return TopK(log_prob, word)


def topk_of(positions: Positions, position: Tensor, k: int) -> Iterator[tuple[Tensor, TopK]]:
    """Blocks of some positions [A], and their k most probable words."""
    for block, log_prob in all_words(positions, position):
        yield block, _best(log_prob, k)


def nuclei(positions: Positions, power: float, top_p: float) -> Iterator[tuple[Tensor, TopK]]:
    """The smallest sets of most probable words whose share of Z = Σ P^power reaches `top_p`.

    Yields positions [A] and their words [A, size]; smaller sets are padded with log_prob -∞.
    """
    for block, log_prob in all_words(positions, every(positions)):
        yield block, nucleus(_best(log_prob, log_prob.shape[1]), power, top_p)


def nucleus(words: TopK, power: float, top_p: float, total: float | None = None) -> TopK:
    """The fewest of some words, first ones first, that have `top_p` of their mass, or of a total.

    Masses are P^power, relative to that of the first word if there is no total.
    """
    log_weight = power * words.log_prob.double()
    if total is None:
        log_weight = log_weight - log_weight[:, :1]
    mass = log_weight.exp().cumsum(dim=1)
    size = (mass < top_p * (mass[:, -1:] if total is None else total)).sum(dim=1) + 1
    return first(words, size.clamp(max=mass.shape[1]))


def within_ratio(positions: Positions, power: float, min_p: float) -> Iterator[tuple[Tensor, TopK]]:
    """The words with P^power ≥ min_p · max P^power, 0 < min_p ≤ 1; yields as `nuclei` does."""
    for block, log_prob in all_words(positions, every(positions)):
        cut = power * log_prob.amax(dim=1, keepdim=True).double() + math.log(min_p)
        size = (power * log_prob.double() >= cut).sum(dim=1)
        yield block, first(_best(log_prob, int(size.max())), size)


def first(words: TopK, size: Tensor) -> TopK:
    """The first `size` [A] of some words in order, padded with log_prob -∞."""
    largest = int(size.max())
    log_prob, word = (each[:, :largest] for each in words)
    beyond = torch.arange(largest, device=size.device) >= size[:, None]
    return TopK(log_prob.masked_fill(beyond, -torch.inf), word)


def _best(log_prob: Tensor, k: int) -> TopK:
    """The k best of all words [A, N], in order."""
    if k == log_prob.shape[1]:
        return TopK(*log_prob.sort(dim=1, descending=True, stable=True))
    best, word = log_prob.topk(k + 1, dim=1)
    tied = best[:, k] == best[:, k - 1]
    word, order = word[:, :k].sort(dim=1)  # of equal words, the lowest comes first
    best, order = best.gather(1, order).sort(dim=1, descending=True, stable=True)
    word = word.gather(1, order)
    if bool(tied.any()):  # it is not known which of equal words `topk` has found
        ordered = log_prob[tied].sort(dim=1, descending=True, stable=True)
        best[tied], word[tied] = ordered.values[:, :k], ordered.indices[:, :k]
    return TopK(best, word)
