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

from data_prep.classes.assignment import IntArray, membership
from data_prep.compiled import compiled

DoubleArray = NDArray[np.float64]

TABLE_SIZE = 1 << 16
"""Counts below it have x ln x in a table."""


class Text(NamedTuple):
    """Counts of a text. The neighbours on side s, 0 right and 1 left, are a sparse CSR matrix."""

    begin: IntArray  # [2, N + 1], where the neighbours of each word begin
    word: IntArray  # [2, E], other words
    times: IntArray  # [2, E]
    self_count: IntArray  # [N], how often a word follows itself
    counts: IntArray  # [N], n(w)


class Classes(NamedTuple):
    """An assignment and its counts."""

    word_class: IntArray  # [N]
    pairs: IntArray  # [2, C + A, C], how often class d is on side s of class c, at s, d, c
    mass: IntArray  # [C + A], N(c)
    size: IntArray  # [C + A], number of words


class Sums(NamedTuple):
    """A word's neighbours, summed by class."""

    times: IntArray  # [2, C + A]
    classes: IntArray  # [2, C + A], those whose sum is not 0
    found: IntArray  # [2], their number


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
    """Move each word to its best class, frequent words first, until none moves in one of `passes`.

    Words that never occur stay, and so do the `separate` words (ids [A]): each is a class that no
    word joins, and no member of its class in `word_class`. A class with `capacity` words or more
    accepts none. Returns int64 [N], no class empty; F (1) is never lower than at the start.
    Objective: Brown et al. 1992, equation 10; algorithm: Martin, Liermann & Ney 1998, section 3.
    """
    separate = np.array(separate, np.int64)
    num_all = num_word_classes + len(separate)
    in_class = word_class.astype(np.int64)
    in_class[separate] = np.arange(num_word_classes, num_all)
    member = membership(in_class, np.arange(len(counts)), num_all).astype(np.float64)
    movable = member[:, :num_word_classes]
    sides = [(member.T @ (pairs @ movable)).toarray() for pairs in (bigrams.T, bigrams)]
    mass = np.bincount(in_class, weights=counts, minlength=num_all).astype(np.int64)
    size = np.bincount(in_class, minlength=num_all)
    classes = Classes(in_class, np.stack(sides).round().astype(np.int64), mass, size)
    others = (bigrams - sparse.diags_array(bigrams.diagonal(), dtype=bigrams.dtype)).tocsr()
    others.eliminate_zeros()
    arrays = zip(*((m.indptr, m.indices, m.data) for m in (others, others.T.tocsr())), strict=True)
    begin, word, times = (np.stack(pair, dtype=np.int64) for pair in arrays)
    text = Text(begin, word, times, bigrams.diagonal().astype(np.int64), counts)
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
def _sum_by_class(text: Text, w: int, word_class: IntArray, sums: Sums) -> None:
    """Sum a word's neighbours by class, into `sums`, whose times are 0."""
    for s in range(2):
        found = 0
        for i in range(text.begin[s, w], text.begin[s, w + 1]):
            d = word_class[text.word[s, i]]
            if sums.times[s, d] == 0:
                sums.classes[s, found] = d
                found += 1
            sums.times[s, d] += text.times[s, i]
        sums.found[s] = found


@compiled
def _shift(w: int, c: int, sign: int, text: Text, sums: Sums, state: Classes) -> None:
    """Add a word to class c (sign 1) or remove it (sign -1)."""
    pairs = state.pairs
    for s in range(2):
        for d in sums.classes[s, : sums.found[s]]:
            pairs[s, d, c] += sign * sums.times[s, d]
            if d < pairs.shape[2]:
                pairs[1 - s, c, d] += sign * sums.times[s, d]
        pairs[s, c, c] += sign * text.self_count[w]
    state.mass[c] += sign * text.counts[w]
    state.size[c] += sign


@compiled
def _set_gains(
    w: int, text: Text, sums: Sums, state: Classes, table: DoubleArray, gain: DoubleArray
) -> None:
    """Gain of F (1) by adding a word, which is in no class, to each class: `gain` [C]."""
    n, mass, times = text.counts[w], state.mass, sums.times
    for c in range(len(gain)):
        diagonal = state.pairs[0, c, c]
        together = times[0, c] + times[1, c] + text.self_count[w]
        gain[c] = _f(diagonal + together, table) - _f(diagonal, table)
        gain[c] -= 2 * (_f(mass[c] + n, table) - _f(mass[c], table))
    for s in range(2):
        for d in sums.classes[s, : sums.found[s]]:
            row, more = state.pairs[s, d], times[s, d]
            for c in range(len(gain)):
                if c != d:
                    gain[c] += _f(row[c] + more, table) - _f(row[c], table)


@compiled
def _move_words(
    order: IntArray, text: Text, state: Classes, capacity: int, table: DoubleArray
) -> int:
    """Do one pass over the words; return how many moved."""
    word_class, size = state.word_class, state.size
    shape = (2, len(size))
    sums = Sums(np.zeros(shape, np.int64), np.empty(shape, np.int64), np.zeros(2, np.int64))
    gain = np.empty(state.pairs.shape[2])
    num_moved = 0
    for w in order:
        present = word_class[w]
        if size[present] == 1:
            continue
        _sum_by_class(text, w, word_class, sums)
        _shift(w, present, -1, text, sums, state)
        _set_gains(w, text, sums, state, table, gain)
        best = present
        for c in range(len(gain)):
            if size[c] < capacity and gain[c] > gain[best] + 1e-9 * text.counts[w]:
                best = c
        _shift(w, best, 1, text, sums, state)
        word_class[w] = best
        num_moved += best != present
        for s in range(2):
            sums.times[s][sums.classes[s, : sums.found[s]]] = 0
    return num_moved
