"""Word classes by exchange: one word at a time moves to the class that makes the text most likely.

Decides which words share a class by the likelihood of the class bigram model alone, and, if asked
to, by what a class costs the softmax. The loops are compiled, as they look at every class for every
word.

Legend: N words, C classes, A words that are a class each, alone in it for good and numbered after
the C, n(w) occurrences of word w, N(c, d) how often class d follows class c, N(c) occurrences of
class c's words, s(c) their number. Maximised is

    F = Σ_{c,d} N(c, d) ln N(c, d) - 2 Σ_c N(c) ln N(c) - λ Σ_c N(c) s(c)         (1)

whose first two terms are the log-likelihood of the text but for what no assignment changes, and
whose third is λ times the columns that the class level's words cost, over all tokens.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from tqdm import tqdm

from data_prep.compiled import compiled

IntArray = NDArray[np.int64]
DoubleArray = NDArray[np.float64]

TABLE_SIZE = 1 << 16
"""Counts below it have their x ln x looked up."""


class Neighbours(NamedTuple):
    """For each word, the words on one side of it and how often: a sparse matrix by rows, without
    the word itself.
    """

    begin: IntArray  # [N + 1]
    word: IntArray
    times: IntArray


def exchange(
    bigrams: sparse.csr_array,
    counts: IntArray,
    word_class: NDArray[np.integer],
    num_word_classes: int,
    capacity: int,
    *,
    alone: IntArray | None = None,
    passes: int = 8,
    column_cost: float = 0.0,
    progress: bool = False,
) -> IntArray:
    """Move words, most frequent first, each to its best class; again until none moves.

    Args:
        bigrams: [N, N] how often word w is followed by word v.
        counts: [N] occurrences of each word; those that never occur stay.
        word_class: [N] classes to start from, none empty.
        num_word_classes: C.
        capacity: most words in a class; a class that starts with more takes none.
        alone: [A] ids of words that count as a class each. They stay, none joins them, and they
            neither fill nor weigh the class that they have in `word_class`; to the other words they
            are neighbours told apart.
        passes: most times that every word is looked at.
        column_cost: λ, nats that one column of one token is worth.
        progress: a bar on stderr.

    Returns:
        [N] classes, none empty; F (1) is never lower than at the start.

    Source:
        Brown et al. 1992, equation 10, for the objective; Martin, Liermann & Ney 1998, section 3,
        for the algorithm.
    """
    alone = np.empty(0, np.int64) if alone is None else alone
    num_all = num_word_classes + len(alone)
    in_class = word_class.astype(np.int64)
    in_class[alone] = np.arange(num_word_classes, num_all)
    right, left, self_count = _neighbours(bigrams)
    member = sparse.csr_array(
        (np.ones(len(counts)), (np.arange(len(counts)), in_class)), shape=(len(counts), num_all)
    )
    movable = member[:, :num_word_classes]
    follows, followed = (
        (member.T @ (pairs @ movable)).toarray().round().astype(np.int64)
        for pairs in (bigrams, bigrams.T)
    )
    mass = np.bincount(in_class, weights=counts, minlength=num_all).astype(np.int64)
    size = np.bincount(in_class, minlength=num_all)
    small = np.arange(TABLE_SIZE, dtype=np.float64)
    table = small * np.log(np.maximum(small, 1))
    seen = np.flatnonzero((counts > 0) & (in_class < num_word_classes))
    order = seen[np.argsort(-counts[seen], kind="stable")]
    for _ in tqdm(range(passes), desc="exchanging words", disable=None if progress else True):
        moved = _move_words(
            order, right, left, self_count, counts, in_class,
            follows, followed, mass, size, capacity, column_cost, table,
        )  # fmt: skip
        if moved == 0:
            break
    in_class[alone] = word_class[alone]
    return in_class


def objective(
    bigrams: sparse.csr_array, counts: IntArray, word_class: IntArray, column_cost: float = 0.0
) -> float:
    """F (1) in nats, from its definition."""
    num_word_classes = int(word_class.max()) + 1
    pairs = bigrams.tocoo()
    follows: DoubleArray = np.zeros((num_word_classes, num_word_classes))
    np.add.at(follows, (word_class[pairs.row], word_class[pairs.col]), pairs.data)
    mass = np.bincount(word_class, weights=counts).astype(np.float64)
    size = np.bincount(word_class)
    likelihood = _x_log_x(follows).sum() - 2 * _x_log_x(mass).sum()
    return float(likelihood - column_cost * (mass @ size))


def _x_log_x(values: DoubleArray) -> DoubleArray:
    return values * np.log(np.where(values > 0, values, 1))


def _neighbours(bigrams: sparse.csr_array) -> tuple[Neighbours, Neighbours, IntArray]:
    """Words after and before each word, and how often a word follows itself [N]."""
    self_count = bigrams.diagonal().round().astype(np.int64)
    others = (bigrams - sparse.diags_array(bigrams.diagonal(), dtype=bigrams.dtype)).tocsr()
    others.eliminate_zeros()
    sides = []
    for side in (others, others.T.tocsr()):
        sides.append(
            Neighbours(
                side.indptr.astype(np.int64),
                side.indices.astype(np.int64),
                side.data.round().astype(np.int64),
            )
        )
    return sides[0], sides[1], self_count


@compiled
def _f(x: int, table: DoubleArray) -> float:
    """x ln x."""
    return table[x] if x < len(table) else x * np.log(x)  # type: ignore[no-any-return]


@compiled
def _by_class(
    side: Neighbours, w: int, word_class: IntArray, of_class: IntArray, classes: IntArray
) -> int:
    """Sum a word's neighbours on one side by class: `of_class` [C + A] gets the counts, `classes`
    those classes that have any; returns how many.
    """
    found = 0
    for i in range(side.begin[w], side.begin[w + 1]):
        d = word_class[side.word[i]]
        if of_class[d] == 0:
            classes[found] = d
            found += 1
        of_class[d] += side.times[i]
    return found


@compiled
def _shift(
    c: int, sign: int, own: int, n: int,
    after: IntArray, after_classes: IntArray, num_after: int,
    before: IntArray, before_classes: IntArray, num_before: int,
    follows: IntArray, followed: IntArray, mass: IntArray, size: IntArray,
) -> None:  # fmt: skip
    """Put a word into class c (sign 1) or take it out (sign -1). `follows` [C + A, C] has N(d, c),
    `followed` N(c, d).
    """
    num_word_classes = follows.shape[1]
    for i in range(num_after):
        d = after_classes[i]
        followed[d, c] += sign * after[d]
        if d < num_word_classes:
            follows[c, d] += sign * after[d]
    for i in range(num_before):
        d = before_classes[i]
        follows[d, c] += sign * before[d]
        if d < num_word_classes:
            followed[c, d] += sign * before[d]
    follows[c, c] += sign * own
    followed[c, c] += sign * own
    mass[c] += sign * n
    size[c] += sign


@compiled
def _gains(
    own: int, n: int,
    after: IntArray, after_classes: IntArray, num_after: int,
    before: IntArray, before_classes: IntArray, num_before: int,
    follows: IntArray, followed: IntArray, mass: IntArray, size: IntArray,
    column_cost: float, table: DoubleArray, gain: DoubleArray,
) -> None:  # fmt: skip
    """What F (1) gains by a word, which is in no class, in each class: `gain` [C]."""
    for c in range(len(gain)):
        diagonal = follows[c, c]
        together = after[c] + before[c] + own
        gain[c] = _f(diagonal + together, table) - _f(diagonal, table)
        gain[c] -= 2 * (_f(mass[c] + n, table) - _f(mass[c], table))
        gain[c] -= column_cost * (n * (size[c] + 1) + mass[c])
    _add_gains(after, after_classes, num_after, followed, table, gain)
    _add_gains(before, before_classes, num_before, follows, table, gain)


@compiled
def _add_gains(
    side: IntArray, classes: IntArray, found: int,
    pairs: IntArray, table: DoubleArray, gain: DoubleArray,
) -> None:  # fmt: skip
    """Add what the pairs with the classes of a word's neighbours on one side gain by it."""
    for i in range(found):
        d = classes[i]
        for c in range(len(gain)):
            if c != d:
                gain[c] += _f(pairs[d, c] + side[d], table) - _f(pairs[d, c], table)


@compiled
def _move_words(
    order: IntArray, right: Neighbours, left: Neighbours, self_count: IntArray,
    counts: IntArray, word_class: IntArray,
    follows: IntArray, followed: IntArray, mass: IntArray, size: IntArray,
    capacity: int, column_cost: float, table: DoubleArray,
) -> int:  # fmt: skip
    """One pass over the words; returns how many moved."""
    num_word_classes = follows.shape[1]
    after, before = np.zeros_like(mass), np.zeros_like(mass)
    after_classes, before_classes = np.empty_like(mass), np.empty_like(mass)
    gain = np.empty(num_word_classes)
    moved = 0
    for w in order:
        a = word_class[w]
        if size[a] == 1:
            continue
        num_after = _by_class(right, w, word_class, after, after_classes)
        num_before = _by_class(left, w, word_class, before, before_classes)
        own, n = self_count[w], counts[w]
        _shift(
            a, -1, own, n, after, after_classes, num_after, before, before_classes, num_before,
            follows, followed, mass, size,
        )  # fmt: skip
        _gains(
            own, n, after, after_classes, num_after, before, before_classes, num_before,
            follows, followed, mass, size, column_cost, table, gain,
        )  # fmt: skip
        best = a
        for c in range(num_word_classes):
            if size[c] < capacity and gain[c] > gain[best] + 1e-9 * n:
                best = c
        _shift(
            best, 1, own, n, after, after_classes, num_after, before, before_classes, num_before,
            follows, followed, mass, size,
        )  # fmt: skip
        word_class[w] = best
        moved += best != a
        for i in range(num_after):
            after[after_classes[i]] = 0
        for i in range(num_before):
            before[before_classes[i]] = 0
    return moved
