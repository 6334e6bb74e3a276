"""What one instruction accesses in memory, for all threads that execute it, and what is wrong."""

from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from .ptx import Instruction

if TYPE_CHECKING:
    from .trace import Trace

Array = NDArray[Any]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Types of raw bits by bytes."""


class Fault(Exception):
    """Something that a GPU would execute, with a result that depends on timing or on garbage."""


class Lanes:
    """The threads of programs that run together, as they are numbered: program by program.

    Attributes:
        row: program in the batch, of every lane.
        program: program in the grid.
        thread: thread of its program.
        warp: warp of its program.
        epoch: barriers that its program has passed.
        checksums: by space, of what is accessed; empty if not wanted.
        trace: of accesses, if wanted.
    """

    def __init__(
        self, kernel: str, ids: Array, num_threads: int, trace: "Trace | None" = None
    ) -> None:
        self.kernel, self.ids, self.num_threads, self.trace = kernel, ids, num_threads, trace
        self.size = len(ids) * num_threads
        self.row = np.repeat(np.arange(len(ids)), num_threads)
        self.program = ids[self.row]
        self.thread = np.tile(np.arange(num_threads), len(ids))
        self.warp = self.thread // 32
        self.epoch = np.zeros(self.size, np.int64)
        self.checksums: dict[str, int] = {}

    def pass_barrier(self, rows: Array) -> None:
        """Start the next epoch of some programs."""
        self.epoch.reshape(-1, self.num_threads)[rows] += 1


class Access:
    """Addresses [k] of those threads that execute a load or store, each of `width` bytes."""

    def __init__(
        self, by: Instruction, address: Array, width: int, lanes: Lanes, chosen: Any
    ) -> None:
        self.by, self.address, self.width = by, address, width
        self.lanes, self.chosen = lanes, chosen  # the lanes [k], or a slice of all

    def of(self, name: str) -> Array:
        """An attribute of the lanes, [k]."""
        values: Array = getattr(self.lanes, name)[self.chosen]
        return values

    @property
    def lane(self) -> Array:
        """The lanes, [k]."""
        lanes: Array = np.arange(self.lanes.size)[self.chosen]
        return lanes

    def note(
        self, space: str, index: Array, n: int, *raw: Array, write: bool, ordered: bool = False
    ) -> None:
        """Add rows [k] of n elements to the checksum, with what is written, and to the trace."""
        sums = self.lanes.checksums
        if sums:
            for each in (np.array(self.by.index), self.lane, self.address, *raw):
                sums[space] = crc32(each.tobytes(), sums[space])
        if self.lanes.trace:
            self.lanes.trace.add(self, space, index, n, write=write, ordered=ordered)

    def part(self, part: Array) -> "Access":
        """The access of some of the threads, given as indices."""
        return Access(self.by, self.address[part], self.width, self.lanes, self.lane[part])

    def check_alignment(self, offset: Array) -> None:
        """Raise unless offsets are multiples of the bytes of the access."""
        if np.bitwise_or.reduce(offset) & (self.width - 1):
            self.fail("misaligned address", offset & (self.width - 1) != 0)

    def fail(self, what: str, where: Any) -> None:
        """Raise a fault that names the instruction and the first threads, of a mask [k]."""
        which, program, thread = np.flatnonzero(where), self.of("program"), self.of("thread")
        threads = [(int(program[i]), int(thread[i])) for i in which[:4]]
        raise Fault(f"{self.lanes.kernel}: {what}: (program, thread) {threads} at {self.by}")


def take(state: Array, index: Array, n: int) -> Array:
    """The rows [k, n] of a vector that is seen as a matrix of n columns."""
    return state.reshape(-1, n).take(index, 0)


def put(state: Array, index: Array, n: int, values: Array) -> None:
    """Set rows to values that broadcast to [k, n]."""
    row = f"V{n * state.itemsize}"
    full = np.ascontiguousarray(np.broadcast_to(values, (len(index), n)), state.dtype)
    state.view(row)[index] = full.view(row)[:, 0]
