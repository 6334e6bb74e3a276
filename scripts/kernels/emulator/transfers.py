"""Loads, stores, atomics and asynchronous copies."""

import re
from typing import Any

import numpy as np

from .access import UNSIGNED, Array
from .arithmetic import TYPES
from .decoder import Decoder, elements, instruction
from .parser import Instruction, Unsupported
from .programs import BITS, Action, Mask, Programs
from .shared_memory import PIECE

WIDTH = {kind: np.dtype(number).itemsize for kind, number in TYPES.items()} | {"b8": 1}
"""Bytes by type."""


def _space(by: Instruction) -> str:
    """Global or shared; what is volatile, relaxed or from the second-level cache is the same."""
    names = {field.split("::")[0] for field in by.fields[1:]}
    found = names & {"global", "shared", "param"}
    if len(found) != 1:
        raise Unsupported(by.text)
    return found.pop()


def _vector(by: Instruction) -> int:
    return next((int(each[1:]) for each in by.fields if re.fullmatch(r"v\d", each)), 1)


def _extended(part: Array, kind: str, bits: Any) -> Array:
    """Loaded bits in a register that may be wider; signed types keep their sign."""
    if part.dtype == bits:
        return part
    if kind[0] == "s":
        part = part.view(f"i{part.dtype.itemsize}").astype(f"i{np.dtype(bits).itemsize}")
        return np.asarray(part.view(bits))
    return part.astype(bits)


def shared_width(by: Instruction) -> int:
    """Bytes of shared memory that a thread accesses at a time; many if it accesses none."""
    if by.mnemonic == "cp" and len(by.operands) > 2:
        return int(by.operands[2], 0)
    if by.mnemonic in {"ld", "st"} and _space(by) == "shared":
        return int(WIDTH[by.fields[-1]]) * _vector(by)
    return PIECE


@instruction("ld")
def _load(decoder: Decoder, by: Instruction) -> Action:
    space, kind = _space(by), by.fields[-1]
    if space == "param":
        return _load_parameter(decoder, by)
    names, where = elements(by.operands[0]), decoder.mask(by)
    if len(names) != _vector(by):
        raise Unsupported(by.text)
    targets = [
        (i, decoder.target(name), decoder.bits_of(name))
        for i, name in enumerate(names)
        if name != "_"
    ]
    address = decoder.address(by.operands[1], "b64" if space == "global" else "b32")
    size = WIDTH[kind]

    def act(programs: Programs, mask: Mask) -> None:
        mask = where(programs, mask)
        access = programs.access(by, address(programs), size * len(names), mask)
        if access is None:
            return
        memory = programs.memory if space == "global" else programs.shared
        items = memory.load(access).view(UNSIGNED[size])
        for i, slot, bits in targets:
            value = _extended(np.ascontiguousarray(items[:, i]), kind, bits)
            _set_lanes(programs, slot, value, access.chosen, mask)

    return act


def _set_lanes(programs: Programs, slot: int, value: Array, chosen: Any, mask: Mask) -> None:
    """Write a register of the chosen lanes."""
    if mask is None:
        programs.registers[slot] = value.reshape(programs.shape)
        return
    old = programs.registers[slot]
    new = np.zeros(programs.shape, value.dtype) if old is None else programs.full(old).copy()
    new = new.reshape(-1)
    new[chosen] = value
    programs.registers[slot] = new.reshape(programs.shape)


def _load_parameter(decoder: Decoder, by: Instruction) -> Action:
    found = re.fullmatch(r"\[\s*(\w+)\s*\]", by.operands[1])
    if found is None:
        raise Unsupported(by.text)
    slot, name = decoder.target(by.operands[0]), found[1]
    bits = decoder.bits_of(by.operands[0])

    def act(programs: Programs, mask: Mask) -> None:
        value = programs.parameters[name]
        programs.set(slot, _extended(value, by.fields[-1], bits), mask)

    return act


@instruction("st")
def _store(decoder: Decoder, by: Instruction) -> Action:
    space, kind = _space(by), by.fields[-1]
    size, where = WIDTH[kind], decoder.mask(by)
    address = decoder.address(by.operands[0], "b64" if space == "global" else "b32")
    sources = decoder.vector(by.operands[1], kind if kind in BITS else "b32")
    if len(sources) != _vector(by):
        raise Unsupported(by.text)

    def act(programs: Programs, mask: Mask) -> None:
        access = programs.access(by, address(programs), size * len(sources), where(programs, mask))
        if access is None:
            return
        raw = np.empty((len(access.address), len(sources)), UNSIGNED[size])
        for i, slot in enumerate(sources):
            raw[:, i] = programs.full(programs.registers[slot])[access.chosen]
        memory = programs.memory if space == "global" else programs.shared
        memory.store(access, raw.view(np.uint8))

    return act


@instruction("atom", "red")
def _atomic(decoder: Decoder, by: Instruction) -> Action:
    name, kind = by.fields[-2], by.fields[-1]
    operands = by.operands if by.mnemonic == "atom" else ("_", *by.operands)
    if _space(by) != "global" or name != "add":
        raise Unsupported(by.text)
    orders = {"relaxed", "acquire", "release", "acq_rel"}
    order = next((field for field in by.fields if field in orders), "relaxed")
    slot = None if operands[0] == "_" else decoder.target(operands[0])
    address, where = decoder.address(operands[1], "b64"), decoder.mask(by)
    (source,) = decoder.sources(operands[2:], kind)
    number, size = TYPES[kind], WIDTH[kind]

    def act(programs: Programs, mask: Mask) -> None:
        mask = where(programs, mask)
        access = programs.access(by, address(programs), size, mask)
        if access is None:
            return
        added = programs.full(programs.registers[source])[access.chosen].view(number)

        def update(old: Any, i: int) -> Any:
            return (old.view(number) + added[i]).view(UNSIGNED[size])

        old = programs.memory.atomic(access, update, order)
        if slot is not None:
            _set_lanes(programs, slot, old, access.chosen, mask)

    return act


@instruction("cp")
def _copy(decoder: Decoder, by: Instruction) -> Action:
    if by.fields[:2] != ("cp", "async"):
        raise Unsupported(by.text)
    where = decoder.mask(by)
    if by.fields[2] == "commit_group":
        return lambda programs, mask: programs.shared.commit_copies(programs.chosen(mask))
    if by.fields[2] == "wait_group":
        pending = int(by.operands[0], 0)
        return lambda programs, mask: programs.shared.wait_for_copies(
            programs.chosen(mask), pending, by
        )
    spaces = [field.split("::")[0] for field in by.fields[3:5]]
    if by.fields[2] not in {"ca", "cg"} or spaces != ["shared", "global"]:
        raise Unsupported(by.text)
    target, source = decoder.address(by.operands[0], "b32"), decoder.address(by.operands[1], "b64")
    size = int(by.operands[2], 0)
    limit = decoder.source(by.operands[3] if len(by.operands) > 3 else str(size), "b32")

    def act(programs: Programs, mask: Mask) -> None:
        mask = where(programs, mask)
        access = programs.access(by, target(programs), size, mask)
        if access is None:
            return
        length = programs.full(programs.registers[limit])
        if not np.isin(length[access.chosen], (0, size)).all():
            raise Unsupported(f"partial copy {by.text}")
        raw = np.zeros((programs.lanes.size, size), np.uint8)
        reads = (length == size) & (True if mask is None else programs.full(mask))
        loading = programs.access(by, source(programs), size, reads.reshape(programs.shape))
        if loading is not None:
            raw[loading.chosen] = programs.memory.load(loading)
        programs.shared.copy(access, raw[access.chosen])

    return act


@instruction("fence")
def _fence(decoder: Decoder, by: Instruction) -> Action:
    if by.fields[1] != "proxy":
        raise Unsupported(by.text)
    return lambda programs, mask: programs.shared.fence_proxies(programs.rows(by, mask), by)
