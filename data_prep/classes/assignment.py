"""Words into classes of limited size: prices settle who gets the places that many words want.

Decides places only; scores are the caller's. Whatever is words by classes is made for one portion
of the words at a time and never kept.

Legend: n words to place, C classes, K candidate classes of a word; a *score* is what a word gains
by being in a class, a *price* what a class in demand charges, the *capacity* the places of a class.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
Score = Callable[[IntArray], FloatArray]
"""Ids of n words → their score in every class, [n, C]."""

SCORES_PER_PORTION = 1 << 22
CANDIDATES = 32
"""K: a word bids for its best K classes first."""
PRICE_STEPS = 8


def assign(
    score: Score,
    words: IntArray,
    occupied: IntArray,
    capacity: int,
    prices: FloatArray,
    temperature: float,
) -> tuple[IntArray, FloatArray]:
    """Put words into classes with a high sum of scores, at most `capacity` words in a class.

    Classes in demand raise their prices (Sinkhorn's iteration, stopped early); then each word takes
    its best class at these prices, those first that would lose most by their second choice.

    Args:
        score: of any of the words in every class.
        words: [n] ids to place.
        occupied: [C] places taken by words that stay.
        capacity: places in a class.
        prices: [C] to start from: 0, or those that a similar assignment ended with.
        temperature: > 0, in units of scores; the smaller, the harder the choices behind prices.

    Returns:
        [n] classes, and [C] prices.
    """
    candidates, scores = _candidates(score, words, prices)
    prices = _raise_prices(candidates, scores, occupied, capacity, prices, temperature)
    room = capacity - occupied
    placed = _place(candidates, scores - prices[candidates], room)
    for part in _portions(np.flatnonzero(placed < 0), len(prices)):
        vacant = np.flatnonzero(room > 0)
        value = score(words[part])[:, vacant] - prices[vacant]
        placed[part] = _place(np.broadcast_to(vacant, value.shape), value, room)
    return placed, prices


def _portions(ids: IntArray, num_word_classes: int) -> Iterator[IntArray]:
    """Consecutive parts of `ids`, small enough for an array [part, C]."""
    size = max(1, SCORES_PER_PORTION // num_word_classes)
    return (ids[start : start + size] for start in range(0, len(ids), size))


def _candidates(
    score: Score, words: IntArray, prices: FloatArray
) -> tuple[NDArray[np.int32], FloatArray]:
    """The K best classes of each word at these prices, in no order, and their scores, [n, K]."""
    width = min(CANDIDATES, len(prices))
    candidates = np.empty((len(words), width), dtype=np.int32)
    scores = np.empty((len(words), width), dtype=np.float32)
    for part in _portions(np.arange(len(words)), len(prices)):
        every = score(words[part])
        best = np.argpartition(prices - every, width - 1, axis=1)[:, :width]
        candidates[part], scores[part] = best, np.take_along_axis(every, best, axis=1)
    return candidates, scores


def _raise_prices(
    candidates: NDArray[np.int32],
    scores: FloatArray,
    occupied: IntArray,
    capacity: int,
    prices: FloatArray,
    temperature: float,
) -> FloatArray:
    """Prices [C] ≥ 0 at which the words' soft choices among candidates about fit the classes."""
    for _ in range(PRICE_STEPS):
        demand = occupied.astype(np.float64)
        for part in _portions(np.arange(len(candidates)), candidates.shape[1]):
            value = (scores[part] - prices[candidates[part]]) / temperature
            share = np.exp(value - value.max(axis=1, keepdims=True))
            share /= share.sum(axis=1, keepdims=True)
            demand += np.bincount(candidates[part].ravel(), share.ravel(), minlength=len(prices))
        step = temperature * np.log(np.maximum(demand, 1e-9) / capacity)
        prices = np.maximum(prices + step, 0).astype(np.float32)
    return prices


def _place(candidates: NDArray[np.integer], value: FloatArray, room: IntArray) -> IntArray:
    """Class of each word, -1 where none of its candidates has room; takes places off `room` [C].

    In each round every word asks for its best class that has room; a class with too few places
    takes those who would lose most by their second choice.
    """
    placed = np.full(len(value), -1)
    lowest = value.min(axis=1)
    pending = np.arange(len(value))
    while len(pending):
        vacant = np.where(room[candidates[pending]] > 0, value[pending], -np.inf)
        best = vacant.argmax(axis=1)
        first = vacant[np.arange(len(pending)), best]
        vacant[np.arange(len(pending)), best] = -np.inf
        regret = first - np.maximum(vacant.max(axis=1), lowest[pending])
        possible = np.flatnonzero(first > -np.inf)
        choice = candidates[pending[possible], best[possible]]
        order = np.lexsort((-regret[possible], choice))
        pending, choice = pending[possible[order]], choice[order]
        rank = np.arange(len(choice)) - np.searchsorted(choice, choice)
        accepted = rank < room[choice]
        placed[pending[accepted]] = choice[accepted]
        room -= np.bincount(choice[accepted], minlength=len(room))
        pending = np.sort(pending[~accepted])
    return placed


def smallest_classes(sizes: IntArray, capacity: int, num_words: int) -> IntArray:
    """Classes [num_words] for words that may go anywhere: the smallest are filled to one level.

    Args:
        sizes: [C] words in each class already.
        capacity: most words in a class.
        num_words: number of places wanted; there are as many.
    """

    def places(level: int) -> IntArray:
        free: IntArray = np.maximum(min(level, capacity) - sizes, 0)
        return free

    top = int(sizes.max()) + num_words
    level = bisect_left(range(top + 1), num_words, key=lambda level: int(places(level).sum()))
    below = places(level - 1)
    last = np.flatnonzero(places(level) > below)[: num_words - below.sum()]
    return np.concatenate([np.repeat(np.arange(len(sizes)), below), last])


def without_empty_classes(
    word_class: IntArray, counts: IntArray, num_word_classes: int
) -> IntArray:
    """The same classes, but each empty one gets the least frequent word of the then largest one."""
    word_class = word_class.copy()
    sizes = np.bincount(word_class, minlength=num_word_classes)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        members = np.flatnonzero(word_class == largest)
        word_class[members[counts[members].argmin()]] = empty
        sizes[largest] -= 1
        sizes[empty] += 1
    return word_class
