"""Arithmetic, comparisons, bits, moves and conversions."""

from typing import Any

import numpy as np

from .access import Array
from .decoder import Decoder, Function, elements, instruction
from .parser import Instruction, Unsupported
from .programs import BITS, Action, Mask, Programs

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


def from_halves(bits: Array, kind: str) -> Array:
    """fp32 numbers of the halves in registers or bytes."""
    halves = np.ascontiguousarray(bits).view(np.uint16)
    return bf16_to_f32(halves) if kind[0] == "b" else halves.view(np.float16).astype(np.float32)


def to_halves(values: Array, kind: str) -> Array:
    """The bits of fp32 numbers as halves."""
    return f32_to_bf16(values) if kind[0] == "b" else values.astype(np.float16).view(np.uint16)


FUNCTIONS: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "rem": np.fmod, "fma": lambda x, y, z: x * y + z, "mad": lambda x, y, z: x * y + z,
    "min": np.fmin, "max": np.fmax, "neg": np.negative, "sqrt": np.sqrt, "ex2": np.exp2,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
}  # fmt: skip
"""By mnemonic: of numbers of one type."""


@instruction(*FUNCTIONS)
def _function(decoder: Decoder, by: Instruction) -> Action:
    kind, name = by.fields[-1], by.mnemonic
    function = FUNCTIONS[name]
    if name in {"mul", "mad"} and by.has("wide"):
        return _wide(decoder, by)
    if name == "div" and kind[0] != "f":
        function = _quotient
    if name == "rem":
        function = _remainder
    if name == "fma" and kind == "f32":
        function = _fma32
    if kind[0] in "fs":
        function = _typed(kind, function)
    sources = decoder.sources(by.operands[1:], kind)
    return decoder.compute(by, by.operands[0], sources, function)


def _quotient(x: Array, y: Array) -> Array:
    y = np.where(y == 0, 1, y).astype(x.dtype)
    return ((x - np.fmod(x, y)) // y).astype(x.dtype)


def _remainder(x: Array, y: Array) -> Array:
    return np.asarray(np.fmod(x, np.where(y == 0, 1, y).astype(x.dtype)))


def _wide(decoder: Decoder, by: Instruction) -> Action:
    """Products of twice as many bits, perhaps added to a number."""
    kind = by.fields[-1]
    number, wide = np.dtype(TYPES[kind]), WIDE[TYPES[kind]]

    def function(x: Array, y: Array, *addend: Array) -> Array:
        found = np.asarray(x.view(number).astype(wide) * y.view(number))
        bits = found.view(f"u{found.itemsize}")
        return np.asarray(bits + addend[0] if addend else bits)

    added = f"b{16 * number.itemsize}"
    sources = decoder.sources(by.operands[1:3], kind) + decoder.sources(by.operands[3:], added)
    return decoder.compute(by, by.operands[0], sources, function)


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
    "eq": np.equal, "ne": np.not_equal, "num": _neither_nan,
}  # fmt: skip


@instruction("setp")
def _compare(decoder: Decoder, by: Instruction) -> Action:
    _, name, kind = by.fields
    number, compare = TYPES[kind], COMPARISONS[name]
    if kind[0] == "f" and name == "ne":  # not that of numpy for nan
        raise Unsupported(by.text)

    def function(x: Array, y: Array) -> Array:
        found: Array = compare(x.view(number), y.view(number))
        return found

    sources = decoder.sources(by.operands[1:], kind)
    return decoder.compute(by, by.operands[0], sources, function)


@instruction("mov")
def _move(decoder: Decoder, by: Instruction) -> Action:
    kind = by.fields[-1]
    target, source = by.operands
    if target.startswith("{"):
        return _unpack(decoder, by)
    if source.startswith("{"):
        return _pack(decoder, by)
    return decoder.compute(by, target, [decoder.source(source, kind)], lambda x: x)


def _unpack(decoder: Decoder, by: Instruction) -> Action:
    names, where = elements(by.operands[0]), decoder.mask(by)
    source = decoder.source(by.operands[1], by.fields[-1])
    part = np.dtype(f"u{np.dtype(BITS[by.fields[-1]]).itemsize // len(names)}")
    targets = [(i, decoder.target(name)) for i, name in enumerate(names) if name != "_"]

    def act(programs: Programs, mask: Mask) -> None:
        value = np.ascontiguousarray(programs.registers[source])
        parts = value[..., None].view(part)
        for i, slot in targets:
            programs.set(slot, np.ascontiguousarray(parts[..., i]), where(programs, mask))

    return act


def _pack(decoder: Decoder, by: Instruction) -> Action:
    whole = BITS[by.fields[-1]]
    names = elements(by.operands[1])
    size = np.dtype(whole).itemsize // len(names)
    sources = decoder.sources(names, f"b{8 * size}")

    def function(*values: Array) -> Array:
        same = np.broadcast_arrays(*values)
        return np.ascontiguousarray(np.stack(same, -1)).view(whole)[..., 0]

    return decoder.compute(by, by.operands[0], sources, function)


@instruction("cvt")
def _convert(decoder: Decoder, by: Instruction) -> Action:
    to, source = by.fields[-2], by.fields[-1]
    if to in {"bf16x2", "f16x2"}:
        sources = decoder.sources(by.operands[1:3], "f32")
        return decoder.compute(by, by.operands[0], sources, _pack_halves(to))
    kept = source if source in BITS else "b16"
    sources = decoder.sources(by.operands[1:2], kept)
    return decoder.compute(by, by.operands[0], sources, _conversion(decoder, by))


def _conversion(decoder: Decoder, by: Instruction) -> Function:
    to, source = by.fields[-2], by.fields[-1]
    if source == "bf16" and to == "f32":
        return lambda x: bf16_to_f32(x).view(np.uint32)
    if to == "bf16" and source == "f32":
        return lambda x: f32_to_bf16(x.view(np.float32))
    number, result, bits = TYPES[source], TYPES[to], decoder.bits_of(by.operands[0])

    def function(x: Array) -> Array:
        value = x.astype(f"u{np.dtype(number).itemsize}", copy=False).view(number).astype(result)
        if value.dtype.kind == "f":
            return np.asarray(value.view(bits))
        return np.asarray(value.astype(f"{value.dtype.kind}{np.dtype(bits).itemsize}").view(bits))

    return function


def _pack_halves(kind: str) -> Function:
    def bits(x: Array) -> Array:
        return to_halves(x.view(np.float32), kind).astype(np.uint32)

    return lambda high, low: (bits(high) << np.uint32(16)) | bits(low)
