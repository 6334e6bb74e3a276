"""Expanding a node at one position, compiled by numba; see `lm.output.decoding.expansion`."""

import math
from typing import NamedTuple

import numba
import numpy as np

from lm.output.backends.compiled.row_operations import log_softmax_row, scaled_row
from lm.output.backends.compiled.tiles import ROWS, dot_rows


class Layer(NamedTuple):
    """The arrays of an `Expander`."""

    hidden: np.ndarray  # [P, W]
    weight: np.ndarray  # [R, W]
    bias: np.ndarray  # [R] or [0]
    first_row: np.ndarray  # of the tree, as all that follow
    num_children: np.ndarray
    item_of_row: np.ndarray
    num_words_below: np.ndarray
    num_node_rows: int  # nodes with later rows have words alone
    excluded: np.ndarray  # [K] rows, sorted
    penalized: np.ndarray  # [P, L] rows, sorted; L = 0 for none
    factor: float  # ∞: they are excluded
    lowest: float  # log-probability of excluded words, and the least with a penalty


@numba.njit(nogil=True)
def expand(layer, position, node, above, log_q, bias_of_child):
    """Set the log-probabilities [n] of a node's children; whether they are finite."""
    hidden, weight, bias = layer.hidden, layer.weight, layer.bias
    row, n, size = layer.first_row[node], layer.num_children[node], hidden.itemsize
    start, stride = hidden.ctypes.data + position * hidden.strides[0], weight.strides[0]
    for j in range(0, n, ROWS):
        row_address, out = weight.ctypes.data + (row + j) * stride, log_q.ctypes.data + j * size
        dot_rows(hidden, weight, weight.shape[1], start, row_address, stride, out, n - 1 - j)
    address = bias_of_child.ctypes.data
    if len(bias) == 0:
        bias_of_child[:n] = 0
    else:
        one = hidden.dtype.type(1)
        scaled_row(bias, bias_of_child, bias.ctypes.data + row * bias.itemsize, address, n, one)
    parent = hidden.dtype.type(above)
    log_softmax_row(log_q, log_q.ctypes.data, n, address, parent, address + n * size)
    is_finite = math.isfinite(bias_of_child[n])
    if layer.penalized.shape[1] > 0:
        rows = layer.penalized[position]
        for i in range(np.searchsorted(rows, row), len(rows)):
            if rows[i] >= row + n:
                break
            if i == 0 or rows[i - 1] != rows[i]:
                j = rows[i] - row
                log_q[j] = max(layer.factor * log_q[j], layer.lowest)
                if math.isinf(layer.factor):  # ∞ · 0 is not a number
                    log_q[j] = layer.lowest
    for i in range(np.searchsorted(layer.excluded, row), len(layer.excluded)):
        if layer.excluded[i] >= row + n:
            break
        log_q[layer.excluded[i] - row] = layer.lowest
    return is_finite


@numba.njit(nogil=True)
def item_log_weight(power, log_prob, num_words):
    """Logarithm of (1) of `draws`, of a node with so many words below it, or of a word."""
    if power >= 1:
        return power * log_prob
    return power * log_prob + (1 - power) * math.log(num_words)
