"""Word classes by exchange: one word at a time moves to the class that makes the text most likely.

The loops are compiled, because they examine every class for every word.

Legend: N words, C classes, A separate words, each of which is a class numbered after the C and
stays alone in it, n(w) occurrences of word w, N(c, d) how often class d follows class c, N(c)
occurrences of the words of class c. The objective is

    F = Σ_{c,d} N(c, d) ln N(c, d) - 2 Σ_c N(c) ln N(c)         (1)

which is the log-likelihood of the text without the terms that no assignment changes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from tqdm import tqdm

from data_prep.compiled import compiled

IntArray = NDArray[np.int64]
DoubleArray = NDArray[np.float64]

TABLE_SIZE = 1 << 16
"""Counts below it have x ln x in a table."""


class Neighbours(NamedTuple):
    """The other words on one side of each word, a sparse matrix in CSR format."""

    begin: IntArray  # [N + 1]
    word: IntArray
    times: IntArray


class Text(NamedTuple):
    """The counts of a text."""

    right: Neighbours
    left: Neighbours
    self_count: IntArray  # [N] how often a word follows itself
    counts: IntArray  # [N] n(w)


class Classes(NamedTuple):
    """An assignment and its counts."""

    word_class: IntArray  # [N]
    follows: IntArray  # [C + A, C] N(d, c) at row d
    followed: IntArray  # [C + A, C] N(c, d) at row d
    mass: IntArray  # [C + A] N(c)
    size: IntArray  # [C + A] s(c)


class ClassSums(NamedTuple):
    """A word's neighbours on one side, summed by class."""

    times: IntArray  # [C + A]
    classes: IntArray  # those classes whose sum is not 0


class Word(NamedTuple):
    """The counts of one word."""

    num: int  # n(w)
    num_self: int  # how often it follows itself
    after: ClassSums
    before: ClassSums


def exchange(
    bigrams: sparse.csr_array,
    counts: IntArray,
    word_class: NDArray[np.integer],
    num_word_classes: int,
    capacity: int,
    *,
    separate: IntArray | Sequence[int] = (),
    passes: int = 8,
    progress: bool = False,
) -> IntArray:
    """Move each word to its best class, most frequent words first, until no word moves.

    Words that never occur stay, and so do the `separate` words (ids [A]): each is a class that no
    word joins, and no member of its class in `word_class`. A class with `capacity` words or more
    accepts none. Returns int64 [N], no class empty; F (1) is never lower than at the start.
    Objective: Brown et al. 1992, equation 10; algorithm: Martin, Liermann & Ney 1998, section 3.
    """
    separate = np.array(separate, np.int64)
    num_all = num_word_classes + len(separate)
    in_class = word_class.astype(np.int64)
    in_class[separate] = np.arange(num_word_classes, num_all)
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
    classes = Classes(in_class, follows, followed, mass, size)
    others = (bigrams - sparse.diags_array(bigrams.diagonal(), dtype=bigrams.dtype)).tocsr()
    others.eliminate_zeros()
    right, left = (
        Neighbours(*(array.astype(np.int64) for array in (side.indptr, side.indices, side.data)))
        for side in (others, others.T.tocsr())
    )
    text = Text(right, left, bigrams.diagonal().astype(np.int64), counts)
    small = np.arange(TABLE_SIZE, dtype=np.float64)
    table = small * np.log(np.maximum(small, 1))
    seen = np.flatnonzero((counts > 0) & (in_class < num_word_classes))
    order = seen[np.argsort(-counts[seen], kind="stable")]
    for _ in tqdm(range(passes), desc="exchanging words", disable=None if progress else True):
        if _move_words(order, text, classes, capacity, table) == 0:
            break
    in_class[separate] = word_class[separate]
    return in_class


@compiled
def _f(x: int, table: DoubleArray) -> float:
    """Compute x ln x."""
    return table[x] if x < len(table) else x * np.log(x)  # type: ignore[no-any-return]


@compiled
def _by_class(
    side: Neighbours, w: int, word_class: IntArray, times: IntArray, classes: IntArray
) -> ClassSums:
    """Sum a word's neighbours on one side by class, into `times` (zeros) and `classes`, [C + A]."""
    found = 0
    for i in range(side.begin[w], side.begin[w + 1]):
        d = word_class[side.word[i]]
        if times[d] == 0:
            classes[found] = d
            found += 1
        times[d] += side.times[i]
    return ClassSums(times, classes[:found])


@compiled
def _shift(word: Word, c: int, sign: int, state: Classes) -> None:
    """Add a word to class c (sign 1) or remove it (sign -1)."""
    follows, followed = state.follows, state.followed
    num_word_classes = follows.shape[1]
    for d in word.after.classes:
        followed[d, c] += sign * word.after.times[d]
        if d < num_word_classes:
            follows[c, d] += sign * word.after.times[d]
    for d in word.before.classes:
        follows[d, c] += sign * word.before.times[d]
        if d < num_word_classes:
            followed[c, d] += sign * word.before.times[d]
    follows[c, c] += sign * word.num_self
    followed[c, c] += sign * word.num_self
    state.mass[c] += sign * word.num
    state.size[c] += sign


@compiled
def _set_gains(word: Word, state: Classes, table: DoubleArray, gain: DoubleArray) -> None:
    """Gain of F (1) by adding a word, which is in no class, to each class: `gain` [C]."""
    n, after, before = word.num, word.after.times, word.before.times
    follows, mass = state.follows, state.mass
    for c in range(len(gain)):
        diagonal = follows[c, c]
        together = after[c] + before[c] + word.num_self
        gain[c] = _f(diagonal + together, table) - _f(diagonal, table)
        gain[c] -= 2 * (_f(mass[c] + n, table) - _f(mass[c], table))
    _add_gains(word.after, state.followed, table, gain)
    _add_gains(word.before, follows, table, gain)


@compiled
def _add_gains(side: ClassSums, pairs: IntArray, table: DoubleArray, gain: DoubleArray) -> None:
    """Add the gain by the pairs with the classes of a word's neighbours on one side."""
    for d in side.classes:
        times = side.times[d]
        for c in range(len(gain)):
            if c != d:
                gain[c] += _f(pairs[d, c] + times, table) - _f(pairs[d, c], table)


@compiled
def _move_words(
    order: IntArray, text: Text, state: Classes, capacity: int, table: DoubleArray
) -> int:
    """Do one pass over the words; return how many moved."""
    word_class, size = state.word_class, state.size
    num_word_classes = state.follows.shape[1]
    times_after, times_before = np.zeros_like(size), np.zeros_like(size)
    classes_after, classes_before = np.empty_like(size), np.empty_like(size)
    gain = np.empty(num_word_classes)
    num_moved = 0
    for w in order:
        present = word_class[w]
        if size[present] == 1:
            continue
        after = _by_class(text.right, w, word_class, times_after, classes_after)
        before = _by_class(text.left, w, word_class, times_before, classes_before)
        word = Word(text.counts[w], text.self_count[w], after, before)
        _shift(word, present, -1, state)
        _set_gains(word, state, table, gain)
        best = present
        for c in range(num_word_classes):
            if size[c] < capacity and gain[c] > gain[best] + 1e-9 * word.num:
                best = c
        _shift(word, best, 1, state)
        word_class[w] = best
        num_moved += best != present
        times_after[after.classes] = 0
        times_before[before.classes] = 0
    return num_moved
