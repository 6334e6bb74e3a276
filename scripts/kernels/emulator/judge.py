"""Which faults put into compiled kernels the emulator sees.

A fault is seen if the execution of a launch raises, or writes other values, or loads or stores
other bytes. Not counted, as idle, is what cannot be a fault in these launches:

- a wait or fence that finds nothing to order, or that another one, which orders as much, follows on
  every way through the code with nothing to order between: only arithmetic, and between two waits
  for products barriers and other products (Triton 3.7 hoists proxy fences to such places);
- a barrier that orders nothing by the definition of a race, as `trace` finds for some programs of
  each launch: the compiler puts one between any two accesses of a buffer that it does not know to
  be of the same warp, and next to those that the source asks for;
- a changed instruction that computes what the original does, for all threads, whenever it is
  executed, as a product of small numbers that is narrowed to 32 bits;
- a loop that runs one step longer, in which no thread then accesses global memory.

Nor is counted, as unused, a changed instruction with which every access of global and of shared
memory is the same, with the same values: no thread that accesses memory uses the result.

A predicate that is not seen is true for every thread that reaches it, or keeps threads from loading
what they do not use and another thread of the program loads anyway.
"""

import numpy as np

from .access import Fault
from .execution import Code, Run, decoded
from .mutations import Mutant, mutants
from .parser import Kernel
from .programs import Mask, Programs
from .trace import Trace

FOLLOWED = {"wait for copies", "wait for products", "proxy fence"}
"""Kinds of which the next one may order as much."""
CHANGED = {
    "loop bound", "constant", "register", "narrowed sum", "narrowed product", "selection",
    "shuffle",
}  # fmt: skip
"""Kinds that change what a thread computes."""
ORDERED = {
    "ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "wgmma", "bar", "barrier",
    "fence", "bra", "ret", "exit",
}  # fmt: skip
"""What a wait may order, or ends a block."""
NUM_TRACED = 4
"""Programs of a launch whose accesses show that a barrier orders nothing."""
MANY = 5
"""Times as many instructions as the kernel has and executes without a fault are an endless loop."""
NOT_REACHED, IDLE, UNUSED, NOT_SEEN = "not reached", "idle", "unused", "not seen"
SEEN = ("fault", "values", "bytes")
"""Verdicts."""


class Judge:
    """Executes mutants of launches, which were executed without faults and counted."""

    def __init__(self, history: list[Run]) -> None:
        self._runs: dict[str, list[Run]] = {}  # by PTX
        self._idle: dict[str, set[int]] = {}
        for run in history:
            self._runs.setdefault(run.request.text, []).append(run)

    def mutants(self, most: int | None = None) -> list[Mutant]:
        """All faults in the kernels of the launches, or some of each kind in each kernel."""
        return [mutant for text in self._runs for mutant in mutants(text, most)]

    def verdict(self, mutant: Mutant) -> str:
        """How a fault is seen, in the first launch that shows it; or one of the other verdicts."""
        kernel, index = decoded(mutant.text).kernel, mutant.original.index
        block = next(block for block in kernel.blocks() if index in block)
        runs = [run for run in self._runs[mutant.text] if block.start in run.reached]
        if not runs:
            return NOT_REACHED
        verdicts = set()
        for run in runs:
            verdicts.add(_compared(mutant, run))
            if seen := verdicts & {*SEEN}:
                return seen.pop()
        if mutant.kind in FOLLOWED and _is_idle(kernel, index, runs):
            return IDLE
        if mutant.kind == "barrier":
            return IDLE if index in self._idle_barriers(mutant.text) else NOT_SEEN
        return next(each for each in (NOT_SEEN, UNUSED, IDLE) if each in verdicts)

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
    """Whether a wait or fence finds nothing to order, or another one orders as much on all ways."""
    if not any(index in run.useful for run in runs):
        return True
    this = kernel.instructions[index]
    ordered = {"ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "wgmma", "bar", "fence"}
    if this.mnemonic == "wgmma":
        ordered -= {"bar", "fence", "wgmma"}
    ahead, met = [index + 1], {index + 1}
    while ahead:
        by = kernel.instructions[ahead.pop()]
        repeated = by is not this and by.fields == this.fields
        if repeated and (not this.operands or int(by.operands[0]) <= int(this.operands[0])):
            continue
        if this.mnemonic == "fence":
            if by.fields[:2] == ("wgmma", "mma_async"):
                return False
        elif by.mnemonic in ordered:
            return False
        after = set() if by.mnemonic in {"ret", "exit"} else {by.index + 1}
        if by.mnemonic == "bra":
            after = {kernel.labels[by.operands[0]]} | (after if by.guard else set())
        ahead += after - met
        met |= after
    return True


def _compared(mutant: Mutant, expected: Run) -> str:
    """How a fault is seen in a launch; idle if it computes what the original does."""
    code, differs = _comparing(mutant)
    limit = MANY * (len(code.kernel.instructions) + expected.num_instructions)
    try:
        found = Run(expected.request, code, counting=True, limit=limit)
    except Fault:
        return "fault"
    one, other = found.memory, expected.memory
    if not np.array_equal(one.data, other.data):
        return "values"
    if (one.loaded, one.stored) != (other.loaded, other.stored):
        return "bytes"
    if not differs:
        return IDLE
    if mutant.kind not in CHANGED:
        return NOT_SEEN
    same = {
        space for space in found.checksums if found.checksums[space] == expected.checksums[space]
    }
    longer = mutant.kind == "loop bound" and found.num_instructions > expected.num_instructions
    if longer and "global" in same:
        return IDLE
    return UNUSED if len(same) == 2 else NOT_SEEN


def _comparing(mutant: Mutant) -> tuple[Code, list[bool]]:
    """The code of a mutant, and a list that is filled when it computes what the original does not.

    Instructions that do more than writing registers differ from the start.
    """
    original, differs = decoded(mutant.text), list[bool]()
    code = original.changed(mutant.changed)
    by = mutant.original
    if not by.writes or by.mnemonic in ORDERED or by.fields == ("bar", "sync"):
        return code, [True]
    start = next(block.start for block in original.kernel.blocks() if by.index in block)
    actions, stop = code.blocks[start]
    place = next(i for i, (each, _) in enumerate(actions) if each.index == by.index)
    truth, act = original.blocks[start][0][place][1], actions[place][1]
    slots = [code.decoder.slots[name] for name in sorted(by.writes)]

    def both(programs: Programs, mask: Mask) -> None:
        registers = programs.registers
        before = [registers[slot] for slot in slots]
        truth(programs, mask)
        right = [programs.full(registers[slot]) for slot in slots]
        for slot, value in zip(slots, before, strict=True):
            registers[slot] = value
        act(programs, mask)
        wrong = [programs.full(registers[slot]) for slot in slots]
        lanes = programs.chosen(mask)
        if any((a[lanes] != b[lanes]).any() for a, b in zip(right, wrong, strict=True)):
            differs.append(True)

    code.blocks[start] = (
        [*actions[:place], (actions[place][0], both), *actions[place + 1 :]],
        stop,
    )
    return code, differs
