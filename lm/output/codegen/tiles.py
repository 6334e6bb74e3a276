"""Products of tiles: code of LLVM, and the loops over tiles that products of matrices consist of.

A *tile* is a small part of a matrix whose numbers are in registers. Where it exceeds the matrix,
the matrix's last rows are computed and stored again, and columns are masked: one piece of code
serves all sizes. Each result is a sum in an order that does not depend on where its tile begins, so
it is the same bit for bit however the work is divided among threads.

Factors in bf16 are multiplied two at a time, by an instruction that adds both products to a number
in fp32 (`vectors.HAS_BF16`). A *pair* of them is next to each other in memory.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from lm.output.codegen.compilation import emitted
from lm.output.codegen.vectors import AHEAD_BYTES, HAS_AVX512, INT, VECTOR_BYTES, Vectors, addresses

TILE = (4, 4) if HAS_AVX512 else (4, 3)
"""Rows and vectors of a tile; processors have 32 or 16 registers for vectors."""
ROW_TILE = (6, 4) if HAS_AVX512 else TILE
"""Tile of sums of products of bf16 numbers for a node's rows."""
ROWS = 8
"""Rows that one hidden vector is multiplied with at a time."""
ADDED_AHEAD_BYTES = 128 << 10
"""Distance, in bytes, at which rows that sums are added to are prefetched."""
LINE_BYTES = 64
"""A line of a cache."""
TERMS = 64
"""Rows that are summed up at a time, and stay in the first cache meanwhile."""
STREAMED_BYTES = 16 << 10
"""Rows that stay in the first cache before they go past it."""


def sum_dtype(dtype: Any) -> Any:
    """The dtype of sums of products of two factors: fp32 for bf16, else the factors'."""
    return types.float32 if dtype == types.uint16 else dtype


@emitted
def dot_tile(builder, hidden, weight, num, starts, strides, out, last):
    """out[i, j] = hidden[i] · weight[j] for rows i and j of a tile; in fp32 for bf16.

    `starts`, `strides` and `last` are those of hidden and of weight.
    """
    emit = Vectors(builder, sum_dtype(hidden))
    is_bf16 = hidden == types.uint16
    read = Vectors(builder, hidden) if is_bf16 else emit
    multiply = emit.dot if is_bf16 else emit.multiply_add
    h, w = (addresses(builder, *place) for place in zip(starts, strides, TILE, last, strict=True))

    def step(index: Any, sums: list[Any], mask: Any) -> None:
        a = [read.load(emit.pointer(x, hidden, index), hidden, mask) for x in h]
        for j, row in enumerate(w):
            b = read.load(emit.pointer(row, weight, index), weight, mask)
            emit.prefetch(emit.pointer(builder.add(row, INT(AHEAD_BYTES)), weight, index))
            for i in range(TILE[0]):
                k = i * TILE[1] + j
                sums[k] = multiply(a[i], b, sums[k])

    sums = emit.sums(read.row(num, [emit.zero] * (TILE[0] * TILE[1]), step))
    num_stored = builder.add(last[1], INT(1))
    for i, row in enumerate(addresses(builder, *out, TILE[0], last[0])):
        emit.store_numbers(sums[i * TILE[1] : (i + 1) * TILE[1]], row, num_stored)


@njit(nogil=True)
def dots(hidden, weight, size, num, n, starts, strides, out):
    """The products of `num` hidden vectors [size] with `n` rows; addresses as of `dot_tile`."""
    item_bytes = max(hidden.itemsize, 4)
    for j in range(0, n, TILE[1]):
        for i in range(0, num, TILE[0]):
            first = (starts[0] + i * strides[0], starts[1] + j * strides[1])
            to = (out[0] + i * out[1] + j * item_bytes, out[1])
            last = (num - 1 - i, n - 1 - j)
            dot_tile(hidden, weight, size, first, strides, to, last)


@emitted
def dot_rows(builder, hidden, weight, num, start, row, stride, out, last):
    """out[j] = hidden · weight[j] for one hidden vector and `ROWS` rows.

    `start`, `row` and `out` are addresses of the vector, the first row and out[0], in hidden's
    dtype. Reading the rows takes all the time: this is fastest in the order of addresses.
    """
    emit = Vectors(builder, hidden)

    def product(row: Any) -> Any:
        ahead = builder.add(row, INT(AHEAD_BYTES))

        def step(index: Any, carried: list[Any], mask: Any) -> None:
            a = emit.load(emit.pointer(start, hidden, index), hidden, mask)
            b = emit.load(emit.pointer(row, weight, index), weight, mask)
            emit.prefetch(emit.pointer(ahead, weight, index))
            carried[0] = emit.multiply_add(a, b, carried[0])

        return emit.row(num, [emit.zero], step)[0]

    sums = [product(each) for each in addresses(builder, row, stride, ROWS, last)]
    emit.store_numbers(emit.sums(sums), out, builder.add(last, INT(1)))


def sum_tile(tile: tuple[int, int]) -> Any:
    """A function for tiles of some shape: `sum_tile(factor, rows, out, …)`.

    out[i, k] = Σ_n factor[i, n] · rows[n, k], or += it if `added`, for rows i and columns k of a
    tile, in the dtype of factor; in fp32 for bf16, where factors are in pairs, of an n and the next
    one, whose last has a 0 for an odd number.

    Args:
        num: how many n there are.
        starts: addresses of factor[0, 0] and rows[0, 0].
        strides: bytes of factor from an i to the next, of factor and rows from an n to the
            next; of pairs half of what is from one to the next.
        to: (address, stride) of out.
        left: how many columns there are from the tile's first one on.
        ahead: bytes from a row to what is read ahead meanwhile, or None.
    """

    @emitted
    def sum_tile(builder, factor, rows, out, num, starts, strides, to, last, left, added, ahead):
        terms = _Terms(builder, factor, rows, tile[1])
        emit = terms.emit
        stride_i, stride_n, row_stride = strides
        factors = addresses(builder, starts[0], stride_i, tile[0], last)
        outs = addresses(builder, *to, tile[0], last)
        offsets = [INT(j * emit.lanes) for j in range(tile[1])]

        def whole_or_part(left: Any = None) -> None:
            masks = [left and emit.mask(builder.sub(left, offset)) for offset in offsets]
            places = [emit.pointer(row, out, offset) for row in outs for offset in offsets]
            variables = emit.variables([emit.zero] * len(places))
            with builder.if_then(added):
                loaded = zip(places, masks * tile[0], strict=True)
                before = [emit.load(x, out, mask) for x, mask in loaded]
                for row in outs:
                    later = builder.add(row, INT(ADDED_AHEAD_BYTES))
                    for offset in offsets:
                        emit.prefetch(emit.pointer(later, out, offset))
                emit.assign(variables, terms.reordered(before, emit.halves_split))
            sums = [builder.load(variable) for variable in variables]
            read_masks = terms.masks(left)
            with emit.loop(num, terms.step, sums) as (n, carried):
                row = builder.add(starts[1], builder.mul(n, row_stride))
                b = terms.rows(row, row_stride, builder.sub(num, n), read_masks)
                if ahead is not None:
                    terms.read_ahead(builder.add(row, ahead), row_stride)
                for i, address in enumerate(factors):
                    a = terms.factor(builder.add(address, builder.mul(n, stride_n)))
                    for k in range(i * tile[1], (i + 1) * tile[1]):
                        carried[k] = terms.multiply_add(a, b[k - i * tile[1]], carried[k])
            if terms.is_pair and out == types.uint16:
                for i, row in enumerate(outs):
                    terms.store(sums[i * tile[1] : (i + 1) * tile[1]], row, read_masks)
                return
            sums = terms.reordered(sums, emit.halves_merged)
            for value, place, mask in zip(sums, places, masks * tile[0], strict=True):
                emit.store(value, place, out, mask)

        full = builder.icmp_signed(">=", left, INT(tile[1] * emit.lanes))
        with builder.if_else(full) as (whole, partly):
            with whole:
                whole_or_part()
            with partly:
                whole_or_part(left)

    return sum_tile


class _Terms:
    """Emits what `sum_tile` adds up: the products of a factor and a row, one n at a time.

    Of numbers in bf16 two n at a time, whose rows are interleaved: see `Vectors.interleaved`.
    """

    def __init__(self, builder: Any, factor: Any, row: Any, width: int) -> None:
        self.builder, self.row_dtype = builder, row
        self.is_pair = factor == types.uint16
        self.step = 2 if self.is_pair else 1
        self.factor_dtype = sum_dtype(factor)
        self.emit = self.read = Vectors(builder, self.factor_dtype)
        if self.is_pair:
            self.read = Vectors(builder, row)
        self.multiply_add = self.emit.dot if self.is_pair else self.emit.multiply_add
        self.starts = [INT(j * self.read.lanes) for j in range(width // self.step)]

    def masks(self, left: Any) -> list[Any]:
        """Masks of the loads of a row; None for all columns."""
        return [left and self.read.mask(self.builder.sub(left, start)) for start in self.starts]

    def places(self, row: Any) -> list[Any]:
        """The pointers to what is loaded of the row at an address."""
        return [self.emit.pointer(row, self.row_dtype, start) for start in self.starts]

    def read_ahead(self, row: Any, stride: Any) -> None:
        """Bring the rows of an n, which are at an address, into a cache."""
        for i in range(self.step):
            for place in self.places(self.builder.add(row, self.builder.mul(stride, INT(i)))):
                self.emit.prefetch(place)

    def rows(self, row: Any, stride: Any, num_left: Any, masks: list[Any]) -> list[Any]:
        """The vectors to be multiplied, of the row at an address.

        In bf16 pairs with the next row, or of this one twice if it is the last.
        """
        loaded = self._loaded(row, masks)
        if not self.is_pair:
            return loaded
        has_next = self.builder.icmp_signed(">", num_left, INT(1))
        following = self.builder.select(has_next, self.builder.add(row, stride), row)
        both = zip(loaded, self._loaded(following, masks), strict=True)
        return [pairs for a, b in both for pairs in self.read.interleaved(a, b)]

    def _loaded(self, row: Any, masks: list[Any]) -> list[Any]:
        both = zip(self.places(row), masks, strict=True)
        return [self.read.load(place, self.row_dtype, mask) for place, mask in both]

    def factor(self, address: Any) -> Any:
        """The factor, or the pair of factors, in all lanes."""
        return self.emit.broadcast(self.emit.pointer(address, self.factor_dtype), self.factor_dtype)

    def reordered(self, values: list[Any], order: Callable[..., list[Any]]) -> list[Any]:
        """Vectors of columns in the order of the sums (`halves_split`), or back (`halves_merged`).

        They are the same without pairs.
        """
        if not self.is_pair:
            return values
        pairs = zip(values[::2], values[1::2], strict=True)
        return [half for a, b in pairs for half in order(a, b)]

    def store(self, sums: list[Any], row: Any, masks: list[Any]) -> None:
        """The sums of pairs, of a row, to memory, rounded to bf16."""
        pairs = zip(sums[::2], sums[1::2], self.places(row), masks, strict=True)
        for a, b, place, mask in pairs:
            self.read.store(self.emit.rounded_halves(a, b), place, types.uint16, mask)


@emitted
def stream(builder, source, to, num):
    """Copy `num` bytes past the caches, which then do not read the memory at `to` first.

    Both addresses have the same remainder of `LINE_BYTES`. The lines at both ends, which are not
    copied as a whole, go through the caches.
    """
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


def _sums(tile: tuple[int, int]) -> tuple[Callable[..., None], Callable[..., None]]:
    add, height = sum_tile(tile), tile[0]

    @njit(nogil=True)
    def sums(factor, rows, out, num, num_terms, starts, strides, to, added, ahead):
        """`num` rows of sums of `num_terms` rows; see `sum_tile`.

        What is left of a row is computed again with columns before it, if it is not added to.
        """
        num_columns = out.shape[1]
        columns = tile[1] * (VECTOR_BYTES // max(factor.itemsize, 4))
        for start in range(0, num_columns, columns):
            k = start if added else max(0, min(start, num_columns - columns))
            for i in range(0, num, height):
                first = (starts[0] + i * strides[0], starts[1] + k * rows.itemsize)
                place = (to[0] + i * to[1] + k * out.itemsize, to[1])
                last, left = num - 1 - i, num_columns - k
                add(factor, rows, out, num_terms, first, strides, place, last, left, added, ahead)

    @njit(nogil=True)
    def streamed_sums(factor, rows, out, num, num_terms, starts, strides, to, buffer):
        """`sums` for rows next to each other, stored from the address `to` on, past the caches.

        `buffer` has `STREAMED_BYTES`, or a row and two lines of a cache if that is more.
        """
        row_bytes, first = out.shape[1] * out.itemsize, -buffer.ctypes.data % LINE_BYTES
        # As many whole tiles as fit; of rows so long that no tile fits, as many rows as do.
        few = (len(buffer) - 2 * LINE_BYTES) // row_bytes
        few = max(few - few % height, min(few, height))
        for i in range(0, num, few):
            there, n = to + i * row_bytes, min(few, num - i)
            here = buffer.ctypes.data + first + there % LINE_BYTES
            of_rows, place = (starts[0] + i * strides[0], starts[1]), (here, row_bytes)
            sums(factor, rows, out, n, num_terms, of_rows, strides, place, False, None)
            stream(here, there, n * row_bytes)

    return sums, streamed_sums


sums, streamed_sums = _sums(TILE)
row_sums, streamed_row_sums = _sums(ROW_TILE)
