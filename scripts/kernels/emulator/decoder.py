"""Instructions into actions: operands are resolved once, before the kernel runs."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import shared_memory
from .access import Array
from .parser import Instruction, Kernel, Unsupported
from .programs import BITS, Action, Mask, Programs

Builder = Callable[["Decoder", Instruction], Action]
Function = Callable[..., Array]
BUILDERS: dict[str, Builder] = {}
"""By mnemonic."""
REFUSED = {"sat", "relu", "xorsign", "NaN", "hi", "rni", "rzi", "rmi", "rpi"}
"""Forms of known instructions."""
SPECIAL = {"%tid.x", "%ctaid.x", "%nctaid.x"}


def instruction(*mnemonics: str) -> Callable[[Builder], Builder]:
    """Decorator of what builds the actions of instructions."""

    def register(builder: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(mnemonics, builder))
        return builder

    return register


class Decoder:
    """Resolves the operands of a kernel's instructions."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.local = kernel.local_registers()
        self.slots = {name: i for i, name in enumerate([*kernel.registers, *sorted(SPECIAL)])}
        self.initial: list[Array | None] = [None] * len(self.slots)  # constants; None: no value yet
        self._constants: dict[tuple[int, str], int] = {}

    def target(self, text: str) -> int:
        """The slot of a register that is written."""
        return self.slots[text]

    def bits_of(self, text: str) -> Any:
        """The type in which a register is kept."""
        return BITS[self.kernel.registers[text]]

    def source(self, text: str, kind: str) -> int:
        """The slot of a register, or of a constant of a type."""
        if text in self.slots:
            return self.slots[text]
        if text.startswith("%"):
            raise Unsupported(f"register {text}")
        if text == "global_smem":
            value = shared_memory.BASE
        elif re.fullmatch(r"0[fd][0-9A-Fa-f]+", text):
            value = int(text[2:], 16)
        else:
            value = int(text.rstrip("U"), 0)
        if (value, kind) not in self._constants:
            bits = BITS[kind]
            size = 8 * np.dtype(bits).itemsize
            kept = bool(value) if kind == "pred" else value & ((1 << size) - 1)
            self._constants[value, kind] = len(self.initial)
            self.initial.append(np.full((1, 1), kept, bits))
        return self._constants[value, kind]

    def sources(self, texts: Sequence[str], kind: str) -> list[int]:
        """Slots of several operands of one type."""
        return [self.source(text, kind) for text in texts]

    def vector(self, text: str, kind: str) -> list[int]:
        """Slots of `{a, b}` or of one operand."""
        return self.sources(elements(text), kind)

    def address(self, text: str, kind: str) -> Callable[[Programs], Array]:
        """The address `[register + offset]`."""
        found = re.fullmatch(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\d+)\s*)?\]", text)
        if found is None:
            raise Unsupported(f"address {text}")
        slot, offset = self.source(found[1], kind), int(found[2] or 0)

        def address(programs: Programs) -> Array:
            value: Array = programs.registers[slot]
            return value.astype(np.int64) + offset

        return address

    def mask(self, by: Instruction) -> Callable[[Programs, Mask], Mask]:
        """Where an instruction is executed: a mask and its guard."""
        if by.guard is None:
            return lambda programs, mask: mask
        slot, negated = self.slots[by.guard], by.guard_is_negated

        def both(programs: Programs, mask: Mask) -> Mask:
            guard: Array = programs.registers[slot]
            if negated:
                guard = ~guard
            return guard if mask is None else guard & mask

        return both

    def compute(
        self, by: Instruction, target: str, sources: list[int], function: Function
    ) -> Action:
        """Write a function of registers.

        A local register needs no mask of programs: those that are elsewhere do not read it.
        """
        slot, where, local = self.target(target), self.mask(by), target in self.local

        def unmasked(programs: Programs, mask: Mask) -> None:
            registers = programs.registers
            registers[slot] = function(*[registers[each] for each in sources])

        def act(programs: Programs, mask: Mask) -> None:
            value = function(*[programs.registers[each] for each in sources])
            programs.set(slot, value, where(programs, None if local else mask))

        return unmasked if local and by.guard is None else act

    def actions(self) -> dict[int, tuple[list[tuple[Instruction, Action]], int]]:
        """The actions of every block by its first instruction, and where it ends."""
        every = self.kernel.instructions
        blocks = self.kernel.blocks()
        return {each.start: (self.block([every[i] for i in each]), each.stop) for each in blocks}

    def block(self, instructions: list[Instruction]) -> list[tuple[Instruction, Action]]:
        """The actions of instructions, but for those that the scheduler itself executes."""
        return [(each, self._build(each)) for each in instructions if not _moves_control(each)]

    def _build(self, by: Instruction) -> Action:
        if by.mnemonic not in BUILDERS or REFUSED & set(by.fields):
            raise Unsupported(f"instruction {by.text!r} of {self.kernel.name}")
        try:
            return BUILDERS[by.mnemonic](self, by)
        except (KeyError, ValueError) as error:
            raise Unsupported(f"instruction {by.text!r} of {self.kernel.name}") from error


def elements(text: str) -> list[str]:
    """The operands in `{a, b}`, or one operand."""
    return [name.strip() for name in text.strip("{}").split(",")]


def _moves_control(by: Instruction) -> bool:
    """Whether the scheduler itself executes an instruction."""
    barrier = by.mnemonic in {"bar", "barrier"} and by.fields[1] == "sync"
    if barrier and by.operands != ("0",):
        raise Unsupported(f"barrier of some threads: {by.text!r}")
    return barrier or by.mnemonic in {"bra", "ret", "exit"}
