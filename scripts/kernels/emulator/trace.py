"""Which barriers of a launch order nothing: who accesses what between barriers.

This knows no more than the definition of a race, and is kept apart from what the emulator checks
while it executes. For some programs of a launch, a barrier is idle if without it, between the
barriers that remain, no place of shared memory were accessed by two warps and no place of global
memory by two threads, of which one writes, and no atomic with an order shared that time with
another access of global memory.
"""

from typing import Any

import numpy as np

from .access import Access, Array

FIELDS = {"program": 12, "space": 2, "place": 24, "epoch": 14, "actor": 8, "write": 1}
"""Bits of the fields of an access, which is kept as one number."""
SHARED, GLOBAL, ORDER = range(3)
"""Spaces; all accesses of global memory, and atomics with an order, are one place of the last."""
GROUP = 255
"""The actor of what several warps do together: another one than each of them."""
MOST = 1 << 22
"""Numbers that are kept before repeated ones are left out."""


class Trace:
    """The accesses of some programs of a launch."""

    def __init__(self, programs: Array) -> None:
        self._programs = programs
        self._passed: dict[int, list[int]] = {}  # barriers, by program
        self._keys: list[Array] = [np.zeros(0, np.int64)]
        self._size = 0

    def pass_barrier(self, programs: Array, index: int) -> None:
        """Note a barrier of some programs."""
        for program in np.intersect1d(programs, self._programs).tolist():
            self._passed.setdefault(program, []).append(index)

    def add(
        self, access: Access, space: str, index: Array, n: int, *, write: bool, ordered: bool
    ) -> None:
        """Note an access of rows of n elements; copies and products end later than they begin."""
        where = np.isin(access.of("program"), self._programs)
        program, epoch = access.of("program")[where], access.of("epoch")[where]
        place = index[where, None] * n + np.arange(n)
        actor: Any = access.of("thread" if space == "global" else "warp")[where]
        if access.by.mnemonic == "wgmma":
            actor = np.full_like(actor, GROUP)
        self._add(program, GLOBAL if space == "global" else SHARED, place, epoch, actor, write)
        if space == "global":
            self._add(program, ORDER, 0 * place[:, :1], epoch, 0 * actor + ordered, ordered)

    def _add(
        self, program: Array, space: int, place: Array, epoch: Array, actor: Array, write: bool
    ) -> None:
        one: Any = (program[:, None], space, place, epoch[:, None], actor[:, None], int(write))
        key: Array = np.zeros(place.shape, np.int64)
        for bits, values in zip(FIELDS.values(), one, strict=True):
            assert np.max(values, initial=0) < 1 << bits
            key = key << bits | values
        self._keys.append(np.unique(key))
        self._size += self._keys[-1].size
        if self._size > MOST:
            self._keys = [np.unique(np.concatenate(self._keys))]
            self._size = 0

    def passed(self) -> set[int]:
        """The barriers that were passed."""
        return {index for each in self._passed.values() for index in each}

    def idle(self) -> set[int]:
        """The barriers that order nothing, of those that were passed."""
        key = np.unique(np.concatenate(self._keys))
        columns: dict[str, Array] = {}
        for name, bits in reversed(FIELDS.items()):
            columns[name] = key & ((1 << bits) - 1)
            key = key >> bits
        suspicious = _conflicts(columns, 0 * columns["epoch"])
        columns = {name: values[suspicious] for name, values in columns.items()}
        num_epochs = 1 + int(columns["epoch"].max(initial=0))
        idle = set()
        for barrier in self.passed():
            remaining = np.zeros((1 << FIELDS["program"], num_epochs), np.int64)
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
    most, least = (
        {name: f.reduceat(columns[name], first) for name in ("actor", "epoch", "write")}
        for f in (np.maximum, np.minimum)
    )
    racing = (most["write"] > 0) & (most["actor"] > least["actor"])
    racing &= most["epoch"] > least["epoch"]
    found: Array = np.repeat(racing, np.diff(first, append=len(epoch)))
    return found
