"""Refinement of word classes by the likelihood of the class bigram model, many words at a time.

Legend: N words, C classes.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from tqdm import tqdm

from data_prep.classes.assignment import (
    FloatArray,
    IntArray,
    assign,
    membership,
    without_empty_classes,
)

DoubleArray = NDArray[np.float64]

REFINEMENT_PASSES = 20
REFINEMENT_SHARE = 0.7
"""Share of the words that may move in one pass; moving all at once overshoots."""
REFINEMENT_TEMPERATURE = 3.0
"""In nats."""
REFINEMENT_SMOOTHING = 0.02
"""Weight of the average context added to each class, as a share of a mean class's tokens."""


def refine_classes(
    bigrams: sparse.csr_array,
    counts: IntArray,
    word_class: IntArray,
    num_word_classes: int,
    capacity: int,
    seed: int,
    progress: bool,
) -> IntArray:
    """Raise the likelihood of the class bigram model by moving words between classes, int64 [N].

    In each pass a random part of the words is assigned again. The score of a word in a class is the
    log-probability of the classes of all its neighbours given that class. A pass that does not
    raise the likelihood of the text (Brown et al. 1992, equation 10) is undone. No class is empty.
    If the text contains words outside `bigrams` [N, N], the class after them is not predicted.
    """
    generator = np.random.default_rng(seed)
    reverse = bigrams.T.tocsr()
    seen = np.flatnonzero(counts > 0)
    prices = np.zeros(num_word_classes, dtype=np.float32)
    best = _ClassContexts(bigrams, reverse, counts, word_class, num_word_classes)
    for _ in tqdm(
        range(REFINEMENT_PASSES), desc="refining classes", disable=None if progress else True
    ):
        moving = generator.random(len(seen)) < REFINEMENT_SHARE
        occupied = np.bincount(best.word_class, minlength=num_word_classes)
        occupied -= np.bincount(best.word_class[seen[moving]], minlength=num_word_classes)
        changed = best.word_class.copy()
        changed[seen[moving]], new_prices = assign(
            best.score, seen[moving], occupied, capacity, prices, REFINEMENT_TEMPERATURE
        )
        changed = without_empty_classes(changed, counts, num_word_classes)
        trial = _ClassContexts(bigrams, reverse, counts, changed, num_word_classes)
        if trial.log_likelihood > best.log_likelihood:
            best, prices = trial, new_prices
    return best.word_class


class _ClassContexts:
    """Counts of words and classes before and after each class, for one assignment."""

    def __init__(
        self,
        bigrams: sparse.csr_array,
        reverse: sparse.csr_array,
        counts: IntArray,
        word_class: IntArray,
        num_word_classes: int,
    ) -> None:
        member = membership(word_class, np.arange(len(counts)), num_word_classes)
        self.word_class = word_class
        self.of_word = sparse.hstack([bigrams @ member, reverse @ member], format="csr")  # [N, 2C]
        self.of_class: DoubleArray = (member.T @ self.of_word).toarray()  # [C, 2C]
        sides = self.of_class.reshape(num_word_classes, 2, num_word_classes)
        average = sides.sum(axis=0) + 1
        average /= average.sum(axis=1, keepdims=True)
        pseudo = REFINEMENT_SMOOTHING * (float(counts.sum()) / num_word_classes) + 1e-9
        self.prior = pseudo * average.reshape(-1)  # [2C]
        self.total = sides.sum(axis=2) + pseudo  # [C, 2]
        smoothed = (self.of_class + self.prior) / np.repeat(self.total, num_word_classes, axis=1)
        self.log_prob = np.log(smoothed).T.copy()  # [2C, C]
        self.log_likelihood = _log_likelihood(sides[:, 0], counts, word_class)

    def score(self, words: IntArray) -> FloatArray:
        """Log-probability (nats) of the classes of the words' neighbours in each class, [n, C].

        The counts of a word are subtracted from those of its present class.
        """
        contexts = self.of_word[words]
        score: FloatArray = (contexts @ self.log_prob).astype(np.float32)
        rows = np.repeat(np.arange(len(words)), np.diff(contexts.indptr))
        columns, present = contexts.indices, self.word_class[words]
        side = columns // len(self.of_class)
        in_side = np.bincount(2 * rows + side, weights=contexts.data, minlength=2 * len(words))
        others = self.of_class[present[rows], columns] - contexts.data + self.prior[columns]
        total = self.total[present[rows], side] - in_side[2 * rows + side]
        without = np.bincount(rows, contexts.data * np.log(others / total), minlength=len(words))
        score[np.arange(len(words)), present] = without
        return score


def _log_likelihood(transitions: DoubleArray, counts: IntArray, word_class: IntArray) -> float:
    """Maximum log-likelihood (nats) of the text, without the terms that no assignment changes."""
    class_counts = np.bincount(word_class, weights=counts, minlength=len(transitions)).astype(float)
    return float(_x_log_x(transitions) - _x_log_x(transitions.sum(axis=1)) - _x_log_x(class_counts))


def _x_log_x(values: DoubleArray) -> float:
    """Σ x ln x, 0 at 0."""
    return float((values * np.log(np.where(values > 0, values, 1))).sum())
