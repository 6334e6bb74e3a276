"""Arithmetic, comparisons and bits."""

from typing import Any

import numpy as np

from .access import Array
from .decoder import Decoder, Function, instruction
from .parser import Instruction, Unsupported
from .programs import BITS, Action

TYPES: dict[str, Any] = {
    "s16": np.int16, "u16": np.uint16, "b16": np.uint16, "f16": np.float16,
    "s32": np.int32, "u32": np.uint32, "b32": np.uint32, "f32": np.float32,
    "s64": np.int64, "u64": np.uint64, "b64": np.uint64, "f64": np.float64,
    "s8": np.int8, "u8": np.uint8, "pred": np.bool_,
}  # fmt: skip
WIDE = {np.int32: np.int64, np.uint32: np.uint64, np.int16: np.int32, np.uint16: np.uint32}


def bf16_to_f32(bits: Array) -> Array:
    """The numbers of bf16 bits."""
    return np.asarray((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))


def f32_to_bf16(values: Array) -> Array:
    """bf16 bits, rounded to nearest even."""
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _typed(kind: str, function: Function) -> Function:
    """A function of bits, from one of numbers that keeps their type."""
    number, bits = TYPES[kind], BITS[kind]
    return lambda *values: function(*[each.view(number) for each in values]).view(bits)


def _fma32(x: Array, y: Array, z: Array) -> Array:
    return (x.astype(np.float64) * y + z).astype(np.float32)


def _pairs(kind: str, function: Function) -> Function:
    """A function of two halves in a register of 32 bits."""

    def of_bf16(*values: Array) -> Array:
        wide = [bf16_to_f32(_halves(each)) for each in values]
        return f32_to_bf16(function(*wide).astype(np.float32)).view(np.uint32)

    def of_f16(*values: Array) -> Array:
        wide = [_halves(each).view(np.float16).astype(np.float32) for each in values]
        return np.asarray(function(*wide).astype(np.float16).view(np.uint32))

    return of_bf16 if kind == "bf16x2" else of_f16


def _halves(value: Array) -> Array:
    return np.ascontiguousarray(value).view(np.uint16)


FUNCTIONS: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "fma": lambda x, y, z: x * y + z, "mad": lambda x, y, z: x * y + z,
    "min": np.fmin, "max": np.fmax, "neg": np.negative, "abs": np.abs,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": np.reciprocal,
    "ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
}  # fmt: skip
"""By mnemonic: of numbers of one type."""


@instruction(*FUNCTIONS)
def _function(decoder: Decoder, by: Instruction) -> Action:
    kind, name = by.fields[-1], by.mnemonic
    function = FUNCTIONS[name]
    if name in {"mul", "mad"} and (by.has("wide") or by.has("hi")):
        return _wide(decoder, by)
    if by.has("NaN"):
        function = {"min": np.minimum, "max": np.maximum}[name]
    if name == "div" and kind[0] != "f":
        function = _quotient
    if name == "fma" and kind == "f32":
        function = _fma32
    if kind in {"bf16x2", "f16x2"}:
        function, kind = _pairs(kind, function), "b32"
    elif kind[0] in "fs":
        function = _typed(kind, function)
    sources = decoder.sources(by.operands[1:], kind)
    return decoder.compute(by, by.operands[0], sources, function)


def _quotient(x: Array, y: Array) -> Array:
    y = np.where(y == 0, 1, y).astype(x.dtype)
    return ((x - np.fmod(x, y)) // y).astype(x.dtype)


def _wide(decoder: Decoder, by: Instruction) -> Action:
    """Products of twice as many bits: all of them, or the upper half."""
    kind = by.fields[-1]
    number, wide = TYPES[kind], WIDE[TYPES[kind]]
    bits = np.dtype(f"u{np.dtype(wide).itemsize}")

    def product(x: Array, y: Array) -> Array:
        return np.asarray(x.view(number).astype(wide) * y.view(number))

    def upper(x: Array, y: Array) -> Array:
        return np.asarray((product(x, y) >> wide(32)).astype(number).view(BITS[kind]))

    sources = decoder.sources(by.operands[1:3], kind)
    if by.mnemonic == "mul":
        function = upper if by.has("hi") else lambda x, y: product(x, y).view(bits)
        return decoder.compute(by, by.operands[0], sources, function)
    if by.has("hi"):
        raise Unsupported(by.text)
    sources.append(decoder.source(by.operands[3], "b64"))
    return decoder.compute(
        by, by.operands[0], sources, lambda x, y, z: product(x, y).view(bits) + z
    )


@instruction("shl", "shr")
def _shift(decoder: Decoder, by: Instruction) -> Action:
    kind = by.fields[-1]
    number, bits = TYPES[kind], BITS[kind]
    size = 8 * np.dtype(bits).itemsize
    signed = np.dtype(number).kind == "i" and by.mnemonic == "shr"

    def function(x: Array, count: Array) -> Array:
        over = count >= size
        count = np.minimum(count, size - 1)
        if signed:
            return np.asarray((x.view(number) >> count.astype(number)).view(bits))
        count = count.astype(bits)
        shifted = x << count if by.mnemonic == "shl" else x >> count
        return np.where(over, bits(0), shifted) if over.any() else shifted

    sources = [decoder.source(by.operands[1], kind), decoder.source(by.operands[2], "b32")]
    return decoder.compute(by, by.operands[0], sources, function)


@instruction("shf")
def _funnel_shift(decoder: Decoder, by: Instruction) -> Action:
    left, wraps = by.fields[1] == "l", by.fields[2] == "wrap"

    def function(low: Array, high: Array, count: Array) -> Array:
        count = count & np.uint32(31) if wraps else np.minimum(count, np.uint32(32))
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        wide = count.astype(np.uint64)
        if left:
            return ((both << wide) >> np.uint64(32)).astype(np.uint32)
        return (both >> wide).astype(np.uint32)

    sources = decoder.sources(by.operands[1:4], "b32")
    return decoder.compute(by, by.operands[0], sources, function)


@instruction("bfe")
def _extract_bits(decoder: Decoder, by: Instruction) -> Action:
    kind = by.fields[-1]

    def function(x: Array, position: Array, length: Array) -> Array:
        begin = np.asarray((position & np.uint32(255)).astype(np.int64))
        size = np.asarray((length & np.uint32(255)).astype(np.int64))
        field = (x.view(TYPES[kind]).astype(np.int64) >> begin) & ((np.int64(1) << size) - 1)
        if kind == "s32":
            negative = ((field >> np.maximum(size - 1, 0)) & 1 == 1) & (size > 0)
            field = np.where(negative, field - (np.int64(1) << size), field)
        return np.asarray((field & 0xFFFFFFFF).astype(np.uint32))

    if kind not in {"s32", "u32"}:
        raise Unsupported(by.text)
    sources = decoder.sources(by.operands[1:], kind)
    return decoder.compute(by, by.operands[0], sources, function)


@instruction("prmt")
def _permute_bytes(decoder: Decoder, by: Instruction) -> Action:
    def function(low: Array, high: Array, selectors: Array) -> Array:
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        result = np.zeros((1, 1), np.uint32)
        for i in range(4):
            selector = (selectors >> np.uint32(4 * i)) & np.uint32(15)
            place = ((selector & np.uint32(7)) * np.uint32(8)).astype(np.uint64)
            byte = ((both >> place) & np.uint64(255)).astype(np.uint32)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            byte = np.where(selector & np.uint32(8), sign, byte)
            result = result | (byte << np.uint32(8 * i))
        return result

    if len(by.fields) > 2:
        raise Unsupported(by.text)
    sources = decoder.sources(by.operands[1:], "b32")
    return decoder.compute(by, by.operands[0], sources, function)


@instruction("popc")
def _count_bits(decoder: Decoder, by: Instruction) -> Action:
    if by.fields[-1] != "b32":
        raise Unsupported(by.text)
    sources = decoder.sources(by.operands[1:], "b32")
    return decoder.compute(
        by, by.operands[0], sources, lambda x: np.bitwise_count(x).astype(np.uint32)
    )


@instruction("selp")
def _select(decoder: Decoder, by: Instruction) -> Action:
    kind = by.fields[-1]
    sources = [*decoder.sources(by.operands[1:3], kind), decoder.source(by.operands[3], "pred")]
    return decoder.compute(by, by.operands[0], sources, _where)


def _where(x: Array, y: Array, condition: Array) -> Array:
    return np.where(condition, x, y)


def _neither_nan(x: Array, y: Array) -> Array:
    return ~(np.isnan(x) | np.isnan(y))


COMPARISONS: dict[str, Function] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
    "ltu": lambda x, y: ~(x >= y), "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y), "geu": lambda x, y: ~(x < y),
    "equ": lambda x, y: (x == y) | ~_neither_nan(x, y), "neu": np.not_equal,
    "num": _neither_nan, "nan": lambda x, y: ~_neither_nan(x, y),
}  # fmt: skip


@instruction("setp")
def _compare(decoder: Decoder, by: Instruction) -> Action:
    kind = by.fields[-1]
    number, compare = TYPES[kind], COMPARISONS[by.fields[1]]
    if kind[0] == "f" and by.fields[1] == "ne":
        compare = lambda x, y: (x != y) & _neither_nan(x, y)  # noqa: E731
    sources = decoder.sources(by.operands[1:3], kind)
    if len(by.operands) == 3:
        function = lambda x, y: compare(x.view(number), y.view(number))  # noqa: E731
        return decoder.compute(by, by.operands[0], sources, function)
    logic = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[by.fields[2]]
    sources.append(decoder.source(by.operands[3], "pred"))
    combined = lambda x, y, z: logic(compare(x.view(number), y.view(number)), z)  # noqa: E731
    return decoder.compute(by, by.operands[0], sources, combined)
