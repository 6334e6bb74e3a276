"""The class report: what word classes cost, and how well they predict the text they were made for.

Decides nothing; lm.report shows it as text, JSON and a picture.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from data_prep.classes.bigrams import TOKENS_PER_CHUNK, Tokens
from data_prep.errors import UserError

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ClassReport:
    """What word classes cost and how well they predict, on the text that they were made for."""

    num_word_classes: int
    head: int
    """Words on the root, beside the classes and in none of them. Those with head words alone are
    empty here, and not in the tree."""
    head_mass: float
    """Share of the tokens that the head's words make up."""
    min_words: int
    """Words in the smallest class."""
    median_words: float
    max_words: int
    sizes: tuple[int, ...]
    """Words in each class."""
    token_mass: tuple[float, ...]
    """Share of the tokens that each class's words make up."""
    columns_per_token: float
    """Logits that the two-level softmax computes for a token, on average: the root's children +
    Σ mass · size."""
    log_likelihood: float
    """Nats per token of the maximum likelihood class bigram model, P(w'|w) = P(c'|c) · P(w'|c');
    the first token is not predicted. A word of the head is a class to it, and to the entropies."""
    class_entropy: float
    """Bits: entropy of the class of a token."""
    word_entropy: float
    """Bits: entropy of a token when its class is known."""
    top_words: tuple[tuple[int, ...], ...]
    """Ids of each class's most frequent words, most frequent first."""


def class_report(
    counts: IntArray,
    word_class: NDArray[np.integer],
    tokens: Tokens,
    *,
    head: int = 0,
    num_top_words: int = 10,
) -> ClassReport:
    """Sizes, masses, entropies and bigram likelihood of word classes.

    Args:
        counts: [N] occurrences of each word in `tokens`.
        word_class: [N], values 0 to C - 1, every class non-empty.
        tokens: [T] word ids, at least two; may be a memory map, is read in portions.
        head: this many of the most frequent words are in no class, whatever `word_class` says.
        num_top_words: most ids in each of `top_words`.

    Raises:
        ValueError: the arrays do not belong together, or a class is empty.
        UserError: there are fewer than two tokens.

    Source:
        Brown et al. 1992, equation 10, for the likelihood.
    """
    if len(word_class) != len(counts) or counts.sum() != len(tokens):
        raise ValueError(
            f"expected classes of {len(counts)} words and {counts.sum()} tokens, "
            f"got classes of {len(word_class)} words and {len(tokens)} tokens"
        )
    if len(tokens) < 2:
        raise UserError(
            f"a class report wants two tokens of training text at least, got {len(tokens)}"
        )
    num_word_classes = int(word_class.max()) + 1
    if not (sizes := np.bincount(word_class)).all():
        raise ValueError(f"class {sizes.argmin()} has no words")
    in_class = word_class.astype(np.int64)
    in_class[np.argsort(-counts, kind="stable")[:head]] = num_word_classes + np.arange(head)
    sizes = np.bincount(in_class, minlength=num_word_classes)
    class_counts = np.bincount(in_class, weights=counts, minlength=len(sizes)).astype(np.float64)
    class_entropy = _entropy(class_counts)
    mass, head_mass = np.split(class_counts / len(tokens), [num_word_classes])
    columns = np.count_nonzero(sizes) + mass @ sizes[:num_word_classes]
    log_likelihood = _bigram_log_likelihood(counts, class_counts, in_class, tokens)
    top_words = _top_words(counts, in_class, sizes, num_top_words)[:num_word_classes]
    sizes = sizes[:num_word_classes]
    return ClassReport(
        num_word_classes=num_word_classes,
        head=head,
        head_mass=float(head_mass.sum()),
        min_words=int(sizes.min()),
        median_words=float(np.median(sizes)),
        max_words=int(sizes.max()),
        sizes=tuple(sizes.tolist()),
        token_mass=tuple(mass.tolist()),
        columns_per_token=float(columns),
        log_likelihood=log_likelihood,
        class_entropy=class_entropy / np.log(2),
        word_entropy=(_entropy(counts) - class_entropy) / np.log(2),
        top_words=top_words,
    )


def _bigram_log_likelihood(
    counts: IntArray,
    class_counts: NDArray[np.float64],
    word_class: NDArray[np.integer],
    tokens: Tokens,
) -> float:
    """Nats per predicted token: P(c'|c) from the T - 1 pairs, P(w|c) from all T tokens."""
    shape = (len(class_counts), len(class_counts))
    transitions = sparse.csr_array(shape, dtype=np.int64)
    for start in range(0, len(tokens) - 1, TOKENS_PER_CHUNK):
        classes = word_class[tokens[start : start + TOKENS_PER_CHUNK + 1]]
        once = np.ones(len(classes) - 1, np.int64)
        transitions += sparse.coo_array((once, (classes[:-1], classes[1:])), shape).tocsr()
    of_class = -_entropy(transitions.data) + _entropy(transitions.sum(axis=1))
    log_prob_in_class = np.log(np.maximum(counts, 1) / np.maximum(class_counts, 1)[word_class])
    first = int(tokens[0])
    of_words = counts @ log_prob_in_class - log_prob_in_class[first]
    return float(of_class + of_words / (len(tokens) - 1))


def _entropy(counts: NDArray[np.integer] | NDArray[np.float64]) -> float:
    """Entropy (nats) of the distribution that the counts are proportional to."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _top_words(
    counts: IntArray, word_class: NDArray[np.integer], sizes: IntArray, num_top_words: int
) -> tuple[tuple[int, ...], ...]:
    """Ids of the most frequent words of each class; the lower id first among equals."""
    order = np.lexsort((-counts, word_class))
    starts = np.cumsum(sizes) - sizes
    return tuple(
        tuple(order[start : start + min(size, num_top_words)].tolist())
        for start, size in zip(starts, sizes, strict=True)
    )
