"""Global memory of a launch: the tensors between guard bands, and what is known of each element.

Programs are ordered by vector clocks. A program's time is the number of barriers that it has
passed. A release publishes what the program did before its last barrier; an acquire makes that
known to the threads behind the next barrier. Two accesses of one element by different programs, of
which one is a plain store, are a race unless the second program knows of the first access.
"""

from collections import Counter
from typing import Any

import numpy as np

from .access import Access, Array, Fault, gather, scatter

BASE = 0x7F00_0000_0000
"""Address of the first byte."""
PAGE = 512
"""Bytes between tensors, and of which a multiple is reserved for each."""
GUARD, UNWRITTEN, BEFORE = -3, -2, -1
"""Writers of elements: no tensor, nobody yet, somebody before the launch."""


class GlobalMemory:
    """The memory of a launch; tensors are added before it is sealed."""

    def __init__(self, num_programs: int) -> None:
        self.num_programs = num_programs
        self.names: list[str] = []
        self.start: list[int] = []
        self.shift: list[int] = []  # log2 of the bytes of an element
        self._contents: list[tuple[Array, Array]] = []
        self._end = PAGE
        self.loaded: Counter[str] = Counter()  # bytes by tensor, each once per program and load
        self.stored: Counter[str] = Counter()
        self.counting = False

    def add(self, name: str, contents: Array, written: Array, item: int) -> int:
        """Add the bytes of a tensor, and which of them have values; return its address."""
        self.names.append(name)
        self.start.append(self._end)
        self.shift.append(item.bit_length() - 1)
        self._contents.append((contents, written))
        self._end += -(-len(contents) // PAGE) * PAGE + PAGE
        return BASE + self.start[-1]

    def seal(self) -> None:
        """Copy the tensors; what nobody has written is NaN, or -1."""
        self.data = np.full(self._end, 0xFF, np.uint8)
        self._page = np.full(self._end // PAGE, -1, np.int64)  # which tensor
        self._first = np.zeros(len(self.names), np.int64)  # element of each tensor
        writers = []
        num_elements = 0
        for i, (contents, written) in enumerate(self._contents):
            begin, end = self.start[i], self.start[i] + len(contents)
            self.data[begin:end] = np.where(written, contents, 0xFF)
            reserved = -(-len(contents) // PAGE) * PAGE
            self._page[begin // PAGE : (begin + reserved) // PAGE] = i
            writer = np.full(reserved >> self.shift[i], GUARD, np.int32)
            item = 1 << self.shift[i]
            known: Array = np.asarray(written.reshape(-1, item).all(1))
            writer[: len(known)] = np.where(known, BEFORE, UNWRITTEN)
            writers.append(writer)
            self._first[i] = num_elements
            num_elements += len(writer)
        self._start, self._shift = np.array(self.start), np.array(self.shift)
        self.writer = np.concatenate(writers) if writers else np.zeros(0, np.int32)
        self._write_epoch = np.zeros(num_elements, np.int32)
        self._write_thread = np.zeros(num_elements, np.int32)
        self._by_atomic = np.zeros(num_elements, np.bool_)
        self._was_read = np.zeros(num_elements, np.bool_)
        self._read_epoch = np.zeros((self.num_programs, num_elements), np.int16)  # + 1
        self.clock = np.zeros((self.num_programs, self.num_programs), np.int64)
        self._acquired = np.zeros_like(self.clock)
        self._released: dict[int, Array] = {}
        self._last = np.zeros(self._end, np.int32)

    def written(self, index: int) -> Array:
        """Which bytes of a tensor have values."""
        size, shift = len(self._contents[index][0]), self.shift[index]
        first = self._first[index]
        return np.repeat(self.writer[first : first + (size >> shift)] >= BEFORE, 1 << shift)

    def pass_barrier(self, programs: Array | slice) -> None:
        """Let programs know what they have acquired."""
        self.clock[programs] = np.maximum(self.clock[programs], self._acquired[programs])

    def load(self, access: Access) -> Array:
        """Bytes [k, width]."""
        offset = access.address - BASE
        access.check(offset, len(self.data))
        element = self._elements(access, offset, "read")
        writer = self.writer[element]
        if writer.min() < BEFORE:
            access.fail("read of memory that nobody wrote", (writer < BEFORE).any(1))
        if writer.max() >= 0:
            self._check_order(access, element, writer, "read of what another {} wrote")
        self._was_read[element] = True
        self._read_epoch[access.program[:, None], element] = access.epoch[:, None] + 1
        if self.counting:
            self._count(self.loaded, access, offset)
        return gather(self.data, offset, access.width)

    def store(self, access: Access, raw: Array) -> None:
        """Write bytes [k, width]."""
        offset = access.address - BASE
        access.check(offset, len(self.data))
        element = self._elements(access, offset, "write")
        writer = self.writer[element]
        last = self._last  # writer of each place, among the threads
        slot, order = offset // access.width, np.arange(len(offset), dtype=np.int32)
        last[slot] = order
        if (last[slot] != order).any():
            access.fail("two threads write one place at once", last[slot] != order)
        if writer.max() >= 0:
            self._check_order(access, element, writer, "write where another {} wrote")
        self._check_readers(access, element)
        self.writer[element] = access.program[:, None]
        self._write_epoch[element] = access.epoch[:, None]
        self._write_thread[element] = access.thread[:, None]
        self._by_atomic[element] = False
        if self.counting:
            self._count(self.stored, access, offset)
        scatter(self.data, offset, raw)

    def atomic(self, access: Access, update: Any, order: str) -> Array:
        """Replace values by `update(old, i)`, thread by thread; return the old ones [k]."""
        offset = access.address - BASE
        access.check(offset, len(self.data))
        element = self._elements(access, offset, "write")
        words = self.data.view(f"u{access.width}")
        old = np.zeros(len(offset), words.dtype)
        for i in range(len(offset)):
            one = access.part(np.array([i]))
            writer = self.writer[element[i : i + 1]]
            if writer.min() < BEFORE:
                access.fail("atomic on memory that nobody wrote", np.arange(len(offset)) == i)
            if writer.max() >= 0 and not self._by_atomic[element[i]].all():
                self._check_order(one, element[i : i + 1], writer, "atomic where another {} wrote")
            self._check_readers(one, element[i : i + 1])
            place = offset[i] // access.width
            old[i] = words[place]
            words[place] = update(old[i], i)
            self._synchronise(int(access.program[i]), int(access.epoch[i]), int(place), order)
        self.writer[element] = access.program[:, None]
        self._write_epoch[element] = access.epoch[:, None]
        self._write_thread[element] = access.thread[:, None]
        self._by_atomic[element] = True
        if self.counting:
            self._count(self.loaded, access, offset)
            self._count(self.stored, access, offset)
        return old

    def _synchronise(self, program: int, epoch: int, place: int, order: str) -> None:
        released = self._released.get(place)
        if order in {"acquire", "acq_rel"} and released is not None:
            self._acquired[program] = np.maximum(self._acquired[program], released)
        if order in {"release", "acq_rel"}:
            mine = self.clock[program].copy()
            mine[program] = epoch
            self._released[place] = mine if released is None else np.maximum(released, mine)

    def _elements(self, access: Access, offset: Array, what: str) -> Array:
        """Elements [k, n] that are accessed."""
        tensor = self._page[offset // PAGE]
        if tensor.min() < 0:
            access.fail(f"{what} outside of tensors", tensor < 0)
        low = tensor.min()
        shift = self._shift[low]
        if low != tensor.max() and (self._shift[tensor] != shift).any():
            raise Fault(f"{access.kernel}: tensors of several dtypes at #{access.by.index}")
        first = self._first[tensor] + ((offset - self._start[tensor]) >> shift)
        element = first[:, None] + np.arange(max(access.width >> shift, 1))
        if self.writer[element].min() == GUARD:
            beyond = (self.writer[element] == GUARD).any(1)
            access.fail(f"{what} outside of tensors", beyond)
        return np.asarray(element)

    def _check_order(self, access: Access, element: Array, writer: Array, what: str) -> None:
        """Raise unless the writers are known to have finished."""
        program, epoch = access.program[:, None], self._write_epoch[element]
        foreign = (writer >= 0) & (writer != program)
        if foreign.any():
            racing = foreign & (self.clock[program, np.maximum(writer, 0)] <= epoch)
            if racing.any():
                access.fail("race: " + what.format("program"), racing.any(1))
        now = (writer == program) & (epoch == access.epoch[:, None])
        racing = now & (self._write_thread[element] != access.thread[:, None])
        if racing.any():
            access.fail("race: " + what.format("thread") + ", no barrier between", racing.any(1))

    def _check_readers(self, access: Access, element: Array) -> None:
        """Raise if another program, not known to have finished, has read the elements."""
        was_read = self._was_read[element].any(1)
        if not was_read.any():
            return
        for program in np.unique(access.program[was_read]):
            mine = was_read & (access.program == program)
            epochs = self._read_epoch[:, element[mine]].reshape(self.num_programs, -1).max(1)
            racing = (epochs > 0) & (self.clock[program] <= epochs - 1)
            racing[program] = False
            if racing.any():
                access.fail("race: write of what another program has read", mine)

    def _count(self, counter: Counter[str], access: Access, offset: Array) -> None:
        """Count the bytes, each once in a program."""
        key = np.unique(access.program * len(self.data) + offset)
        tensors, times = np.unique(self._page[key % len(self.data) // PAGE], return_counts=True)
        for tensor, number in zip(tensors, times, strict=True):
            counter[self.names[tensor]] += int(number) * access.width
