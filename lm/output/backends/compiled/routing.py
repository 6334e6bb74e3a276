"""From targets to visits in compiled loops: the results of `lm.output.backends.visits`."""

import numpy as np

from lm.output.backends.compiled.compilation import compiler
from lm.output.backends.compiled.sorting import sort_by_rank

EMITTED = "3b03e5c193f27c3d"
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
