"""Moves of registers, whole or in parts, and conversions between types."""

import numpy as np

from .access import Array
from .arithmetic import TYPES, bf16_to_f32, f32_to_bf16
from .decoder import Decoder, Function, instruction
from .parser import Instruction
from .programs import BITS, Action, Mask, Programs


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
    slots = decoder.vector(by.operands[0], "b32")
    source = decoder.source(by.operands[1], by.fields[-1])
    part = np.dtype(f"u{np.dtype(BITS[by.fields[-1]]).itemsize // len(slots)}")
    where = decoder.mask(by)

    def act(programs: Programs, mask: Mask) -> None:
        value = np.ascontiguousarray(programs.registers[source])
        parts = value[..., None].view(part)
        for i, slot in enumerate(slots):
            if slot is not None:
                programs.set(slot, np.ascontiguousarray(parts[..., i]), where(programs, mask))

    return act


def _pack(decoder: Decoder, by: Instruction) -> Action:
    whole = BITS[by.fields[-1]]
    names = by.operands[1].strip("{}").split(",")
    size = np.dtype(whole).itemsize // len(names)
    sources = decoder.sources(tuple(name.strip() for name in names), f"b{8 * size}")

    def function(*values: Array) -> Array:
        same = np.broadcast_arrays(*values)
        return np.ascontiguousarray(np.stack(same, -1)).view(whole)[..., 0]

    return decoder.compute(by, by.operands[0], sources, function)


@instruction("cvt")
def _convert(decoder: Decoder, by: Instruction) -> Action:
    to, source = by.fields[-2], by.fields[-1]
    if to in {"bf16x2", "f16x2"}:
        return decoder.compute(
            by, by.operands[0], decoder.sources(by.operands[1:3], "f32"), _pack_halves(to)
        )
    kept = source if source in BITS else "b16"
    sources = decoder.sources(by.operands[1:2], kept)
    return decoder.compute(by, by.operands[0], sources, _conversion(decoder, by))


def _conversion(decoder: Decoder, by: Instruction) -> Function:
    to, source = by.fields[-2], by.fields[-1]
    if source == "bf16" and to == "f32":
        return lambda x: bf16_to_f32(x).view(np.uint32)
    if to == "bf16" and source == "f32":
        return lambda x: f32_to_bf16(x.view(np.float32))
    if to == "tf32":
        return lambda x: (x + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    number, result, bits = TYPES[source], TYPES[to], decoder.bits_of(by.operands[0])
    rounded: Function = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.get(
        next((each for each in by.fields if each in {"rzi", "rmi", "rpi"}), ""), np.rint
    )

    def function(x: Array) -> Array:
        value = x.astype(f"u{np.dtype(number).itemsize}", copy=False).view(number)
        if value.dtype.kind == "f" and np.dtype(result).kind in "iu":
            value = rounded(value)
        value = value.astype(result)
        if value.dtype.kind == "f":
            return np.asarray(value.view(bits))
        return np.asarray(value.astype(f"{value.dtype.kind}{np.dtype(bits).itemsize}").view(bits))

    return function


def _pack_halves(kind: str) -> Function:
    def bits(x: Array) -> Array:
        value = x.view(np.float32)
        half = f32_to_bf16(value) if kind == "bf16x2" else value.astype(np.float16).view(np.uint16)
        return half.astype(np.uint32)

    return lambda high, low: (bits(high) << np.uint32(16)) | bits(low)
