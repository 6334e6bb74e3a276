"""Arithmetic, comparisons, bits, moves and conversions."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .access import Array
from .decoder import BITS, Decoder, Function, elements, instruction
from .programs import Action, Mask, Programs
from .ptx import Instruction, Unsupported

TYPES: dict[str, Any] = {
    "s16": np.int16, "u16": np.uint16, "b16": np.uint16, "f16": np.float16,
    "s32": np.int32, "u32": np.uint32, "b32": np.uint32, "f32": np.float32,
    "s64": np.int64, "u64": np.uint64, "b64": np.uint64, "f64": np.float64, "pred": np.bool_,
}  # fmt: skip


def numbers(bits: Array, kind: str) -> Array:
    """The numbers of bits; of bf16 as fp32."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(TYPES[kind])


def rounded(values: Array, kind: str) -> Array:
    """The bits of numbers in a type, to nearest even."""
    if kind != "bf16":
        return values.astype(TYPES[kind]).view(BITS[kind])
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    halves = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), halves).astype(np.uint16)


def _multiply_add(x: Array, y: Array, z: Array) -> Array:
    if x.dtype == np.float32:  # one rounding
        return (x.astype(np.float64) * y + z).astype(np.float32)
    return np.asarray(x * y + z)


def _divide(x: Array, y: Array) -> Array:
    if x.dtype.kind == "f":
        return np.divide(x, y)
    y = np.where(y == 0, 1, y).astype(x.dtype)
    return np.asarray((x - np.fmod(x, y)) // y)


def _remainder(x: Array, y: Array) -> Array:
    return np.asarray(np.fmod(x, np.where(y == 0, 1, y).astype(x.dtype)))


FUNCTIONS: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _divide, "rem": _remainder,
    "fma": _multiply_add, "mad": _multiply_add, "min": np.fmin, "max": np.fmax,
    "neg": np.negative, "sqrt": np.sqrt, "ex2": np.exp2,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
}  # fmt: skip
"""By mnemonic: of numbers of one type."""


@instruction(*FUNCTIONS)
def _function(decoder: Decoder, by: Instruction) -> Action:
    kind, function = by.fields[-1], FUNCTIONS[by.mnemonic]
    if by.has("wide") or by.has("hi"):
        return _wide(decoder, by)
    number, bits = TYPES[kind], BITS[kind]
    sources = decoder.sources(by.operands[1:], kind)
    if number is bits:
        return decoder.compute(by, sources, function)
    return decoder.compute(
        by, sources, lambda *values: function(*[each.view(number) for each in values]).view(bits)
    )


def _wide(decoder: Decoder, by: Instruction) -> Action:
    """Products of twice as many bits, perhaps added to a number; or the upper half of them."""
    kind = by.fields[-1]
    if by.has("hi") and by.fields not in {("mul", "hi", "s32"), ("mul", "hi", "u32")}:
        raise Unsupported(by.text)
    size = 2 * np.dtype(TYPES[kind]).itemsize
    wide, bits = f"{kind[0].replace('s', 'i')}{size}", f"u{size}"

    def function(x: Array, y: Array, *addend: Array) -> Array:
        found = (numbers(x, kind).astype(wide) * numbers(y, kind)).view(bits)
        if by.has("hi"):
            return np.asarray((found >> np.uint64(32)).astype(np.uint32))
        return np.asarray(found + addend[0] if addend else found)

    addend = decoder.sources(by.operands[3:], f"b{8 * size}")
    return decoder.compute(by, decoder.sources(by.operands[1:3], kind) + addend, function)


@instruction("shl", "shr")
def _shift(decoder: Decoder, by: Instruction) -> Action:
    kind, shift = by.fields[-1], np.left_shift if by.mnemonic == "shl" else np.right_shift
    size = 8 * np.dtype(BITS[kind]).itemsize

    def function(x: Array, count: Array) -> Array:
        value = numbers(x, kind)
        shifted = shift(value, np.minimum(count, size - 1).astype(value.dtype)).view(x.dtype)
        if kind[0] == "s" or not (over := count >= size).any():
            return np.asarray(shifted)
        return np.where(over, 0, shifted).astype(x.dtype)

    sources = [decoder.source(by.operands[1], kind), decoder.source(by.operands[2], "b32")]
    return decoder.compute(by, sources, function)


@instruction("shf")
def _funnel_shift(decoder: Decoder, by: Instruction) -> Action:
    if by.fields != ("shf", "l", "wrap", "b32"):
        raise Unsupported(by.text)

    def function(low: Array, high: Array, count: Array) -> Array:
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        moved = both << (count & np.uint32(31)).astype(np.uint64)
        return (moved >> np.uint64(32)).astype(np.uint32)

    return decoder.compute(by, decoder.sources(by.operands[1:4], "b32"), function)


@instruction("bfe")
def _extract_bits(decoder: Decoder, by: Instruction) -> Action:
    kind = by.fields[-1]

    def function(x: Array, position: Array, length: Array) -> Array:
        begin, size = ((each & np.uint32(255)).astype(np.int64) for each in (position, length))
        field = (numbers(x, kind).astype(np.int64) >> begin) & ((np.int64(1) << size) - 1)
        if kind == "s32":
            negative = ((field >> np.maximum(size - 1, 0)) & 1 == 1) & (size > 0)
            field = np.where(negative, field - (np.int64(1) << size), field)
        return np.asarray((field & 0xFFFFFFFF).astype(np.uint32))

    if kind not in {"s32", "u32"}:
        raise Unsupported(by.text)
    return decoder.compute(by, decoder.sources(by.operands[1:], kind), function)


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

    if by.fields != ("prmt", "b32"):
        raise Unsupported(by.text)
    return decoder.compute(by, decoder.sources(by.operands[1:], "b32"), function)


@instruction("popc")
def _count_bits(decoder: Decoder, by: Instruction) -> Action:
    if by.fields != ("popc", "b32"):
        raise Unsupported(by.text)
    sources = decoder.sources(by.operands[1:], "b32")
    return decoder.compute(by, sources, lambda x: np.bitwise_count(x).astype(np.uint32))


@instruction("selp")
def _select(decoder: Decoder, by: Instruction) -> Action:
    sources = decoder.sources(by.operands[1:3], by.fields[-1])
    sources.append(decoder.source(by.operands[3], "pred"))
    return decoder.compute(by, sources, _choose)


def _choose(x: Array, y: Array, condition: Array) -> Array:
    return np.where(condition, x, y)


COMPARISONS: dict[str, Function] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
}  # fmt: skip


@instruction("setp")
def _compare(decoder: Decoder, by: Instruction) -> Action:
    _, name, kind = by.fields
    compare = COMPARISONS[name]
    if kind[0] == "f" and name == "ne":  # not that of numpy for nan
        raise Unsupported(by.text)
    return decoder.compute(
        by,
        decoder.sources(by.operands[1:], kind),
        lambda x, y: compare(numbers(x, kind), numbers(y, kind)),
    )


@instruction("mov")
def _move(decoder: Decoder, by: Instruction) -> Action:
    kind = by.fields[-1]
    target, source = by.operands
    if target.startswith("{"):
        return _unpack(decoder, elements(target), decoder.source(source, kind))
    if source.startswith("{"):
        return _pack(decoder, by, elements(source))
    return decoder.compute(by, [decoder.source(source, kind)], lambda x: x)


def _unpack(decoder: Decoder, names: Sequence[str], source: int) -> Action:
    targets = [(i, decoder.slots[name]) for i, name in enumerate(names) if name != "_"]

    def act(programs: Programs, mask: Mask) -> None:
        value = np.ascontiguousarray(programs.registers[source])
        parts = value[..., None].view(f"u{value.itemsize // len(names)}")
        for i, slot in targets:
            programs.set(slot, np.ascontiguousarray(parts[..., i]), mask)

    return act


def _pack(decoder: Decoder, by: Instruction, names: Sequence[str]) -> Action:
    whole = np.dtype(BITS[by.fields[-1]])

    def function(*values: Array) -> Array:
        same = np.broadcast_arrays(*values)
        return np.asarray(np.ascontiguousarray(np.stack(same, -1)).view(whole)[..., 0])

    sources = decoder.sources(names, f"b{8 * whole.itemsize // len(names)}")
    return decoder.compute(by, sources, function)


@instruction("cvt")
def _convert(decoder: Decoder, by: Instruction) -> Action:
    to, source = by.fields[-2:]
    if to in {"bf16x2", "f16x2"}:
        kind = to.removesuffix("x2")

        def pack(high: Array, low: Array) -> Array:
            halves = (rounded(x.view(np.float32), kind).astype(np.uint32) for x in (high, low))
            return (next(halves) << np.uint32(16)) | next(halves)

        return decoder.compute(by, decoder.sources(by.operands[1:], "f32"), pack)
    if BITS[decoder.kernel.registers[by.operands[0]]] is not BITS[to]:
        raise Unsupported(by.text)

    def convert(x: Array) -> Array:
        return rounded(numbers(x.astype(BITS[source], copy=False), source), to)

    return decoder.compute(by, decoder.sources(by.operands[1:], source), convert)
