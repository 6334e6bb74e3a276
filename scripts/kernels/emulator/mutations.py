"""Faults put into compiled kernels on purpose: which of them the emulator sees.

A fault is seen if the execution of a launch raises, or writes other values, or loads or stores
other bytes. Not counted is what cannot be a fault there: an instruction that no launch executes; a
wait or fence that finds nothing to order, or is followed by one that orders as much, with nothing
but arithmetic between; a barrier that orders nothing by the definition of a race, as `trace` finds
for some programs of each launch: the compiler puts one between any two accesses of a buffer that it
does not know to be of the same warp, and next to those that the source asks for. A predicate that
is not seen is true for every thread that reaches it, or keeps threads from loading what they do not
use and another thread of the program loads anyway.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from .access import Fault
from .decoder import Decoder, instruction
from .execution import Run, decoded
from .parser import Instruction, Kernel
from .programs import Action
from .trace import Trace

KINDS: dict[str, Callable[[Instruction], bool]] = {
    "barrier": lambda by: by.fields == ("bar", "sync"),
    "wait for copies": lambda by: by.fields == ("cp", "async", "wait_group"),
    "wait for products": lambda by: by.fields[:2] == ("wgmma", "wait_group"),
    "proxy fence": lambda by: by.fields[:2] == ("fence", "proxy"),
    "memory order": lambda by: by.has("acq_rel"),
    "predicate": lambda by: by.guard is not None and by.has("global"),
}
"""What is removed; a memory order becomes relaxed."""
FOLLOWED = {"wait for copies", "wait for products", "proxy fence"}
"""Kinds of which the next one may order as much."""
ORDERED = {
    "ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "wgmma", "bar", "barrier",
    "fence", "membar", "bra", "ret", "exit",
}  # fmt: skip
"""What a wait may order, or ends a block."""
NUM_TRACED = 4
"""Programs of a launch whose accesses show that a barrier orders nothing."""
MANY = 20
"""Times as many instructions as without a fault are taken for an endless loop."""
NOT_REACHED, IDLE, NOT_SEEN = "not reached", "idle", "not seen"
SEEN = ("fault", "values", "bytes")
"""Verdicts."""


@instruction("removed")
def _nothing(decoder: Decoder, by: Instruction) -> Action:
    return lambda programs, mask: None


class Mutant(NamedTuple):
    """A kernel without one of its instructions, or with a weaker one."""

    kind: str
    text: str  # PTX without the fault
    original: Instruction

    @property
    def changed(self) -> Instruction:
        """The instruction in its place."""
        if self.kind == "predicate":
            return replace(self.original, guard=None)
        if self.kind == "memory order":
            fields = ["relaxed" if each == "acq_rel" else each for each in self.original.fields]
            return replace(self.original, fields=tuple(fields))
        return replace(self.original, fields=("removed",), operands=(), guard=None)

    def __str__(self) -> str:
        name = decoded(self.text).kernel.name
        return f"{self.kind} in {name} #{self.original.index}: {self.original.text}"


class Judge:
    """Executes mutants of launches, which were executed without faults and counted."""

    def __init__(self, history: list[Run]) -> None:
        self._runs: dict[str, list[Run]] = {}  # by PTX
        self._idle: dict[str, set[int]] = {}
        for run in history:
            self._runs.setdefault(run.request.text, []).append(run)

    def mutants(self, most: int | None = None) -> list[Mutant]:
        """All faults in the kernels of the launches, or some of each kind in each kernel."""
        found = []
        for text, (kind, is_kind) in product(self._runs, KINDS.items()):
            chosen = [by for by in decoded(text).kernel.instructions if is_kind(by)]
            random.Random(0).shuffle(chosen)
            found += [Mutant(kind, text, by) for by in chosen[:most]]
        return found

    def verdict(self, mutant: Mutant) -> str:
        """How a fault is seen, in the first launch that shows it; or one of the other verdicts."""
        kernel, index = decoded(mutant.text).kernel, mutant.original.index
        block = next(block for block in kernel.blocks() if index in block)
        runs = [run for run in self._runs[mutant.text] if block.start in run.reached]
        if not runs:
            return NOT_REACHED
        if mutant.kind in FOLLOWED and _is_idle(kernel, index, runs):
            return IDLE
        verdicts = (_compared(mutant, run) for run in runs)
        found = next((verdict for verdict in verdicts if verdict != NOT_SEEN), NOT_SEEN)
        barrier = found == NOT_SEEN and mutant.kind == "barrier"
        return IDLE if barrier and index in self._idle_barriers(mutant.text) else found

    def _idle_barriers(self, text: str) -> set[int]:
        """The barriers that order nothing in any launch, by the definition of a race."""
        if text not in self._idle:
            traces = []
            for run in self._runs[text]:
                num_programs = run.memory.num_programs
                some = np.linspace(0, num_programs - 1, min(num_programs, NUM_TRACED), dtype=int)
                traces.append(Trace(some))
                Run(run.request, decoded(text), trace=traces[-1])
            needed = set().union(*(trace.passed() - trace.idle() for trace in traces))
            self._idle[text] = set().union(*(trace.passed() for trace in traces)) - needed
        return self._idle[text]


def _is_idle(kernel: Kernel, index: int, runs: list[Run]) -> bool:
    """Whether a wait or fence finds nothing to order, or the next one orders as much."""
    if not any(index in run.useful for run in runs):
        return True
    this, *later = kernel.instructions[index:]
    following = next((by for by in later if by.mnemonic in ORDERED), this)
    if following.fields != this.fields or not this.operands:
        return False
    return following is not this and int(following.operands[0]) <= int(this.operands[0])


def _compared(mutant: Mutant, expected: Run) -> str:
    code = decoded(mutant.text).changed(mutant.changed)
    limit = MANY * expected.num_instructions
    try:
        found = Run(expected.request, code, counting=True, limit=limit)
    except Fault:
        return "fault"
    one, other = found.memory, expected.memory
    if not np.array_equal(one.data, other.data):
        return "values"
    return NOT_SEEN if (one.loaded, one.stored) == (other.loaded, other.stored) else "bytes"
