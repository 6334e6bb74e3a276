"""Which faults put into compiled kernels the emulator sees.

A fault is seen if the execution of a launch raises, or writes other values, or loads or stores
other bytes. Not counted, as idle, is what cannot be a fault in these launches:

- a wait or fence that finds nothing to order, or that another one, which orders as much, follows on
  every way through the code with nothing to order between: only arithmetic, and between two waits
  for products barriers and other products (Triton 3.7 hoists proxy fences to such places);
- a barrier that orders nothing by the definition of a race, as `trace` finds for some programs of
  each launch: the compiler puts one between any two accesses of a buffer that it does not know to
  be of the same warp, and next to those that the source asks for;
- a changed instruction with which every access of memory is the same, with the same values: it
  computes what the original does, or no thread that accesses memory uses the result;
- a loop that runs one step longer, in which no thread then accesses global memory.

A predicate that is not seen keeps threads from loading what they do not use and another thread of
the program loads anyway.
"""

import numpy as np

from .access import Fault
from .execution import Run, decoded
from .mutations import Mutant, mutants
from .ptx import Kernel
from .trace import Trace

ORDERING = {"barrier", "wait for copies", "wait for products", "proxy fence", "memory order"}
"""Kinds of faults that change when something happens."""
NUM_TRACED = 4
"""Programs of a launch whose accesses show that a barrier orders nothing."""
MANY = 5
"""Times as many instructions as the kernel has and executes without a fault are an endless loop."""
NOT_REACHED, IDLE, NOT_SEEN = "not reached", "idle", "not seen"
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
        start = kernel.block_of(index).start
        runs = [run for run in self._runs[mutant.text] if start in run.reached]
        if not runs:
            return NOT_REACHED
        verdicts = set()
        for run in runs:
            verdict = _compared(mutant, run)
            if verdict in SEEN:
                return verdict
            verdicts.add(verdict)
        if mutant.kind == "barrier":
            return IDLE if index in self._idle_barriers(mutant.text) else NOT_SEEN
        if mutant.kind in ORDERING:
            return IDLE if _is_idle(kernel, index, runs) else NOT_SEEN
        return NOT_SEEN if NOT_SEEN in verdicts else IDLE

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
    this = kernel.instructions[index]
    if this.mnemonic == "atom":
        return False
    if not any(index in run.useful for run in runs):
        return True
    ordered = {"ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "wgmma", "bar", "fence"}
    if this.mnemonic == "wgmma":
        ordered -= {"bar", "fence", "wgmma"}
    ahead, met = {index + 1}, {index + 1}
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
        ahead |= kernel.after(by) - met
        met |= ahead
    return True


def _compared(mutant: Mutant, expected: Run) -> str:
    """How a fault is seen in a launch; idle if no access of memory differs."""
    code = decoded(mutant.text).changed(mutant.changed)
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
    longer = mutant.kind == "loop bound" and found.num_instructions > expected.num_instructions
    spaces = ("global",) if longer else ("global", "shared")
    same = all(found.checksums[space] == expected.checksums[space] for space in spaces)
    return IDLE if same else NOT_SEEN
