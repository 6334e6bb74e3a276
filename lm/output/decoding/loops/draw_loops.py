"""Exact draws from a tree of softmaxes at one position after another, compiled by numba.

At temperature T word w has probability P(w)^β / Z with β = 1/T and Z = Σ P(w)^β over *all* words,
which differs from applying the temperature in each softmax of the tree. Let S_n = Σ q^β over the
words below node n, where q are their probabilities given n. The exact weight of n is P(n)^β S_n,
but S_n is known only once everything below n has been opened. It has an upper bound u_n: for
β ≥ 1, Σ q^β ≤ Σ q = 1; for β < 1 the sum is largest for equal q (Jensen's inequality), (number of
words)^(1 - β). So every known item has a weight b that is at least the exact one:

    b_w = P(w)^β,    b_n = P(n)^β u_n.                                                     (1)

A trial draws item i with probability b_i / Σ b. A word ends the trial. A node is opened: its
children have weights (1) with total t ≤ b_n; with probability t / b_n the trial continues with one
of them, drawn in proportion to the weights, otherwise it is rejected. Along the path of a word all
totals and bounds cancel, so a trial yields

    word w with probability P(w)^β / Σ b,                                                  (2)

whatever has been opened before. So trials repeated until one succeeds sample P^β / Z exactly, and
each uses what the rejected ones have opened: t replaces b_n. For T = 1 no trial is rejected
(u_n = 1 = S_n), and only the nodes on the path of the word are opened.

A repetition penalty θ gives words that occurred before the weight P^(βθ) instead of P^β, and
excluded words have the weight 0. Since θ ≥ 1 the bounds (1) remain valid, and nothing else changes;
at T = 1 trials may then be rejected.

The known items of a position are the children of the root and of those nodes opened later that have
nodes among their children. A node with words alone only changes its weight; if drawn again, it is
opened again.
"""

import math
from typing import NamedTuple

import numpy as np

from lm.output.codegen.compilation import compiled
from lm.output.codegen.row_operations import exp_row
from lm.output.decoding.loops.expansion_loops import (
    OPENED,
    QUEUED,
    begin,
    excluded_rows,
    expand,
    item_log_weight,
    new_frontier,
    open_next,
)


@compiled
def _uniform(seed, index):
    """Number `index` of a seed, see `lm.output.decoding.draws`."""
    bits = np.uint64(seed) + np.uint64(index + 1) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = bits ^ (bits >> np.uint64(31))
    return float(bits >> np.uint64(11)) * 2.0**-53


@compiled
def _sample_index(log_weight, num, uniform, cumulative):
    """The first of `num` indices at which the sum of the weights exceeds that share of all."""
    start, to = log_weight.ctypes.data, cumulative.ctypes.data
    exp_row(log_weight, cumulative, start, to, num, 1.0, log_weight[:num].max())
    total = 0.0
    for i in range(num):
        total += cumulative[i]
        cumulative[i] = total
    return np.searchsorted(cumulative[:num], uniform * total, side="right")


class DrawGoal(NamedTuple):
    """What to draw."""

    power: float  # 1 / T
    is_plain: bool  # whether power is 1, and there is no penalty
    share: float  # of the nucleus that words must be in; 1 if they may be any
    num_draws: int  # after which words outside it are given up


class Trials(NamedTuple):
    """The known items of a position; the memory is used again for each position."""

    item: np.ndarray  # [R]
    log_prob: np.ndarray  # [R]
    log_weight: np.ndarray  # [R] fp64
    cumulative: np.ndarray  # [R] fp64
    log_q: np.ndarray  # [widest], log-probabilities of a node's children
    bias: np.ndarray  # [widest], their biases
    child_log_weight: np.ndarray  # [widest] fp64
    count: np.ndarray  # int64, KNOWN, USED and TRIED


KNOWN, USED, TRIED = range(3)
"""Counts of `Trials`: known items, random numbers used, and nodes opened."""


class Found(NamedTuple):
    """The words below the nodes of a position that are opened to search for a nucleus."""

    log_prob: np.ndarray  # [N]
    word: np.ndarray  # [N]
    weight: np.ndarray  # [N] fp64
    count: np.ndarray  # int64, WORDS and EXCLUDED


WORDS, EXCLUDED = range(2)
"""Counts of `Found`: words, and excluded words."""
LARGEST_EXPONENT = 600.0
"""Largest log of a weight relative to a drawn word's: sums of larger ones might not be finite."""


@compiled
def _num_excluded(layer, p, node):
    """How many of a node's children are words excluded at position p."""
    row, rows = layer.first_row[node], excluded_rows(layer, p)
    return np.searchsorted(rows, row + layer.num_children[node]) - np.searchsorted(rows, row)


@compiled
def _open(layer, p, frontier, found):
    """Open the most probable node; whether all log-probabilities are finite."""
    node, num = open_next(layer, p, frontier), found.count[WORDS]
    if node < 0:
        return False
    row = layer.first_row[node]
    for j in range(layer.num_children[node]):
        item = layer.item_of_row[row + j]
        if item >= 0:
            found.log_prob[num], found.word[num] = frontier.log_q[j], item
            num += 1
    found.count[WORDS] = num
    found.count[EXCLUDED] += _num_excluded(layer, p, node)
    return True


@compiled
def _may_have_excluded(layer, p, node, count):
    """Whether words excluded at position p may be below a node that is not opened."""
    if count[EXCLUDED] == layer.excluded.shape[1]:
        return False
    return layer.first_row[node] < layer.num_node_rows or _num_excluded(layer, p, node) > 0


@compiled
def _add_words(found, first, power, shift, word, log_prob):
    """The weights of words from number `first` on: of all, and of those before a word."""
    num, weight, total, before = found.count[WORDS] - first, found.weight, 0.0, 0.0
    for i in range(num):
        weight[i] = min(power * found.log_prob[first + i] - shift, LARGEST_EXPONENT)
    exp_row(weight, weight, weight.ctypes.data, weight.ctypes.data, num, 1.0, 0.0)
    for i in range(num):
        other = found.log_prob[first + i]
        is_before = other > log_prob or (other == log_prob and found.word[first + i] < word)
        total += weight[i]
        before += weight[i] if is_before else 0.0
    return total, before


@compiled
def _is_in_nucleus(layer, p, goal, frontier, found, word, log_prob):
    """Whether a word is in the nucleus of position p; -1 if log-probabilities are not finite.

    It is if words before it, more probable ones and equal ones with lower numbers, have less than
    that share of Z. Nodes are opened in the order of probability until bounds of both tell.
    Weights are relative to that of the word.
    """
    count, power, share, shift = frontier.count, goal.power, goal.share, goal.power * log_prob
    mass, before = _add_words(found, 0, power, shift, word, log_prob)
    next_check = 0
    while True:
        if count[OPENED] >= next_check or count[QUEUED] == 0:
            next_check = count[OPENED] + 1 + count[OPENED] // 4
            rest, rest_before, low = 0.0, 0.0, mass
            for i in range(count[QUEUED]):
                above, node = -frontier.key[i], frontier.node[i]
                bound = item_log_weight(power, above, layer.num_words_below[node]) - shift
                weight = math.exp(min(bound, LARGEST_EXPONENT))
                rest += weight
                rest_before += weight if above >= log_prob else 0.0
                is_exact = goal.is_plain and not _may_have_excluded(layer, p, node, found.count)
                low += weight if is_exact else 0.0
            if before >= share * (mass + rest):
                return 0
            if before + rest_before < share * low or rest == 0:  # the latter once none is left
                return 1
        first = found.count[WORDS]
        if not _open(layer, p, frontier, found):
            return -1
        more, more_before = _add_words(found, first, power, shift, word, log_prob)
        mass, before = mass + more, before + more_before


@compiled
def _weigh(layer, power, node, log_q, log_weight):
    """Set the logarithms of the weights (1) of a node's children; whether some are nodes."""
    row, has_nodes = layer.first_row[node], False
    for j in range(layer.num_children[node]):
        item = layer.item_of_row[row + j]
        num_words = layer.num_words_below[~item] if item < 0 else 1
        log_weight[j] = item_log_weight(power, log_q[j], num_words)
        has_nodes |= item < 0
    return has_nodes


@compiled
def _draw_word(layer, p, seed, power, is_exact, trials):
    """A word of position p by trials (2) and its log-probability; word -1 if one is not finite."""
    known, known_log_weight, count = trials.item, trials.log_weight, trials.count
    log_q, log_weight, cumulative = trials.log_q, trials.child_log_weight, trials.cumulative
    column, node, above, weight = -1, 0, 0.0, 0.0
    begins = count[KNOWN] > 0
    while True:
        if begins:
            point = _uniform(seed, count[USED])
            count[USED] += 1
            column = _sample_index(known_log_weight, count[KNOWN], point, cumulative)  # a class
            item, above = known[column], float(trials.log_prob[column])
            weight = known_log_weight[column]
            if item >= 0:
                return item, above
            node = ~item
        row, n, base = layer.first_row[node], layer.num_children[node], count[KNOWN]
        count[TRIED] += 1
        if not expand(layer, p, node, above, log_q, trials.bias):
            return -1, 0.0
        items = layer.item_of_row[row : row + n]
        has_nodes = _weigh(layer, power, node, log_q, log_weight)
        begins, point = column < 0, 0.0
        if column >= 0:
            point = _uniform(seed, count[USED])
            count[USED] += 1
            if not is_exact:
                total = largest = log_weight[:n].max()
                if largest > -math.inf:  # of words that are not all excluded
                    total += math.log(np.exp(log_weight[:n] - largest).sum())
                share = min(1.0, math.exp(total - weight))
                begins = point >= share
                point = 0.0 if begins else point / share
                known_log_weight[column] = -math.inf if has_nodes else total
        if column < 0 or (has_nodes and not is_exact):
            known[base : base + n] = items
            trials.log_prob[base : base + n] = log_q[:n]
            known_log_weight[base : base + n] = log_weight[:n]
            count[KNOWN] += n
        if not begins:
            child = _sample_index(log_weight, n, point, cumulative)  # a word of it
            column, item, above = base + child, items[child], float(log_q[child])
            weight = log_weight[child]
            if item >= 0:
                return item, above
            node = ~item


@compiled
def draw_words(layer, seeds, goal, widest, word):
    """Set word [P], drawn from P^power, or from the nucleus of it.

    Args:
        layer, goal: see `LayerArrays` and `DrawGoal`.
        seeds: [P] int64.
        widest: the most children of a node, or more.
        word: to be set; to -1 where words are given up.

    Returns:
        The first position whose log-probabilities are not finite, or -1; the number of nodes
        opened.
    """
    frontier, dtype, num_rows = new_frontier(layer, widest), layer.hidden.dtype, len(layer.weight)
    trials = Trials(
        np.empty(num_rows, np.int64),
        np.empty(num_rows, dtype),
        np.empty(num_rows),
        np.empty(num_rows),
        frontier.log_q,
        frontier.bias,
        np.empty(widest),
        np.empty(3, np.int64),
    )
    num_words = layer.num_words_below[0] if goal.share < 1 else 0
    found = Found(
        np.empty(num_words, dtype),
        np.empty(num_words, np.int64),
        np.empty(num_words),
        np.empty(2, np.int64),
    )
    is_exact, opened = goal.is_plain and layer.excluded.shape[1] == 0, 0
    for p in range(len(word)):
        trials.count[:], found.count[:], word[p] = 0, 0, -1
        begin(frontier)
        for _ in range(goal.num_draws):
            drawn, log_prob = _draw_word(layer, p, seeds[p], goal.power, is_exact, trials)
            is_wanted = 1 if drawn >= 0 else -1
            if drawn >= 0 and goal.share < 1:
                is_wanted = _is_in_nucleus(layer, p, goal, frontier, found, drawn, log_prob)
            if is_wanted < 0:
                return p, opened
            if is_wanted:
                word[p] = drawn
                break
        opened += trials.count[TRIED] + frontier.count[OPENED]
    return -1, opened
