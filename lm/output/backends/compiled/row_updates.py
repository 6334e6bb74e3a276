"""The row-wise gradient of a batch: its norm, and the update of rows, a few at a time.

A row's gradient is formed, used and discarded, so that it stays in a cache: Σ e_v x_v over the
visits of its node, e_v being the row's probability (less 1 if it is the target's), x_v = d nll · h,
plus what `single` has for the row, times a factor, as of clipping. What follows for the row, in
fp32 if it is stored in 16 bits, is SGD, Adagrad or Adam by the numbers of `_rule` in
`lm.output.rowwise.optimizers`. Rows in bf16 (uint16 in loops, see `codegen.vectors`) are then
rounded up or down at random, rows in fp16 to the nearest number.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from math import sqrt  # by name: torch.fx replaces those of `math` while it traces
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from lm.output.backends.compiled.division import bounds_of, divide
from lm.output.backends.compiled.memory import as_array, own
from lm.output.codegen.compilation import compiled, emitted
from lm.output.codegen.row_operations import add_scaled_row, row_address, row_product, scaled_row
from lm.output.codegen.tiles import TERMS, sums
from lm.output.codegen.vectors import AHEAD_BYTES, INT, Vectors, constant_of
from lm.output.inputs import compute_dtype
from lm.output.rowwise.factors import KINDS, Block, RowFactors, Rule, each_once

SGD, ADAGRAD, ADAM = map(KINDS.index, ("sgd", "adagrad", "adam"))
"""Rules of `update_rows`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledFactors(RowFactors):
    """The gradient of a table in one batch, which `visited` has, and of single rows, for loops."""

    @cached_property
    def single_rows(self) -> tuple[Tensor, Tensor]:
        """The single rows, ascending, each once, and their gradients."""
        formed = self.visited[0].formed
        none = formed.new_empty(0, dtype=torch.int64), formed[:0]
        if not self.rows:
            return none
        row, values = (torch.cat(each) for each in zip(none, *self.rows, strict=True))
        return each_once(row, values.to(formed.dtype))

    def square_norm(self, table: Tensor) -> Tensor:
        """See `RowFactors.square_norm`."""
        visited = self.visited[0]
        squares = visited.formed.new_empty(len(visited.nodes) + len(self.single_rows[0]))
        self._divide(len(table), square_norms, own(squares))
        return squares.sum().clamp(min=0) * self.factor**2

    def update(self, table: Tensor, rule: Rule) -> Iterable[Block]:
        """See `RowFactors.update`."""
        formed = self.visited[0].formed
        same_dtype = compute_dtype(table.dtype) == formed.dtype  # not if positions alone are fp64
        if rule.kind not in KINDS or not same_dtype:
            return super().update(table, rule)
        none, dtype = formed.new_empty(0, 0), own(formed).dtype.type
        state = {"total": none.view(-1), "mean": none, "square": none} | rule.state
        numbers = (float(self.factor), *rule.numbers, *[0.0] * (6 - len(rule.numbers)))
        seed = int(torch.randint(1 << 32, (), device="cpu")) if table.dtype == torch.bfloat16 else 0
        arrays = as_array(table), tuple(map(as_array, state.values()))
        loop = partial(update_rows, KINDS.index(rule.kind))
        self._divide(len(table), loop, *arrays, tuple(map(dtype, numbers)), seed)
        return ()

    def _divide(self, num_rows: int, loop: Callable[..., None], *arguments: Any) -> None:
        nodes, *arrays = map(own, self.visited[0])
        bounds = bounds_of(nodes, num_rows, by_rows=True)
        divide(bounds, loop, nodes, *arrays, tuple(map(own, self.single_rows)), *arguments)


@compiled
def square_norms(begin, end, nodes, error, hidden, formed, single, out):
    """Set `out` [M + K] to parts of the squared norm: of nodes, and what `single` adds.

    See `update_rows`. Of a node with errors E [v, n] and hidden vectors X [v, H] it is
    ‖EᵀX‖² = Σ (E Eᵀ) ∘ (X Xᵀ), since v is small where rows are not formed.
    """
    num_columns, k = formed.shape[1], np.searchsorted(single[0], begin)
    for m in range(len(nodes)):
        start, stop, row, n, offset, place = nodes[m]
        num_visits = stop - start if place < 0 else 0  # of rows that are not formed
        vectors = row_address(hidden, start)
        k = _single_norms(k, min(row, end), error, num_columns, single, len(nodes), out)
        if begin <= row < end and place >= 0:
            total = 0.0
            for j in range(place, place + n):
                address = row_address(formed, j)
                total += row_product(formed, address, address, num_columns)
            out[m] = total
        elif begin <= row < end:
            out[m] = _norm_of_products(error, hidden, offset, start, num_visits, n, num_columns)
        while k < len(single[0]) and single[0][k] < min(row + n, end):
            x, j = row_address(single[1], k), single[0][k] - row
            total = row_product(error, x, x, num_columns)
            if place >= 0:
                address = row_address(formed, place + j)
                total += 2 * row_product(error, x, address, num_columns)
            for a in range(num_visits):
                product = row_product(error, x, vectors + a * hidden.strides[0], num_columns)
                total += 2 * error[offset + a * n + j] * product
            out[len(nodes) + k] = total
            k += 1
    _single_norms(k, end, error, num_columns, single, len(nodes), out)


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
def _single_norms(k, until, error, num_columns, single, num_nodes, out):
    """Norms² of `single` from number k on, of rows below `until`; the next number."""
    while k < len(single[0]) and single[0][k] < until:
        x = row_address(single[1], k)
        out[num_nodes + k] = row_product(error, x, x, num_columns)
        k += 1
    return k


@compiled
def update_rows(
    rule, begin, end, nodes, error, hidden, formed, single, table, states, numbers, seed
):  # fmt: skip
    """Change the rows from `begin` to `end`, whose gradients are formed a few at a time.

    Args:
        nodes: of each, its first visit, their end, its first row, how many, where its errors begin,
            and its place, where `formed` [F, W] has the gradients of its rows; -1: formed here.
        error, hidden: flat, [visits, rows] of each node, and [P, ≥ W], of all visits.
        single: rows [K] int64, ascending, and gradients [K, W] that are added to theirs.
        states: of the optimizer, one number per row [R], and two arrays [R, W].
        numbers: factor of the gradients, as by clipping, and the numbers of the rule.
        seed: for rounding rows in bf16.
    """
    size, few = error.itemsize, np.empty((TERMS + 1, table.shape[1]), error.dtype)
    num_columns, one = few.shape[1], few.dtype.type(1)
    both = row_address(few, TERMS)
    k = np.searchsorted(single[0], begin)
    for start, stop, row, n, offset, place in nodes:
        first, last = max(row, begin), min(row + n, end)
        if first >= last:
            continue
        k = _update_single(k, first, rule, few, single, table, states, numbers, seed)
        vectors, stride = row_address(hidden, start), hidden.strides[0]
        is_linear = rule == SGD and place < 0 and stop - start <= TERMS and table.itemsize == size
        if is_linear:  # the products are added to the rows, vectors multiplied by the step
            for v in range(stop - start):
                to = row_address(few, v)
                change = few.dtype.type(-numbers[0] * numbers[1])  # factor and lr
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
                sums(error, few, table, num, stop - start, starts, strides, to, True, None)  # added
                k = _update_single(k, j + num, rule, few, single, table, states, numbers, seed)
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
                if k < len(single[0]) and single[0][k] == j + i:
                    other = row_address(single[1], k)
                    scaled_row(few, few, of_row, both, num_columns, one)
                    add_scaled_row(few, few, other, both, num_columns, one)
                    of_row, k = both, k + 1
                _update_row(rule, few, of_row, j + i, table, states, numbers, seed)
    _update_single(k, end, rule, few, single, table, states, numbers, seed)


@compiled
def _update_single(k, until, rule, few, single, table, states, numbers, seed):
    """Update by `single` from number k on, of rows below `until`; returns the next number."""
    while k < len(single[0]) and single[0][k] < until:
        address = row_address(single[1], k)
        _update_row(rule, few, address, single[0][k], table, states, numbers, seed)
        k += 1
    return k


@compiled
def _update_row(rule, rows, address, row, table, states, numbers, seed):
    """Change a row by the gradient at an address, which has the dtype and length of `rows`."""
    num, (total, mean, square) = rows.shape[1], states
    place, first = row_address(table, row), seed + row * num  # each element has its own
    if rule == ADAM:
        places = (place, row_address(mean, row), row_address(square, row))
        adam_row(rows, table, address, places, num, numbers, first)
        return
    factor, lr, eps = numbers[0], numbers[1], numbers[2]
    change = -factor * lr
    if rule == ADAGRAD:
        square_norm = row_product(rows, address, address, num)
        total[row] += square_norm * factor * factor / num
        change /= sqrt(total[row]) + eps
    change_row(rows, table, address, place, num, rows.dtype.type(change), first)


@emitted
def change_row(builder, rows, table, start, place, num, change, seed):
    """A step of SGD or Adagrad: row += change · gradient, of the addresses `place` and `start`."""
    emit = Vectors(builder, rows)
    scale = emit.everywhere(change)

    def step(index: Any, _: list[Any], mask: Any) -> None:
        gradient = emit.load(emit.pointer(start, rows, index), rows, mask)
        row = emit.pointer(place, table, index)
        emit.prefetch(emit.pointer(builder.add(place, INT(AHEAD_BYTES)), table, index))
        changed = emit.multiply_add(scale, gradient, emit.load(row, table, mask))
        if table == types.uint16:
            changed = _rounded_at_random(emit, changed, seed, index)
        emit.store(changed, row, table, mask)

    emit.row(num, [], step)


@emitted
def adam_row(builder, rows, table, start, places, num, numbers, seed):
    """A step of Adam: m += (1 - β1) (g - m), s = β2 s + (1 - β2) g², row -= lr' m / (√s / c + eps).

    `start` is the address of the gradient, `places` those of row, m and s; `numbers` are the factor
    of the gradient, 1 - β1, β2, 1 - β2, and lr', c and eps, where lr' and c correct the bias.
    """
    emit = Vectors(builder, rows)
    factor, one_less_beta1, beta2, one_less_beta2, rate, correction, eps = map(
        emit.everywhere, numbers
    )

    def step(index: Any, _: list[Any], mask: Any) -> None:
        mean, square = (emit.pointer(each, rows, index) for each in places[1:])
        row = emit.pointer(places[0], table, index)
        g = builder.fmul(factor, emit.load(emit.pointer(start, rows, index), rows, mask))
        m = emit.load(mean, rows, mask)
        m = emit.multiply_add(one_less_beta1, builder.fsub(g, m), m)
        s = builder.fmul(beta2, emit.load(square, rows, mask))
        s = emit.multiply_add(one_less_beta2, builder.fmul(g, g), s)
        root = builder.fadd(builder.fdiv(emit.square_root(s), correction), eps)
        change = builder.fdiv(builder.fmul(rate, m), root)
        emit.store(m, mean, rows, mask)
        emit.store(s, square, rows, mask)
        changed = builder.fsub(emit.load(row, table, mask), change)
        if table == types.uint16:
            changed = _rounded_at_random(emit, changed, seed, index)
        emit.store(changed, row, table, mask)

    emit.row(num, [], step)


def _rounded_at_random(emit: Vectors, value: Any, seed: Any, index: Any) -> Any:
    """The bits of fp32 numbers in bf16, rounded up or down in proportion to the distance.

    To the 16 bits that are dropped, as many random ones are added, and a carry rounds up. They are
    hashes of the seed plus the element's number, by the finalizer of MurmurHash3, whose last step
    changes lower bits alone and is left out. NaN remains so.
    """
    builder, words = emit.builder, emit.words
    first = emit.everywhere(builder.trunc(builder.add(seed, index), words.element))
    x = builder.add(first, ir.Constant(words, list(range(emit.lanes))))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = builder.xor(x, builder.lshr(x, constant_of(words, shift)))
        x = builder.mul(x, constant_of(words, factor))
    half = constant_of(words, 16)
    bits = builder.add(builder.bitcast(value, words), builder.lshr(x, half))
    is_nan = builder.fcmp_unordered("uno", value, value)
    bits = builder.select(is_nan, constant_of(words, 0x7FC00000), bits)
    return builder.trunc(builder.lshr(bits, half), ir.VectorType(ir.IntType(16), emit.lanes))
