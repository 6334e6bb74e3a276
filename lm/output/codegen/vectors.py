"""Operations on vectors of numbers, as wide as the processor's registers, emitted as LLVM code.

Numbers in memory are fp32, fp64, bf16 or fp16. Of the last two, numba gets the bits: as uint16 and
int16. In registers, numbers have the dtype that sums are formed in.
"""

import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, codegen, config

FEATURES = codegen.get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
HAS_AVX512 = "+avx512f" in FEATURES.split(",")
"""Whether numba compiles for a processor with AVX-512; NUMBA_CPU_FEATURES may limit it."""
HAS_BF16 = HAS_AVX512 and "+avx512bf16" in FEATURES.split(",")
"""Whether there are instructions for bf16, which take numbers below 1.2e-38 for 0."""
HAS_FP16 = platform.machine() not in ("x86_64", "AMD64") or "+f16c" in FEATURES.split(",")
"""Whether numbers in fp16 are converted by instructions: without, LLVM ends the process."""
VECTOR_BYTES = 64 if HAS_AVX512 else 32
INT = ir.IntType(64)
_FLOATS = {ir.FloatType(): (4, "f32"), ir.DoubleType(): (8, "f64"), ir.HalfType(): (2, "f16")}
_STORED = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.uint16: ir.IntType(16),
    types.int16: ir.HalfType(),
}
"""LLVM's type of numbers in memory by numba's."""
AHEAD_BYTES = 12 << 10
"""How far rows are read ahead that are read in the order of addresses."""
_TERMS = {"f32": 8, "f64": 14}
"""Terms of the Taylor series of exp, whose rest is below a rounding up to log(2) / 2."""
_LEAST_EXP = {"f32": -87.0, "f64": -708.0}
"""exp of smaller numbers is 0, before it is a subnormal number."""


class _BFloat(ir.Type):
    """bf16, which llvmlite has no type for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class Vectors:
    """Emits code for vectors of numbers, of which `compute` is numba's or LLVM's type.

    They are fp32 or fp64; or uint16 for numbers that stay in bf16.
    """

    def __init__(self, builder: Any, compute: Any) -> None:
        self.builder = builder
        self.scalar = _STORED.get(compute, compute)
        self.item_bytes = _size(self.scalar)[0]
        self.lanes = VECTOR_BYTES // self.item_bytes
        self.vector = ir.VectorType(self.scalar, self.lanes)
        self.words = ir.VectorType(ir.IntType(32), self.lanes)
        self.zero = ir.Constant(self.vector, None)

    def pointer(self, address: Any, dtype: Any, index: Any = None) -> Any:
        """The pointer to a number, `index` numbers after an address."""
        pointer = self.builder.inttoptr(address, _STORED[dtype].as_pointer())
        return pointer if index is None else self.builder.gep(pointer, [index])

    def load(self, pointer: Any, dtype: Any, mask: Any = None) -> Any:
        """A vector from memory, 0 where it is masked."""
        stored = ir.VectorType(_STORED[dtype], self.lanes)
        pointer = self.builder.bitcast(pointer, stored.as_pointer())
        num_bytes, short = _size(stored.element)
        if mask is None:
            return self._widened(self.builder.load(pointer, align=num_bytes), self.vector)
        arguments = [pointer, ir.IntType(32)(num_bytes), mask, ir.Constant(stored, None)]
        name = f"llvm.masked.load.v{self.lanes}{short}.p0"
        return self._widened(self._call(name, stored, arguments), self.vector)

    def store(self, value: Any, pointer: Any, dtype: Any, mask: Any = None) -> None:
        """A vector to memory, rounded to the nearest number of `dtype` unless it is one."""
        stored = ir.VectorType(_STORED[dtype], self.lanes)
        value = self._narrowed(value, stored)
        pointer = self.builder.bitcast(pointer, stored.as_pointer())
        num_bytes, short = _size(stored.element)
        if mask is None:
            self.builder.store(value, pointer, align=num_bytes)
        else:
            name = f"llvm.masked.store.v{self.lanes}{short}.p0"
            self._call(name, ir.VoidType(), [value, pointer, ir.IntType(32)(num_bytes), mask])

    def store_numbers(self, numbers: Sequence[Any], address: Any, num: Any) -> None:
        """The first `num` of some numbers, or all of them, to memory; none of them is rounded."""
        kind = ir.VectorType(self.scalar, len(numbers))
        value = ir.Constant(kind, ir.Undefined)
        for lane, number in enumerate(numbers):
            value = self.builder.insert_element(value, number, ir.IntType(32)(lane))
        name = f"llvm.masked.store.v{kind.count}{_size(self.scalar)[1]}.p0"
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        align, mask = ir.IntType(32)(self.item_bytes), self.mask(num, kind.count)
        self._call(name, ir.VoidType(), [value, pointer, align, mask])

    def everywhere(self, value: Any, lanes: int | None = None) -> Any:
        """A vector of one number."""
        kind = ir.VectorType(value.type, lanes or self.lanes)
        first = self.builder.insert_element(
            ir.Constant(kind, ir.Undefined), value, ir.IntType(32)(0)
        )
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), None)
        return self.builder.shuffle_vector(first, first, zeros)

    def broadcast(self, pointer: Any, dtype: Any) -> Any:
        """A vector of one number from memory."""
        return self.everywhere(self._widened(self.builder.load(pointer), self.scalar))

    def constant(self, value: float) -> Any:
        """A vector of one known number."""
        return ir.Constant(self.vector, [value] * self.lanes)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """A · b + c, rounded once."""
        return self._call(self._name("fma"), self.vector, [a, b, c])

    def dot(self, a: Any, b: Any, c: Any) -> Any:
        """C in fp32 plus both products of the pairs of bf16 numbers in each lane of a and b."""
        arguments = [c, *(self.builder.bitcast(pair, self.words) for pair in (a, b))]
        return self._call("llvm.x86.avx512bf16.dpbf16ps.512", self.vector, arguments)

    def interleaved(self, a: Any, b: Any) -> list[Any]:
        """The pairs (a[k], b[k]) of bf16 numbers, two vectors of them.

        The first one has half of each block of 8 k, the second one the other half: a processor has
        an instruction for this order.
        """
        starts = range(0, self.lanes, 8)
        halves = ([s + half + k for s in starts for k in range(4)] for half in (0, 4))
        return [
            self._shuffled(a, b, [i for k in half for i in (k, self.lanes + k)]) for half in halves
        ]

    def halves_split(self, a: Any, b: Any, half: int = 4) -> list[Any]:
        """The first `half` of each 2 · `half` numbers of the vectors a and b, and the others."""
        starts = range(0, 2 * self.lanes, 2 * half)
        low = [start + i for start in starts for i in range(half)]
        return [self._shuffled(a, b, [i + shift for i in low]) for shift in (0, half)]

    def halves_merged(self, a: Any, b: Any) -> list[Any]:
        """The opposite of `halves_split`, by fours."""
        order = self._merged()
        return [self._shuffled(a, b, half) for half in (order[: self.lanes], order[self.lanes :])]

    def rounded_halves(self, a: Any, b: Any) -> Any:
        """What `halves_merged` gives, rounded to bf16, in one vector."""
        numbers = ir.VectorType(_BFloat(), 2 * self.lanes)
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        value = self.builder.bitcast(
            self._call(name, numbers, [b, a]), ir.VectorType(ir.IntType(16), 2 * self.lanes)
        )
        return self._shuffled(value, value, self._merged())

    def _merged(self) -> list[int]:
        """Numbers of two vectors, four of each in turn."""
        starts = range(0, self.lanes, 4)
        return [i + k for s in starts for i in (s, s + self.lanes) for k in range(4)]

    def paired(self, a: Any, b: Any) -> Any:
        """The pairs of both vectors' numbers, rounded to bf16, in the lanes of one."""
        builder, words = self.builder, self.words
        short = ir.VectorType(ir.IntType(16), self.lanes)
        low, high = (builder.zext(self._narrowed(value, short), words) for value in (a, b))
        pairs = builder.or_(low, builder.shl(high, constant_of(words, 16)))
        return builder.bitcast(pairs, self.vector)

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger number of each lane; the other one if one is NaN."""
        return self._call(self._name("maxnum"), self.vector, [a, b])

    def square_root(self, x: Any) -> Any:
        """√x."""
        return self._call(self._name("sqrt"), self.vector, [x])

    def sums(self, values: Sequence[Any]) -> list[Any]:
        """The sum of each vector's numbers, see `reduced`."""
        return self.reduced(values, self.builder.fadd)

    def reduced(self, values: Sequence[Any], combine: Callable[[Any, Any], Any]) -> list[Any]:
        """Each vector's numbers combined: of halves, of halves of these, and so on.

        Halves of two vectors are combined at a time, so that an operation serves all lanes.
        """
        found: list[Any] = []
        for first in range(0, len(values), self.lanes):
            group = list(values[first : first + self.lanes])
            num = len(group)
            half = self.lanes // 2
            while half:
                group += [group[0]] * (len(group) % 2)
                pairs = zip(group[::2], group[1::2], strict=True)
                group = [combine(*self.halves_split(a, b, half)) for a, b in pairs]
                half //= 2
            lanes = map(ir.IntType(32), range(num))
            found += [self.builder.extract_element(group[0], lane) for lane in lanes]
        return found

    def _shuffled(self, a: Any, b: Any, order: list[int]) -> Any:
        """Numbers of a, and of b from `lanes` on."""
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
        return self.builder.shuffle_vector(a, b, mask)

    def prefetch(self, pointer: Any) -> None:
        """Bring memory into the second cache before it is read; any address is allowed.

        The first cache, which has few places for missing lines, took up to twice as long.
        """
        builder, number = self.builder, ir.IntType(32)
        arguments = [builder.bitcast(pointer, ir.IntType(8).as_pointer())]
        self._call("llvm.prefetch.p0", ir.VoidType(), [*arguments, *map(number, (0, 2, 1))])

    def exp(self, x: Any) -> Any:
        """Exp x to about one rounding, where it is finite; 0 below `_LEAST_EXP`.

        It is 2ⁿ exp r with an integer n and |r| ≤ log(2) / 2.
        """
        builder, name = self.builder, _FLOATS[self.scalar][1]
        n = builder.fmul(x, self.constant(1 / math.log(2)))
        n = self._call(self._name("nearbyint"), self.vector, [n])
        width, fraction = (32, 23) if name == "f32" else (64, 52)
        bias = (1 << width - fraction - 2) - 1
        n = self.maximum(n, self.constant(1.0 - bias))
        high = 0.693359375  # log(2) to 10 bits, so that n · high is exact
        r = self.multiply_add(n, self.constant(-high), x)
        r = self.multiply_add(n, self.constant(high - math.log(2)), r)
        series = self.constant(1 / math.factorial(_TERMS[name] - 1))
        for i in range(_TERMS[name] - 2, -1, -1):
            series = self.multiply_add(series, r, self.constant(1 / math.factorial(i)))
        whole = builder.fptosi(n, self.words)  # all processors convert to 32 bits
        exponent = builder.add(whole, constant_of(self.words, bias))
        if width == 64:
            exponent = builder.sext(exponent, ir.VectorType(INT, self.lanes))
        power = builder.shl(exponent, constant_of(exponent.type, fraction))
        power = builder.bitcast(power, self.vector)
        is_tiny = builder.fcmp_ordered("<", x, self.constant(_LEAST_EXP[name]))
        return builder.select(is_tiny, self.zero, builder.fmul(series, power))

    def log(self, x: Any) -> Any:
        """Natural logarithm of one number."""
        return self._call(f"llvm.log.{_FLOATS[x.type][1]}", x.type, [x])

    def mask(self, num: Any, lanes: int | None = None) -> Any:
        """Which lanes are below a number."""
        lanes = lanes or self.lanes
        numbers = ir.Constant(ir.VectorType(INT, lanes), list(range(lanes)))
        return self.builder.icmp_signed("<", numbers, self.everywhere(num, lanes))

    def lane_is(self, number: Any) -> Any:
        """Which lane has a number, if any."""
        lanes = ir.Constant(self.words, list(range(self.lanes)))
        wanted = self.everywhere(self.builder.trunc(number, self.words.element))
        return self.builder.icmp_signed("==", lanes, wanted)

    @contextmanager
    def loop(self, stop: Any, step: int, carried: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
        """Code for `range(0, stop, step)`, whose body replaces the values that it carries."""
        places = self.variables(carried)
        with cgutils.for_range_slice(self.builder, INT(0), stop, INT(step), inc=True) as (index, _):
            values = [self.builder.load(place) for place in places]
            yield index, values
            self.assign(places, values)
        carried[:] = [self.builder.load(place) for place in places]

    def row(self, num: Any, carried: list[Any], step: Callable[..., None]) -> list[Any]:
        """Code for `num` numbers, a vector at a time, the last one masked: what the steps carry.

        `step(index, carried, mask)` replaces the values of `carried`; `mask` is None for a whole
        vector.
        """
        builder = self.builder
        whole = builder.and_(num, INT(-self.lanes))
        with self.loop(whole, self.lanes, carried) as (index, values):
            step(index, values, None)
        places = self.variables(carried)
        left = builder.sub(num, whole)
        with builder.if_then(builder.icmp_signed(">", left, INT(0))):
            values = list(carried)
            step(whole, values, self.mask(left))
            self.assign(places, values)
        return [builder.load(place) for place in places]

    def variables(self, values: Sequence[Any]) -> list[Any]:
        """Variables with initial values; the compiler turns them into registers."""
        places = [cgutils.alloca_once(self.builder, value.type) for value in values]
        self.assign(places, values)
        return places

    def assign(self, places: Sequence[Any], values: Sequence[Any]) -> None:
        """Set variables."""
        for place, value in zip(places, values, strict=True):
            self.builder.store(value, place)

    def _widened(self, value: Any, to: Any) -> Any:
        """Numbers as they are in memory, a vector or a scalar, in the type `to`."""
        if value.type == to:
            return value
        if isinstance(getattr(value.type, "element", value.type), ir.IntType):
            word = _like(to, ir.IntType(32))
            value = self.builder.shl(self.builder.zext(value, word), constant_of(word, 16))
            value = self.builder.bitcast(value, _like(to, ir.FloatType()))
        return value if value.type == to else self.builder.fpext(value, to)

    def _narrowed(self, value: Any, to: Any) -> Any:
        """A vector as it is in memory, rounded to nearest, ties to even."""
        builder = self.builder
        if value.type == to:
            return value
        if value.type.element == ir.DoubleType() and to.element != ir.FloatType():
            value = builder.fptrunc(value, _like(to, ir.FloatType()))  # LLVM has no other function
        if not isinstance(to.element, ir.IntType):
            return builder.fptrunc(value, to)
        if HAS_BF16:
            return builder.bitcast(builder.fptrunc(value, _like(to, _BFloat())), to)
        word = _like(to, ir.IntType(32))
        is_nan = builder.fcmp_unordered("uno", value, value)
        bits = builder.bitcast(value, word)
        odd = builder.and_(builder.lshr(bits, constant_of(word, 16)), constant_of(word, 1))
        bits = builder.add(bits, builder.add(odd, constant_of(word, 0x7FFF)))
        bits = builder.select(is_nan, constant_of(word, 0x7FC00000), bits)
        return builder.trunc(builder.lshr(bits, constant_of(word, 16)), to)

    def _name(self, operation: str) -> str:
        return f"llvm.{operation}.v{self.lanes}{_FLOATS[self.scalar][1]}"

    def _call(self, name: str, result: Any, arguments: list[Any]) -> Any:
        kind = ir.FunctionType(result, [value.type for value in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)


def addresses(builder: Any, first: Any, stride: Any, num: int, last: Any) -> list[Any]:
    """Addresses of `num` rows; beyond row number `last`, its address again."""
    inside = [builder.icmp_signed("<", INT(i), last) for i in range(num)]
    rows = [builder.select(is_inside, INT(i), last) for i, is_inside in enumerate(inside)]
    return [builder.add(first, builder.mul(row, stride)) for row in rows]


def _size(kind: Any) -> tuple[int, str]:
    """Bytes and name of an LLVM type of numbers in memory."""
    if kind == ir.HalfType() and not HAS_FP16:
        raise RuntimeError("the processor has no instructions for fp16")
    return (2, "i16") if isinstance(kind, ir.IntType) else _FLOATS[kind]


def _like(kind: Any, element: Any) -> Any:
    """A vector of other elements, or one element if `kind` is one."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def constant_of(kind: Any, value: int) -> Any:
    """A constant of an LLVM type, in all lanes if it is a vector."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)
