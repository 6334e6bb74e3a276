"""Programs of a launch that run together: their registers, and which of them are where.

Registers are arrays [programs, threads], or with a size of 1 where all programs or all threads have
the same value, so that an instruction is one operation of numpy for all threads that execute it.
Those that are at the first instruction run, so that paths meet again as soon as they can. A mask is
None for all threads, [programs, 1] or [programs, threads].
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .access import Access, Array, Fault, Lanes
from .global_memory import GlobalMemory
from .parser import Instruction, Kernel
from .shared_memory import SharedMemory

Mask = Array | None
Action = Callable[["Programs", Mask], None]

BITS = {
    "pred": np.bool_,
    **dict.fromkeys(("b8", "u8", "s8", "b16", "u16", "s16", "f16"), np.uint16),
    **dict.fromkeys(("b32", "u32", "s32", "f32"), np.uint32),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), np.uint64),
}
"""How a register of a type is kept: as its bits."""


class Programs:
    """Programs `ids` of a launch, which run together."""

    def __init__(
        self,
        kernel: Kernel,
        ids: Array,
        memory: GlobalMemory,
        num_shared_bytes: int,
        element_bytes: int,
        registers: list[Any],
        slots: dict[str, int],
        parameters: dict[str, Array],
    ) -> None:
        self.kernel, self.memory, self.slots = kernel, memory, slots
        self.parameters = parameters
        self.lanes = Lanes(kernel.name, ids, kernel.num_threads)
        self.shape = (len(ids), kernel.num_threads)
        self.shared = SharedMemory(self.lanes, num_shared_bytes, element_bytes, memory.trace)
        self.registers = registers
        self.num_products = 0  # multiply-adds of tensor cores
        # registers that products read or write, with the commit of each program to wait for
        self.reading: dict[str, Array] = {}
        self.writing: dict[str, Array] = {}

    def full(self, value: Array) -> Array:
        """A value or mask for every thread, [G * T]."""
        same = value if value.shape == self.shape else np.broadcast_to(value, self.shape)
        return same.reshape(-1)

    def warps(self, value: Array) -> Array:
        """A value for every thread, [warps of all programs, 32]."""
        return self.full(value).reshape(-1, 32)

    def count(self, mask: Mask) -> int:
        """The number of threads of a mask."""
        return self.lanes.size if mask is None else int(self.full(mask).sum())

    def set(self, slot: int, value: Array, mask: Mask) -> None:
        """Write a register where a mask is true."""
        old = self.registers[slot]
        self.registers[slot] = value if mask is None or old is None else np.where(mask, value, old)

    def access(self, by: Instruction, address: Array, width: int, mask: Mask) -> Access | None:
        """The access of the threads of a mask; None if there are none."""
        chosen = self.chosen(mask)
        where = self.full(address)[chosen]
        return Access(by, where, width, self.lanes, chosen) if len(where) else None

    def chosen(self, mask: Mask) -> Any:
        """The lanes of a mask, as an index."""
        return slice(None) if mask is None else np.flatnonzero(self.full(mask))

    def rows(self, by: Instruction, mask: Mask) -> Array:
        """The programs of a mask, which must be programs as a whole."""
        if mask is None:
            return np.arange(self.shape[0])
        threads = np.broadcast_to(mask, self.shape)
        if (threads.any(1) != threads.all(1)).any():
            self.fail(by, "executed by some threads of a program")
        return np.flatnonzero(threads.all(1))

    def require_whole_warps(self, by: Instruction, mask: Mask) -> None:
        """Raise if a warp instruction is executed by some threads of a warp."""
        if mask is not None and mask.shape[1] > 1:
            warps = self.warps(mask)
            if (warps.any(1) != warps.all(1)).any():
                self.fail(by, "executed by some threads of a warp")

    def fail(self, by: Instruction, what: str) -> None:
        """Raise a fault of an instruction."""
        raise Fault(f"{self.kernel.name}: {what} at {by}")

    def check_products(self, by: Instruction, mask: Mask) -> None:
        """Raise if an instruction uses registers of a wgmma that is running."""
        active = np.broadcast_to(True if mask is None else mask, self.shape).any(1)
        waits = self.shared.product_waits[:, 0]
        for name in by.writes:
            if name in self.reading and ((self.reading[name] >= waits) & active).any():
                self.fail(by, f"{name} is written while a wgmma reads it")
        if by.mnemonic == "wgmma":
            return
        for name in by.writes | by.reads:
            if name in self.writing and ((self.writing[name] >= waits) & active).any():
                self.fail(by, f"{name} is used before the wgmma that computes it was waited for")


class Scheduler:
    """Runs programs to their end.

    Programs exchange values at atomics alone, else there is a race: so the order in which atomics
    are executed is all that an order of programs can change. "together": all that wait at one
    instruction, in turn. "forward", "backward": the first or the last of all programs, until it
    ends. "interleaved": one of them at random.
    """

    def __init__(
        self,
        programs: Programs,
        blocks: dict[int, tuple[list[tuple[Instruction, Action]], int]],
        order: str,
        random: np.random.Generator,
        limit: int,
    ) -> None:
        self._programs, self._blocks, self._order, self._random = programs, blocks, order, random
        self._limit = limit  # of instructions
        self._running: dict[int, Array] = {0: np.ones(programs.shape, np.bool_)}
        self._held: dict[int, Array] = {}  # at atomics
        self._at_barrier: dict[int, Array] = {}  # at barriers
        self._alive = np.ones(programs.shape, np.bool_)
        self.num_instructions = 0
        self.reached: set[int] = set()  # first instructions of executed blocks

    def run(self) -> None:
        """Run all programs to their end."""
        instructions = self._programs.kernel.instructions
        while True:
            if not self._running:
                if self._held:
                    self._release()
                    continue
                if self._at_barrier:
                    waiting = [instructions[i].text for i in self._at_barrier]
                    raise Fault(f"{self._programs.kernel.name}: threads wait forever at {waiting}")
                return
            at = min(self._running)
            mask = self._running.pop(at)
            self._run_block(at, mask)

    def _run_block(self, at: int, threads: Array) -> None:
        kernel = self._programs.kernel
        self.reached.add(at)
        if at == len(kernel.instructions):
            self._end(threads)
            return
        first = kernel.instructions[at]
        if first.mnemonic in {"atom", "red"} and self._order != "together":
            self._add(self._held, at, threads)
            return
        if first.mnemonic in {"bar", "barrier"} and first.fields[1] == "sync":
            self._arrive(first, threads)
            return
        after = self._execute(at, _smallest(threads))
        last = kernel.instructions[after - 1]
        if last.mnemonic in {"bra", "ret", "exit"}:
            leaving = threads & self._condition(last)
            threads = threads & ~leaving
            if last.mnemonic == "bra":
                self._add(self._running, kernel.labels[last.operands[0]], leaving)
            else:
                self._end(leaving)
        self._add(self._running, after, threads)

    def _execute(self, at: int, mask: Mask) -> int:
        """Execute the actions of a block; return where it ends."""
        programs = self._programs
        actions, after = self._blocks[at]
        self.num_instructions += len(actions) + 1
        if self.num_instructions > self._limit:
            raise Fault(f"{programs.kernel.name}: no end after {self._limit} instructions")
        for each, act in actions:
            if programs.reading or programs.writing:
                programs.check_products(each, mask)
            act(programs, mask)
        return after

    def _condition(self, by: Instruction) -> Array:
        """Where the guard of an instruction is true."""
        if by.guard is None:
            return np.ones((1, 1), np.bool_)
        value = np.asarray(self._programs.registers[self._programs.slots[by.guard]])
        return ~value if by.guard_is_negated else value

    @staticmethod
    def _add(where: dict[int, Array], at: int, threads: Array) -> None:
        if threads.any():
            where[at] = where[at] | threads if at in where else threads

    def _end(self, threads: Array) -> None:
        self._alive &= ~threads
        self._pass_barriers()

    def _arrive(self, at: Instruction, threads: Array) -> None:
        self._add(self._at_barrier, at.index, threads)
        if len(self._at_barrier) > 1:
            stopped = np.stack([mask.any(1) for mask in self._at_barrier.values()])
            if (stopped.sum(0) > 1).any():
                self._programs.fail(at, "threads of a program wait at several barriers")
        self._pass_barriers()

    def _pass_barriers(self) -> None:
        """Let the programs continue of which all threads are at the barrier."""
        for at, stopped in list(self._at_barrier.items()):
            done = (stopped == self._alive).all(1) & stopped.any(1)
            if not done.any():
                continue
            programs = self._programs
            rows = None if done.all() else np.flatnonzero(done)
            programs.lanes.pass_barrier(rows)
            programs.shared.pass_barrier(np.flatnonzero(done))
            programs.memory.pass_barrier(programs.lanes.ids[done])
            if programs.memory.trace:
                programs.memory.trace.pass_barrier(programs.lanes.ids[done], at)
            self._add(self._running, at + 1, stopped & done[:, None])
            rest = stopped & ~done[:, None]
            del self._at_barrier[at]
            self._add(self._at_barrier, at, rest)

    def _release(self) -> None:
        """Execute the atomic of one of the programs that wait at atomics."""
        candidates = {
            int(row) for mask in self._held.values() for row in np.flatnonzero(mask.any(1))
        }
        ordered = sorted(candidates, key=lambda row: int(self._programs.lanes.ids[row]))
        row = ordered[0 if self._order == "forward" else -1]
        if self._order == "interleaved":
            row = ordered[int(self._random.integers(len(ordered)))]
        at = min(i for i, mask in self._held.items() if mask[row].any())
        held = self._held.pop(at)
        chosen = np.zeros_like(held)
        chosen[row] = held[row]
        self._add(self._held, at, held & ~chosen)
        self._add(self._running, self._execute(at, chosen), chosen)


def _smallest(threads: Array) -> Mask:
    """A mask as None or [programs, 1], if it says the same."""
    if threads.all():
        return None
    whole: Array = np.asarray(threads.all(1))
    return whole[:, None] if (whole == threads.any(1)).all() else threads
