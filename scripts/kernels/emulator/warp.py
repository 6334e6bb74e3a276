"""Instructions that a warp executes as a whole: exchange between its threads, and matrix rows."""

import re
from collections.abc import Callable

import numpy as np

from .access import Access
from .arithmetic import TYPES
from .decoder import Decoder, instruction
from .parser import Instruction, Unsupported
from .programs import Action, Mask, Programs

LANE = np.arange(32)
ROW, PAIR = LANE // 4, 2 * (LANE % 4)
"""Which elements of an 8 x 8 matrix a thread holds: of its row, those at PAIR and PAIR + 1."""


@instruction("shfl")
def _shuffle(decoder: Decoder, by: Instruction) -> Action:
    mode, slot = by.fields[2], decoder.target(by.operands[0])
    if mode not in {"bfly", "idx", "up"}:
        raise Unsupported(by.text)
    value, lane, control = decoder.sources(by.operands[1:4], "b32")
    where = decoder.mask(by)

    def act(programs: Programs, mask: Mask) -> None:
        mask = where(programs, mask)
        programs.require_whole_warps(by, mask)
        registers = programs.registers
        by_lane = programs.warps(registers[lane]).astype(np.int64)
        bounds = programs.warps(registers[control]).astype(np.int64)
        segment, clamp = (bounds >> 8) & 31, bounds & 31
        first = LANE & segment
        last = first | (clamp & ~segment & 31)
        if mode == "bfly":
            source = LANE ^ by_lane
        elif mode == "idx":
            source = first | (by_lane & ~segment & 31)
        else:
            source = LANE - by_lane
        valid = source >= last if mode == "up" else source <= last
        source = np.where(valid, source, LANE)
        found = np.take_along_axis(programs.warps(registers[value]), source, 1)
        programs.set(slot, found.reshape(programs.shape), mask)

    return act


@instruction("redux")
def _reduce(decoder: Decoder, by: Instruction) -> Action:
    number = TYPES[by.fields[-1]]
    reduce = {"min": np.minimum, "max": np.maximum, "add": np.add}[by.fields[2]]
    slot, source = decoder.target(by.operands[0]), decoder.source(by.operands[1], "b32")
    where = decoder.mask(by)

    def act(programs: Programs, mask: Mask) -> None:
        mask = where(programs, mask)
        programs.require_whole_warps(by, mask)
        value = programs.warps(programs.registers[source]).view(number)
        found = reduce.reduce(value, axis=1, dtype=number).repeat(32)
        programs.set(slot, found.view(np.uint32).reshape(programs.shape), mask)

    return act


@instruction("bar", "barrier")
def _warp_barrier(decoder: Decoder, by: Instruction) -> Action:
    if by.fields[1] != "warp":
        raise Unsupported(by.text)
    return lambda programs, mask: programs.require_whole_warps(by, mask)


def _matrices(by: Instruction, num_registers: int) -> int:
    """Number of 8 x 8 matrices of 16-bit elements."""
    found = re.search(r"\.m8n8\.x([124])\.", ".".join(by.fields))
    if found is None or int(found[1]) != num_registers:
        raise Unsupported(by.text)
    return num_registers


def _row_access(
    decoder: Decoder, by: Instruction, operand: str, count: int
) -> Callable[[Programs, Mask], Access | None]:
    """The access of the threads whose addresses are used: of the rows of `count` matrices."""
    address = decoder.address(operand, "b32")

    def access(programs: Programs, mask: Mask) -> Access | None:
        programs.require_whole_warps(by, mask)
        used = (programs.lanes.thread % 32 < 8 * count).reshape(programs.shape)
        used = used if mask is None else used & mask
        return programs.access(by, address(programs), 16, used)

    return access


@instruction("ldmatrix")
def _load_matrices(decoder: Decoder, by: Instruction) -> Action:
    slots = decoder.vector(by.operands[0], "b32")
    count, transposed = _matrices(by, len(slots)), by.has("trans")
    access_of, where = _row_access(decoder, by, by.operands[1], count), decoder.mask(by)

    def act(programs: Programs, mask: Mask) -> None:
        mask = where(programs, mask)
        access = access_of(programs, mask)
        if access is None:
            return
        rows = np.zeros((programs.lanes.size, 8), np.uint16)
        rows[access.chosen] = programs.shared.load(access).view(np.uint16)
        matrices = rows.reshape(-1, 4, 8, 8)  # [warps, matrix, row, column]
        for i, slot in enumerate(slots):
            matrix = matrices[:, i].swapaxes(1, 2) if transposed else matrices[:, i]
            low = matrix[:, ROW, PAIR].astype(np.uint32)
            high = matrix[:, ROW, PAIR + 1].astype(np.uint32)
            programs.set(slot, (low | (high << np.uint32(16))).reshape(programs.shape), mask)

    return act


@instruction("stmatrix")
def _store_matrices(decoder: Decoder, by: Instruction) -> Action:
    sources = decoder.vector(by.operands[1], "b32")
    count, transposed = _matrices(by, len(sources)), by.has("trans")
    access_of, where = _row_access(decoder, by, by.operands[0], count), decoder.mask(by)

    def act(programs: Programs, mask: Mask) -> None:
        access = access_of(programs, where(programs, mask))
        if access is None:
            return
        matrices = np.zeros((programs.lanes.size // 32, 4, 8, 8), np.uint16)
        for i, slot in enumerate(sources):
            value = programs.warps(programs.registers[slot])
            matrix = matrices[:, i].swapaxes(1, 2) if transposed else matrices[:, i]
            matrix[:, ROW, PAIR] = value & np.uint32(0xFFFF)
            matrix[:, ROW, PAIR + 1] = value >> np.uint32(16)
        raw = matrices.reshape(-1, 8)[access.chosen].view(np.uint8)
        programs.shared.store(access, raw)

    return act
