"""Products and softmaxes of many visits of a node: a lane of a vector is a visit.

The sums over a hidden vector and over a node's children are then sums of vectors: no vector is
reduced to one number. Factors are in bf16, in pairs next to each other in memory, all else is in
fp32. A *block* is the numbers of `BLOCK` visits or fewer, those of a child next to each other.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from lm.output.backends.compiled.tiles import addresses
from lm.output.backends.compiled.vectors import INT, Vectors

BLOCK = 32
"""Visits of a block, those of two vectors."""
BLOCK_ROWS = 12
"""Rows that a block of hidden vectors is multiplied with at a time: 24 vectors of sums."""
NUMBER = types.float32


class _Block:
    """The vectors of a block. Lanes from `visits` on are read as 0 and not written.

    Args:
        context, builder: of numba's code generation.
        start, stride: the address of the block, and bytes from a child to the next.
        visits: how many visits there are.
    """

    def __init__(self, context: Any, builder: Any, start: Any, stride: Any, visits: Any) -> None:
        self.builder, self.start, self.stride = builder, start, stride
        self.emit = Vectors(context, builder, NUMBER)
        self.lanes = [INT(first) for first in range(0, BLOCK, self.emit.lanes)]
        self.masks = [self.emit.mask(builder.sub(visits, first)) for first in self.lanes]

    def vectors(self, address: Any) -> list[Any]:
        """A number of each visit, of all lanes, from an address on."""
        return [self.emit.load(place, NUMBER) for place in self.places(address)]

    def places(self, address: Any) -> list[Any]:
        """Pointers to the vectors at an address."""
        return [self.emit.pointer(address, NUMBER, first) for first in self.lanes]

    def child(self, j: Any) -> list[Any]:
        """Pointers to the numbers of a child."""
        return self.places(self.builder.add(self.start, self.builder.mul(j, self.stride)))

    def load(self, j: Any) -> list[Any]:
        """The numbers of a child."""
        both = zip(self.child(j), self.masks, strict=True)
        return [self.emit.load(place, NUMBER, mask) for place, mask in both]

    def store(self, j: Any, values: list[Any]) -> None:
        """Set the numbers of a child."""
        for value, place, mask in zip(values, self.child(j), self.masks, strict=True):
            self.emit.store(value, place, NUMBER, mask)


def _intrinsic_of(num: int, emit_code: Callable[..., None]) -> tuple[Any, Any]:
    """The signature of `num` integers, and the code that `emit_code` emits for them."""

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        emit_code(context, builder, *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * num), generate


@intrinsic
def transposed_pairs(typing, start, stride, visits, num, out):
    """out[k, i] = the pair of numbers k of hidden vector i, of the last one beyond it.

    Args:
        start, stride: address of the first hidden vector, and bytes to the next.
        visits: how many hidden vectors there are.
        num: how many pairs they have, a multiple of 16.
        out: address of [num, BLOCK] pairs.
    """

    def code(context: Any, builder: Any, start: Any, stride: Any, *more: Any) -> None:
        visits, num, out = more
        last = builder.sub(visits, INT(1))
        block = _Block(context, builder, out, INT(4 * BLOCK), INT(BLOCK))
        emit = block.emit
        rows = addresses(builder, start, stride, BLOCK, last)
        with emit.loop(num, emit.lanes, []) as (k, _):
            columns = []
            for first in range(0, BLOCK, emit.lanes):
                few = rows[first : first + emit.lanes]
                loaded = [emit.load(emit.pointer(row, NUMBER, k), NUMBER) for row in few]
                columns.append(emit.transposed(loaded))
            for i, values in enumerate(zip(*columns, strict=True)):
                block.store(builder.add(k, INT(i)), list(values))

    return _intrinsic_of(5, code)


@intrinsic
def dot_columns(typing, pairs, num, row, row_stride, bias, start, stride, visits, largest):
    """z[j, i] = row j · hidden vector i + bias[j] for `BLOCK_ROWS` rows, and the largest of each i.

    Args:
        pairs, num: address of the hidden vectors, see `transposed_pairs`, and their pairs.
        row, row_stride: address of the first row, and bytes to the next.
        bias: address of its bias.
        start, stride, visits: see `_Block`.
        largest: address of the largest number of each visit so far [BLOCK].
    """

    def code(context: Any, builder: Any, pairs: Any, num: Any, *more: Any) -> None:
        row, row_stride, bias, *place, largest = more
        block = _Block(context, builder, *place)
        emit, vectors = block.emit, len(block.lanes)
        rows = [builder.add(row, builder.mul(row_stride, INT(j))) for j in range(BLOCK_ROWS)]
        sums = [emit.zero] * (BLOCK_ROWS * vectors)
        with emit.loop(num, 1, sums) as (k, carried):
            hidden = block.vectors(builder.add(pairs, builder.mul(k, INT(4 * BLOCK))))
            for j, address in enumerate(rows):
                pair = emit.everywhere(builder.load(emit.pointer(address, NUMBER, k), align=2))
                for i, vector in enumerate(hidden, vectors * j):
                    carried[i] = emit.dot(vector, pair, carried[i])
        most = block.vectors(largest)
        for j in range(BLOCK_ROWS):
            added = emit.broadcast(emit.pointer(bias, NUMBER, INT(j)), NUMBER)
            z = [builder.fadd(x, added) for x in sums[vectors * j : vectors * (j + 1)]]
            block.store(INT(j), z)
            most = [emit.maximum(a, b) for a, b in zip(most, z, strict=True)]
        for value, pointer in zip(most, block.places(largest), strict=True):
            emit.store(value, pointer, NUMBER)

    return _intrinsic_of(9, code)


@intrinsic
def exp_columns(typing, start, stride, visits, num, largest, totals):
    """exp(z - largest) in place of the logits z of `num` children, and their sums added to totals.

    Args:
        start, stride, visits: see `_Block`.
        num: how many children there are.
        largest, totals: addresses of a number for each visit [BLOCK].
    """

    def code(context: Any, builder: Any, *more: Any) -> None:
        *place, num, largest, totals = more
        block = _Block(context, builder, *place)
        emit, shifts = block.emit, block.vectors(largest)
        sums = [emit.zero] * len(shifts)
        with emit.loop(num, 1, sums) as (j, carried):
            both = zip(block.load(j), shifts, strict=True)
            values = [emit.exp(builder.fsub(z, shift)) for z, shift in both]
            block.store(j, values)
            carried[:] = [builder.fadd(a, b) for a, b in zip(carried, values, strict=True)]
        for before, value, pointer in zip(
            block.vectors(totals), sums, block.places(totals), strict=True
        ):
            emit.store(builder.fadd(before, value), pointer, NUMBER)

    return _intrinsic_of(6, code)


@intrinsic
def error_columns(typing, start, stride, visits, num, factor, pairs):
    """Errors factor · x in place of the numbers x of `num` children.

    x is what `exp_columns` leaves, less the total at the target.

    Args:
        start, stride, visits: see `_Block`.
        num: how many children there are.
        factor: address of 1 / total of each visit [BLOCK].
        pairs: address of pairs [⌈num / 2⌉, BLOCK], of the errors of a child and of the next one, or
            0 after the last, rounded to bf16.
    """

    def code(context: Any, builder: Any, *more: Any) -> None:
        *place, num, factor, pairs = more
        block = _Block(context, builder, *place)
        emit, factors = block.emit, block.vectors(factor)
        low = _Block(context, builder, pairs, INT(2 * BLOCK), INT(BLOCK))

        def errors(j: Any) -> list[Any]:
            values = [builder.fmul(x, a) for x, a in zip(block.load(j), factors, strict=True)]
            block.store(j, values)
            return values

        whole = builder.and_(num, INT(-2))
        with emit.loop(whole, 2, []) as (j, _):
            both = zip(errors(j), errors(builder.add(j, INT(1))), strict=True)
            low.store(j, [emit.paired(a, b) for a, b in both])
        with builder.if_then(builder.icmp_signed("<", whole, num)):
            low.store(whole, [emit.paired(a, emit.zero) for a in errors(whole)])

    return _intrinsic_of(6, code)


@intrinsic
def paired_columns(typing, start, stride, visits, num, factor, out, out_stride):
    """out[j, i] = factor[i] · x[j, i] in bf16, of `num` children j and an even number of visits i.

    If the number of visits is odd, the last one is 0.

    Args:
        start, stride, visits: see `_Block`.
        num: how many children there are.
        factor: address of a number for each visit.
        out, out_stride: address of out[0, 0], and bytes from a child to the next.
    """

    def code(context: Any, builder: Any, *more: Any) -> None:
        *place, num, factor, out, out_stride = more
        block = _Block(context, builder, *place)
        emit = block.emit
        visits = place[2]
        even = builder.and_(builder.add(visits, INT(1)), INT(-2))
        stored = [emit.mask(builder.sub(even, first)) for first in block.lanes]
        loaded = zip(block.places(factor), block.masks, strict=True)
        factors = [emit.load(pointer, NUMBER, mask) for pointer, mask in loaded]
        with emit.loop(num, 1, []) as (j, _):
            row = builder.add(out, builder.mul(j, out_stride))
            parts = zip(block.load(j), factors, block.lanes, stored, strict=True)
            for x, a, first, mask in parts:
                pointer = emit.pointer(row, types.uint16, first)
                emit.store(builder.fmul(x, a), pointer, types.uint16, mask)

    return _intrinsic_of(7, code)
