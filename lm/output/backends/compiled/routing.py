"""From targets to visits in compiled loops: the results of `lm.output.backends.visits`."""

import numpy as np

from lm.output.backends.compiled.compilation import EMITTED, compiler

BITS = 8
"""Of a rank that positions are sorted by at a time."""
compiled = compiler(EMITTED)  # of which these functions have nothing


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
    _sort(rank, len(preorder), position)
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
def _sort(rank, largest, position):
    """The positions in the order of their ranks, equal ones in their own: a radix sort."""
    order, other = np.arange(len(rank)), np.empty(len(rank), np.int64)
    end = np.empty(1 << BITS, np.int64)
    for shift in range(0, 64, BITS):
        if shift and not largest >> shift:
            break
        end[:] = 0
        for p in order:
            end[rank[p] >> shift & len(end) - 1] += 1
        begin = np.cumsum(end) - end
        for p in order:
            digit = rank[p] >> shift & len(end) - 1
            other[begin[digit]] = p
            begin[digit] += 1
        order, other = other, order
    position[:] = order
