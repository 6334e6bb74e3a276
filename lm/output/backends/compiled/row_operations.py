"""Operations on rows: the code of LLVM that loops over nodes consist of, besides `tiles`."""

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lm.output.backends.compiled.tiles import AHEAD_BYTES, TILE, addresses, pair_of
from lm.output.backends.compiled.vectors import INT, Vectors

LINE_BYTES = 64
"""A line of a cache."""


@intrinsic
def softmax_rows(typing, rows, low, place, low_place, last, num, bias, child, out, kept):
    """(2) and (4) in place of the logits without biases of a few visits, `TILE[0]` or less.

    Args:
        rows, low: arrays, for their dtypes.
        place: address of the first visit's logits, and bytes from a visit to the next.
        low_place: the same of their errors rounded to bf16, if that is the dtype of `low`.
        last: the last visit there is.
        num: how many children there are.
        bias, child: addresses of the children's biases, and of the visits' targets.
        out: address of two numbers for each visit: the target's logit less the largest one, and the
            sum of exp(z - largest) over all.
        kept: whether errors are needed.
    """
    integer, pair = types.int64, types.UniTuple(types.int64, 2)
    signature = types.void(
        rows, low, pair, pair, integer, integer, integer, integer, integer, types.boolean
    )

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        emit = Vectors(context, builder, rows.dtype)
        place, low_place, last, num, bias, child, out, kept = values[2:]
        visits = addresses(builder, *pair_of(builder, place), TILE[0], last)
        logits = _Logits(emit, rows.dtype, visits, num)
        largest = logits.add_bias(bias)
        targets = [
            builder.load(builder.inttoptr(address, INT.as_pointer()))
            for address in addresses(builder, child, INT(8), TILE[0], last)
        ]
        logit = [builder.load(logits.pointer(i, target)) for i, target in enumerate(targets)]
        totals = logits.exponentials([emit.everywhere(value) for value in largest])
        results = addresses(builder, out, INT(2 * emit.item_bytes), TILE[0], last)
        for i, address in enumerate(results):
            builder.store(builder.fsub(logit[i], largest[i]), emit.pointer(address, rows.dtype))
            builder.store(totals[i], emit.pointer(address, rows.dtype, INT(1)))
        with builder.if_then(kept):
            inverses = [emit.everywhere(builder.fdiv(emit.scalar(1.0), total)) for total in totals]
            lows = addresses(builder, *pair_of(builder, low_place), TILE[0], last)
            logits.errors(inverses, targets, low.dtype, lows)
        return context.get_dummy_value()

    return signature, generate


class _Logits:
    """The logits of a few visits, which (2) and (4) replace step by step.

    Args:
        emit: operations on vectors of the logits' dtype.
        dtype: that dtype.
        visits: addresses of each visit's first logit.
        num: how many logits a visit has.
    """

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
        emit, lowest = self.emit, self.emit.constant(-math.inf)

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

    def errors(self, inverses: list[Any], targets: list[Any], low: Any, lows: list[Any]) -> None:
        """Replace exponentials by their product with `inverses`, less 1 at the target.

        If the dtype `low` is bf16, they are stored in it as well, from the addresses `lows` on.
        """
        emit, builder = self.emit, self.emit.builder
        one = emit.constant(1)

        def step(index: Any, _: list[Any], mask: Any) -> None:
            for i, value in enumerate(self.load(index, mask)):
                error = builder.fmul(value, inverses[i])
                is_target = emit.lane_is(builder.sub(targets[i], index))
                error = builder.select(is_target, builder.fsub(error, one), error)
                emit.store(error, self.pointer(i, index), self.dtype, mask)
                if low == types.uint16:
                    emit.store(error, emit.pointer(lows[i], low, index), low, mask)

        emit.row(self.num, [], step)


@intrinsic
def log_softmax_row(typing, rows, place, num, bias, above, out):
    """Log-probabilities of a node's children in place of a visit's logits without biases.

    Args:
        rows: array, for its dtype, which all numbers have.
        place: address of the logits.
        num: how many children there are.
        bias: address of their biases.
        above: log-probability of the node, which is added.
        out: address of the sum of the log-probabilities, which is finite if they are.
    """
    integer, number = types.int64, rows.dtype
    signature = types.void(rows, integer, integer, integer, number, integer)

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        emit = Vectors(context, builder, number)
        place, num, bias, above, out = values[1:]
        logits = _Logits(emit, number, [place], num)
        largest = emit.everywhere(logits.add_bias(bias)[0])
        (total,) = logits.exponentials([largest], stored=False)
        shift = emit.everywhere(builder.fsub(above, emit.log(total)))

        def step(index: Any, sums: list[Any], mask: Any) -> None:
            (value,) = logits.load(index, mask)
            value = builder.fadd(builder.fsub(value, largest), shift)
            sums[0] = builder.fadd(sums[0], logits.store(0, index, value, mask, emit.zero))

        (total,) = emit.sums(emit.row(num, [emit.zero], step))
        builder.store(total, emit.pointer(out, number))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def exp_row(typing, source, out, start, to, num, factor, shift):
    """out[k] = exp(factor · source[k] - shift) in fp64, for `num` numbers; see `scaled_row`.

    No exponent is above 700.
    """
    integer, number = types.int64, types.float64
    signature = types.void(source, out, integer, integer, integer, number, number)

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        emit = Vectors(context, builder, number)
        start, to, num, *both = values[2:]
        factor, shift = map(emit.everywhere, both)

        def step(index: Any, _: list[Any], mask: Any) -> None:
            value = emit.load(emit.pointer(start, source.dtype, index), source.dtype, mask)
            value = builder.fsub(builder.fmul(factor, value), shift)
            emit.store(emit.exp(value), emit.pointer(to, number, index), number, mask)

        emit.row(num, [], step)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def scaled_row(typing, source, out, start, to, num, factor):
    """out[k] = factor · source[k] for `num` numbers from the addresses `start` and `to` on.

    `source` and `out` are arrays, for their dtypes; the factor has the dtype of sums.
    """
    return _row_operation(source, out, factor, added=False)


@intrinsic
def add_scaled_row(typing, source, out, start, to, num, factor):
    """out[k] += factor · source[k], see `scaled_row`."""
    return _row_operation(source, out, factor, added=True)


def _row_operation(source: Any, out: Any, factor: Any, *, added: bool) -> Any:
    integer = types.int64
    signature = types.void(source, out, integer, integer, integer, factor)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit = Vectors(context, builder, signature.args[5])
        start, to, num, factor = values[2:]
        scale = emit.everywhere(factor)

        def step(index: Any, _: list[Any], mask: Any) -> None:
            value = emit.load(emit.pointer(start, source.dtype, index), source.dtype, mask)
            place = emit.pointer(to, out.dtype, index)
            if added:
                ahead = builder.add(to, INT(AHEAD_BYTES))
                emit.prefetch(emit.pointer(ahead, out.dtype, index))
                value = emit.multiply_add(scale, value, emit.load(place, out.dtype, mask))
            else:
                value = builder.fmul(scale, value)
            emit.store(value, place, out.dtype, mask)

        emit.row(num, [], step)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def stream(typing, source, to, num):
    """Copy `num` bytes past the caches, which then do not read the memory at `to` first.

    Both addresses have the same remainder of `LINE_BYTES`. The lines at both ends, which are not
    copied as a whole, go through the caches.
    """
    integer = types.int64
    signature = types.void(integer, integer, integer)

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        source, to, num = values
        line = ir.VectorType(ir.IntType(8), LINE_BYTES)
        once = builder.module.add_metadata([ir.IntType(32)(1)])

        def pointer(address: Any, kind: Any) -> Any:
            return builder.inttoptr(address, kind.as_pointer())

        def copy(start: Any, num: Any) -> None:
            ends = (pointer(builder.add(each, start), ir.IntType(8)) for each in (to, source))
            cgutils.raw_memcpy(builder, *ends, num, 1)

        head = builder.and_(builder.neg(to), INT(LINE_BYTES - 1))
        head = builder.select(builder.icmp_signed("<", head, num), head, num)
        end = builder.add(head, builder.and_(builder.sub(num, head), INT(-LINE_BYTES)))
        copy(INT(0), head)
        with cgutils.for_range_slice(builder, head, end, INT(LINE_BYTES), inc=True) as (at, _):
            value = builder.load(pointer(builder.add(source, at), line), align=LINE_BYTES)
            store = builder.store(value, pointer(builder.add(to, at), line), align=LINE_BYTES)
            store.set_metadata("nontemporal", once)
        copy(end, builder.sub(num, end))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def paired_rows(typing, source, start, other, to, num, factor, other_factor):
    """Pairs of factor · source[k] and other_factor · source[k] in bf16, for `num` k.

    `source` is an array in fp32, for its dtype; the rows begin at the addresses `start` and
    `other`, the pairs at `to`.
    """
    integer, number = types.int64, types.float32
    signature = types.void(source, integer, integer, integer, integer, number, number)

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        emit = Vectors(context, builder, number)
        start, other, to, num, *factors = values[1:]
        scales = [emit.everywhere(factor) for factor in factors]

        def step(index: Any, _: list[Any], mask: Any) -> None:
            both = [
                builder.fmul(scale, emit.load(emit.pointer(row, number, index), number, mask))
                for row, scale in zip((start, other), scales, strict=True)
            ]
            emit.store(emit.paired(*both), emit.pointer(to, number, index), number, mask)

        emit.row(num, [], step)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def row_product(typing, source, start, other, num):
    """The sum of the products of `num` numbers from two addresses on; `source` gives the dtype."""
    signature = source.dtype(source, types.int64, types.int64, types.int64)

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        emit = Vectors(context, builder, source.dtype)
        starts, num = values[1:3], values[3]

        def step(index: Any, total: list[Any], mask: Any) -> None:
            places = (emit.pointer(start, source.dtype, index) for start in starts)
            a, b = (emit.load(place, source.dtype, mask) for place in places)
            total[0] = emit.multiply_add(a, b, total[0])

        return emit.sums(emit.row(num, [emit.zero], step))[0]

    return signature, generate


@intrinsic
def adam_row(typing, rows, start, places, num, numbers):
    """A step of Adam for `num` numbers.

        m += a (g - m), s = b s + c g², row -= lr m / (√s / d + eps)

    Args:
        rows: array, for the dtype of everything.
        start: address of the gradient.
        places: addresses of row, m and s.
        num: of the numbers of a row.
        numbers: the factor of the gradient, a, b, c, lr, d and eps.
    """
    signature = types.void(rows, types.int64, places, types.int64, numbers)

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        dtype = rows.dtype
        emit = Vectors(context, builder, dtype)
        start, places, num, numbers = values[1:]
        addresses = [builder.extract_value(places, i) for i in range(3)]
        factor, a, b, c, lr, d, eps = (
            emit.everywhere(builder.extract_value(numbers, i)) for i in range(7)
        )

        def step(index: Any, _: list[Any], mask: Any) -> None:
            row, mean, square = (emit.pointer(each, dtype, index) for each in addresses)
            g = emit.load(emit.pointer(start, dtype, index), dtype, mask)
            g = builder.fmul(factor, g)
            m = emit.load(mean, dtype, mask)
            m = emit.multiply_add(a, builder.fsub(g, m), m)
            s = builder.fmul(b, emit.load(square, dtype, mask))
            s = emit.multiply_add(c, builder.fmul(g, g), s)
            root = builder.fadd(builder.fdiv(emit.square_root(s), d), eps)
            change = builder.fdiv(builder.fmul(lr, m), root)
            emit.store(m, mean, dtype, mask)
            emit.store(s, square, dtype, mask)
            emit.store(builder.fsub(emit.load(row, dtype, mask), change), row, dtype, mask)

        emit.row(num, [], step)
        return context.get_dummy_value()

    return signature, generate
