"""Interpolated modified Kneser–Ney estimation of an n-gram model from token ids.

    P(w | h) = [h w is kept] (a(h w) - D(a(h w))) / Σ_x a(h x) + b(h) P(w | h')                  (1)
    b(h) = 1 - Σ_x [h x is kept] (a(h x) - D(a(h x))) / Σ_x a(h x)

h' is h without its first word, and P(w | h') of a single word's h' is uniform over the N words of
the vocabulary, `<unk>` and `</s>` among them, as in KenLM by default. a(g)
is the count of g if g has the largest order or begins with `<s>`, else the number of distinct words
before g. With n_k the number of n-grams of an order with a(g) = k, Y = n_1 / (n_1 + 2 n_2),

    D(k) = k - (k + 1) Y n_{k+1} / n_k     for k = 1, 2, 3, and D(k) = D(3) for k > 3            (2)

or D(k) = Y for all k if one of n_1, n_2, n_3 or D(k) is not positive, in a very small text, which
KenLM refuses; Y is then 1/2 if n_1 or n_2 is 0, so that every word has a probability above 0.

An n-gram is kept if it occurs more often than the threshold of its order, as with KenLM's --prune:
occurrences and not a(g), so that all parts of an n-gram that is kept are kept. D and the sums are
those of all n-grams. Every line begins with one `<s>`, which is never predicted, and ends with
`</s>`.

All places of the text are sorted by the words that follow, so that equal n-grams of every order are
neighbours. That takes 4 bytes a place twice, and each n-gram takes 16 bytes until it is estimated.

Source: Chen and Goodman 1998, "An Empirical Study of Smoothing Techniques for Language Modeling";
Heafield et al. 2013, "Scalable Modified Kneser-Ney Language Model Estimation".
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.compiled import compiled
from data_prep.errors import UserError
from lm.scoring.ngram_tree import NEVER, Arrays, Floats, Ints, NGramTree

Index = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
MOST = (1 << 32) - 1
"""Largest number of places or n-grams, which have 32-bit numbers."""


class _Order(NamedTuple):
    """The distinct n-grams [g] of one order, by their words."""

    word: Index  # [g], the last one
    suffix: Index  # [g], the place of the last n - 1 words among the n-grams of that order
    adjusted: Index  # [g], a(g)
    kept: NDArray[np.bool_]  # [g]
    first: Index  # [histories + 1], where those of each history begin


def estimate(
    tokens: NDArray[Any], vocab_size: int, eos_id: int, order: int = 5, prune: Sequence[int] = ()
) -> NGramTree:
    """The model of equation (1).

    Args:
        tokens: [n] ids in [0, vocab_size), `eos_id` at the end of each line.
        vocab_size: N.
        eos_id: id of the end of a line.
        order: the largest n, at least 2.
        prune: thresholds of orders 1, 2, …, increasing, the first one 0; the last one is that of
            all further orders. Empty: nothing is pruned.

    Raises:
        UserError: if the text or the model is too large for 32-bit numbers, or there is no text.
    """
    if not len(tokens):
        raise UserError("the training split has no token to count")
    thresholds = (*prune, *[prune[-1] if prune else 0] * order)[:order]
    orders = _count(_with_begins(tokens, vocab_size, eos_id, order), vocab_size, thresholds)
    sizes = [int(each.kept.sum()) for each in orders]
    _check_size(1 + sum(sizes), "n-grams: prune")
    arrays = Arrays.empty(1 + sum(sizes), 1 + sum(sizes[:-1]))
    lower, above = np.full(1, 1 / vocab_size), np.ones(1, np.bool_)
    numbers, begin, parents = np.zeros(1, np.uint32), 1, slice(0, 1)
    for n, size in enumerate(sizes, 1):
        each = orders.pop(0)
        prob, backoff = np.zeros(len(each.word)), np.ones(len(lower))
        _estimate(each, _discounts(each.adjusted), lower, prob, backoff)
        if n == 1:
            prob[vocab_size] = 10**NEVER
        before = np.full(len(prob) + 1, begin, np.uint32)  # of as many n-grams, the next node
        before[1:] += np.cumsum(each.kept, dtype=np.uint32)
        nodes = slice(begin, begin + size)
        np.log(backoff[above], out=arrays.backoff[parents])
        arrays.first[parents] = before[each.first[:-1][above]]
        arrays.word[nodes] = each.word[each.kept]
        np.log(prob[each.kept], out=arrays.log_prob[nodes])
        if n < order:
            arrays.suffix[nodes] = numbers[each.suffix[each.kept]]
        lower, above, numbers = prob, each.kept, before
        parents, begin = nodes, begin + size
    arrays.first[-1] = begin
    return NGramTree(arrays, sizes, eos_id)


def _check_size(number: int, what: str) -> None:
    if number > MOST:
        raise UserError(f"{number:,} {what}: at most {MOST:,} are possible")


def _with_begins(tokens: NDArray[Any], begin: int, eos_id: int, order: int) -> Index:
    """The tokens with `<s>`, the id `begin`, before each line, and so often after the last one."""
    starts = np.flatnonzero(tokens[:-1] == eos_id) + 1
    stream = np.full(len(tokens) + len(starts) + 1 + order, begin, np.uint32)
    _check_size(len(stream), "tokens")
    is_token = np.ones(len(stream) - order, np.bool_)
    is_token[np.append(0, starts + 1 + np.arange(len(starts)))] = False
    stream[:-order][is_token] = tokens
    return stream


def _count(stream: Index, begin: int, thresholds: Sequence[int]) -> list[_Order]:
    """The n-grams of each order, from a text with `<s>`; of order 1 all words and `<s>`, by id."""
    order, size = len(thresholds), begin + 1
    places, shared, valid = _sorted_places(stream, size, order)
    node = stream[:-order].copy()  # of the n-gram at each place, as n grows
    frequency = np.bincount(node, minlength=size).astype(np.uint32)
    word, suffix = np.arange(size, dtype=np.uint32), np.zeros(size, np.uint32)
    first, begins = np.array([0, size], np.uint32), begin  # where those with <s> begin
    orders = []
    for n, threshold in enumerate(thresholds, 1):
        adjusted, kept = frequency, (frequency > threshold) | (n == 1)
        if n < order:
            adjusted = np.zeros(len(word), np.uint32)
            number = int(((shared <= n) & (valid > n)).sum())
            longer = [np.zeros(number, np.uint32) for _ in range(3)]
            next_first = np.zeros(len(word) + 1, np.uint32)
            node = _lengthen(
                stream, places, shared, valid, n + 1, node, *longer, next_first, adjusted
            )
            if n > 1:
                adjusted[begins:] = frequency[begins:]
        orders.append(_Order(word, suffix, adjusted, kept, first))
        if n < order:
            word, suffix, frequency = longer
            first, begins = next_first, int(next_first[begins])
    return orders


def _sorted_places(stream: Index, size: int, order: int) -> tuple[Index, Bytes, Bytes]:
    """The places [T] of a text by the `order` words from each on, and two figures of each.

    The first one is how many words it shares with the place before it in that order, the second
    how many words from it on precede the next `<s>`.
    """
    places = np.arange(len(stream) - order, dtype=np.uint32)
    other = np.empty_like(places)
    for offset in range(order - 1, -1, -1):
        words = stream[offset : offset + len(places)]
        count = np.bincount(words, minlength=size)
        _sort_by_word(words, places, np.cumsum(count) - count, other)
        places, other = other, places
    shared, valid = np.zeros(len(places), np.uint8), np.zeros(len(places), np.uint8)
    _compare(stream, places, size - 1, order, shared, valid)
    return places, shared, valid


@compiled
def _sort_by_word(stream: Index, places: Index, begin: Ints, out: Index) -> None:
    """Sort places by the word at each, those of a word from `begin` [words] on, stably."""
    for place in places:
        word = stream[place]
        out[begin[word]] = place
        begin[word] += 1


@compiled
def _compare(
    stream: Index, places: Index, begin: int, order: int, shared: Bytes, valid: Bytes
) -> None:
    last = np.int64(0)
    for i in range(len(places)):
        place = np.int64(places[i])
        n = 0
        while i > 0 and n < order and stream[place + n] == stream[last + n]:
            n += 1
        shared[i] = n
        n = 1
        while n < order and stream[place + n] != begin:
            n += 1
        valid[i] = n
        last = place


@compiled
def _lengthen(
    stream: Index, places: Index, shared: Bytes, valid: Bytes, n: int, node: Index,
    word: Index, suffix: Index, frequency: Index, first: Index, adjusted: Index,
) -> Index:  # fmt: skip
    """Fill in the n-grams of order n; returns the one at each place, from those of order n - 1."""
    after = np.zeros_like(node)
    found, history = -1, -1
    for i in range(len(places)):
        if valid[i] < n:
            continue
        place = np.int64(places[i])
        if shared[i] < n:
            found += 1
            word[found] = stream[place + n - 1]
            suffix[found] = node[place + 1]
            adjusted[suffix[found]] += 1
            while history < node[place]:
                history += 1
                first[history] = found
        frequency[found] += 1
        after[place] = found
    first[history + 1 :] = found + 1
    return after


def _discounts(adjusted: Index) -> Floats:
    """D(0), …, D(3), equation (2)."""
    _, ones, twos, threes, fours = (int((adjusted == k).sum()) for k in range(5))
    y = ones / (ones + 2 * twos) if ones and twos else 0.5
    ratios = twos / max(1, ones), threes / max(1, twos), fours / max(1, threes)
    by_count = [k - (k + 1) * y * ratio for k, ratio in enumerate(ratios, 1)]
    if min(ones, twos, threes, *by_count) <= 0:
        by_count = [y] * 3
    return np.array([0.0, *by_count])


@compiled
def _estimate(
    ngrams: _Order, discounts: Floats, lower: Floats, prob: Floats, backoff: Floats
) -> None:
    """Equation (1) of the n-grams [g] that are kept, and b of each history, from P by suffix."""
    for h in range(len(backoff)):
        children = range(ngrams.first[h], ngrams.first[h + 1])
        total, reserved = 0.0, 0.0
        for i in children:
            count = float(ngrams.adjusted[i])
            total += count
            reserved += discounts[min(3, ngrams.adjusted[i])] if ngrams.kept[i] else count
        if total > 0:
            backoff[h] = reserved / total
        for i in children:
            if ngrams.kept[i]:
                discounted = ngrams.adjusted[i] - discounts[min(3, ngrams.adjusted[i])]
                prob[i] = discounted / total + backoff[h] * lower[ngrams.suffix[i]]
