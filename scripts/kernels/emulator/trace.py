"""Which barriers of a launch order nothing: who accesses what between barriers.

This knows no more than the definition of a race, and is kept apart from what the emulator checks
while it executes. For some programs of a launch, a barrier is idle if without it, between the
barriers that remain, no place of shared memory were accessed by two warps and no place of global
memory by two threads, of which one writes, and no atomic with an order shared that time with
another access of global memory.
"""

import numpy as np

from .access import Access, Array

SHARED, GLOBAL, ORDER = range(3)
"""Where a place is; all accesses of global memory, and atomics with an order, are one of the last.
"""
_BITS = {"program": 12, "space": 2, "place": 24, "epoch": 14, "actor": 8, "write": 1}
"""Bits of the fields of an access, which is kept as one number."""
GROUP = 255
"""The actor of what several warps do together: another one than each of them."""
_MOST = 1 << 22
"""Numbers that are kept before repeated ones are left out."""


class Trace:
    """The accesses of some programs of a launch."""

    def __init__(self, programs: Array) -> None:
        self._programs = programs
        self._passed: dict[int, list[int]] = {}  # barriers, by program
        self._keys: list[Array] = [np.zeros(0, np.int64)]
        self._size = 0
        self._operands: list[tuple[Access, Array, int, int, Array]] = []  # of running products

    def pass_barrier(self, programs: Array, index: int) -> None:
        """Note a barrier of some programs."""
        for program in np.intersect1d(programs, self._programs).tolist():
            self._passed.setdefault(program, []).append(index)

    def add_global(
        self, access: Access, index: Array, n: int, *, write: bool, ordered: bool = False
    ) -> None:
        """Note an access of rows of n elements of global memory."""
        self._add(access, GLOBAL, index, n, access.thread, write=write)
        self._add(access, ORDER, 0 * index, 1, int(ordered), write=ordered)

    def add_shared(self, access: Access, index: Array, n: int, *, write: bool) -> None:
        """Note an access of rows of n elements of shared memory."""
        self._add(access, SHARED, index, n, access.warp, write=write)

    def add_operand(self, access: Access, index: Array, n: int, group: int, commit: Array) -> None:
        """Note what a warp group reads, now and when the commit [k] has been waited for."""
        which = np.flatnonzero(np.isin(access.program, self._programs))
        if len(which):
            access, index = access.part(which), index[which]
            self._operands.append((access, index, n, group, commit[which]))
            self._add(access, SHARED, index, n, GROUP, write=False)

    def wait_for_products(self, waits: Array) -> None:
        """Note the reads of the products that have been waited for, of [programs, groups]."""
        running = []
        for access, index, n, group, commit in self._operands:
            done = commit < waits[access.row, group]
            ended, rest = np.flatnonzero(done), np.flatnonzero(~done)
            if len(ended):
                self._add(access.part(ended), SHARED, index[ended], n, GROUP, write=False)
            if len(rest):
                running.append((access.part(rest), index[rest], n, group, commit[rest]))
        self._operands = running

    def _add(
        self, access: Access, space: int, index: Array, n: int, actor: Array | int, *, write: bool
    ) -> None:
        values = (access.program, space, index * n, access.epoch, actor, int(write))
        key, shift = np.zeros(len(index), np.int64), sum(_BITS.values())
        for (name, bits), value in zip(_BITS.items(), values, strict=True):
            shift -= bits
            assert np.max(value, initial=0) < 1 << bits
            key |= np.asarray(value, np.int64) << shift
            if name == "place":
                step = 1 << shift
        key = np.unique(key[np.isin(access.program, self._programs)])
        self._keys.append((key[:, None] + step * np.arange(n)).ravel())
        self._size += self._keys[-1].size
        if self._size > _MOST:
            self._keys = [np.unique(np.concatenate(self._keys))]
            self._size = 0

    def passed(self) -> set[int]:
        """The barriers that were passed."""
        return {index for each in self._passed.values() for index in each}

    def idle(self) -> set[int]:
        """The barriers that order nothing, of those that were passed."""
        key = np.unique(np.concatenate(self._keys))
        columns: dict[str, Array] = {}
        for name, bits in reversed(_BITS.items()):
            columns[name] = key & ((1 << bits) - 1)
            key = key >> bits
        suspicious = _conflicts(columns, 0 * columns["epoch"])
        columns = {name: values[suspicious] for name, values in columns.items()}
        num_epochs = 1 + int(columns["epoch"].max(initial=0))
        idle = set()
        for barrier in self.passed():
            remaining = np.zeros((1 << _BITS["program"], num_epochs), np.int64)
            for program, passed in self._passed.items():
                count = np.cumsum([0, *(index != barrier for index in passed)])[:num_epochs]
                remaining[program, : len(count)] = count
            epoch = remaining[columns["program"], columns["epoch"]]
            if not _conflicts(columns, epoch).any():
                idle.add(barrier)
        return idle


def _conflicts(columns: dict[str, Array], epoch: Array) -> Array:
    """Which accesses are of a place where some race, if the barriers left make other epochs."""
    parts = [columns["program"], columns["space"], columns["place"], epoch]
    first = np.flatnonzero(np.any([np.diff(part, prepend=-1) != 0 for part in parts], axis=0))
    if not len(first):
        return np.zeros(0, np.bool_)

    def differs(name: str) -> Array:
        values = columns[name]
        most, least = (f.reduceat(values, first) for f in (np.maximum, np.minimum))
        return np.asarray(most != least)

    written = np.maximum.reduceat(columns["write"], first) > 0
    sizes = np.diff(first, append=len(epoch))
    racing: Array = np.repeat(differs("actor") & differs("epoch") & written, sizes)
    return racing
