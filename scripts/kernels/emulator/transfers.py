"""Loads, stores, atomics, asynchronous copies, and exchange between the threads of a warp."""

import re
from collections.abc import Callable

import numpy as np

from .access import UNSIGNED, Access
from .arithmetic import TYPES
from .decoder import BITS, Decoder, elements, instruction
from .programs import Action, Mask, Programs
from .ptx import Instruction, Unsupported

WIDTH = {"b8": 1, "b16": 2, "b32": 4, "s32": 4, "u32": 4, "f32": 4, "b64": 8}
"""Bytes by type."""
LANE = np.arange(32)
ROW, PAIR = LANE // 4, 2 * (LANE % 4)
"""Which elements of an 8 x 8 matrix a thread holds: of its row, those at PAIR and PAIR + 1."""


def _space(by: Instruction) -> str:
    """Global, shared or param."""
    names = {field.split("::")[0] for field in by.fields[1:]}
    found = names & {"global", "shared", "param"}
    if len(found) != 1:
        raise Unsupported(by.text)
    return found.pop()


def _vector(by: Instruction) -> int:
    return next((int(each[1:]) for each in by.fields if re.fullmatch(r"v\d", each)), 1)


@instruction("ld")
def _load(decoder: Decoder, by: Instruction) -> Action:
    space, names, size = _space(by), elements(by.operands[0]), WIDTH[by.fields[-1]]
    targets = [(decoder.slots[name], BITS[decoder.kernel.registers[name]]) for name in names]
    if len(names) != _vector(by):
        raise Unsupported(by.text)
    if space == "param":
        source, (_, to) = decoder.slots[by.operands[1].strip("[] ")], targets[0]
        return decoder.compute(by, [source], lambda value: value.astype(to))
    address, width = decoder.address(by.operands[1]), size * len(names)
    if space == "shared":
        decoder.element_bytes = min(decoder.element_bytes, width)

    def act(programs: Programs, mask: Mask) -> None:
        access = programs.access(by, address(programs), width, mask)
        memory = programs.memory if space == "global" else programs.shared
        items = memory.load(access).view(UNSIGNED[size])
        for i, (slot, bits) in enumerate(targets):
            programs.set_lanes(slot, items[:, i].astype(bits), access.chosen)

    return act


@instruction("st")
def _store(decoder: Decoder, by: Instruction) -> Action:
    space, kind = _space(by), by.fields[-1]
    size, address = WIDTH[kind], decoder.address(by.operands[0])
    sources = decoder.vector(by.operands[1], kind if kind in BITS else "b32")
    width = size * len(sources)
    if len(sources) != _vector(by):
        raise Unsupported(by.text)
    if space == "shared":
        decoder.element_bytes = min(decoder.element_bytes, width)

    def act(programs: Programs, mask: Mask) -> None:
        access = programs.access(by, address(programs), width, mask)
        raw = np.empty((len(access.address), len(sources)), UNSIGNED[size])
        for i, slot in enumerate(sources):
            raw[:, i] = programs.full(programs.registers[slot])[access.chosen]
        memory = programs.memory if space == "global" else programs.shared
        memory.store(access, raw.view(np.uint8))

    return act


@instruction("atom", "red")
def _atomic(decoder: Decoder, by: Instruction) -> Action:
    order, (*to, place, value) = by.fields[3], by.operands
    if by.fields[1:3] != ("global", "gpu") or by.fields[4:] != ("add", "u32"):
        raise Unsupported(by.text)
    if order not in ({"relaxed", "acq_rel"} if to else {"relaxed"}):
        raise Unsupported(by.text)
    slots, address = [decoder.slots[each] for each in to], decoder.address(place)
    source = decoder.source(value, "u32")

    def act(programs: Programs, mask: Mask) -> None:
        access = programs.access(by, address(programs), 4, mask)
        added = programs.full(programs.registers[source])[access.chosen]
        old = programs.memory.atomic(access, added, ordered=order == "acq_rel")
        for slot in slots:
            programs.set_lanes(slot, old, access.chosen)

    return act


@instruction("cp")
def _copy(decoder: Decoder, by: Instruction) -> Action:
    if by.fields == ("cp", "async", "commit_group"):
        return lambda programs, mask: programs.shared.commit_copies(programs.chosen(mask))
    if by.fields == ("cp", "async", "wait_group"):
        pending = int(by.operands[0], 0)
        return lambda programs, mask: programs.shared.wait_for_copies(
            programs.chosen(mask), pending, by
        )
    spaces = [field.split("::")[0] for field in by.fields[3:5]]
    if by.fields[2] not in {"ca", "cg"} or spaces != ["shared", "global"]:
        raise Unsupported(by.text)
    target, source = decoder.address(by.operands[0]), decoder.address(by.operands[1])
    size = int(by.operands[2], 0)
    decoder.element_bytes = min(decoder.element_bytes, size)
    limit = decoder.source(by.operands[3] if len(by.operands) > 3 else str(size), "b32")

    def act(programs: Programs, mask: Mask) -> None:
        access = programs.access(by, target(programs), size, mask)
        length = programs.full(programs.registers[limit])
        if not np.isin(length[access.chosen], (0, size)).all():
            raise Unsupported(f"partial copy {by.text}")
        raw = np.zeros((programs.lanes.size, size), np.uint8)
        reads = (length == size) & programs.full(mask)
        if reads.any():
            loading = programs.access(by, source(programs), size, reads.reshape(programs.shape))
            raw[loading.chosen] = programs.memory.load(loading)
        programs.shared.copy(access, raw[access.chosen])

    return act


@instruction("fence")
def _fence(decoder: Decoder, by: Instruction) -> Action:
    if by.fields[1] != "proxy":
        raise Unsupported(by.text)
    return lambda programs, mask: programs.shared.fence_proxies(programs.rows(by, mask), by)


@instruction("bar")
def _warp_barrier(decoder: Decoder, by: Instruction) -> Action:
    if by.fields != ("bar", "warp", "sync"):
        raise Unsupported(by.text)
    return lambda programs, mask: programs.require_whole_warps(by, mask)


@instruction("shfl")
def _shuffle(decoder: Decoder, by: Instruction) -> Action:
    mode, slot = by.fields[2], decoder.slots[by.operands[0]]
    if mode not in {"bfly", "idx", "up"}:
        raise Unsupported(by.text)
    value, lane, control = decoder.sources(by.operands[1:4], "b32")

    def act(programs: Programs, mask: Mask) -> None:
        programs.require_whole_warps(by, mask)
        by_lane, bounds = (programs.warps(each).astype(np.int64) for each in (lane, control))
        segment, clamp = (bounds >> 8) & 31, bounds & 31
        first = LANE & segment
        last = first | (clamp & ~segment & 31)
        if mode == "bfly":
            source = LANE ^ by_lane
        elif mode == "idx":
            source = first | (by_lane & ~segment & 31)
        else:
            source = LANE - by_lane
        source = np.where(source >= last if mode == "up" else source <= last, source, LANE)
        found = np.take_along_axis(programs.warps(value), source, 1)
        programs.set(slot, found.reshape(programs.shape), mask)

    return act


@instruction("redux")
def _reduce(decoder: Decoder, by: Instruction) -> Action:
    number = TYPES[by.fields[-1]]
    reduce = {"min": np.minimum, "max": np.maximum, "add": np.add}[by.fields[2]]
    slot, source = decoder.slots[by.operands[0]], decoder.source(by.operands[1], "b32")

    def act(programs: Programs, mask: Mask) -> None:
        programs.require_whole_warps(by, mask)
        value = programs.warps(source).view(number)
        found = reduce.reduce(value, axis=1, dtype=number).repeat(32)
        programs.set(slot, found.view(np.uint32).reshape(programs.shape), mask)

    return act


def _row_access(
    decoder: Decoder, by: Instruction, operand: str, count: int
) -> Callable[[Programs, Mask], Access]:
    """The access of the threads whose addresses are used: of the rows of `count` 8 x 8 matrices."""
    address = decoder.address(operand)
    if f".m8n8.x{count}." not in ".".join(by.fields):
        raise Unsupported(by.text)

    def access(programs: Programs, mask: Mask) -> Access:
        programs.require_whole_warps(by, mask)
        used = (programs.lanes.thread % 32 < 8 * count).reshape(programs.shape)
        return programs.access(by, address(programs), 16, used & mask)

    return access


@instruction("ldmatrix")
def _load_matrices(decoder: Decoder, by: Instruction) -> Action:
    slots, transposed = decoder.vector(by.operands[0], "b32"), by.has("trans")
    access_of = _row_access(decoder, by, by.operands[1], len(slots))

    def act(programs: Programs, mask: Mask) -> None:
        access = access_of(programs, mask)
        rows = np.zeros((programs.lanes.size, 8), np.uint16)
        rows[access.chosen] = programs.shared.load(access).view(np.uint16)
        matrices = rows.reshape(-1, 4, 8, 8)  # [warps, matrix, row, column]
        matrices = matrices.swapaxes(2, 3) if transposed else matrices
        low, high = (matrices[:, :, ROW, PAIR + i].astype(np.uint32) for i in (0, 1))
        for i, slot in enumerate(slots):
            pair = low[:, i] | (high[:, i] << np.uint32(16))
            programs.set(slot, pair.reshape(programs.shape), mask)

    return act


@instruction("stmatrix")
def _store_matrices(decoder: Decoder, by: Instruction) -> Action:
    sources, transposed = decoder.vector(by.operands[1], "b32"), by.has("trans")
    access_of = _row_access(decoder, by, by.operands[0], len(sources))

    def act(programs: Programs, mask: Mask) -> None:
        access = access_of(programs, mask)
        matrices = np.zeros((programs.lanes.size // 32, 4, 8, 8), np.uint16)
        for i, slot in enumerate(sources):
            value = programs.warps(slot)
            matrices[:, i, ROW, PAIR] = value & np.uint32(0xFFFF)
            matrices[:, i, ROW, PAIR + 1] = value >> np.uint32(16)
        matrices = matrices.swapaxes(2, 3) if transposed else matrices
        raw = np.ascontiguousarray(matrices).reshape(-1, 8)[access.chosen].view(np.uint8)
        programs.shared.store(access, raw)

    return act
