"""The loops over rows with a gradient, of which factors are given: norms and steps of optimizers.

The letters and equations are those of the reference backend.
"""

import math

import numpy as np

from lm.output.backends.compiled.compilation import compiler
from lm.output.backends.compiled.row_operations import (
    adam_row,
    add_scaled_row,
    row_product,
    scaled_row,
)
from lm.output.backends.compiled.tile_loops import TERMS, sums

EMITTED = "41666ec6c59763c9"
"""See `compiler`."""
SGD, ADAGRAD, ADAM = range(3)
"""Rules of `update_rows`."""
compiled = compiler(EMITTED)


@compiled
def square_norms(begin, end, nodes, error, hidden, formed, more, out):
    """Set `out` [M + K] to parts of the squared norm: of nodes, and what `more` adds to them.

    See `update_rows`. Of a node with errors E [v, n] and hidden vectors X [v, H] it is
    ‖EᵀX‖² = Σ (E Eᵀ) ∘ (X Xᵀ), since v is small where rows are not formed.
    """
    num_columns, k = formed.shape[1], np.searchsorted(more[0], begin)
    for m in range(len(nodes)):
        start, stop, row, n, offset, _, place = nodes[m]
        num_visits = stop - start if place < 0 else 0  # of rows that are not formed
        vectors = hidden.ctypes.data + start * hidden.strides[0]
        k = _more_norms(k, min(row, end), error, num_columns, more, len(nodes), out)
        if begin <= row < end and place >= 0:
            total = 0.0
            for j in range(place, place + n):
                address = formed.ctypes.data + j * formed.strides[0]
                total += row_product(formed, address, address, num_columns)
            out[m] = total
        elif begin <= row < end:
            out[m] = _norm_of_products(error, hidden, offset, start, num_visits, n, num_columns)
        while k < len(more[0]) and more[0][k] < min(row + n, end):
            x, j = more[1].ctypes.data + k * more[1].strides[0], more[0][k] - row
            total = row_product(error, x, x, num_columns)
            if place >= 0:
                address = formed.ctypes.data + (place + j) * formed.strides[0]
                total += 2 * row_product(error, x, address, num_columns)
            for a in range(num_visits):
                product = row_product(error, x, vectors + a * hidden.strides[0], num_columns)
                total += 2 * error[offset + a * n + j] * product
            out[len(nodes) + k] = total
            k += 1
    _more_norms(k, end, error, num_columns, more, len(nodes), out)


@compiled
def _norm_of_products(error, hidden, offset, start, num_visits, n, num_columns):
    """The squared norm of a node's rows from its errors and hidden vectors."""
    size, total = error.itemsize, 0.0
    errors = error.ctypes.data + offset * size
    vectors = hidden.ctypes.data + start * hidden.strides[0]
    for a in range(num_visits):
        for b in range(a + 1):
            e = errors + a * n * size, errors + b * n * size
            x = vectors + a * hidden.strides[0], vectors + b * hidden.strides[0]
            product = row_product(error, e[0], e[1], n)
            product *= row_product(error, x[0], x[1], num_columns)
            total += product if a == b else 2 * product
    return total


@compiled
def _more_norms(k, until, error, num_columns, more, num_nodes, out):
    """Norms² of `more` from number k on, for rows below `until`; returns the next number."""
    while k < len(more[0]) and more[0][k] < until:
        x = more[1].ctypes.data + k * more[1].strides[0]
        out[num_nodes + k] = row_product(error, x, x, num_columns)
        k += 1
    return k


@compiled
def update_rows(rule, begin, end, nodes, error, hidden, formed, more, table, states, numbers):
    """Change the rows from `begin` to `end`, whose gradients are formed a few at a time.

    Args:
        rule: `SGD`, `ADAGRAD` or `ADAM`.
        nodes: [M, 7] from `list_nodes`, and the first of the node's rows in `formed`, or -1.
        error, hidden: as of `backward`.
        formed: [F, W] gradients.
        more: rows [K] int64, ascending, and gradients [K, W] that are added to theirs.
        table: [R, W].
        states: of the optimizer, one number per row [R], and two arrays [R, W].
        numbers: factor of the gradients, and the numbers of the rule.
    """
    size, few = error.itemsize, np.empty((TERMS + 1, table.shape[1]), error.dtype)
    num_columns, one = few.shape[1], few.dtype.type(1)
    both = few.ctypes.data + TERMS * few.strides[0]
    k = np.searchsorted(more[0], begin)
    for start, stop, row, n, offset, _, place in nodes:
        first, last, vectors = max(row, begin), min(row + n, end), hidden.ctypes.data
        if first >= last:
            continue
        k = _update_more(k, first, rule, few, more, table, states, numbers)
        vectors, stride = vectors + start * hidden.strides[0], hidden.strides[0]
        is_linear = rule == SGD and place < 0 and stop - start <= TERMS
        if is_linear:  # the products are added to the rows, vectors multiplied by the step
            for v in range(stop - start):
                to = few.ctypes.data + v * few.strides[0]
                change = few.dtype.type(-numbers[0] * numbers[1])
                scaled_row(few, few, vectors + v * stride, to, num_columns, change)
            vectors, stride = few.ctypes.data, few.strides[0]
        for j in range(first, last, TERMS):
            num = min(TERMS, last - j)
            starts, strides = (
                (error.ctypes.data + (offset + j - row) * size, vectors),
                (size, n * size, stride),
            )
            if is_linear:
                to = table.ctypes.data + j * table.strides[0], table.strides[0]
                sums(error, few, table, num, stop - start, starts, strides, to, True, None)
                k = _update_more(k, j + num, rule, few, more, table, states, numbers)
                continue
            at, row_stride = few.ctypes.data, few.strides[0]
            if place < 0:
                to = at, row_stride
                sums(error, few, few, num, stop - start, starts, strides, to, False, None)
            else:
                row_stride = formed.strides[0]
                at = formed.ctypes.data + (place + j - row) * row_stride
            for i in range(num):
                of_row = at + i * row_stride
                if k < len(more[0]) and more[0][k] == j + i:
                    other = more[1].ctypes.data + k * more[1].strides[0]
                    scaled_row(few, few, of_row, both, num_columns, one)
                    add_scaled_row(few, few, other, both, num_columns, one)
                    of_row, k = both, k + 1
                _update_row(rule, few, of_row, j + i, table, states, numbers)
    _update_more(k, end, rule, few, more, table, states, numbers)


@compiled
def _update_more(k, until, rule, few, more, table, states, numbers):
    """Update by `more` from number k on, for rows below `until`; returns the next number."""
    while k < len(more[0]) and more[0][k] < until:
        address = more[1].ctypes.data + k * more[1].strides[0]
        _update_row(rule, few, address, more[0][k], table, states, numbers)
        k += 1
    return k


@compiled
def _update_row(rule, rows, address, row, table, states, numbers):
    """A row, whose gradient is at an address; `rows` has its length."""
    num, (total, mean, square) = rows.shape[1], states
    place = table.ctypes.data + row * table.strides[0]
    if rule == ADAM:
        places = (
            place,
            mean.ctypes.data + row * mean.strides[0],
            square.ctypes.data + row * square.strides[0],
        )
        adam_row(rows, address, places, num, numbers)
        return
    change = -numbers[0] * numbers[1]
    if rule == ADAGRAD:
        sum_of_squares = row_product(rows, address, address, num)
        total[row] += sum_of_squares * numbers[0] * numbers[0] / num
        change /= math.sqrt(total[row]) + numbers[2]
    add_scaled_row(rows, table, address, place, num, rows.dtype.type(change))
