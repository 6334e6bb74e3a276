"""Opening nodes at one position, compiled by numba: the log-probabilities of their children.

A child is an *item*: word w is item w, node n is item ~n = -1 - n.
"""

import math
from typing import NamedTuple

import numpy as np

from lm.output.codegen.compilation import compiled
from lm.output.codegen.row_operations import log_softmax_row, row_address, scaled_row
from lm.output.codegen.sorting import push, replace_first
from lm.output.codegen.tiles import ROWS, dot_rows


class LayerArrays(NamedTuple):
    """The arrays of `Positions`."""

    hidden: np.ndarray  # [P, W]
    weight: np.ndarray  # [R, W]
    bias: np.ndarray  # [R] or [0]
    first_row: np.ndarray  # of the tree, as all that follow
    num_children: np.ndarray
    item_of_row: np.ndarray
    num_words_below: np.ndarray
    num_node_rows: int  # the rows from this one on are those of words
    excluded: np.ndarray  # [P, K] or, for all positions, [1, K] rows, sorted; -1 is skipped
    penalized: np.ndarray  # [P, L] rows, sorted; L = 0 for none
    factor: float
    least: float  # log-probability with a penalty


class Frontier(NamedTuple):
    """The nodes of a position that are not opened; the memory is used again for each position."""

    key: np.ndarray  # [I], a heap of their negative log-probabilities
    node: np.ndarray  # [I]
    log_q: np.ndarray  # [widest], log-probabilities of the children of the node opened last
    bias: np.ndarray  # [widest], their biases
    count: np.ndarray  # int64, QUEUED and OPENED


QUEUED, OPENED = range(2)
"""Counts of a frontier: nodes in its heap, and nodes opened."""


@compiled
def new_frontier(layer, widest):
    """Memory for a frontier of nodes with at most `widest` children."""
    num_nodes, dtype = len(layer.first_row), layer.hidden.dtype
    return Frontier(
        np.empty(num_nodes),
        np.empty(num_nodes, np.int64),
        np.empty(widest, dtype),
        np.empty(widest, dtype),
        np.empty(2, np.int64),
    )


@compiled
def begin(frontier):
    """The root alone, of log-probability 0."""
    frontier.key[0], frontier.node[0] = 0.0, 0
    frontier.count[QUEUED], frontier.count[OPENED] = 1, 0


@compiled
def open_next(layer, position, frontier):
    """Open the most probable node and add its nodes: the node, or -1 if it is not finite."""
    key, nodes, count = frontier.key, frontier.node, frontier.count
    above, node, last = -key[0], nodes[0], count[QUEUED] - 1
    replace_first(key, nodes, last, key[last], nodes[last])
    count[QUEUED] = last
    count[OPENED] += 1
    if not expand(layer, position, node, above, frontier.log_q, frontier.bias):
        return -1
    row = layer.first_row[node]
    for j in range(layer.num_children[node] if row < layer.num_node_rows else 0):
        item = layer.item_of_row[row + j]
        if item < 0:
            push(key, nodes, count[QUEUED], -float(frontier.log_q[j]), ~item)
            count[QUEUED] += 1
    return node


@compiled
def expand(layer, position, node, above, log_q, bias_of_child):
    """Set the log-probabilities [n] of a node's children; whether they are finite."""
    hidden, weight, bias = layer.hidden, layer.weight, layer.bias
    row, n, size = layer.first_row[node], layer.num_children[node], hidden.itemsize
    start, stride, to = row_address(hidden, position), weight.strides[0], log_q.ctypes.data
    for j in range(0, n, ROWS):
        at = row_address(weight, row + j)
        dot_rows(hidden, weight, weight.shape[1], start, at, stride, to + j * size, n - 1 - j)
    address = bias_of_child.ctypes.data
    if len(bias) == 0:
        bias_of_child[:n] = 0
    else:
        one = hidden.dtype.type(1)
        scaled_row(bias, bias_of_child, row_address(bias, row), address, n, one)
    parent = hidden.dtype.type(above)
    is_finite = log_softmax_row(log_q, to, n, address, parent) == 0
    if layer.penalized.shape[1] > 0:
        rows = layer.penalized[position]
        for i in range(np.searchsorted(rows, row), len(rows)):
            if rows[i] >= row + n:
                break
            if i == 0 or rows[i - 1] != rows[i]:
                j = rows[i] - row
                log_q[j] = max(layer.factor * log_q[j], layer.least)
    excluded = excluded_rows(layer, position)
    for i in range(np.searchsorted(excluded, row), len(excluded)):
        if excluded[i] >= row + n:
            break
        log_q[excluded[i] - row] = -np.inf
    return is_finite


@compiled
def excluded_rows(layer, position):
    """The rows of the words that are never found at a position, sorted."""
    return layer.excluded[position if len(layer.excluded) > 1 else 0]


@compiled
def item_log_weight(power, log_prob, num_words):
    """Logarithm of (1) of `draw_loops`, for a node with this many words, or for a word."""
    if power >= 1:
        return power * log_prob
    return power * log_prob + (1 - power) * math.log(num_words)
