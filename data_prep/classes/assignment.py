"""Assignment of words to classes of limited size by scores and prices.

Arrays of words × classes exist for one portion of the words at a time.

Legend: n words to assign, C classes, K candidate classes of a word; a *score* is the gain of a word
in a class, a *price* is subtracted from the scores of a class with more demand than places, the
*capacity* is the number of places of a class.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
Score = Callable[[IntArray], FloatArray]
"""Maps the ids of n words to their scores in every class, [n, C]."""

SCORES_PER_PORTION = 1 << 22
CANDIDATES = 32
"""K, number of best classes that a word is first assigned among."""
PRICE_STEPS = 8


def assign(
    score: Score,
    words: IntArray,
    occupied: IntArray,
    capacity: int,
    prices: FloatArray,
    temperature: float,
) -> tuple[IntArray, FloatArray]:
    """Assign words to classes with a high sum of scores, at most `capacity` words in a class.

    Prices [C], which start at those of a similar assignment or at 0, are raised for classes with
    too much demand (Sinkhorn's iteration, stopped early; `temperature`, in units of the scores, is
    the softness of its choices). Then each of the `words` [n] is assigned to its best class at
    these prices, in order of the loss that its second choice would cause. `occupied` [C] places
    are taken by other words. Returns the classes [n] and the prices [C].
    """
    width = min(CANDIDATES, len(prices))
    candidates = np.empty((len(words), width), dtype=np.int32)  # unordered
    scores = np.empty((len(words), width), dtype=np.float32)
    for portion in _portions(np.arange(len(words)), len(prices)):
        every = score(words[portion])
        best = np.argpartition(prices - every, width - 1, axis=1)[:, :width]
        candidates[portion], scores[portion] = best, np.take_along_axis(every, best, axis=1)
    for _ in range(PRICE_STEPS):
        demand = occupied.astype(np.float64)
        for portion in _portions(np.arange(len(words)), width):
            classes = candidates[portion]
            value = (scores[portion] - prices[classes]) / temperature
            share = np.exp(value - value.max(axis=1, keepdims=True))
            share /= share.sum(axis=1, keepdims=True)
            demand += np.bincount(classes.ravel(), share.ravel(), minlength=len(prices))
        step = temperature * np.log(np.maximum(demand, 1e-9) / capacity)
        prices = np.maximum(prices + step, 0).astype(np.float32)
    vacancies = capacity - occupied
    assigned = _take_places(candidates, scores - prices[candidates], vacancies)
    for portion in _portions(np.flatnonzero(assigned < 0), len(prices)):
        vacant = np.flatnonzero(vacancies > 0)
        value = score(words[portion])[:, vacant] - prices[vacant]
        assigned[portion] = _take_places(np.broadcast_to(vacant, value.shape), value, vacancies)
    return assigned, prices


def _portions(ids: IntArray, num_word_classes: int) -> Iterator[IntArray]:
    """Consecutive slices of `ids`, small enough for an array [slice, C]."""
    size = max(1, SCORES_PER_PORTION // num_word_classes)
    return (ids[start : start + size] for start in range(0, len(ids), size))


def _take_places(
    candidates: NDArray[np.integer], value: FloatArray, vacancies: IntArray
) -> IntArray:
    """Class of each word, -1 if its candidates are full; subtracts the places from `vacancies`."""
    assigned = np.full(len(value), -1)
    lowest = value.min(axis=1)
    pending = np.arange(len(value))
    while len(pending):  # each requests its best class that has a vacancy
        vacant = np.where(vacancies[candidates[pending]] > 0, value[pending], -np.inf)
        best = vacant.argmax(axis=1)
        first = vacant[np.arange(len(pending)), best]
        vacant[np.arange(len(pending)), best] = -np.inf
        regret = first - np.maximum(vacant.max(axis=1), lowest[pending])
        possible = np.flatnonzero(first > -np.inf)
        choice = candidates[pending[possible], best[possible]]
        order = np.lexsort((-regret[possible], choice))
        pending, choice = pending[possible[order]], choice[order]
        rank = np.arange(len(choice)) - np.searchsorted(choice, choice)
        accepted = rank < vacancies[choice]  # those that would lose most by their second choice
        assigned[pending[accepted]] = choice[accepted]
        vacancies -= np.bincount(choice[accepted], minlength=len(vacancies))
        pending = np.sort(pending[~accepted])
    return assigned


def smallest_classes(sizes: IntArray, capacity: int, num_words: int) -> IntArray:
    """Choose classes [num_words] by filling the smallest to one level; there are enough places."""

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
    """Give each empty class the least frequent word of the class that is largest at that time."""
    word_class = word_class.copy()
    sizes = np.bincount(word_class, minlength=num_word_classes)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        members = np.flatnonzero(word_class == largest)
        word_class[members[counts[members].argmin()]] = empty
        sizes[largest] -= 1
        sizes[empty] += 1
    return word_class


def membership(word_class: IntArray, words: IntArray, num_word_classes: int) -> sparse.csr_array:
    """Build the sparse indicator matrix, float32 [N, C]: 1 at each of `words` and its class."""
    ones = np.ones(len(words), dtype=np.float32)
    shape = (len(word_class), num_word_classes)
    return sparse.csr_array((ones, (words, word_class[words])), shape=shape)
