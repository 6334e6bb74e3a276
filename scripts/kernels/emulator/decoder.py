"""Instructions into actions: operands are resolved once, before the kernel runs."""

import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from .access import Array
from .programs import Action, Blocks, Mask, Programs
from .ptx import Instruction, Unsupported, parse
from .shared_memory import BASE, PIECE

BITS: dict[str, Any] = {
    "pred": np.bool_,
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), np.uint16),
    **dict.fromkeys(("b32", "u32", "s32", "f32"), np.uint32),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), np.uint64),
}
"""How a register of a type is kept: as its bits."""
ADDRESS = re.compile(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\d+)\s*)?\]")
Builder = Callable[["Decoder", Instruction], Action]
Function = Callable[..., Array]
BUILDERS: dict[str, Builder] = {}
"""By mnemonic."""
REFUSED = {"sat", "relu", "xorsign", "NaN", "rni", "rzi", "rmi", "rpi"}
"""Forms of known instructions."""
SPECIAL = ("%tid.x", "%ctaid.x", "%nctaid.x")


def instruction(*mnemonics: str) -> Callable[[Builder], Builder]:
    """Decorator of what builds the actions of instructions."""

    def register(builder: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(mnemonics, builder))
        return builder

    return register


class Decoder:
    """Resolves the operands of the instructions of a kernel, which is then ready to run.

    Attributes:
        kernel: the parsed text.
        slots: places of registers and parameters among the registers of `Programs`.
        initial: values of registers and constants; None for no value yet.
        element_bytes: least bytes of shared memory that a thread accesses at a time.
        blocks: the actions.
    """

    def __init__(self, text: str) -> None:
        self.kernel = parse(text)
        self._local = self.kernel.local_registers()
        names = [*self.kernel.registers, *SPECIAL, *self.kernel.parameters]
        self.slots = {name: i for i, name in enumerate(names)}
        self.initial: list[Array | None] = [None] * len(self.slots)
        self._constants: dict[tuple[int, str], int] = {}
        self.element_bytes = PIECE
        self.blocks: Blocks = {}
        for block in self.kernel.blocks:
            actions = self.actions(self.kernel.instructions[block.start : block.stop])
            self.blocks[block.start] = actions, block.stop

    def changed(self, by: Instruction) -> "Decoder":
        """The kernel with another instruction in the place of the one with its index."""
        other, block = copy(self), self.kernel.block_of(by.index)
        instructions = [*self.kernel.instructions]
        instructions[by.index] = by
        other.kernel = replace(self.kernel, instructions=instructions)
        actions = other.actions(instructions[block.start : block.stop])
        other.blocks = self.blocks | {block.start: (actions, block.stop)}
        return other

    def source(self, text: str, kind: str) -> int:
        """The slot of a register, or of a constant of a type."""
        if text in self.slots:
            return self.slots[text]
        if text.startswith("%"):
            raise Unsupported(f"register {text}")
        if text == "global_smem":
            value = BASE
        else:
            value = int(text[2:], 16) if text[:2] in ("0f", "0d") else int(text.rstrip("U"), 0)
        if (value, kind) not in self._constants:
            size = 8 * np.dtype(BITS[kind]).itemsize
            kept = bool(value) if kind == "pred" else value & ((1 << size) - 1)
            self._constants[value, kind] = len(self.initial)
            self.initial.append(np.full((1, 1), kept, BITS[kind]))
        return self._constants[value, kind]

    def sources(self, texts: Sequence[str], kind: str) -> list[int]:
        """Slots of several operands of one type."""
        return [self.source(text, kind) for text in texts]

    def vector(self, text: str, kind: str) -> list[int]:
        """Slots of `{a, b}` or of one operand."""
        return self.sources(elements(text), kind)

    def address(self, text: str) -> Callable[[Programs], Array]:
        """The address `[register + offset]`."""
        found = ADDRESS.fullmatch(text)
        if found is None:
            raise Unsupported(f"address {text}")
        slot, offset = self.source(found[1], "b64"), int(found[2] or 0)
        return lambda programs: programs.registers[slot].astype(np.int64) + offset

    def compute(self, by: Instruction, sources: Sequence[int], function: Function) -> Action:
        """Write a function of registers.

        A local register needs no mask of programs: those that are elsewhere do not read it.
        """
        slot, local = self.slots[by.operands[0]], by.operands[0] in self._local

        def unmasked(programs: Programs, mask: Mask) -> None:
            registers = programs.registers
            registers[slot] = function(*[registers[each] for each in sources])

        def masked(programs: Programs, mask: Mask) -> None:
            value = function(*[programs.registers[each] for each in sources])
            programs.set(slot, value, mask)

        return unmasked if local and by.guard is None else masked

    def actions(self, instructions: list[Instruction]) -> list[tuple[Instruction, Action]]:
        """The actions of instructions, but for those that the scheduler itself executes."""
        return [(each, self._build(each)) for each in instructions if not _moves_control(each)]

    def _build(self, by: Instruction) -> Action:
        """What an instruction does where its guard is true, if it is anywhere."""
        if by.mnemonic not in BUILDERS or REFUSED & set(by.fields):
            raise Unsupported(f"instruction {by.text!r} of {self.kernel.name}")
        try:
            act = BUILDERS[by.mnemonic](self, by)
        except (KeyError, ValueError) as error:
            raise Unsupported(f"instruction {by.text!r} of {self.kernel.name}") from error
        if by.guard is None:
            return act
        slot, negated = self.slots[by.guard], by.guard_is_negated

        def guarded(programs: Programs, mask: Mask) -> None:
            guard: Array = programs.registers[slot]
            guard = ~guard if negated else guard
            where = guard & mask
            if where.any():
                act(programs, where)

        return guarded


def elements(text: str) -> list[str]:
    """The operands in `{a, b}`, or one operand."""
    return [name.strip() for name in text.strip("{}").split(",")]


def _moves_control(by: Instruction) -> bool:
    """Whether the scheduler itself executes an instruction."""
    if by.fields[:2] != ("bar", "sync"):
        return by.mnemonic in {"bra", "ret"}
    if by.operands != ("0",) or len(by.fields) > 2:
        raise Unsupported(f"barrier of some threads: {by.text!r}")
    return True
