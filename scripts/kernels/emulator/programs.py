"""Programs of a launch that run together: their registers, and which of them are where.

Registers are arrays [programs, threads], or with a size of 1 where all programs or all threads have
the same value, so that an instruction is one operation of numpy for all threads that execute it.
Those that are at the first instruction run, so that paths meet again as soon as they can. A mask is
`ALL`, [programs, 1] or [programs, threads].
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .access import Access, Array, Fault, Lanes
from .global_memory import GlobalMemory
from .ptx import Instruction, Kernel
from .shared_memory import SharedMemory

Mask = Array
ALL = np.ones((1, 1), np.bool_)
"""The mask of all threads."""
Action = Callable[["Programs", Mask], None]
Blocks = dict[int, tuple[list[tuple[Instruction, Action]], int]]
"""Actions of every block by its first instruction, and where it ends."""


class Programs:
    """Programs of a launch, which run together.

    `writing` are the registers that wgmma writes, with the commit of each program to wait for.
    """

    def __init__(
        self,
        kernel: Kernel,
        lanes: Lanes,
        memory: GlobalMemory,
        shared: SharedMemory,
        registers: list[Any],
        slots: dict[str, int],
    ) -> None:
        self.kernel, self.lanes, self.memory, self.shared = kernel, lanes, memory, shared
        self.registers, self.slots = registers, slots
        self.shape = (len(lanes.ids), kernel.num_threads)
        self.writing: dict[str, Array] = {}

    def full(self, value: Array) -> Array:
        """A value or mask for every thread, [G * T]."""
        same = value if value.shape == self.shape else np.broadcast_to(value, self.shape)
        return same.reshape(-1)

    def warps(self, slot: int) -> Array:
        """A register of every thread, [warps of all programs, 32]."""
        return self.full(self.registers[slot]).reshape(-1, 32)

    def set(self, slot: int, value: Array, mask: Mask) -> None:
        """Write a register where a mask is true."""
        old = self.registers[slot]
        self.registers[slot] = value if mask is ALL or old is None else np.where(mask, value, old)

    def set_lanes(self, slot: int, value: Array, chosen: Any) -> None:
        """Write a register of the chosen lanes."""
        if isinstance(chosen, slice):
            self.registers[slot] = value.reshape(self.shape)
            return
        old = self.registers[slot]
        new = np.zeros(self.lanes.size, value.dtype) if old is None else self.full(old).copy()
        new[chosen] = value
        self.registers[slot] = new.reshape(self.shape)

    def access(self, by: Instruction, address: Array, width: int, mask: Mask) -> Access:
        """The access of the threads of a mask."""
        chosen = self.chosen(mask)
        return Access(by, self.full(address)[chosen], width, self.lanes, chosen)

    def chosen(self, mask: Mask) -> Any:
        """The lanes of a mask, as an index."""
        return slice(None) if mask is ALL else np.flatnonzero(self.full(mask))

    def rows(self, by: Instruction, mask: Mask) -> Array:
        """The programs of a mask, which must be programs as a whole."""
        threads = np.broadcast_to(mask, self.shape)
        if (threads.any(1) != threads.all(1)).any():
            self.fail(by, "executed by some threads of a program")
        return np.flatnonzero(threads.all(1))

    def require_whole_warps(self, by: Instruction, mask: Mask) -> None:
        """Raise if a warp instruction is executed by some threads of a warp."""
        if mask.shape[1] > 1:
            warps = self.full(mask).reshape(-1, 32)
            if (warps.any(1) != warps.all(1)).any():
                self.fail(by, "executed by some threads of a warp")

    def fail(self, by: Instruction, what: str) -> None:
        """Raise a fault of an instruction."""
        raise Fault(f"{self.kernel.name}: {what} at {by}")

    def check_products(self, by: Instruction, mask: Mask) -> None:
        """Raise if an instruction uses registers of a wgmma that is running."""
        active = np.broadcast_to(mask, self.shape).any(1)
        waits = self.shared.product_waits[:, 0]
        for name in (by.writes | by.reads) & self.writing.keys():
            if ((self.writing[name] >= waits) & active).any():
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
        blocks: Blocks,
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
        kernel = self._programs.kernel
        while self._running or self._held:
            if self._running:
                at = min(self._running)
                self._run_block(at, self._running.pop(at))
            else:
                self._release()
        if self._at_barrier:
            waiting = [kernel.instructions[i].text for i in self._at_barrier]
            raise Fault(f"{kernel.name}: threads wait forever at {waiting}")

    def _run_block(self, at: int, threads: Array) -> None:
        kernel = self._programs.kernel
        self.reached.add(at)
        first = kernel.instructions[at]
        if first.mnemonic == "atom" and self._order != "together":
            self._add(self._held, at, threads)
            return
        if first.fields == ("bar", "sync"):
            self._arrive(first, threads)
            return
        after = self._execute(at, _smallest(threads))
        last = kernel.instructions[after - 1]
        if last.mnemonic in {"bra", "ret"}:
            leaving = threads & self._condition(last)
            threads = threads & ~leaving
            if last.mnemonic == "bra":
                self._add(self._running, kernel.labels[last.operands[0]], leaving)
            else:
                self._alive &= ~leaving
                self._pass_barriers()
        self._add(self._running, after, threads)

    def _execute(self, at: int, mask: Mask) -> int:
        """Execute the actions of a block; return where it ends."""
        programs = self._programs
        actions, after = self._blocks[at]
        self.num_instructions += len(actions) + 1
        if self.num_instructions > self._limit:
            raise Fault(f"{programs.kernel.name}: no end after {self._limit} instructions")
        for each, act in actions:
            if programs.writing and each.mnemonic != "wgmma":
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

    def _arrive(self, at: Instruction, threads: Array) -> None:
        self._add(self._at_barrier, at.index, threads)
        if len(self._at_barrier) > 1:
            stopped = np.stack([mask.any(1) for mask in self._at_barrier.values()])
            if (stopped.sum(0) > 1).any():
                self._programs.fail(at, "threads of a program wait at several barriers")
        self._pass_barriers()

    def _pass_barriers(self) -> None:
        """Let the programs continue of which all threads are at the barrier."""
        programs = self._programs
        for at, stopped in list(self._at_barrier.items()):
            done = (stopped == self._alive).all(1) & stopped.any(1)
            if not done.any():
                continue
            rows, ids = np.flatnonzero(done), programs.lanes.ids[done]
            programs.lanes.pass_barrier(rows)
            programs.shared.pass_barrier(rows)
            programs.memory.pass_barrier(ids)
            if programs.lanes.trace:
                programs.lanes.trace.pass_barrier(ids, at)
            del self._at_barrier[at]
            self._add(self._running, at + 1, stopped & done[:, None])
            self._add(self._at_barrier, at, stopped & ~done[:, None])

    def _release(self) -> None:
        """Execute the atomic of one of the programs that wait at atomics."""
        waiting = np.any([mask.any(1) for mask in self._held.values()], axis=0)
        rows = np.flatnonzero(waiting)
        rows = rows[np.argsort(self._programs.lanes.ids[rows])]
        row = rows[0 if self._order == "forward" else -1]
        if self._order == "interleaved":
            row = rows[int(self._random.integers(len(rows)))]
        at = min(i for i, mask in self._held.items() if mask[row].any())
        held = self._held.pop(at)
        chosen = np.zeros_like(held)
        chosen[row] = held[row]
        self._add(self._held, at, held & ~chosen)
        self._add(self._running, self._execute(at, chosen), chosen)


def _smallest(threads: Array) -> Mask:
    """A mask as `ALL` or [programs, 1], if it says the same."""
    if threads.all():
        return ALL
    whole: Array = np.asarray(threads.all(1))
    return whole[:, None] if (whole == threads.any(1)).all() else threads
