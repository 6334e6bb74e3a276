"""Best-first search at one position after another, compiled by numba.

A word is at most as probable as a node above it: less probable nodes need not be opened.
What is found is defined by `topk` and `within_ratio` of `lm.output.decoding.search`; nuclei are
taken from the words above a floor.
"""

import math
from typing import NamedTuple

import numpy as np

from lm.output.codegen.compilation import compiled
from lm.output.codegen.sorting import push, replace_first, sort_by_rank
from lm.output.decoding.loops.expansion_loops import (
    OPENED,
    QUEUED,
    begin,
    expand,
    new_frontier,
    open_next,
)

UNFINISHED, WRONG = -1, -2
"""Sizes of sets that are not searched to the end, or whose log-probabilities are not finite."""


class SearchGoal(NamedTuple):
    """What to search for: the `k` most probable words, or for 0 those within ratio and floor."""

    k: int
    power: float
    ratio: float
    floor: float  # log-probability below which words are not needed
    most_rows: int  # opened of a position, beyond which it is left unfinished
    most_nodes: int  # opened in the order of probability


class Words(NamedTuple):
    """The words of a position found so far."""

    log_prob: np.ndarray  # [N + 1]
    word: np.ndarray  # [N + 1]
    best: np.ndarray  # [k], a heap of the largest log-probabilities; or the largest one
    state: np.ndarray  # fp64 [1], the log-probability below which words are not needed
    count: np.ndarray  # int64 [2], of the words found, and of those in the heap


@compiled
def _add(layer, goal, node, log_q, words):
    """Add the words of a node that are needed to those found."""
    row, (log_prob, word, best, state, count) = layer.first_row[node], words
    items = layer.item_of_row[row : row + layer.num_children[node]]
    threshold, found = state[0], count[0]
    num = found
    for j in range(len(items)):  # without branches that are taken for half of the words
        log_prob[num], word[num] = log_q[j], items[j]
        num += (items[j] >= 0) & (log_q[j] >= threshold)
    count[0] = num
    for value in log_prob[found:num]:
        if goal.k == 0:
            best[0] = max(best[0], value)
        elif count[1] < goal.k:
            push(best, best, count[1], value, value)
            count[1] += 1
        elif value > best[0]:
            replace_first(best, best, goal.k, value, value)
    if goal.k == 0:
        cut = (goal.power * best[0] + math.log(goal.ratio)) / goal.power
        state[0] = max(goal.floor, cut - 1e-14 * abs(cut))  # the division is rounded
    elif count[1] == goal.k:
        state[0] = best[0]


@compiled
def _open_all(layer, p, goal, frontier, words):
    """Open all nodes that are needed, in the order of their rows; whether all are finite."""
    key, node, count = frontier.key, frontier.node, frontier.count
    above = np.full(len(layer.first_row), -np.inf)
    for i in range(count[QUEUED]):
        above[node[i]] = -key[i]
    for each in range(len(above)):
        if above[each] == -np.inf or above[each] < words.state[0]:
            continue
        count[OPENED] += 1
        if not expand(layer, p, each, above[each], frontier.log_q, frontier.bias):
            return False
        _add(layer, goal, each, frontier.log_q, words)
        row = layer.first_row[each]
        for j in range(layer.num_children[each]):
            item = layer.item_of_row[row + j]
            if item < 0:
                above[~item] = frontier.log_q[j]
    return True


@compiled
def _sort(log_prob, word, bits):
    """Sort words in place: the most probable ones first, ties by number.

    `bits` is an array of integers with as many bits as a log-probability.
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
def _search_position(layer, p, goal, frontier, words, bits):
    """The size of the set of position p, or `UNFINISHED` or `WRONG`; see `search`."""
    log_prob, word, best, state, count = words
    begin(frontier)
    count[:], state[0], best[0], num_rows = 0, goal.floor, -math.inf, 0
    while frontier.count[QUEUED] and -frontier.key[0] >= state[0]:
        if num_rows > goal.most_rows:
            return UNFINISHED
        if frontier.count[OPENED] >= goal.most_nodes:
            if not _open_all(layer, p, goal, frontier, words):
                return WRONG
            break
        node = open_next(layer, p, frontier)
        if node < 0:
            return WRONG
        _add(layer, goal, node, frontier.log_q, words)
        num_rows += layer.num_children[node]
    num = 0
    for i in range(count[0]):
        if log_prob[i] >= state[0]:
            log_prob[num], word[num] = log_prob[i], word[i]
            num += 1
    _sort(log_prob[:num], word[:num], bits)
    if goal.k > 0:
        return goal.k
    cut = goal.power * log_prob[0] + math.log(goal.ratio)
    return np.searchsorted(-goal.power * log_prob[:num], -cut, side="right")


@compiled
def search(layer, goal, bits, widest, log_prob, word, size):
    """The most probable words of each position.

    Nodes are opened in the order of probability, while they may hold a word that is needed. After
    `most_nodes`, the others are gone through in the order of their rows.

    Args:
        layer, goal: see `LayerArrays` and `SearchGoal`.
        bits: see `_sort`.
        widest: the most children of a node, or more.
        log_prob: [P, N + 1], set to those of each set; then to -∞ up to the largest set's size.
        word: [P, N + 1], likewise; then to 0.
        size: [P], set to the number of words, or `UNFINISHED`.

    Returns:
        The first position whose log-probabilities are not finite, or -1; the number of nodes
        opened; the largest size; whether all are searched to the end.
    """
    frontier, opened = new_frontier(layer, widest), 0
    best, state, count = np.empty(max(1, goal.k)), np.empty(1), np.empty(2, np.int64)
    for p in range(len(size)):
        words = Words(log_prob[p], word[p], best, state, count)
        size[p] = _search_position(layer, p, goal, frontier, words, bits)
        opened += frontier.count[OPENED]
        if size[p] == WRONG:
            return p, opened, 0, False
    largest = max(0, size.max())
    for p in range(len(size)):
        start = max(0, size[p])
        log_prob[p, start:largest] = -np.inf
        word[p, start:largest] = 0
    return -1, opened, largest, size.min() >= 0
