"""Word classes learnt from text: word vectors, balanced k-means, then refinement by likelihood.

Decides which words share a class, under a limit on the size of a class. Everything is read off the
counts of neighbouring words: first as vectors of positive pointwise mutual information, which are
good for rare words; then as the likelihood of the class bigram model, which frequent words decide.

Legend: N words, C classes, D dimensions, T tokens.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from tqdm import tqdm

from data_prep.classes.assignment import (
    FloatArray,
    IntArray,
    assign,
    smallest_classes,
    without_empty_classes,
)
from data_prep.errors import UserError

DoubleArray = NDArray[np.float64]

CONTEXT_WORDS = 10_000
"""Most frequent words that count as neighbours in the vectors."""
CONTEXT_SMOOTHING = 0.75
"""Exponent on context counts; below 1, rare contexts do not dominate (Levy et al. 2015, 3.2)."""
SINGULAR_VALUE_POWER = 0.5
KMEANS_ITERATIONS = 15
KMEANS_TEMPERATURE = 0.03
SEED_WORDS_PER_CLASS = 32
"""k-means++ chooses the first centroids among C times this many of the most frequent words."""
REFINEMENT_PASSES = 20
REFINEMENT_SHARE = 0.7
"""Share of the words that may move in one pass; all at once would overshoot."""
REFINEMENT_TEMPERATURE = 3.0
"""Nats."""
REFINEMENT_SMOOTHING = 0.02
"""Average contexts that a class is given besides its own, as a share of a mean class's tokens."""


def embedding_classes(
    counts: IntArray,
    bigrams: sparse.csr_array,
    num_word_classes: int,
    *,
    dimensions: int = 100,
    max_words: int | None = None,
    seed: int = 1,
    progress: bool = False,
) -> NDArray[np.int32]:
    """Classes of words with like neighbours: balanced k-means on PPMI-SVD vectors, then refined.

    The refinement raises the likelihood of the class bigram model. Words that never occur are dealt
    to the smallest classes.

    Args:
        counts: [N] occurrences of each word.
        bigrams: [N, N] how often word w is followed by word v, from `count_bigrams`.
        num_word_classes: C, 1 to N.
        dimensions: D, length of the vectors; fewer where the vocabulary is smaller.
        max_words: most words in one class; default ⌈N / C⌉, equal sizes.
        seed: the same seed, text and machine give the same classes.
        progress: bars on stderr.

    Returns:
        [N] class of each word, 0 to C - 1, none empty, none with more than `max_words` words.

    Raises:
        ValueError: C is not in 1 to N.
        UserError: C classes of `max_words` words do not hold the vocabulary.
    """
    vocab_size = len(counts)
    if not 1 <= num_word_classes <= vocab_size:
        raise ValueError(f"num_word_classes: expected 1 to {vocab_size}, got {num_word_classes}")
    capacity = max_words or -(-vocab_size // num_word_classes)
    if capacity * num_word_classes < vocab_size:
        raise UserError(
            f"classes.max_words: {num_word_classes} classes of at most {capacity} words hold "
            f"{num_word_classes * capacity} words, but {vocab_size} are to be clustered"
        )
    vectors = word_vectors(bigrams, counts, dimensions, seed)
    word_class = balanced_kmeans(
        vectors, counts, num_word_classes, capacity, seed, progress=progress
    )
    word_class = refine_classes(
        bigrams, counts, word_class, num_word_classes, capacity, seed, progress=progress
    )
    return word_class.astype(np.int32)


def word_vectors(
    bigrams: sparse.csr_array, counts: IntArray, dimensions: int, seed: int
) -> FloatArray:
    """Directions of the words' contexts: truncated SVD of the PPMI with left and right neighbours.

    Args:
        bigrams: [N, N] counts of neighbours.
        counts: [N] occurrences of each word.
        dimensions: D.
        seed: of the randomised SVD.

    Returns:
        [N, D] vectors of length 1, or 0 for a word without an informative neighbour.

    Source:
        Levy, Goldberg & Dagan 2015, sections 2 and 3; Bullinaria & Levy 2012 for the power of the
        singular values.
    """
    contexts = np.argsort(-counts, kind="stable")[:CONTEXT_WORDS]
    right, left = bigrams, bigrams.T.tocsr()
    matrix = sparse.hstack([_ppmi(right, contexts), _ppmi(left, contexts)], format="csr")
    left_vectors, singular_values = truncated_svd(matrix, dimensions, seed)
    return _unit_rows(left_vectors * singular_values**SINGULAR_VALUE_POWER)


def _ppmi(neighbours: sparse.csr_array, contexts: IntArray) -> sparse.csr_array:
    """Positive pointwise mutual information (float32) with the context words, [N, contexts]."""
    word_total: DoubleArray = neighbours.sum(axis=1)
    smoothed: DoubleArray = neighbours.sum(axis=0) ** CONTEXT_SMOOTHING
    log_context = np.log(np.maximum(smoothed, 1e-300)) - np.log(max(smoothed.sum(), 1e-300))
    ppmi = neighbours[:, contexts]
    rows = np.repeat(np.arange(ppmi.shape[0]), np.diff(ppmi.indptr))
    information = np.log(ppmi.data / word_total[rows]) - log_context[contexts[ppmi.indices]]
    ppmi.data = np.maximum(information, 0).astype(np.float32)
    ppmi.eliminate_zeros()
    return ppmi


def truncated_svd(
    matrix: sparse.csr_array, rank: int, seed: int, *, oversampling: int = 20, iterations: int = 3
) -> tuple[FloatArray, FloatArray]:
    """The largest singular values and their left vectors, by randomised subspace iteration.

    Each vector's entry of largest magnitude is positive.

    Args:
        matrix: [N, M], sparse.
        rank: D; fewer come back where the matrix is smaller.
        seed: of the random start.
        oversampling: further columns carried along for accuracy.
        iterations: products with the matrix and its transpose before the last.

    Returns:
        Left vectors [N, D] and singular values [D], descending (float32; values far below the first
        are inexact, as they come from squares).

    Source:
        Halko, Martinsson & Tropp 2011, algorithms 4.4 and 5.1.
    """
    generator = np.random.default_rng(seed)
    width = min(rank + oversampling, *matrix.shape)
    transposed = matrix.T.tocsr()
    basis = generator.standard_normal((matrix.shape[1], width)).astype(np.float32)
    for _ in range(iterations):
        basis = np.linalg.qr(transposed @ (matrix @ basis)).Q
    image = matrix @ basis  # [N, width]
    squares, rotation = np.linalg.eigh((image.T @ image).astype(np.float64))
    values = np.sqrt(np.maximum(squares[::-1][:rank], 0)).astype(np.float32)
    rotation = rotation[:, ::-1][:, :rank].astype(np.float32)
    vectors = (image @ rotation) / np.where(values > 0, values, 1)
    largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(vectors.shape[1])]
    return vectors * np.where(largest < 0, -1, 1).astype(np.float32), values


def _unit_rows(matrix: FloatArray) -> FloatArray:
    """The rows scaled to length 1; rows of no length to speak of become exactly 0."""
    length = np.linalg.norm(matrix, axis=1, keepdims=True)
    keep = length > 1e-5 * length.max(initial=0)
    return np.where(keep, matrix / np.where(keep, length, 1), 0).astype(np.float32)


def balanced_kmeans(
    vectors: FloatArray,
    counts: IntArray,
    num_word_classes: int,
    capacity: int,
    seed: int,
    *,
    progress: bool = False,
) -> IntArray:
    """Spherical k-means with at most `capacity` words in a class, words weighted by their counts.

    Args:
        vectors: [N, D], length 1 or 0; words of length 0 are dealt to the smallest classes.
        counts: [N] occurrences of each word.
        num_word_classes: C.
        capacity: most words in a class.
        seed: of the first centroids.
        progress: a bar on stderr.

    Returns:
        [N] class of each word, none empty.
    """
    words = np.flatnonzero(np.any(vectors != 0, axis=1))
    centroids = _first_centroids(vectors, counts, num_word_classes, seed)
    # Frequent words choose first: their places matter most to the likelihood.
    urgency = np.sqrt(np.maximum(counts, 1)).astype(np.float32)[:, None]
    weighted = vectors * np.maximum(counts, 1).astype(np.float32)[:, None]
    prices = np.zeros(num_word_classes, dtype=np.float32)
    word_class = np.full(len(vectors), -1)
    for _ in tqdm(range(KMEANS_ITERATIONS), desc="k-means", disable=None if progress else True):

        def score(ids: IntArray, centroids: FloatArray = centroids) -> FloatArray:
            return (vectors[ids] @ centroids.T) * urgency[ids]

        occupied = np.zeros(num_word_classes, dtype=np.int64)
        word_class[words], prices = assign(
            score, words, occupied, capacity, prices, KMEANS_TEMPERATURE
        )
        member = _membership(word_class, words, num_word_classes, len(vectors))
        centroids = _unit_rows(member.T @ weighted)
    rest = np.flatnonzero(word_class < 0)
    rest = rest[np.argsort(-counts[rest], kind="stable")]
    sizes = np.bincount(word_class[words], minlength=num_word_classes)
    word_class[rest] = smallest_classes(sizes, capacity, len(rest))
    return without_empty_classes(word_class, counts, num_word_classes)


def _first_centroids(
    vectors: FloatArray, counts: IntArray, num_word_classes: int, seed: int
) -> FloatArray:
    """Vectors of C words, [C, D], drawn ∝ count · squared distance to the nearest so far.

    Source:
        Arthur & Vassilvitskii 2007 (k-means++).
    """
    generator = np.random.default_rng(seed)
    frequent = np.argsort(-counts, kind="stable")[: SEED_WORDS_PER_CLASS * num_word_classes]
    sample, weight = vectors[frequent], np.maximum(counts[frequent], 1).astype(np.float64)
    distance = np.ones(len(sample))
    chosen = np.empty(num_word_classes, dtype=np.int64)
    for index in range(num_word_classes):
        mass = np.cumsum(weight * distance)
        if mass[-1] <= 0:
            mass = np.cumsum(weight)
        chosen[index] = np.searchsorted(mass, generator.random() * mass[-1], side="right")
        squared = np.maximum(1 - sample @ sample[chosen[index]], 0)
        distance = np.minimum(distance, np.where(squared > 1e-6, squared, 0))
    return sample[chosen]


def _membership(
    word_class: IntArray, words: IntArray, num_word_classes: int, vocab_size: int
) -> sparse.csr_array:
    """[N, C] matrix with a 1 (float32) at each of `words` and its class."""
    ones = np.ones(len(words), dtype=np.float32)
    return sparse.csr_array(
        (ones, (words, word_class[words])), shape=(vocab_size, num_word_classes)
    )


def refine_classes(
    bigrams: sparse.csr_array,
    counts: IntArray,
    word_class: IntArray,
    num_word_classes: int,
    capacity: int,
    seed: int,
    *,
    progress: bool = False,
) -> IntArray:
    """Raise the likelihood of the class bigram model by moving words between classes.

    In each pass, a random part of the words bids for classes; a word's score in a class is the
    log-probability of the classes of all its neighbours, as the neighbours of that class. A pass
    that does not raise the likelihood of the text is taken back.

    Args:
        bigrams: [N, N] counts of neighbours; where a text has other words too, pairs with them are
            left out, and what the class after another word is counts for nothing.
        counts: [N] occurrences of each word.
        word_class: [N] classes to start from.
        num_word_classes: C.
        capacity: most words in a class.
        seed: of the random parts.
        progress: a bar on stderr.

    Returns:
        [N] class of each word, none empty, no less likely than the start.

    Source:
        Brown et al. 1992, equation 10, for the objective; Martin, Liermann & Ney 1998 move one word
        at a time.
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
    """How often words, and classes, stand before and after each class, for one assignment."""

    def __init__(
        self,
        bigrams: sparse.csr_array,
        reverse: sparse.csr_array,
        counts: IntArray,
        word_class: IntArray,
        num_word_classes: int,
    ) -> None:
        vocab_size = len(counts)
        member = _membership(word_class, np.arange(vocab_size), num_word_classes, vocab_size)
        self.word_class = word_class
        self.of_word = sparse.hstack([bigrams @ member, reverse @ member], format="csr")  # [N, 2C]
        of_class: DoubleArray = (member.T @ self.of_word).toarray()  # [C, 2C]
        self.of_class = of_class
        sides = of_class.reshape(num_word_classes, 2, num_word_classes)
        average = sides.sum(axis=0) + 1
        average /= average.sum(axis=1, keepdims=True)
        pseudo = REFINEMENT_SMOOTHING * (float(counts.sum()) / num_word_classes) + 1e-9
        self.prior = pseudo * average.reshape(-1)  # [2C]
        self.total = sides.sum(axis=2) + pseudo  # [C, 2]
        smoothed = (of_class + self.prior) / np.repeat(self.total, num_word_classes, axis=1)
        self.log_prob = np.log(smoothed).T.copy()  # [2C, C]
        self.log_likelihood = _log_likelihood(sides[:, 0], counts, word_class)

    def score(self, words: IntArray) -> FloatArray:
        """Log-probability (nats) of the classes of the words' neighbours in each class, [n, C].

        A word does not vouch for itself: its counts are taken out of its own class.
        """
        contexts = self.of_word[words]
        score: FloatArray = (contexts @ self.log_prob).astype(np.float32)
        rows = np.repeat(np.arange(len(words)), np.diff(contexts.indptr))
        columns, own = contexts.indices, self.word_class[words]
        side = columns // len(self.of_class)
        in_side = np.bincount(2 * rows + side, weights=contexts.data, minlength=2 * len(words))
        rest = self.of_class[own[rows], columns] - contexts.data + self.prior[columns]
        total = self.total[own[rows], side] - in_side[2 * rows + side]
        without = np.bincount(rows, contexts.data * np.log(rest / total), minlength=len(words))
        score[np.arange(len(words)), own] = without
        return score


def _log_likelihood(transitions: DoubleArray, counts: IntArray, word_class: IntArray) -> float:
    """Nats of the text under its best class bigram model, less what no assignment changes: of the
    class after each class in `transitions`, and of every word in its class.
    """
    class_counts = np.bincount(word_class, weights=counts, minlength=len(transitions)).astype(float)
    return float(_x_log_x(transitions) - _x_log_x(transitions.sum(axis=1)) - _x_log_x(class_counts))


def _x_log_x(values: DoubleArray) -> float:
    """Σ x ln x, 0 at 0."""
    return float((values * np.log(np.where(values > 0, values, 1))).sum())
