"""Faults put into compiled kernels on purpose: an instruction is removed, weakened or changed.

Operands are changed of instructions that compute addresses, of comparisons that end a loop, of
selections, shuffles and descriptors of operands of `wgmma`. A displacement in an address, or a
constant that is added, changes by what is one element where the address is used.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .decoder import Decoder, instruction
from .execution import decoded
from .parser import Instruction, Kernel
from .programs import Action, Mask, Programs
from .transfers import WIDTH

ADDRESS = re.compile(r"\[\s*(%\w+)\s*(?:\+\s*(-?\d+)\s*)?\]")
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
    found = []
    program = _Program(decoded(text).kernel)
    for kind, changes in KINDS.items():
        of_kind = [
            Mutant(kind, text, by, changed)
            for by in program.kernel.instructions
            for changed in changes(program, by)
        ]
        random.Random(0).shuffle(of_kind)
        found += of_kind[:most]
    return found


class _Program:
    """What is known of a kernel's registers: which are parts of addresses, and which end loops."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.units: dict[str, int] = {}  # what is one element in a part of an address
        self.steps: dict[str, int] = {}  # of what a register is compared with to end a loop
        self._writers: dict[str, list[Instruction]] = {}
        for each in kernel.instructions:
            for name in each.writes:
                self._writers.setdefault(name, []).append(each)
        for each in kernel.instructions:
            for found in map(ADDRESS.fullmatch, each.operands):
                if found:
                    self._follow(found[1], WIDTH.get(each.fields[-1], 1))
        self.ends = set(self._loop_ends())
        self.block_of = {i: block for block in kernel.blocks() for i in block}

    def _follow(self, name: str, unit: int) -> None:
        if self.units.get(name, 1 << 30) <= unit:
            return
        self.units[name] = unit
        for by in self._writers.get(name, []):
            if by.mnemonic not in COMPUTES or by.guard is not None or by.fields[-1][0] == "f":
                continue
            for i, operand in enumerate(by.operands[1:], 1):
                if operand in self.kernel.registers and self.kernel.registers[operand] != "pred":
                    self._follow(operand, self.unit_before(by, i, unit))

    def unit_before(self, by: Instruction, i: int, unit: int) -> int:
        """What is one element in an operand, if it is `unit` in the result."""
        if by.mnemonic in {"mul", "mad"} and i < 3:
            other = by.operands[3 - i]
            return max(1, unit // max(1, int(other, 0))) if NUMBER.fullmatch(other) else 1
        if by.mnemonic == "shl" and NUMBER.fullmatch(by.operands[2]):
            return max(1, unit >> int(by.operands[2], 0))
        return unit

    def _loop_ends(self) -> Iterator[int]:
        """Comparisons of the branches that repeat or leave a loop."""
        kernel = self.kernel
        branches = [by for by in kernel.instructions if by.mnemonic == "bra"]
        target = {by.index: kernel.labels[by.operands[0]] for by in branches}
        loops = [(target[i], i) for i in target if target[i] <= i]
        for by in branches:
            for first, last in loops:
                repeats = by.index == last or target[by.index] == first
                leaves = not first <= target[by.index] <= last
                if by.guard and first <= by.index <= last and (repeats or leaves):
                    yield from (
                        each.index
                        for each in self._writers.get(by.guard, [])
                        if each.mnemonic == "setp" and first <= each.index <= last
                    )

    def step(self, name: str, depth: int = 4) -> int:
        """By how much a register advances, or one."""
        for by in self._writers.get(name, []) if depth else []:
            if by.mnemonic == "add" and NUMBER.fullmatch(by.operands[-1]):
                return abs(int(by.operands[-1], 0))
            if by.mnemonic == "mov" and (found := self.step(by.operands[1], depth - 1)) > 1:
                return found
        return 1


def _removed(by: Instruction) -> Instruction:
    return replace(by, fields=("removed",), operands=(), guard=None)


def _with(by: Instruction, i: int, operand: str) -> Instruction:
    return replace(by, operands=(*by.operands[:i], operand, *by.operands[i + 1 :]))


def _shifted(by: Instruction, i: int, delta: int) -> Instruction:
    """With a number or register that is larger by `delta`."""
    if NUMBER.fullmatch(by.operands[i]):
        return _with(by, i, str(int(by.operands[i], 0) + delta))
    return replace(by, fields=("shifted", str(i), str(delta), *by.fields))


def _loop_bounds(program: _Program, by: Instruction) -> Iterator[Instruction]:
    """One step less, and one more."""
    if by.index in program.ends and by.fields[-1][0] != "f":
        one, other = by.operands[1:3]
        step = max(program.step(one), program.step(other))
        yield from (_shifted(by, 2, delta) for delta in (step, -step))


def _constants(program: _Program, by: Instruction) -> Iterator[Instruction]:
    """One element more in an address, or the next factor or power of two."""
    for i, operand in enumerate(by.operands):
        if found := ADDRESS.fullmatch(operand):
            offset = int(found[2] or 0) + WIDTH.get(by.fields[-1], 1)
            yield _with(by, i, f"[{found[1]}+{offset}]")
    unit = program.units.get(by.operands[0]) if by.writes and not by.guard else None
    if unit is None or by.mnemonic not in ADDS | {"mul", "shl"}:
        return
    for i, operand in enumerate(by.operands[1:], 1):
        if NUMBER.fullmatch(operand):
            added = by.mnemonic in ADDS and (by.mnemonic != "mad" or i == 3)
            yield _shifted(by, i, unit if added else 1)


def _registers(program: _Program, by: Instruction) -> Iterator[Instruction]:
    """Another register of the same type, computed before, that is a part of an address."""
    if not by.writes or by.mnemonic not in COMPUTES or by.operands[0] not in program.units:
        return
    types, block = program.kernel.registers, program.block_of[by.index]
    before = program.kernel.instructions[block.start : by.index]
    known = {name for each in before if not each.guard for name in each.writes & {*program.units}}
    for i, operand in enumerate(by.operands[1:], 1):
        others = sorted(n for n in known - {operand} if types[n] == types.get(operand) == "b32")
        if others and operand in program.units:
            yield _with(by, i, random.Random(by.index).choice(others))


def _narrowed(program: _Program, by: Instruction, *, products: bool) -> Iterator[Instruction]:
    wide = by.has("wide") or by.fields[-1] in {"s64", "u64", "b64"}
    names = {"mul", "mad", "shl"} if products else {"add", "sub", "mad"}
    if wide and by.mnemonic in names and by.operands[0] in program.units and not by.guard:
        yield replace(by, fields=("narrowed", "product" if products else "sum", *by.fields))


def _shuffles(program: _Program, by: Instruction) -> Iterator[Instruction]:
    if by.mnemonic == "shfl" and NUMBER.fullmatch(by.operands[2]):
        lane = int(by.operands[2], 0)
        yield _with(by, 2, str(8 if lane == 16 else 2 * lane or 1))


def _descriptors(program: _Program, by: Instruction) -> Iterator[Instruction]:
    """The next 16 bytes."""
    if by.fields[:2] == ("wgmma", "mma_async"):
        yield from (_shifted(by, i, 1) for i in (1, 2) if by.operands[i].startswith("%"))


def _if(
    is_kind: Callable[[Instruction], bool], change: Callable[[Instruction], Instruction] = _removed
) -> "Changes":
    return lambda program, by: iter([change(by)] if is_kind(by) else [])


def _relaxed(by: Instruction) -> Instruction:
    fields = ["relaxed" if each == "acq_rel" else each for each in by.fields]
    return replace(by, fields=tuple(fields))


Changes = Callable[[_Program, Instruction], Iterator[Instruction]]
KINDS: dict[str, Changes] = {
    "barrier": _if(lambda by: by.fields == ("bar", "sync")),
    "wait for copies": _if(lambda by: by.fields == ("cp", "async", "wait_group")),
    "wait for products": _if(lambda by: by.fields[:2] == ("wgmma", "wait_group")),
    "proxy fence": _if(lambda by: by.fields[:2] == ("fence", "proxy")),
    "memory order": _if(lambda by: by.has("acq_rel"), _relaxed),
    "predicate": _if(
        lambda by: by.guard is not None and by.has("global"), lambda by: replace(by, guard=None)
    ),
    "loop bound": _loop_bounds,
    "constant": _constants,
    "register": _registers,
    "narrowed sum": lambda program, by: _narrowed(program, by, products=False),
    "narrowed product": lambda program, by: _narrowed(program, by, products=True),
    "selection": _if(
        lambda by: by.mnemonic == "selp",
        lambda by: replace(by, operands=tuple(by.operands[i] for i in (0, 2, 1, 3))),
    ),
    "shuffle": _shuffles,
    "descriptor": _descriptors,
}
"""The instructions that may take the place of one; a memory order becomes relaxed."""


@instruction("removed")
def _nothing(decoder: Decoder, by: Instruction) -> Action:
    return lambda programs, mask: None


@instruction("shifted")
def _shift_operand(decoder: Decoder, by: Instruction) -> Action:
    """The instruction behind `shifted.operand.delta.`, with a register that is larger meanwhile."""
    _, operand, delta, *fields = by.fields
    slot = decoder.slots[by.operands[int(operand)]]
    ((_, act),) = decoder.block([replace(by, fields=tuple(fields))])

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
    (_, what, *fields), slot = by.fields, decoder.target(by.operands[0])
    ((_, act),) = decoder.block([replace(by, fields=tuple(fields))])
    added = decoder.sources(by.operands[3:], "b64") if what == "product" else []

    def narrowed(programs: Programs, mask: Mask) -> None:
        addend = programs.registers[added[0]] if added else np.uint64(0)
        act(programs, mask)
        whole = programs.registers[slot] - addend
        signed = whole.astype(np.uint32).view(np.int32).astype(np.int64).view(np.uint64)
        programs.set(slot, np.asarray(signed + addend), mask)

    return narrowed
