"""From targets to visits, and from visits to nll and back, in compiled loops.

The results are those of `lm.output.backends.visits` and of the reference backend.
"""

import numpy as np

from lm.output.backends.compiled.compilation import compiler
from lm.output.backends.compiled.sorting import sort_by_rank

EMITTED = "41666ec6c59763c9"
"""See `compiler`."""
compiled = compiler(EMITTED)


@compiled
def route(target, ignore_index, arrays, position, node, child):
    """Set position [P], node and child [D, P], see `Visits`.

    Args:
        target: [P].
        ignore_index: value of the targets that are ignored.
        arrays: the first seven of `TreeArrays`.
        position, node, child: to be set.

    Returns:
        Whether all targets are words or ignored; nothing is set otherwise.
    """
    num_children, first_row, row_of_node, node_of_row, row_of_word, level, preorder = arrays
    rank = np.empty(len(target), np.int64)
    for p in range(len(target)):
        word = target[p]
        if word == ignore_index:
            rank[p] = len(preorder)
        elif 0 <= word < len(row_of_word):
            rank[p] = preorder[node_of_row[row_of_word[word]]]
        else:
            return False
    sort_by_rank(rank, len(preorder), position)
    node[:] = -1
    child[:] = 0
    for i in range(len(position)):
        word = target[position[i]]
        row = -1 if word == ignore_index else row_of_word[word]
        while row >= 0:
            n = node_of_row[row]
            if num_children[n] > 1:
                node[level[n], i] = n
                child[level[n], i] = row - first_row[n]
            row = row_of_node[n]
    return True


@compiled
def _divisor(target, ignore_index, mean, like):
    """What nll are divided by: 1, or the number of targets for their mean, in the dtype of nll."""
    num = 0
    for word in target if mean else target[:0]:
        num += word != ignore_index
    return like.dtype.type(max(num, 1))


@compiled
def nll_of(position, log_prob, target, ignore_index, mean, nll):
    """Set nll [P] to -Σ log_prob [D, P] of the sorted positions; divided for a mean."""
    divisor = _divisor(target, ignore_index, mean, nll)
    for i in range(len(position)):
        total = log_prob[0, i]
        for level in range(1, len(log_prob)):
            total += log_prob[level, i]
        nll[position[i]] = -total / divisor


@compiled
def sort_d_nll(position, d_nll, target, ignore_index, mean, out):
    """Set `out` to d_nll [P] of the sorted positions; 0 if ignored, divided for a mean."""
    divisor = _divisor(target, ignore_index, mean, out)
    for i in range(len(position)):
        p = position[i]
        out[i] = 0 if target[p] == ignore_index else d_nll[p] / divisor
