"""Best-first search at one position after another, compiled by numba.

What is found is defined by `lm.output.decoding.search`.
"""

import math
from typing import NamedTuple

import numpy as np

from lm.output.backends.compiled.compilation import compiler
from lm.output.backends.compiled.expansion_loops import expand, item_log_weight
from lm.output.backends.compiled.row_operations import exp_row
from lm.output.backends.compiled.sorting import push, replace_first, sort_by_rank

EMITTED = "41666ec6c59763c9"
"""See `compiler`."""
TOP_K, TOP_P, MIN_P = range(3)
UNFINISHED, WRONG = -1, -2
"""Sizes of sets that are not searched to the end, or whose log-probabilities are not finite."""
SCALE, NUM_BINS = 64, 2048
"""Bins per nat of the histogram of words by log-probability, and all; the last has the rest."""
CHUNK = 512
"""Words whose weights are computed at a time."""
THRESHOLD, BEST, MASS, ABOVE, EDGE, TARGET = range(6)
"""Numbers of a search.

Words less probable than `THRESHOLD` are not needed. `BEST` is the largest log-probability of a word
and `MASS` the weight of all words found. `ABOVE` is that of the bins before number `EDGE`, and at
least `TARGET` unless that is the last one.
"""

QUEUED, FOUND, KEPT, OPENED = range(4)
"""Counts of a search: nodes in its heap, words found, words in the heap of the best ones, and nodes
opened."""
compiled = compiler(EMITTED)


class Goal(NamedTuple):
    """What to search for, see `search`."""

    kind: int  # TOP_K, TOP_P or MIN_P
    k: int
    power: float
    share: float  # top_p or min_p
    is_exact: bool  # whether power is 1 and all probabilities add up to 1
    most_rows: int  # opened of a position, beyond which it is left unfinished
    most_nodes: int  # opened in the order of probability


class Buffers(NamedTuple):
    """Memory of a search, used again for each position."""

    log_q: np.ndarray  # [widest], log-probabilities of a node's children
    weight: np.ndarray  # [widest] fp64
    bias: np.ndarray  # [widest + 1], their biases
    key: np.ndarray  # [I], a heap of negative log-probabilities of nodes
    node: np.ndarray  # [I]
    best: np.ndarray  # [k], a heap of the largest log-probabilities of words
    bins: np.ndarray  # [NUM_BINS], weights of words
    state: np.ndarray  # fp64, THRESHOLD …
    count: np.ndarray  # int64, QUEUED …


@compiled
def _lower_edge(state, bins):
    """Raise the threshold as far as the target allows."""
    edge = int(state[EDGE])
    while edge > 0 and state[ABOVE] - bins[edge - 1] >= state[TARGET]:
        edge -= 1
        state[ABOVE] -= bins[edge]
    state[EDGE] = edge
    if edge < NUM_BINS:
        state[THRESHOLD] = max(state[THRESHOLD], -edge / SCALE)


@compiled
def _add_weights(goal, buffers, items, kept):
    """The weights of a node's words, for top-p.

    `kept` has the log-probabilities of those that may be needed. Weights are relative to that of
    the best word, unless their sum is known.
    """
    weight, state, bins = buffers.weight, buffers.state, buffers.bins
    shift, to = 0.0, weight.ctypes.data
    if not goal.is_exact:
        if len(kept) and kept.max() > state[BEST]:
            largest = float(kept.max())
            ratio = math.exp(goal.power * (state[BEST] - largest))
            bins *= ratio
            for each in (MASS, ABOVE, TARGET):
                state[each] *= ratio
            state[BEST] = largest
        shift = goal.power * state[BEST]
        log_q = buffers.log_q
        exp_row(log_q, weight, log_q.ctypes.data, to, len(items), goal.power, shift)
        mass = 0.0
        for j in range(len(items)):
            mass += weight[j] if items[j] >= 0 else 0.0
        state[MASS] += mass
    exp_row(kept, weight, kept.ctypes.data, to, len(kept), goal.power, shift)
    edge, above = int(state[EDGE]), state[ABOVE]
    for j in range(len(kept)):
        place = int(min(-kept[j] * SCALE, NUM_BINS - 1.0))
        bins[place] += weight[j]
        above += weight[j] if place < edge else 0.0
    state[ABOVE] = above
    if above >= state[TARGET]:
        _lower_edge(state, bins)


@compiled
def _raise_threshold(goal, buffers, words):
    """The threshold for top-k or min-p, with the log-probabilities of more words."""
    state, best, count = buffers.state, buffers.best, buffers.count
    if goal.kind == MIN_P:
        for value in words:
            state[BEST] = max(state[BEST], value)
        cut = (goal.power * state[BEST] + math.log(goal.share)) / goal.power
        state[THRESHOLD] = cut - 1e-14 * abs(cut)  # the division is rounded
        return
    for value in words:
        if count[KEPT] < goal.k:
            push(best, best, count[KEPT], value, value)
            count[KEPT] += 1
        elif value > best[0]:
            replace_first(best, best, goal.k, value, value)
    if count[KEPT] == goal.k:
        state[THRESHOLD] = best[0]


@compiled
def _visit(layer, p, goal, buffers, node, above, log_prob, word):
    """Open a node, add the words that are needed to those found; whether all are finite."""
    log_q, count = buffers.log_q, buffers.count
    count[OPENED] += 1
    if not expand(layer, p, node, above, log_q, buffers.bias):
        return False
    row = layer.first_row[node]
    items = layer.item_of_row[row : row + layer.num_children[node]]
    threshold, found = buffers.state[THRESHOLD], count[FOUND]
    num = found
    for j in range(len(items)):  # without branches that are taken for half of the words
        log_prob[num], word[num] = log_q[j], items[j]
        num += (items[j] >= 0) & (log_q[j] >= threshold)
    count[FOUND] = num
    if goal.kind == TOP_P:
        _add_weights(goal, buffers, items, log_prob[found:num])
    elif num > found:
        _raise_threshold(goal, buffers, log_prob[found:num])
    return True


@compiled
def _rest(layer, goal, buffers):
    """The bound of the weights below the nodes that are not opened, relative to the best word's."""
    shift, total = goal.power * buffers.state[BEST], 0.0
    for i in range(buffers.count[QUEUED]):
        above = -buffers.key[i]
        num_words = layer.num_words_below[buffers.node[i]]
        total += math.exp(item_log_weight(goal.power, above, num_words) - shift)
    return total


@compiled
def _open_all(layer, p, goal, buffers, log_prob, word):
    """Open all nodes that are needed, in the order of their rows; whether all are finite.

    The others are in the heap then, in any order.
    """
    key, node, count = buffers.key, buffers.node, buffers.count
    above = np.full(len(layer.first_row), -np.inf)
    for i in range(count[QUEUED]):
        above[node[i]] = -key[i]
    needs_all = goal.kind == TOP_P and not goal.is_exact
    count[QUEUED] = 0
    for each in range(len(above)):
        if above[each] == -np.inf:
            continue
        if above[each] < buffers.state[THRESHOLD] and not needs_all:
            key[count[QUEUED]], node[count[QUEUED]] = -above[each], each
            count[QUEUED] += 1
            continue
        if not _visit(layer, p, goal, buffers, each, above[each], log_prob, word):
            return False
        row = layer.first_row[each]
        for j in range(layer.num_children[each]):
            item = layer.item_of_row[row + j]
            if item < 0:
                above[~item] = buffers.log_q[j]
    return True


@compiled
def _sort(log_prob, word, bits):
    """Sort words in place: the most probable ones first, ties by number.

    `bits` is a number of the type of integers with as many bits as a log-probability.
    """
    rank = np.abs(log_prob).view(bits.dtype).astype(np.int64)
    rank -= rank.min()
    order = np.empty(len(rank), np.int64)
    sort_by_rank(rank, rank.max(), order)
    log_prob[:], word[:] = log_prob[order], word[order]
    start = 0
    for i in range(1, len(word) + 1):
        if i == len(word) or log_prob[i] != log_prob[start]:
            if i - start == 2:  # as most ties
                first, second = word[start], word[start + 1]
                word[start], word[start + 1] = min(first, second), max(first, second)
            elif i - start > 2:
                word[start:i].sort()
            start = i


@compiled
def _num_reaching(goal, buffers, log_prob, totals):
    """How many words, most probable first, reach the share of each of two totals."""
    shift = 0.0 if goal.is_exact else goal.power * buffers.state[BEST]
    sizes, mass, weight = np.full(2, len(log_prob)), 0.0, np.empty(CHUNK)
    for first in range(0, len(log_prob), CHUNK):
        num = min(CHUNK, len(log_prob) - first)
        start = log_prob.ctypes.data + first * log_prob.itemsize
        exp_row(log_prob, weight, start, weight.ctypes.data, num, goal.power, shift)
        for i in range(num):
            mass += weight[i]
            for which in range(2):
                if mass >= goal.share * totals[which]:
                    sizes[which] = min(sizes[which], first + i + 1)
            if mass >= goal.share * totals[0]:
                return sizes
    return sizes


@compiled
def _select(goal, buffers, bits, log_prob, word):
    """Sort the words found that are needed."""
    num = 0
    for i in range(buffers.count[FOUND]):
        if log_prob[i] >= buffers.state[THRESHOLD]:
            log_prob[num], word[num] = log_prob[i], word[i]
            num += 1
    buffers.count[FOUND] = num
    _sort(log_prob[:num], word[:num], bits)


@compiled
def _find(layer, p, goal, buffers, bits, log_prob, word):
    """The size of the set of position p, or `UNFINISHED` or `WRONG`; see `search`."""
    key, node, state, count = buffers.key, buffers.node, buffers.state, buffers.count
    count[:], state[:], buffers.bins[:] = 0, 0.0, 0.0
    key[0], node[0] = 0.0, 0
    state[THRESHOLD] = state[BEST] = -math.inf
    state[EDGE], state[TARGET] = NUM_BINS, math.inf
    count[QUEUED] = 1
    is_loose = goal.kind == TOP_P and not goal.is_exact
    if goal.kind == TOP_P and goal.is_exact:
        state[TARGET] = goal.share * (1 + 1e-5)  # more than rounding changes the sum of all
        if state[TARGET] < 1:  # words with less than the mean of what is left out are not needed
            state[THRESHOLD] = math.log((1 - state[TARGET]) / (len(word) - 1))
    num_rows, least, next_check, is_sorted = 0, 0, 0, False
    while True:
        while count[QUEUED] and (-key[0] >= state[THRESHOLD] or count[OPENED] < least):
            if num_rows > goal.most_rows:
                return UNFINISHED
            if count[OPENED] >= goal.most_nodes:
                if not _open_all(layer, p, goal, buffers, log_prob, word):
                    return WRONG
                break
            above, each = -key[0], node[0]
            count[QUEUED] -= 1
            last = count[QUEUED]
            replace_first(key, node, last, key[last], node[last])
            if not _visit(layer, p, goal, buffers, each, above, log_prob, word):
                return WRONG
            row, n = layer.first_row[each], layer.num_children[each]
            for j in range(n):
                item = layer.item_of_row[row + j]
                if item < 0:
                    push(key, node, count[QUEUED], -float(buffers.log_q[j]), ~item)
                    count[QUEUED] += 1
            num_rows += n
            if is_loose and count[OPENED] >= next_check:
                next_check = count[OPENED] + 1 + count[OPENED] // 4
                state[TARGET] = goal.share * (state[MASS] + _rest(layer, goal, buffers))
                if state[ABOVE] >= state[TARGET]:
                    _lower_edge(state, buffers.bins)
        if not is_sorted:
            _select(goal, buffers, bits, log_prob, word)
            is_sorted = True
        found = log_prob[: count[FOUND]]
        if goal.kind == TOP_K:
            return goal.k
        if goal.kind == MIN_P:
            cut = goal.power * found[0] + math.log(goal.share)
            return np.searchsorted(-goal.power * found, -cut, side="right")
        totals = (1.0, 1.0)
        if not goal.is_exact:
            totals = (state[MASS] + _rest(layer, goal, buffers), state[MASS])
        sizes = _num_reaching(goal, buffers, found, totals)
        if sizes[0] == sizes[1] or count[QUEUED] == 0:
            return sizes[0]
        least = count[OPENED] + 1 + count[OPENED] // 4


@compiled
def search(layer, goal, bits, widest, log_prob, word, size):
    """The most probable words of each position, as the functions of `decoding.search` define them.

    Nodes are opened in the order of probability, while they may hold a word that is needed. After
    `most_nodes`, the others are gone through in the order of their rows.

    Args:
        layer, goal: see `Layer` and `Goal`.
        bits: see `_sort`.
        widest: the most children of a node, or more.
        log_prob: [P, N + 1], set to those of each set; then to -∞ up to the largest set's size.
        word: [P, N + 1], likewise; then to 0.
        size: [P], set to the number of words, or `UNFINISHED`.

    Returns:
        The first position whose log-probabilities are not finite, or -1; the number of nodes
        opened; the largest size; whether all are searched to the end.
    """
    num_nodes, dtype = len(layer.first_row), layer.hidden.dtype
    buffers = Buffers(
        np.empty(widest, dtype),
        np.empty(widest),
        np.empty(widest + 1, dtype),
        np.empty(num_nodes),
        np.empty(num_nodes, np.int64),
        np.empty(goal.k),
        np.empty(NUM_BINS),
        np.empty(6),
        np.empty(4, np.int64),
    )
    opened = 0
    for p in range(len(size)):
        size[p] = _find(layer, p, goal, buffers, bits, log_prob[p], word[p])
        opened += buffers.count[OPENED]
        if size[p] == WRONG:
            return p, opened, 0, False
    largest = max(0, size.max())
    for p in range(len(size)):
        start = max(0, size[p])
        log_prob[p, start:largest] = -np.inf
        word[p, start:largest] = 0
    return -1, opened, largest, size.min() >= 0
