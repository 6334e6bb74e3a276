"""The row-wise gradient of a batch, and the loops that form and use it a few rows at a time.

The letters and equations are those of the reference backend.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import sqrt  # by name: torch.fx replaces those of `math` while it traces
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm.output.backends.compiled.codegen.compilation import compiled
from lm.output.backends.compiled.codegen.rows import (
    adam_row,
    add_scaled_row,
    row_address,
    row_product,
    scaled_row,
)
from lm.output.backends.compiled.codegen.tiles import TERMS, sums
from lm.output.backends.compiled.division import bounds_of, divide
from lm.output.backends.compiled.memory import Array, as_array, own
from lm.output.rowwise.blocks import Block, Product, RowFactors, Rows, Rule

FORMED_VISITS = 16
"""Visits from which on a node's rows are formed once, not at each use: at most `BLOCK`, from which
on errors have another order, see `codegen.columns`."""
NARROW = 8
"""Most children of a node of which the same is true: its factors are larger than its rows."""
SGD, ADAGRAD, ADAM = range(3)
"""Rules of `update_rows`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Factors(RowFactors):
    """The gradient of the weight as errors and hidden vectors. It is independent of the rows."""

    nodes: Array  # see `update_rows`
    error: Tensor  # as `loops.forward` saves it; of rows that are not formed, [visits, n]
    hidden: Tensor  # [P, ≥ W] of the sorted positions, multiplied by their d nll
    formed: Tensor  # [F, W]
    num_rows: int  # R
    factor: float | Tensor = 1  # of the gradient

    @classmethod
    def of(
        cls,
        nodes: Array,
        error: Tensor,
        hidden: Tensor,
        form: Callable[[Array, Tensor], None],
        shape: tuple[int, ...],
    ) -> "Factors":
        """The gradient of a table of `shape` [R, W], for a bias [R, 1], given `list_nodes`.

        `form` writes the gradients of some nodes' rows, given these nodes, with other numbers of
        rows, to a tensor [F, W].
        """
        listed = torch.from_numpy(nodes)
        num_visits, num_children = listed[:, 1] - listed[:, 0], listed[:, 3]
        is_formed = (num_visits >= FORMED_VISITS) | (num_children <= NARROW)
        width = num_children * is_formed
        place = width.cumsum(0) - width
        found, formed = listed[is_formed], hidden.new_empty(int(width.sum()), shape[1])
        found[:, 2] = place[is_formed]
        form(found.numpy(), formed)
        return cls(
            nodes=torch.column_stack([listed, place.where(is_formed, -1)]).numpy(),
            error=error,
            hidden=hidden,
            formed=formed,
            num_rows=shape[0],
        )

    def general(self) -> RowFactors:
        """See `RowFactors.general`."""
        nodes, size = self.nodes, self.formed.shape[1]
        is_formed = nodes[:, 6] >= 0
        first, num = torch.from_numpy(nodes[is_formed][:, 2:4]).unbind(1)
        rows = (first - num.cumsum(0) + num).repeat_interleave(num)
        rows += torch.arange(len(self.formed), device=rows.device)
        products = []
        for start, end, first_row, n, offset, *_ in nodes[~is_formed].tolist():
            errors = self.error[offset : offset + (end - start) * n].view(-1, n)
            products.append(Product(first_row, errors, self.hidden[start:end, :size]))
        single = [each for each in (Rows(rows, self.formed), self.more) if len(each.row)]
        return RowFactors(products=products, rows=single).times(self.factor)

    @cached_property
    def more(self) -> Rows:
        """The single rows, ascending, each once."""
        none = Rows(self.formed.new_empty(0, dtype=torch.int64), self.formed[:0])
        if not self.rows:
            return none
        row, values = (torch.cat(each) for each in zip(none, *self.rows, strict=True))
        row, place = torch.unique(row, return_inverse=True)
        values = values.to(self.formed.dtype)
        return Rows(row, values.new_zeros(len(row), values.shape[1]).index_add_(0, place, values))

    def plus(self, other: RowFactors) -> RowFactors:
        """See `RowFactors.plus`; the loops take single rows times the same factor."""
        is_one = not isinstance(self.factor, Tensor) and self.factor == 1
        return super().plus(other) if is_one else self.general().plus(other)

    def times(self, number: float | Tensor) -> RowFactors:
        """See `RowFactors.times`."""
        return replace(self, factor=self.factor * number)

    def square_norm(self) -> Tensor:
        """See `RowFactors.square_norm`."""
        squares = self.formed.new_empty(len(self.nodes) + len(self.more.row))
        self._divide(square_norms, own(squares))
        return squares.sum().clamp(min=0) * self.factor**2

    def update(self, table: Tensor, rule: Rule) -> Iterable[Block]:
        """See `RowFactors.update`."""
        if table.dtype != self.error.dtype:
            return super().update(table, rule)
        names = "total", "mean", "square"
        known = [name in rule.state for name in names]
        which = ADAM if known[1] else ADAGRAD if known[0] else SGD
        none, dtype = self.formed.new_empty(0, 0), own(self.formed).dtype.type
        state = {"total": none.view(-1), "mean": none, "square": none} | rule.state
        numbers = (float(self.factor), *rule.numbers, *[0.0] * (6 - len(rule.numbers)))
        self._divide(
            partial(update_rows, which),
            as_array(table),
            tuple(as_array(state[name]) for name in names),
            tuple(map(dtype, numbers)),
        )
        return ()

    def _divide(self, loop: Callable[..., None], *arguments: Any) -> None:
        bounds = bounds_of(self.nodes, self.num_rows, by_rows=True)
        arrays = map(own, (self.error, self.hidden, self.formed))
        divide(bounds, loop, self.nodes, *arrays, tuple(map(own, self.more)), *arguments)


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
        vectors = row_address(hidden, start)
        k = _more_norms(k, min(row, end), error, num_columns, more, len(nodes), out)
        if begin <= row < end and place >= 0:
            total = 0.0
            for j in range(place, place + n):
                address = row_address(formed, j)
                total += row_product(formed, address, address, num_columns)
            out[m] = total
        elif begin <= row < end:
            out[m] = _norm_of_products(error, hidden, offset, start, num_visits, n, num_columns)
        while k < len(more[0]) and more[0][k] < min(row + n, end):
            x, j = row_address(more[1], k), more[0][k] - row
            total = row_product(error, x, x, num_columns)
            if place >= 0:
                address = row_address(formed, place + j)
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
    vectors = row_address(hidden, start)
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
        x = row_address(more[1], k)
        out[num_nodes + k] = row_product(error, x, x, num_columns)
        k += 1
    return k


@compiled
def update_rows(rule, begin, end, nodes, error, hidden, formed, more, table, states, numbers):
    """Change the rows from `begin` to `end`, whose gradients are formed a few at a time.

    Args:
        nodes: [M, 7] from `list_nodes`, and the first of the node's rows in `formed`, or -1.
        error, hidden: as of `loops.backward`.
        formed: [F, W] gradients.
        more: rows [K] int64, ascending, and gradients [K, W] that are added to theirs.
        states: of the optimizer, one number per row [R], and two arrays [R, W].
        numbers: factor of the gradients, and the numbers of the rule.
    """
    size, few = error.itemsize, np.empty((TERMS + 1, table.shape[1]), error.dtype)
    num_columns, one = few.shape[1], few.dtype.type(1)
    both = row_address(few, TERMS)
    k = np.searchsorted(more[0], begin)
    for start, stop, row, n, offset, _, place in nodes:
        first, last = max(row, begin), min(row + n, end)
        if first >= last:
            continue
        k = _update_more(k, first, rule, few, more, table, states, numbers)
        vectors, stride = row_address(hidden, start), hidden.strides[0]
        is_linear = rule == SGD and place < 0 and stop - start <= TERMS
        if is_linear:  # the products are added to the rows, vectors multiplied by the step
            for v in range(stop - start):
                to = row_address(few, v)
                change = few.dtype.type(-numbers[0] * numbers[1])
                scaled_row(few, few, vectors + v * stride, to, num_columns, change)
            vectors, stride = row_address(few, 0), few.strides[0]
        for j in range(first, last, TERMS):
            num = min(TERMS, last - j)
            starts, strides = (
                (error.ctypes.data + (offset + j - row) * size, vectors),
                (size, n * size, stride),
            )
            if is_linear:
                to = row_address(table, j), table.strides[0]
                sums(error, few, table, num, stop - start, starts, strides, to, True, None)
                k = _update_more(k, j + num, rule, few, more, table, states, numbers)
                continue
            at, row_stride = row_address(few, 0), few.strides[0]
            if place < 0:
                to = at, row_stride
                sums(error, few, few, num, stop - start, starts, strides, to, False, None)
            else:
                row_stride = formed.strides[0]
                at = row_address(formed, place + j - row)
            for i in range(num):
                of_row = at + i * row_stride
                if k < len(more[0]) and more[0][k] == j + i:
                    other = row_address(more[1], k)
                    scaled_row(few, few, of_row, both, num_columns, one)
                    add_scaled_row(few, few, other, both, num_columns, one)
                    of_row, k = both, k + 1
                _update_row(rule, few, of_row, j + i, table, states, numbers)
    _update_more(k, end, rule, few, more, table, states, numbers)


@compiled
def _update_more(k, until, rule, few, more, table, states, numbers):
    """Update by `more` from number k on, for rows below `until`; returns the next number."""
    while k < len(more[0]) and more[0][k] < until:
        address = row_address(more[1], k)
        _update_row(rule, few, address, more[0][k], table, states, numbers)
        k += 1
    return k


@compiled
def _update_row(rule, rows, address, row, table, states, numbers):
    """A row, whose gradient is at an address; `rows` has its length."""
    num, (total, mean, square) = rows.shape[1], states
    place = row_address(table, row)
    if rule == ADAM:
        places = (place, row_address(mean, row), row_address(square, row))
        adam_row(rows, address, places, num, numbers)
        return
    change = -numbers[0] * numbers[1]
    if rule == ADAGRAD:
        sum_of_squares = row_product(rows, address, address, num)
        total[row] += sum_of_squares * numbers[0] * numbers[0] / num
        change /= sqrt(total[row]) + numbers[2]
    add_scaled_row(rows, table, address, place, num, rows.dtype.type(change))
