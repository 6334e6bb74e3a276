"""What one instruction accesses in memory, for all threads that execute it, and what is wrong."""

from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from .parser import Instruction

Array = NDArray[Any]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Types of raw bits by bytes."""


class Fault(Exception):
    """Something that a GPU would execute, with a result that depends on timing or on garbage."""


class Lanes:
    """The threads of programs that run together, as they are numbered: program by program."""

    def __init__(self, kernel: str, ids: Array, num_threads: int) -> None:
        self.kernel, self.ids, self.num_threads = kernel, ids, num_threads
        self.size = len(ids) * num_threads
        self.row = np.repeat(np.arange(len(ids)), num_threads)  # among the programs of the batch
        self.program = ids[self.row]  # in the grid
        self.thread = np.tile(np.arange(num_threads), len(ids))
        self.warp = self.thread // 32
        self.epoch_of = np.zeros(len(ids), np.int64)  # barriers that each program has passed
        self.epoch = np.zeros(self.size, np.int64)
        self.checksums: dict[str, int] = {}  # by space, of what is accessed; empty: not wanted

    def pass_barrier(self, rows: Array | None) -> None:
        """Start the next epoch of some programs, or of all."""
        self.epoch_of[slice(None) if rows is None else rows] += 1
        self.epoch = self.epoch_of[self.row]


class Access:
    """Addresses [k] of those threads that execute a load or store, each of `width` bytes."""

    def __init__(
        self, by: Instruction, address: Array, width: int, lanes: Lanes, chosen: Any
    ) -> None:
        self.by, self.address, self.width = by, address, width
        self.lanes, self.chosen = lanes, chosen  # the lanes [k], or a slice of all

    @property
    def row(self) -> Array:
        """Program in the batch, [k]."""
        return np.asarray(self.lanes.row[self.chosen])

    @property
    def program(self) -> Array:
        """Program in the grid, [k]."""
        return np.asarray(self.lanes.program[self.chosen])

    @property
    def thread(self) -> Array:
        """Thread of its program, [k]."""
        return np.asarray(self.lanes.thread[self.chosen])

    @property
    def warp(self) -> Array:
        """Warp of its program, [k]."""
        return np.asarray(self.lanes.warp[self.chosen])

    @property
    def epoch(self) -> Array:
        """Barriers that its program has passed, [k]."""
        return np.asarray(self.lanes.epoch[self.chosen])

    def note(self, space: str, *values: Array) -> None:
        """Add to the checksum of a memory who accesses what, and with which values."""
        sums = self.lanes.checksums
        if sums:
            which = np.arange(self.lanes.size)[self.chosen]
            for each in (np.array(self.by.index), which, self.address, *values):
                sums[space] = crc32(each.tobytes(), sums[space])

    def part(self, part: Array) -> "Access":
        """The access of some of the threads, given as indices."""
        lanes = np.arange(self.lanes.size)[self.chosen][part]
        return Access(self.by, self.address[part], self.width, self.lanes, lanes)

    def check(self, offset: Array, size: int) -> None:
        """Raise unless all bytes are within memory of a size, and aligned."""
        if int(offset.view(np.uint64).max()) + self.width > size:
            self.fail("address outside of memory", (offset < 0) | (offset + self.width > size))
        self.check_alignment(offset)

    def check_alignment(self, offset: Array) -> None:
        """Raise unless offsets are multiples of the bytes of the access."""
        if np.bitwise_or.reduce(offset) & (self.width - 1):
            self.fail("misaligned address", offset & (self.width - 1) != 0)

    def fail(self, what: str, where: Any = None) -> None:
        """Raise a fault that names the instruction and the first threads."""
        which = np.arange(len(self.address)) if where is None else np.flatnonzero(where)
        threads = [(int(self.program[i]), int(self.thread[i])) for i in which[:4]]
        raise Fault(f"{self.lanes.kernel}: {what}: (program, thread) {threads} at {self.by}")


def take(state: Array, index: Array, n: int) -> Array:
    """The rows [k, n] of a vector that is seen as a matrix of n columns."""
    return state.reshape(-1, n).take(index, 0)


def put(state: Array, index: Array, n: int, values: Array) -> None:
    """Set rows to values that broadcast to [k, n]."""
    row = f"V{n * state.itemsize}"
    full = np.ascontiguousarray(np.broadcast_to(values, (len(index), n)), state.dtype)
    state.view(row)[index] = full.view(row)[:, 0]
