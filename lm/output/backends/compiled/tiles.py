"""Products of tiles: code of LLVM that the loops over nodes are made of.

A *tile* is a small part of a matrix whose numbers are in registers. Where it exceeds the matrix,
the matrix's last rows are computed and stored again, and columns are masked: one piece of code
serves all sizes. Each result is a sum in an order that does not depend on where its tile begins, so
it is the same bit for bit however the work is divided among threads.

Factors in bf16 are multiplied two at a time, by an instruction that adds both products to a number
in fp32 (`vectors.HAS_BF16`). A *pair* of them is next to each other in memory.
"""

from typing import Any

from numba import types
from numba.extending import intrinsic

from lm.output.backends.compiled.vectors import HAS_AVX512, INT, Vectors

TILE = (4, 4) if HAS_AVX512 else (4, 3)
"""Rows and vectors of a tile; processors have 32 or 16 registers for vectors."""
VISIT_TILE = (8, 2) if HAS_AVX512 else TILE
"""Tile of sums for the visits of a block, see `columns`."""
ROW_TILE = (6, 4) if HAS_AVX512 else TILE
"""Tile of sums of products of bf16 numbers for a node's rows."""
ROWS = 8
"""Rows that one hidden vector is multiplied with at a time."""
AHEAD_BYTES = 12 << 10
"""How far rows are read ahead that are read in the order of addresses."""
ADDED_AHEAD_BYTES = 128 << 10
"""How far rows that sums are added to are read ahead, some for each tile of columns."""


def sum_dtype(dtype: Any) -> Any:
    """The dtype of sums of products of two factors: fp32 for bf16, else the factors'."""
    return types.float32 if dtype == types.uint16 else dtype


def addresses(builder: Any, first: Any, stride: Any, num: int, last: Any) -> list[Any]:
    """Addresses of `num` rows; beyond row number `last`, its address again."""
    inside = [builder.icmp_signed("<", INT(i), last) for i in range(num)]
    rows = [builder.select(is_inside, INT(i), last) for i, is_inside in enumerate(inside)]
    return [builder.add(first, builder.mul(row, stride)) for row in rows]


def pair_of(builder: Any, value: Any) -> tuple[Any, Any]:
    """The two members of a tuple."""
    return builder.extract_value(value, 0), builder.extract_value(value, 1)


@intrinsic
def dot_tile(typing, hidden, weight, num, starts, strides, out, last):
    """out[i, j] = hidden[i] · weight[j] for rows i and j of a tile.

    Args:
        hidden, weight: arrays, for their dtypes; `out` has that of hidden, or is fp32 for two of
            bf16.
        num: the length of the vectors.
        starts, strides: addresses of the first rows of hidden and weight, and bytes between rows.
        out: address of out[0, 0], and bytes between its rows.
        last: the last i and the last j there are in the tile.
    """
    pair = types.UniTuple(types.int64, 2)
    signature = types.void(hidden, weight, types.int64, pair, pair, pair, pair)

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        emit = Vectors(context, builder, sum_dtype(hidden.dtype))
        is_bf16 = hidden.dtype == types.uint16
        read = Vectors(context, builder, hidden.dtype) if is_bf16 else emit
        multiply = emit.dot if is_bf16 else emit.multiply_add
        num, starts, strides, out, last = values[2], *(pair_of(builder, v) for v in values[3:])
        h, w = (
            addresses(builder, *place) for place in zip(starts, strides, TILE, last, strict=True)
        )

        def step(index: Any, sums: list[Any], mask: Any) -> None:
            a = [read.load(emit.pointer(x, hidden.dtype, index), hidden.dtype, mask) for x in h]
            for j, row in enumerate(w):
                b = read.load(emit.pointer(row, weight.dtype, index), weight.dtype, mask)
                ahead = builder.add(row, INT(AHEAD_BYTES))
                emit.prefetch(emit.pointer(ahead, weight.dtype, index))
                for i in range(TILE[0]):
                    k = i * TILE[1] + j
                    sums[k] = multiply(a[i], b, sums[k])

        sums = emit.sums(read.row(num, [emit.zero] * (TILE[0] * TILE[1]), step))
        num_stored = builder.add(last[1], INT(1))
        for i, row in enumerate(addresses(builder, *out, TILE[0], last[0])):
            place = builder.inttoptr(row, emit.scalar.as_pointer())
            emit.store_numbers(sums[i * TILE[1] : (i + 1) * TILE[1]], place, num_stored)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def dot_rows(typing, hidden, weight, num, start, row, stride, out, last):
    """out[j] = hidden · weight[j] for one hidden vector and `ROWS` rows.

    Reading the rows from memory takes all the time: this is fastest in the order of addresses.

    Args:
        hidden, weight: arrays, for their dtypes; `out` has that of hidden, fp32 or fp64.
        num: the length of the vectors.
        start, row: addresses of the hidden vector and of the first row.
        stride: bytes between rows.
        out: address of out[0].
        last: the last j there is; it stands for those beyond it, which are not stored.
    """
    integer = types.int64
    signature = types.void(hidden, weight, *[integer] * 6)

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        emit = Vectors(context, builder, hidden.dtype)
        num, start, row, stride, out, last = values[2:]
        sums = []
        for each in addresses(builder, row, stride, ROWS, last):
            ahead = builder.add(each, INT(AHEAD_BYTES))

            def step(
                index: Any, carried: list[Any], mask: Any, each: Any = each, ahead: Any = ahead
            ) -> None:
                a = emit.load(emit.pointer(start, hidden.dtype, index), hidden.dtype, mask)
                b = emit.load(emit.pointer(each, weight.dtype, index), weight.dtype, mask)
                emit.prefetch(emit.pointer(ahead, weight.dtype, index))
                carried[0] = emit.multiply_add(a, b, carried[0])

            sums += emit.row(num, [emit.zero], step)
        place = builder.inttoptr(out, emit.scalar.as_pointer())
        emit.store_numbers(emit.sums(sums), place, builder.add(last, INT(1)))
        return context.get_dummy_value()

    return signature, generate


def sum_tile(tile: tuple[int, int]) -> Any:
    """An intrinsic for a tile of some shape."""

    @intrinsic
    def sum_tile(typing, factor, rows, out, num, starts, strides, to, last, left, added, ahead):
        """out[i, k] = Σ_n factor[i, n] · rows[n, k], or += it, for rows i and columns k of a tile.

        Factors in bf16 are in pairs, of an n and the next one; of an odd number, the last pair has
        a 0.

        Args:
            factor, rows, out: arrays, for their dtypes; sums have that of factor, or are in fp32
                for factors and rows in bf16.
            num: how many n there are.
            starts: addresses of factor[0, 0] and rows[0, 0].
            strides: bytes of factor from an i to the next, of factor and rows from an n to the
                next; of pairs half of what is from one to the next.
            to: address of out[0, 0], and bytes between its rows.
            last: the last i there is in the tile.
            left: how many columns there are from the tile's first one on.
            added: whether sums are added to `out`, which then has their dtype.
            ahead: bytes from a row to what is read ahead meanwhile, or None.
        """
        return _sum_tile(tile, factor, rows, out, ahead)

    return sum_tile


def _sum_tile(tile: tuple[int, int], factor: Any, rows: Any, out: Any, ahead: Any) -> Any:
    integer, flag, pair = types.int64, types.boolean, types.UniTuple(types.int64, 2)
    three = types.UniTuple(integer, 3)
    sizes = (integer, pair, three, pair, integer, integer, flag)
    signature = types.void(factor, rows, out, *sizes, ahead)

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        emit = Vectors(context, builder, sum_dtype(factor.dtype))
        num, starts, strides, to, last, left, added, distance = values[3:]
        factor_start, row_start = pair_of(builder, starts)
        stride_i, stride_n, row_stride = (builder.extract_value(strides, i) for i in range(3))
        factors = addresses(builder, factor_start, stride_i, tile[0], last)
        outs = addresses(builder, *pair_of(builder, to), tile[0], last)
        offsets = [INT(j * emit.lanes) for j in range(tile[1])]
        is_bf16 = factor.dtype == types.uint16
        terms = (_Pairs if is_bf16 else _Terms)(context, builder, (factor, rows), tile[1])

        def whole_or_part(left: Any = None) -> None:
            masks = [left and emit.mask(builder.sub(left, offset)) for offset in offsets]
            places = [emit.pointer(row, out.dtype, offset) for row in outs for offset in offsets]
            variables = emit.variables([emit.zero] * len(places))
            with builder.if_then(added):
                loaded = zip(places, masks * tile[0], strict=True)
                before = [emit.load(x, out.dtype, mask) for x, mask in loaded]
                for row in outs:
                    later = builder.add(row, INT(ADDED_AHEAD_BYTES))
                    for offset in offsets:
                        emit.prefetch(emit.pointer(later, out.dtype, offset))
                emit.assign(variables, terms.as_summed(before))
            sums = [builder.load(variable) for variable in variables]
            read_masks = terms.masks(left)
            with emit.loop(num, terms.step, sums) as (n, carried):
                row = builder.add(row_start, builder.mul(n, row_stride))
                b = terms.rows(row, row_stride, builder.sub(num, n), read_masks)
                if not isinstance(ahead, types.NoneType):
                    terms.read_ahead(builder.add(row, distance), row_stride)
                for i, address in enumerate(factors):
                    a = terms.factor(builder.add(address, builder.mul(n, stride_n)))
                    for j in range(tile[1]):
                        k = i * tile[1] + j
                        carried[k] = terms.add(a, b[j], carried[k])
            if is_bf16 and out.dtype == types.uint16:
                for i, row in enumerate(outs):
                    of_row = sums[i * tile[1] : (i + 1) * tile[1]]
                    terms.store(of_row, row, read_masks)
                return
            stored = zip(terms.in_order(sums), places, masks * tile[0], strict=True)
            for value, place, mask in stored:
                emit.store(value, place, out.dtype, mask)

        full = builder.icmp_signed(">=", left, INT(tile[1] * emit.lanes))
        with builder.if_else(full) as (whole, partly):
            with whole:
                whole_or_part()
            with partly:
                whole_or_part(left)
        return context.get_dummy_value()

    return signature, generate


class _Terms:
    """Emits what `sum_tile` adds up: the products of a factor and a row, one n at a time."""

    step = 1

    def __init__(self, context: Any, builder: Any, arrays: tuple[Any, Any], width: int) -> None:
        self.builder = builder
        self.factor_dtype, self.row_dtype = (array.dtype for array in arrays)
        self.emit = Vectors(context, builder, sum_dtype(self.factor_dtype))
        self.read = self.emit
        self.num_loads = width

    def masks(self, left: Any) -> list[Any]:
        """Masks of the loads of a row; None for all columns."""
        starts = (INT(j * self.read.lanes) for j in range(self.num_loads))
        return [left and self.read.mask(self.builder.sub(left, start)) for start in starts]

    def places(self, row: Any) -> list[Any]:
        """The pointers to what is loaded of the row at an address."""
        starts = (INT(j * self.read.lanes) for j in range(self.num_loads))
        return [self.emit.pointer(row, self.row_dtype, start) for start in starts]

    def read_ahead(self, row: Any, stride: Any) -> None:
        """Bring the rows of an n, which are at an address, into a cache."""
        for i in range(self.step):
            for place in self.places(self.builder.add(row, self.builder.mul(stride, INT(i)))):
                self.emit.prefetch(place)

    def loaded(self, row: Any, masks: list[Any]) -> list[Any]:
        """The row at an address."""
        both = zip(self.places(row), masks, strict=True)
        return [self.read.load(place, self.row_dtype, mask) for place, mask in both]

    def rows(self, row: Any, stride: Any, num_left: Any, masks: list[Any]) -> list[Any]:
        """The vectors to be multiplied, of the row of this n."""
        return self.loaded(row, masks)

    def factor(self, address: Any) -> Any:
        """The factor, in all lanes."""
        return self.emit.broadcast(self.emit.pointer(address, self.factor_dtype), self.factor_dtype)

    def add(self, a: Any, b: Any, c: Any) -> Any:
        """C + a · b."""
        return self.emit.multiply_add(a, b, c)

    def as_summed(self, values: list[Any]) -> list[Any]:
        """Vectors of columns in the order in which they are summed up."""
        return values

    def in_order(self, sums: list[Any]) -> list[Any]:
        """The opposite of `as_summed`."""
        return sums


class _Pairs(_Terms):
    """Terms of bf16 numbers, two n at a time."""

    step = 2

    def __init__(self, context: Any, builder: Any, arrays: tuple[Any, Any], width: int) -> None:
        super().__init__(context, builder, arrays, width)
        self.read = Vectors(context, builder, self.row_dtype)
        self.num_loads = width // 2

    def rows(self, row: Any, stride: Any, num_left: Any, masks: list[Any]) -> list[Any]:
        """Pairs of the rows of this n and the next one, or of this one twice if it is the last."""
        has_next = self.builder.icmp_signed(">", num_left, INT(1))
        following = self.builder.select(has_next, self.builder.add(row, stride), row)
        both = zip(self.loaded(row, masks), self.loaded(following, masks), strict=True)
        return [pairs for a, b in both for pairs in self.read.interleaved(a, b)]

    def factor(self, address: Any) -> Any:
        """The pair of factors, in all lanes."""
        return self.emit.broadcast(self.emit.pointer(address, types.float32), types.float32)

    def add(self, a: Any, b: Any, c: Any) -> Any:
        """C + both products."""
        return self.emit.dot(a, b, c)

    def as_summed(self, values: list[Any]) -> list[Any]:
        """See `Vectors.interleaved`."""
        pairs = zip(values[::2], values[1::2], strict=True)
        return [half for a, b in pairs for half in self.emit.halves_split(a, b)]

    def in_order(self, sums: list[Any]) -> list[Any]:
        """The opposite of `as_summed`."""
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return [half for a, b in pairs for half in self.emit.halves_merged(a, b)]

    def store(self, sums: list[Any], row: Any, masks: list[Any]) -> None:
        """The sums of a row to memory, rounded to bf16."""
        pairs = zip(sums[::2], sums[1::2], masks, strict=True)
        for j, (a, b, mask) in enumerate(pairs):
            place = self.emit.pointer(row, types.uint16, INT(j * self.read.lanes))
            value = self.emit.rounded_halves(a, b)
            self.read.store(value, place, types.uint16, mask)
