"""Operations along rows: softmaxes, exponentials and sums.

Rows are given by their addresses; an array among the arguments gives the dtype at some of them.
"""

from functools import partial
from math import inf, log  # by name: torch.fx replaces those of `math` while it traces
from typing import Any

import numpy as np
from numba import njit, types

from lm.output.codegen.compilation import emitted
from lm.output.codegen.tiles import TILE
from lm.output.codegen.vectors import INT, Vectors, addresses


@njit(nogil=True)
def row_address(rows, i):
    """The address of row i, an int64 in all cases."""
    return rows.ctypes.data + i * rows.strides[0]


@emitted
def _softmax_rows(builder, rows, low, place, low_place, last, num, bias, child, out, kept):
    """(2) and (4) in place of the logits without biases of a few visits, `TILE[0]` or less.

    Args:
        place, low_place: (address, stride) of the visits' logits, and of their errors rounded to
            bf16, if that is the dtype of `low`.
        bias, child: addresses of the children's biases, and of the visits' targets.
        out: address of two numbers for each visit: the target's logit less the largest one, and the
            sum of exp(z - largest) over all.
        kept: whether errors are needed.
    """
    emit = Vectors(builder, rows)
    logits = _Logits(emit, rows, addresses(builder, *place, TILE[0], last), num)
    largest = logits.add_bias(bias)
    targets = [
        builder.load(builder.inttoptr(address, INT.as_pointer()))
        for address in addresses(builder, child, INT(8), TILE[0], last)
    ]
    logit = [builder.load(logits.pointer(i, target)) for i, target in enumerate(targets)]
    totals = logits.exponentials([emit.everywhere(value) for value in largest])
    results = addresses(builder, out, INT(2 * emit.item_bytes), TILE[0], last)
    for i, address in enumerate(results):
        builder.store(builder.fsub(logit[i], largest[i]), emit.pointer(address, rows))
        builder.store(totals[i], emit.pointer(address, rows, INT(1)))
    with builder.if_then(kept):
        inverses = [emit.everywhere(builder.fdiv(emit.scalar(1.0), total)) for total in totals]
        lows = addresses(builder, *low_place, TILE[0], last)
        one = emit.constant(1)

        def step(index: Any, _: list[Any], mask: Any) -> None:
            for i, value in enumerate(logits.load(index, mask)):
                error = builder.fmul(value, inverses[i])
                is_target = emit.lane_is(builder.sub(targets[i], index))
                error = builder.select(is_target, builder.fsub(error, one), error)
                emit.store(error, logits.pointer(i, index), rows, mask)
                if low == types.uint16:
                    emit.store(error, emit.pointer(lows[i], low, index), low, mask)

        emit.row(num, [], step)


@njit(nogil=True)
def softmaxes(rows, low, place, low_place, num, n, bias_address, child, log_prob, is_kept):
    """(2) and (4) for a node's `num` visits and `n` children, see `_softmax_rows`."""
    out = np.empty((TILE[0], 2), rows.dtype)
    for v in range(0, num, TILE[0]):
        here = (place[0] + v * place[1], place[1])
        low_here = (low_place[0] + v * low_place[1], low_place[1])
        last, address = num - 1 - v, child.ctypes.data + 8 * v
        _softmax_rows(
            rows, low, here, low_here, last, n, bias_address, address, out.ctypes.data, is_kept
        )
        for i in range(min(TILE[0], num - v)):
            log_prob[v + i] = out[i, 0] - log(out[i, 1])


class _Logits:
    """The `num` logits of a few visits, at some addresses, which (2) and (4) replace."""

    def __init__(self, emit: Vectors, dtype: Any, visits: list[Any], num: Any) -> None:
        self.emit, self.dtype, self.visits, self.num = emit, dtype, visits, num

    def pointer(self, visit: int, index: Any) -> Any:
        """To one of a visit's logits."""
        return self.emit.pointer(self.visits[visit], self.dtype, index)

    def load(self, index: Any, mask: Any) -> list[Any]:
        """A vector of each visit's logits."""
        places = (self.pointer(visit, index) for visit in range(len(self.visits)))
        return [self.emit.load(place, self.dtype, mask) for place in places]

    def store(self, visit: int, index: Any, value: Any, mask: Any, otherwise: Any) -> Any:
        """Store a vector; the vector with another number where there is no logit."""
        self.emit.store(value, self.pointer(visit, index), self.dtype, mask)
        return value if mask is None else self.emit.builder.select(mask, value, otherwise)

    def add_bias(self, bias: Any) -> list[Any]:
        """Add the biases from an address on; the largest logit of each visit."""
        emit, lowest = self.emit, self.emit.constant(-inf)

        def step(index: Any, largest: list[Any], mask: Any) -> None:
            added = emit.load(emit.pointer(bias, self.dtype, index), self.dtype, mask)
            for i, value in enumerate(self.load(index, mask)):
                logit = self.store(i, index, emit.builder.fadd(value, added), mask, lowest)
                largest[i] = emit.maximum(largest[i], logit)

        return emit.reduced(emit.row(self.num, [lowest] * len(self.visits), step), emit.maximum)

    def exponentials(self, shifts: list[Any], *, stored: bool = True) -> list[Any]:
        """The sums of exp(z - shift), by which logits z are replaced if `stored`."""
        emit, builder = self.emit, self.emit.builder

        def step(index: Any, totals: list[Any], mask: Any) -> None:
            for i, value in enumerate(self.load(index, mask)):
                value = emit.exp(builder.fsub(value, shifts[i]))
                if stored:
                    value = self.store(i, index, value, mask, emit.zero)
                elif mask is not None:
                    value = builder.select(mask, value, emit.zero)
                totals[i] = builder.fadd(totals[i], value)

        return emit.sums(emit.row(self.num, [emit.zero] * len(self.visits), step))


@partial(emitted, returns=True)
def log_softmax_row(builder, rows, place, num, bias, above):
    """Log-probabilities of a node's children in place of a visit's logits without biases.

    That of the node, `above`, is added. `place` and `bias` are addresses of the logits and the
    biases. Returns 0 if all log-probabilities are finite, else NaN.
    """
    emit = Vectors(builder, rows)
    logits = _Logits(emit, rows, [place], num)
    largest = emit.everywhere(logits.add_bias(bias)[0])
    (total,) = logits.exponentials([largest], stored=False)
    shift = emit.everywhere(builder.fsub(above, emit.log(total)))

    def step(index: Any, sums: list[Any], mask: Any) -> None:
        (value,) = logits.load(index, mask)
        value = builder.fadd(builder.fsub(value, largest), shift)
        value = logits.store(0, index, value, mask, emit.zero)
        sums[0] = builder.fadd(sums[0], builder.fsub(value, value))

    return emit.sums(emit.row(num, [emit.zero], step))[0]


@emitted
def exp_row(builder, source, out, start, to, num, factor, shift):
    """out[k] = exp(factor · source[k] - shift) in fp64, whose exponents are at most 700."""
    emit = Vectors(builder, out)
    scale, less = emit.everywhere(factor), emit.everywhere(shift)

    def step(index: Any, _: list[Any], mask: Any) -> None:
        value = emit.load(emit.pointer(start, source, index), source, mask)
        value = builder.fsub(builder.fmul(scale, value), less)
        emit.store(emit.exp(value), emit.pointer(to, out, index), out, mask)

    emit.row(num, [], step)


@emitted
def scaled_row(builder, source, out, start, to, num, factor):
    """to[k] = factor · start[k] of two addresses, with the dtypes of `source` and `out`."""
    emit = Vectors(builder, factor.type)
    scale = emit.everywhere(factor)

    def step(index: Any, _: list[Any], mask: Any) -> None:
        value = emit.load(emit.pointer(start, source, index), source, mask)
        emit.store(builder.fmul(scale, value), emit.pointer(to, out, index), out, mask)

    emit.row(num, [], step)


@emitted
def add_scaled_row(builder, source, out, start, to, num, factor):
    """to[k] += factor · start[k], see `scaled_row`."""
    emit = Vectors(builder, factor.type)
    scale = emit.everywhere(factor)

    def step(index: Any, _: list[Any], mask: Any) -> None:
        value = emit.load(emit.pointer(start, source, index), source, mask)
        place = emit.pointer(to, out, index)
        value = emit.multiply_add(scale, value, emit.load(place, out, mask))
        emit.store(value, place, out, mask)

    emit.row(num, [], step)


@emitted
def paired_rows(builder, source, start, other, to, num, factor, other_factor):
    """Pairs in bf16, from the address `to` on, of two rows in fp32 times a factor each."""
    emit = Vectors(builder, source)
    rows = [(start, emit.everywhere(factor)), (other, emit.everywhere(other_factor))]

    def step(index: Any, _: list[Any], mask: Any) -> None:
        both = [
            builder.fmul(scale, emit.load(emit.pointer(row, source, index), source, mask))
            for row, scale in rows
        ]
        emit.store(emit.paired(*both), emit.pointer(to, source, index), source, mask)

    emit.row(num, [], step)


@partial(emitted, returns=True)
def row_product(builder, source, start, other, num):
    """The sum of the products of the numbers from two addresses on."""
    emit = Vectors(builder, source)

    def step(index: Any, total: list[Any], mask: Any) -> None:
        places = (emit.pointer(each, source, index) for each in (start, other))
        a, b = (emit.load(place, source, mask) for place in places)
        total[0] = emit.multiply_add(a, b, total[0])

    return emit.sums(emit.row(num, [emit.zero], step))[0]
