"""Faults put into compiled kernels on purpose: an instruction is removed, weakened or changed.

Operands are changed of instructions that compute addresses, of comparisons that end a loop, of
selections, shuffles and descriptors of operands of `wgmma`. A displacement in an address, or a
constant that is added, changes by what is one element where the address is used.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .decoder import ADDRESS, Decoder, instruction
from .execution import decoded
from .programs import Action, Mask, Programs
from .ptx import Instruction, Kernel
from .transfers import WIDTH

KINDS = (
    "barrier", "wait for copies", "wait for products", "proxy fence", "memory order", "predicate",
    "loop bound", "constant", "register", "narrowed sum", "narrowed product", "selection",
    "shuffle", "descriptor",
)  # fmt: skip
NUMBER = re.compile(r"-?\d+|0x[0-9A-Fa-f]+")
COMPUTES = {
    "add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor", "mov", "cvt", "min", "max",
    "selp", "bfe",
}  # fmt: skip
"""Instructions through which an address is followed to what it is computed from."""
ADDS = {"add", "sub", "or", "xor", "mad"}


class Mutant(NamedTuple):
    """A kernel with another instruction in the place of one of its own."""

    kind: str
    text: str  # PTX without the fault
    original: Instruction
    changed: Instruction

    def __str__(self) -> str:
        name, changed = decoded(self.text).kernel.name, self.changed
        became = f"{'.'.join(changed.fields)} {', '.join(changed.operands)}"
        return f"{self.kind} in {name} {self.original}, now {became}"


def mutants(text: str, most: int | None = None) -> list[Mutant]:
    """All faults in a kernel, or at most so many of each kind."""
    of_kind: dict[str, list[Mutant]] = {kind: [] for kind in KINDS}
    program = _Program(decoded(text).kernel)
    for by in program.kernel.instructions:
        for kind, changed in (*_changes(by), *_computations(program, by)):
            of_kind[kind].append(Mutant(kind, text, by, changed))
    for each in of_kind.values():
        random.Random(0).shuffle(each)
    return [mutant for each in of_kind.values() for mutant in each[:most]]


class _Program:
    """What is known of a kernel's registers: which are parts of addresses, and which end loops."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.units: dict[str, int] = {}  # what is one element in a part of an address
        self._writers: dict[str, list[Instruction]] = {}
        for each in kernel.instructions:
            for name in each.writes:
                self._writers.setdefault(name, []).append(each)
        for each in kernel.instructions:
            for found in map(ADDRESS.fullmatch, each.operands):
                if found and found[1].startswith("%"):
                    self._follow(found[1], WIDTH.get(each.fields[-1], 1))
        self.ends = set(self._loop_ends())

    def _follow(self, name: str, unit: int) -> None:
        if self.units.get(name, 1 << 30) <= unit:
            return
        self.units[name] = unit
        for by in self._writers.get(name, []):
            if by.mnemonic not in COMPUTES or by.guard is not None or by.fields[-1][0] == "f":
                continue
            for i, operand in enumerate(by.operands[1:], 1):
                if self.kernel.registers.get(operand, "pred") != "pred":
                    self._follow(operand, _unit_before(by, i, unit))

    def _loop_ends(self) -> Iterator[int]:
        """Comparisons of the branches that repeat or leave a loop."""
        branches = [by for by in self.kernel.instructions if by.mnemonic == "bra"]
        target = {by.index: self.kernel.labels[by.operands[0]] for by in branches}
        loops = [(target[i], i) for i in target if target[i] <= i]
        for by in branches:
            for first, last in loops:
                repeats = by.index == last or target[by.index] == first
                leaves = not first <= target[by.index] <= last
                if by.guard and first <= by.index <= last and (repeats or leaves):
                    for each in self._writers.get(by.guard, []):
                        if each.mnemonic == "setp" and first <= each.index <= last:
                            yield each.index

    def step(self, name: str, depth: int = 4) -> int:
        """By how much a register advances, or one."""
        for by in self._writers.get(name, []) if depth else []:
            if by.mnemonic == "add" and NUMBER.fullmatch(by.operands[-1]):
                return abs(int(by.operands[-1], 0))
            if by.mnemonic == "mov" and (found := self.step(by.operands[1], depth - 1)) > 1:
                return found
        return 1

    def alternatives(self, by: Instruction) -> list[str]:
        """Parts of addresses that are computed before an instruction, in its block."""
        before = self.kernel.instructions[self.kernel.block_of(by.index).start : by.index]
        names = {name for each in before if not each.guard for name in each.writes}
        return sorted(n for n in names & self.units.keys() if self.kernel.registers[n] == "b32")


def _unit_before(by: Instruction, i: int, unit: int) -> int:
    """What is one element in an operand, if it is `unit` in the result."""
    if by.mnemonic in {"mul", "mad"} and i < 3:
        other = by.operands[3 - i]
        return max(1, unit // max(1, int(other, 0))) if NUMBER.fullmatch(other) else 1
    if by.mnemonic == "shl" and NUMBER.fullmatch(by.operands[2]):
        return max(1, unit >> int(by.operands[2], 0))
    return unit


def _with(by: Instruction, i: int, operand: str) -> Instruction:
    return replace(by, operands=(*by.operands[:i], operand, *by.operands[i + 1 :]))


def _shifted(by: Instruction, i: int, delta: int) -> Instruction:
    """With a number or register that is larger by `delta`."""
    if NUMBER.fullmatch(by.operands[i]):
        return _with(by, i, str(int(by.operands[i], 0) + delta))
    return replace(by, fields=("shifted", str(i), str(delta), *by.fields))


def _changes(by: Instruction) -> Iterator[tuple[str, Instruction]]:
    """Kinds of faults, and what takes the place of an instruction, whatever it computes."""
    removed = replace(by, fields=("removed",), operands=(), guard=None)
    removable = {
        ("bar", "sync"): "barrier",
        ("cp", "async", "wait_group"): "wait for copies",
        ("wgmma", "wait_group"): "wait for products",
        ("fence", "proxy"): "proxy fence",
    }
    for fields, kind in removable.items():
        if by.fields[: len(fields)] == fields:
            yield kind, removed
    if by.has("acq_rel"):
        fields = tuple("relaxed" if each == "acq_rel" else each for each in by.fields)
        yield "memory order", replace(by, fields=fields)
    if by.guard is not None and by.has("global"):
        yield "predicate", replace(by, guard=None)
    if by.mnemonic == "selp":
        yield "selection", replace(by, operands=tuple(by.operands[i] for i in (0, 2, 1, 3)))
    if by.mnemonic == "shfl" and NUMBER.fullmatch(by.operands[2]):
        lane = int(by.operands[2], 0)
        yield "shuffle", _with(by, 2, str(8 if lane == 16 else 2 * lane or 1))
    if by.fields[:2] == ("wgmma", "mma_async"):
        for i in (1, 2):
            if by.operands[i].startswith("%"):  # the next 16 bytes
                yield "descriptor", _shifted(by, i, 1)
    for i, operand in enumerate(by.operands):
        if (found := ADDRESS.fullmatch(operand)) and found[1].startswith("%"):
            offset = int(found[2] or 0) + WIDTH.get(by.fields[-1], 1)
            yield "constant", _with(by, i, f"[{found[1]}+{offset}]")


def _computations(program: _Program, by: Instruction) -> Iterator[tuple[str, Instruction]]:
    """Other operands of what ends a loop or computes an address.

    A loop has a step less or more; a constant is one element, a factor or a power of two more; a
    register becomes another one; a sum or product has 32 bits.
    """
    if by.index in program.ends and by.fields[-1][0] != "f":
        step = max(map(program.step, by.operands[1:3]))
        for delta in (step, -step):
            yield "loop bound", _shifted(by, 2, delta)
    name = by.mnemonic
    if not by.writes or by.operands[0] not in program.units:
        return
    types, unit = program.kernel.registers, program.units[by.operands[0]]
    for i, operand in enumerate(by.operands[1:], 1):
        if by.has("hi"):  # of a division by a constant, which one more or less may not change
            continue
        if NUMBER.fullmatch(operand) and not by.guard and name in ADDS | {"mul", "shl"}:
            added = name in ADDS and (name != "mad" or i == 3)
            yield "constant", _shifted(by, i, unit if added else 1)
        if name in COMPUTES and operand in program.units and types.get(operand) == "b32":
            others = [each for each in program.alternatives(by) if each != operand]
            if others:
                yield "register", _with(by, i, random.Random(by.index).choice(others))
    if not by.guard and (by.has("wide") or by.fields[-1] in {"s64", "u64", "b64"}):
        if name in {"add", "sub", "mad"}:
            yield "narrowed sum", replace(by, fields=("narrowed", "sum", *by.fields))
        if name in {"mul", "mad", "shl"}:
            yield "narrowed product", replace(by, fields=("narrowed", "product", *by.fields))


@instruction("removed")
def _nothing(decoder: Decoder, by: Instruction) -> Action:
    return lambda programs, mask: None


@instruction("shifted")
def _shift_operand(decoder: Decoder, by: Instruction) -> Action:
    """The instruction behind `shifted.operand.delta.`, with a register that is larger meanwhile."""
    _, operand, delta, *fields = by.fields
    slot = decoder.slots[by.operands[int(operand)]]
    ((_, act),) = decoder.actions([replace(by, fields=tuple(fields))])

    def shifted(programs: Programs, mask: Mask) -> None:
        before = programs.registers[slot]
        bits = 8 * before.dtype.itemsize
        programs.registers[slot] = before + before.dtype.type(int(delta) & ((1 << bits) - 1))
        act(programs, mask)
        programs.registers[slot] = before

    return shifted


@instruction("narrowed")
def _narrow(decoder: Decoder, by: Instruction) -> Action:
    """The instruction behind `narrowed.product.` or `narrowed.sum.`, whose result has 32 bits."""
    (_, what, *fields), slot = by.fields, decoder.slots[by.operands[0]]
    ((_, act),) = decoder.actions([replace(by, fields=tuple(fields))])
    added = decoder.sources(by.operands[3:], "b64") if what == "product" else []

    def narrowed(programs: Programs, mask: Mask) -> None:
        addend = programs.registers[added[0]] if added else np.uint64(0)
        act(programs, mask)
        whole = programs.registers[slot] - addend
        signed = whole.astype(np.uint32).view(np.int32).astype(np.int64).view(np.uint64)
        programs.set(slot, np.asarray(signed + addend), mask)

    return narrowed
