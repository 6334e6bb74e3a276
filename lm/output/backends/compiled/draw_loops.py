"""Drawing a word at one position after another, compiled by numba.

Words are drawn as `lm.output.decoding.draws.RejectionSampler` does it.
"""

import math

import numpy as np

from lm.output.backends.compiled.compilation import compiler
from lm.output.backends.compiled.expansion_loops import expand, item_log_weight
from lm.output.backends.compiled.row_operations import exp_row

EMITTED = "bd5defabae8cf51e"
"""See `compiler`."""
compiled = compiler(EMITTED)


@compiled
def _uniform(seed, index):
    """Number `index` of a seed, see `lm.output.decoding.uniforms`."""
    bits = np.uint64(seed) + np.uint64(index + 1) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = bits ^ (bits >> np.uint64(31))
    return float(bits >> np.uint64(11)) * 2.0**-53


@compiled
def _draw(log_weight, num, uniform, cumulative):
    """The first of `num` indices at which the sum of the weights exceeds that share of all."""
    start, to = log_weight.ctypes.data, cumulative.ctypes.data
    exp_row(log_weight, cumulative, start, to, num, 1.0, log_weight[:num].max())
    total = 0.0
    for i in range(num):
        total += cumulative[i]
        cumulative[i] = total
    return np.searchsorted(cumulative[:num], uniform * total, side="right")


@compiled
def _joined(known, new, num, num_new):
    """An array whose `num` known items are followed by the new ones, maybe a longer one."""
    if num + num_new > len(known):
        longer = np.empty(2 * (num + num_new), known.dtype)
        longer[:num] = known[:num]
        known = longer
    known[num : num + num_new] = new[:num_new]
    return known


@compiled
def draw_words(layer, seeds, power, is_exact, widest, word):
    """Set word [P], drawn as `RejectionSampler` draws it.

    Args:
        layer: see `Layer`.
        seeds: [P] int64.
        power, is_exact: see `Goal`.
        widest: the most children of a node, or more.
        word: to be set.

    Returns:
        The first position whose log-probabilities are not finite, or -1; the number of nodes
        opened.
    """
    dtype = layer.hidden.dtype
    log_q, bias = np.empty(widest, dtype), np.empty(widest + 1, dtype)
    log_weight, cumulative = np.empty(widest), np.empty(widest)
    known, known_log_prob = np.empty(0, np.int64), np.empty(0, log_q.dtype)
    known_log_weight, below, opened = np.empty(0), layer.num_words_below, 0
    for p in range(len(word)):
        num, used, column, node, above, weight = 0, 0, -1, 0, 0.0, 0.0
        while True:  # a node is opened, or a trial begins
            opened += 1
            row, n = layer.first_row[node], layer.num_children[node]
            if not expand(layer, p, node, above, log_q, bias):
                return p, opened
            items, has_nodes = layer.item_of_row[row : row + n], False
            for j in range(n):
                num_words = below[~items[j]] if items[j] < 0 else 1
                log_weight[j] = item_log_weight(power, log_q[j], num_words)
                has_nodes |= items[j] < 0
            base, is_accepted, point = num, True, 0.0
            if column >= 0:
                point = _uniform(seeds[p], used)
                used += 1
            if column >= 0 and not is_exact:
                largest = log_weight[:n].max()
                total = largest + math.log(np.exp(log_weight[:n] - largest).sum())
                share = min(1.0, math.exp(total - weight))
                is_accepted = point < share
                point = point / share if is_accepted else 0.0
                known_log_weight[column] = -math.inf if has_nodes else total
            if column < 0 or (has_nodes and not is_exact):
                known = _joined(known, items, num, n)
                known_log_prob = _joined(known_log_prob, log_q, num, n)
                known_log_weight = _joined(known_log_weight, log_weight, num, n)
                num += n
            if column < 0 or not is_accepted:
                point = _uniform(seeds[p], used)
                used += 1
                if num > len(cumulative):
                    cumulative = np.empty(2 * num)
                column = _draw(known_log_weight, num, point, cumulative)
                item, above = known[column], float(known_log_prob[column])
                weight = known_log_weight[column]
            else:
                child = _draw(log_weight, n, point, cumulative)
                column, item, above = base + child, items[child], float(log_q[child])
                weight = log_weight[child]
            if item >= 0:
                word[p] = item
                break
            node = ~item
    return -1, opened
