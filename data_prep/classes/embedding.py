"""Word classes from word vectors: PPMI, truncated SVD, balanced k-means, then refinement.

Words are described by the counts of their neighbours: first as vectors of positive pointwise mutual
information, which suit rare words; then by the likelihood of the class bigram model, which is
dominated by frequent words.

Source: PPMI and SVD: Levy, Goldberg & Dagan 2015, sections 2 and 3; power of the singular values:
Bullinaria & Levy 2012; k-means++: Arthur & Vassilvitskii 2007; likelihood: Brown et al. 1992,
equation 10.

Legend: N words, C classes, D dimensions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from tqdm import tqdm

from data_prep.classes.assignment import (
    FloatArray,
    IntArray,
    assign,
    membership,
    smallest_classes,
    without_empty_classes,
)
from data_prep.errors import DataError

DoubleArray = NDArray[np.float64]

CONTEXT_WORDS = 10_000
"""Number of most frequent words that are used as contexts."""
CONTEXT_SMOOTHING = 0.75
"""Exponent on context counts; below 1, rare contexts do not dominate (Levy et al. 2015, 3.2)."""
SINGULAR_VALUE_POWER = 0.5
OVERSAMPLING = 20
"""Number of dimensions by which the random subspace exceeds the vectors."""
KMEANS_ITERATIONS = 15
KMEANS_TEMPERATURE = 0.03
SEED_WORDS_PER_CLASS = 32
"""The first centroids are chosen among C times this number of the most frequent words."""
REFINEMENT_PASSES = 20
REFINEMENT_SHARE = 0.7
"""Share of the words that may move in one pass; moving all at once overshoots."""
REFINEMENT_TEMPERATURE = 3.0  # nats
REFINEMENT_SMOOTHING = 0.02
"""Weight of the average context added to each class, as a share of a mean class's tokens."""


@dataclass(frozen=True)
class Clustering:
    """N words to be divided into C classes, none of them empty or with more than `max_words`.

    Words without a vector, or without a neighbour, are in the smallest classes. The same seed, text
    and processor give the same classes. UserError if the classes do not hold all words.
    """

    counts: IntArray  # [N]
    num_word_classes: int  # C
    max_words: int
    seed: int
    progress: bool

    def __post_init__(self) -> None:
        num_places, vocab_size = self.num_word_classes * self.max_words, len(self.counts)
        if num_places < vocab_size:
            raise DataError(
                f"classes.max_words: {self.num_word_classes} classes of at most {self.max_words}"
                f" words hold {num_places} words, but {vocab_size} are to be clustered"
            )

    def by_neighbours(self, bigrams: sparse.csr_array, dimensions: int) -> NDArray[np.int32]:
        """Classes [N] of words with similar neighbours: k-means on PPMI-SVD vectors, refined."""
        word_class = self._balanced_kmeans(self._word_vectors(bigrams, dimensions))
        return self._refined(bigrams, word_class).astype(np.int32)

    def by_vectors(self, vectors: FloatArray) -> NDArray[np.int32]:
        """Classes [N] by k-means on the directions of vectors [N, D], 0 where there is none."""
        return self._balanced_kmeans(_unit_rows(vectors)).astype(np.int32)

    def _word_vectors(self, bigrams: sparse.csr_array, dimensions: int) -> FloatArray:
        """Directions of the PPMI with both neighbours [N, D]; 0 without a useful neighbour."""
        contexts = np.argsort(-self.counts, kind="stable")[:CONTEXT_WORDS]
        sides = bigrams, bigrams.T.tocsr()
        matrix = sparse.hstack([_ppmi(side, contexts) for side in sides], format="csr")
        left_vectors, singular_values = truncated_svd(matrix, dimensions, self.seed)
        return _unit_rows(left_vectors * singular_values**SINGULAR_VALUE_POWER)

    def _balanced_kmeans(self, vectors: FloatArray) -> IntArray:
        """Spherical k-means, words weighted by their counts."""
        counts, num_word_classes = self.counts, self.num_word_classes
        words = np.flatnonzero(np.any(vectors != 0, axis=1))
        centroids = self._first_centroids(vectors)
        # Frequent words have priority: their classes have the largest effect on the likelihood.
        urgency = np.sqrt(np.maximum(counts, 1)).astype(np.float32)[:, None]
        weighted = vectors * np.maximum(counts, 1).astype(np.float32)[:, None]
        prices = np.zeros(num_word_classes, dtype=np.float32)
        occupied = np.zeros(num_word_classes, dtype=np.int64)
        word_class = np.full(len(vectors), -1)
        for _ in self._bar(KMEANS_ITERATIONS, "k-means"):

            def score(ids: IntArray, centroids: FloatArray = centroids) -> FloatArray:
                similarity: FloatArray = _product(vectors[ids], centroids.T)
                return similarity * urgency[ids]

            word_class[words], prices = assign(
                score, words, occupied, self.max_words, prices, KMEANS_TEMPERATURE
            )
            member = membership(word_class, words, num_word_classes)
            centroids = _unit_rows(member.T @ weighted)
        others = np.flatnonzero(word_class < 0)
        others = others[np.argsort(-counts[others], kind="stable")]
        sizes = np.bincount(word_class[words], minlength=num_word_classes)
        word_class[others] = smallest_classes(sizes, self.max_words, len(others))
        return without_empty_classes(word_class, counts, num_word_classes)

    def _first_centroids(self, vectors: FloatArray) -> FloatArray:
        """Vectors of C words, [C, D], drawn ∝ count · squared distance to the nearest so far."""
        generator = np.random.default_rng(self.seed)
        num_frequent = SEED_WORDS_PER_CLASS * self.num_word_classes
        frequent = np.argsort(-self.counts, kind="stable")[:num_frequent]
        sample, weight = vectors[frequent], np.maximum(self.counts[frequent], 1).astype(np.float64)
        distance = np.ones(len(sample))
        chosen = np.empty(self.num_word_classes, dtype=np.int64)
        for index in range(self.num_word_classes):
            mass = np.cumsum(weight * distance)
            if mass[-1] <= 0:
                mass = np.cumsum(weight)
            chosen[index] = np.searchsorted(mass, generator.random() * mass[-1], side="right")
            squared = np.maximum(1 - _product(sample, sample[chosen[index]]), 0)
            distance = np.minimum(distance, np.where(squared > 1e-6, squared, 0))
        return sample[chosen]

    def _refined(self, bigrams: sparse.csr_array, word_class: IntArray) -> IntArray:
        """Raise the likelihood by passes in which a random part of the words is assigned again."""
        counts, num_word_classes = self.counts, self.num_word_classes
        generator = np.random.default_rng(self.seed)
        sides = bigrams, bigrams.T.tocsr()
        seen = np.flatnonzero(counts > 0)
        prices = np.zeros(num_word_classes, dtype=np.float32)
        best = _ClassContexts(sides, counts, word_class, num_word_classes)
        for _ in self._bar(REFINEMENT_PASSES, "refining classes"):
            moving = seen[generator.random(len(seen)) < REFINEMENT_SHARE]
            occupied = np.bincount(best.word_class, minlength=num_word_classes)
            occupied -= np.bincount(best.word_class[moving], minlength=num_word_classes)
            changed = best.word_class.copy()
            changed[moving], new_prices = assign(
                best.score, moving, occupied, self.max_words, prices, REFINEMENT_TEMPERATURE
            )
            changed = without_empty_classes(changed, counts, num_word_classes)
            trial = _ClassContexts(sides, counts, changed, num_word_classes)
            if trial.log_likelihood > best.log_likelihood:
                best, prices = trial, new_prices
        return best.word_class

    def _bar(self, num_steps: int, title: str) -> Iterable[int]:
        return tqdm(range(num_steps), desc=title, disable=None if self.progress else True)


def _ppmi(neighbours: sparse.csr_array, contexts: IntArray) -> sparse.csr_array:
    """Positive pointwise mutual information (float32) with the context words, [N, contexts]."""
    word_total: NDArray[np.float64] = neighbours.sum(axis=1)
    smoothed: NDArray[np.float64] = neighbours.sum(axis=0) ** CONTEXT_SMOOTHING
    log_context = np.log(np.maximum(smoothed, 1e-300)) - np.log(max(smoothed.sum(), 1e-300))
    ppmi = neighbours[:, contexts]
    rows = np.repeat(np.arange(ppmi.shape[0]), np.diff(ppmi.indptr))
    information = np.log(ppmi.data / word_total[rows]) - log_context[contexts[ppmi.indices]]
    ppmi.data = np.maximum(information, 0).astype(np.float32)
    ppmi.eliminate_zeros()
    return ppmi


def truncated_svd(
    matrix: sparse.csr_array, rank: int, seed: int, *, iterations: int = 3
) -> tuple[FloatArray, FloatArray]:
    """Compute left singular vectors, [N, D], and the D largest singular values, descending.

    Randomised subspace iteration (Halko, Martinsson & Tropp 2011, algorithms 4.4 and 5.1). Values
    far below the first are inexact, because they are roots of eigenvalues. The entry of largest
    magnitude of each vector is positive.
    """
    generator = np.random.default_rng(seed)
    width = min(rank + OVERSAMPLING, *matrix.shape)
    transposed = matrix.T.tocsr()
    basis = generator.standard_normal((matrix.shape[1], width)).astype(np.float32)
    for _ in range(iterations):
        basis = np.linalg.qr(transposed @ (matrix @ basis)).Q
    image = matrix @ basis  # [N, width]
    squares, rotation = np.linalg.eigh(_product(image.T, image).astype(np.float64))
    values = np.sqrt(np.maximum(squares[::-1][:rank], 0)).astype(np.float32)
    rotation = rotation[:, ::-1][:, :rank].astype(np.float32)
    vectors = _product(image, rotation) / np.where(values > 0, values, 1)
    largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(vectors.shape[1])]
    return vectors * np.where(largest < 0, -1, 1).astype(np.float32), values


def _product(one: Any, other: Any) -> Any:
    """The matrix product. NumPy's on aarch64 may warn of infinities that are not in its result."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return one @ other


def _unit_rows(matrix: FloatArray) -> FloatArray:
    """Rows scaled to length 1; rows of negligible length become exactly 0."""
    length = np.linalg.norm(matrix, axis=1, keepdims=True)
    nonzero = length > 1e-5 * length.max(initial=0)
    return np.where(nonzero, matrix / np.where(nonzero, length, 1), 0).astype(np.float32)


class _ClassContexts:
    """Counts of words and classes before and after each class, for one assignment."""

    def __init__(
        self,
        sides: tuple[sparse.csr_array, sparse.csr_array],
        counts: IntArray,
        word_class: IntArray,
        num_word_classes: int,
    ) -> None:
        member = membership(word_class, np.arange(len(counts)), num_word_classes)
        self.word_class = word_class
        self.of_word = sparse.hstack([side @ member for side in sides], format="csr")  # [N, 2C]
        self.of_class: DoubleArray = (member.T @ self.of_word).toarray()  # [C, 2C]
        followed = self.of_class.reshape(num_word_classes, 2, num_word_classes)
        average = followed.sum(axis=0) + 1
        average /= average.sum(axis=1, keepdims=True)
        pseudo = REFINEMENT_SMOOTHING * (float(counts.sum()) / num_word_classes) + 1e-9
        self.prior = pseudo * average.reshape(-1)  # [2C]
        self.total = followed.sum(axis=2) + pseudo  # [C, 2]
        smoothed = (self.of_class + self.prior) / np.repeat(self.total, num_word_classes, axis=1)
        self.log_prob = np.log(smoothed).T.copy()  # [2C, C]
        # Maximum log-likelihood (nats) without the terms that no assignment changes.
        pairs = followed[:, 0]
        tokens = np.bincount(word_class, weights=counts, minlength=len(pairs)).astype(float)
        self.log_likelihood = _x_log_x(pairs) - _x_log_x(pairs.sum(axis=1)) - _x_log_x(tokens)

    def score(self, words: IntArray) -> FloatArray:
        """Log-probability of the classes of the words' neighbours in each class, without them."""
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


def _x_log_x(values: DoubleArray) -> float:
    """Σ x ln x, 0 at 0."""
    return float((values * np.log(np.where(values > 0, values, 1))).sum())
