"""The class report: cost of word classes, and how well they predict the text they are made from."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from data_prep.classes.bigrams import TOKENS_PER_CHUNK, IntArray, Tokens
from data_prep.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ClassReport:
    """Cost and predictive quality of word classes, on the text that they were made from.

    Classes whose words are all in the shortlist are counted: they are empty here, and not in the
    tree. In likelihood and entropies, a word of the shortlist is a class.
    """

    num_word_classes: int  # C
    shortlist: int  # number of most frequent words that are children of the root and in no class
    shortlist_mass: float  # share of the tokens that are words of the shortlist
    min_words: int  # number of words in the smallest class
    median_words: float
    max_words: int
    sizes: tuple[int, ...]  # number of words in each class
    token_mass: tuple[float, ...]  # share of the tokens that are words of each class
    columns_per_token: float  # mean number of logits: the root's children + Σ mass · size
    log_likelihood: float  # nats per token but the first, P(w'|w) = P(c'|c) · P(w'|c')
    class_entropy: float  # entropy of the class of a token, in bits
    word_entropy: float  # entropy of a token given its class, in bits
    top_words: tuple[tuple[int, ...], ...]  # ids of the most frequent words of each class, in order


def class_report(
    counts: IntArray,
    word_class: NDArray[np.integer],
    tokens: Tokens,
    *,
    shortlist: int = 0,
    num_top_words: int = 10,
) -> ClassReport:
    """Compute sizes, masses, entropies and bigram likelihood of word classes.

    Args:
        counts: int64 [N], occurrences of each word in `tokens`.
        word_class: [N], values 0 to C - 1, every class non-empty; no meaning in the shortlist.
        tokens: [T] word ids, at least two; may be a memory map.
        shortlist: number of most frequent words that are in no class.
        num_top_words: maximum number of ids in each of `top_words`.

    Raises:
        ValueError: the arrays do not match, or a class is empty.
        UserError: there are fewer than two tokens.

    Source: likelihood: Brown et al. 1992, equation 10.

    Example:
        >>> tokens = np.array([0, 1, 0, 2])
        >>> report = class_report(np.array([2, 1, 1]), np.array([0, 1, 1]), tokens)
        >>> report.sizes, report.token_mass, report.class_entropy
        ((1, 2), (0.5, 0.5), 1.0)
    """
    if len(word_class) != len(counts) or counts.sum() != len(tokens):
        raise ValueError(
            f"expected classes of {len(counts)} words and {counts.sum()} tokens, "
            f"got classes of {len(word_class)} words and {len(tokens)} tokens"
        )
    if len(tokens) < 2:
        raise UserError(
            f"a class report needs at least two tokens of training text, got {len(tokens)}"
        )
    num_word_classes = int(word_class.max()) + 1
    if not (sizes := np.bincount(word_class)).all():
        raise ValueError(f"class {sizes.argmin()} has no words")
    in_class = word_class.astype(np.int64)
    most_frequent = np.argsort(-counts, kind="stable")[:shortlist]
    in_class[most_frequent] = num_word_classes + np.arange(shortlist)
    sizes = np.bincount(in_class, minlength=num_word_classes)
    class_counts = np.bincount(in_class, weights=counts, minlength=len(sizes)).astype(np.float64)
    class_entropy = _entropy(class_counts)
    mass, shortlist_mass = np.split(class_counts / len(tokens), [num_word_classes])
    columns = np.count_nonzero(sizes) + mass @ sizes[:num_word_classes]
    top_words = _top_words(counts, in_class, sizes, num_top_words)[:num_word_classes]
    sizes = sizes[:num_word_classes]
    return ClassReport(
        num_word_classes=num_word_classes,
        shortlist=shortlist,
        shortlist_mass=float(shortlist_mass.sum()),
        min_words=int(sizes.min()),
        median_words=float(np.median(sizes)),
        max_words=int(sizes.max()),
        sizes=tuple(sizes.tolist()),
        token_mass=tuple(mass.tolist()),
        columns_per_token=float(columns),
        log_likelihood=_bigram_log_likelihood(counts, class_counts, in_class, tokens),
        class_entropy=float(class_entropy / np.log(2)),
        word_entropy=float((_entropy(counts) - class_entropy) / np.log(2)),
        top_words=top_words,
    )


def _bigram_log_likelihood(
    counts: IntArray, class_counts: NDArray[np.float64], word_class: IntArray, tokens: Tokens
) -> float:
    """Nats per predicted token, with P(c'|c) from the T - 1 pairs, P(w|c) from all T tokens."""
    shape = (len(class_counts), len(class_counts))
    transitions = sparse.csr_array(shape, dtype=np.int64)
    for start in range(0, len(tokens) - 1, TOKENS_PER_CHUNK):
        classes = word_class[tokens[start : start + TOKENS_PER_CHUNK + 1]]
        once = np.ones(len(classes) - 1, np.int64)
        transitions += sparse.coo_array((once, (classes[:-1], classes[1:])), shape).tocsr()
    class_part = -_entropy(transitions.data) + _entropy(transitions.sum(axis=1))
    log_prob_in_class = np.log(np.maximum(counts, 1) / np.maximum(class_counts, 1)[word_class])
    first = int(tokens[0])
    word_part = counts @ log_prob_in_class - log_prob_in_class[first]
    return float(class_part + word_part / (len(tokens) - 1))


def _entropy(counts: NDArray[np.integer] | NDArray[np.float64]) -> float:
    """Entropy (nats) of the distribution proportional to the counts."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _top_words(
    counts: IntArray, word_class: IntArray, sizes: IntArray, num_top_words: int
) -> tuple[tuple[int, ...], ...]:
    """Ids of the most frequent words of each class; equal counts in order of ids."""
    order = np.lexsort((-counts, word_class))
    starts = np.cumsum(sizes) - sizes
    return tuple(
        tuple(order[start : start + min(size, num_top_words)].tolist())
        for start, size in zip(starts, sizes, strict=True)
    )
