"""Global memory of a launch: the tensors, far apart, and what is known of each element.

Addresses are virtual. Tensors begin at multiples of `SPACING`, so that an address or a difference
of two tensors' addresses that is computed in 32 bits is outside of all tensors.

Programs are ordered by vector clocks. A program's time is the number of barriers that it has
passed. An atomic with acquire and release publishes what the program did before its last barrier,
and makes what others have published there known to the threads behind the next barrier. Two
accesses of one element by different programs, of which one is a plain store, are a race unless the
second program knows of the first access.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from .access import UNSIGNED, Access, Array, put, take

SPACING = 1 << 36
"""Bytes from the address of a tensor to that of the next one; the first has this address."""
PAGE = 512
"""Bytes of which a multiple is kept for each tensor."""
GUARD, UNWRITTEN, BEFORE = -3, -2, -1
"""Writers of elements: no tensor, nobody yet, somebody before the launch."""


class Buffer(NamedTuple):
    """A tensor of a launch, or a part of one whose parts are far apart."""

    name: str
    contents: Array  # bytes
    has_values: Array  # of every byte
    item: int  # bytes of an element
    address: int  # virtual, a multiple of the bytes of any access


class GlobalMemory:
    """Copies of the tensors of a launch, in the order of their addresses.

    What nobody has written is NaN, or -1.

    Attributes:
        data: bytes of all tensors, one behind the other.
        start: of each tensor in the data.
        loaded: bytes by tensor, each once for every program and instruction, if counting.
        stored: the same of stores.
    """

    def __init__(self, num_programs: int, tensors: list[Buffer], *, counting: bool) -> None:
        self.num_programs, self._counting = num_programs, counting
        self.names = [each.name for each in tensors]
        reserved = [-(-len(each.contents) // PAGE) * PAGE for each in tensors]
        begins = np.cumsum([0, *reserved])
        self.start: list[int] = begins[:-1].tolist()
        self.data = np.full(begins[-1], 0xFF, np.uint8)
        self._tensor = np.repeat(np.arange(len(tensors)), np.array(reserved, int) // PAGE)  # pages
        writers = [np.zeros(0, np.int32)]
        for i, (_, contents, has_values, item, _) in enumerate(tensors):
            begin = self.start[i]
            self.data[begin : begin + len(contents)] = np.where(has_values, contents, 0xFF)
            known = np.asarray(has_values.reshape(-1, item).all(1))
            writers.append(np.full(reserved[i] // item, GUARD, np.int32))
            writers[-1][: len(known)] = np.where(known, BEFORE, UNWRITTEN)
        self._address = np.array([each.address for each in tensors], np.int64)
        assert (np.diff(self._address) >= reserved[:-1]).all()
        self._start, self._reserved = np.array(self.start), np.array(reserved, np.uint64)
        self._shift = np.array([each.item.bit_length() - 1 for each in tensors])  # log2 of bytes
        self._first = np.cumsum([len(each) for each in writers])  # element of each tensor
        self._size = [len(each.contents) // each.item for each in tensors]  # in elements
        self.writer = np.concatenate(writers)
        num_elements = len(self.writer)
        self._write_epoch = np.zeros(num_elements, np.int32)
        self._write_thread = np.zeros(num_elements, np.int32)
        self._by_atomic = np.zeros(num_elements, np.bool_)
        self._was_read = np.zeros(num_elements, np.bool_)
        self._read_epoch = np.zeros((num_programs, num_elements), np.int16)  # + 1
        self.clock = np.zeros((num_programs, num_programs), np.int64)
        self._acquired = np.zeros_like(self.clock)
        self._released: dict[int, Array] = {}
        self._last = np.zeros(len(self.data), np.int32)
        self.loaded: Counter[str] = Counter()
        self.stored: Counter[str] = Counter()

    def _elements(self, state: Array, index: int) -> Array:
        """The state of the elements of a tensor."""
        first = self._first[index]
        return state[first : first + self._size[index]]

    def written(self, index: int) -> Array:
        """Which bytes of a tensor have values."""
        return np.repeat(self._elements(self.writer, index) >= BEFORE, 1 << self._shift[index])

    def once(self) -> Counter[str]:
        """Bytes that were read and bytes that were written, by tensor, every element once."""
        found: Counter[str] = Counter()
        for i, name in enumerate(self.names):
            read, writer = self._elements(self._was_read, i), self._elements(self.writer, i)
            found[name] = (int(read.sum()) + int((writer >= 0).sum())) << int(self._shift[i])
        return found

    def pass_barrier(self, programs: Array | slice) -> None:
        """Let programs know what they have acquired."""
        self.clock[programs] = np.maximum(self.clock[programs], self._acquired[programs])

    def load(self, access: Access) -> Array:
        """Bytes [k, width]."""
        offset, index, n = self._rows(access, "read")
        access.note("global", index, n, write=False)
        writer = take(self.writer, index, n)
        if writer.min() < BEFORE:
            access.fail("read of memory that nobody wrote", (writer < BEFORE).any(1))
        if writer.max() >= 0:
            self._check_order(access, index, writer, "read of what another {} wrote")
        put(self._was_read, index, n, np.array(True))
        epochs = self._read_epoch.reshape(self.num_programs, -1, n)
        epochs[access.of("program"), index] = access.of("epoch")[:, None] + 1
        if self._counting:
            self._count(access, offset, self.loaded)
        return take(self.data, offset // access.width, access.width)

    def store(self, access: Access, raw: Array) -> None:
        """Write bytes [k, width]."""
        offset, index, n = self._rows(access, "write")
        access.note("global", index, n, raw, write=True)
        place, order = offset // access.width, np.arange(len(index), dtype=np.int32)
        self._last[place] = order
        twice = self._last[place] != order
        if twice.any():
            access.fail("two threads write one place at once", twice)
        self._write(access, index, n, "write where another {} wrote", by_atomic=False)
        if self._counting:
            self._count(access, offset, self.stored)
        put(self.data, place, access.width, raw)

    def atomic(self, access: Access, added: Array, *, ordered: bool) -> Array:
        """Add numbers [k], thread by thread; return the old ones [k]."""
        offset, index, n = self._rows(access, "write")
        words = self.data.view(UNSIGNED[access.width])
        old = np.zeros(len(index), words.dtype)
        for i, place in enumerate((offset // access.width).tolist()):
            one, where = access.part(np.array([i])), index[i : i + 1]
            if take(self.writer, where, n).min() < BEFORE:
                one.fail("atomic on memory that nobody wrote", np.array([True]))
            self._write(one, where, n, "atomic where another {} wrote", by_atomic=True)
            old[i] = words[place]
            words[place] += added[i]
            one.note("global", where, n, words[place], write=True, ordered=ordered)
            if ordered:
                self._synchronise(int(one.of("program")[0]), int(one.of("epoch")[0]), place)
            if self._counting:
                self._count(one, offset[i : i + 1], self.stored)
        if self._counting:
            self._count(access, offset, self.loaded)
        return old

    def _write(self, access: Access, index: Array, n: int, what: str, *, by_atomic: bool) -> None:
        """Check and note a write to rows of elements; atomics do not race with one another."""
        writer = take(self.writer, index, n)
        if writer.max() >= 0 and not (by_atomic and take(self._by_atomic, index, n).all()):
            self._check_order(access, index, writer, what)
        self._check_readers(access, index, n)
        put(self.writer, index, n, access.of("program")[:, None])
        put(self._write_epoch, index, n, access.of("epoch")[:, None])
        put(self._write_thread, index, n, access.of("thread")[:, None])
        put(self._by_atomic, index, n, np.array(by_atomic))

    def _synchronise(self, program: int, epoch: int, place: int) -> None:
        mine = self.clock[program].copy()
        mine[program] = epoch
        released = self._released.get(place, mine)
        self._acquired[program] = np.maximum(self._acquired[program], released)
        self._released[place] = np.maximum(released, mine)

    def _rows(self, access: Access, what: str) -> tuple[Array, Array, int]:
        """Where an access is: offsets [k] into the data, rows [k] of elements, a row's length."""
        tensor = np.searchsorted(self._address, access.address, "right") - 1
        within = access.address - self._address[tensor]  # negative if below all tensors
        outside = within.view(np.uint64) + np.uint64(access.width) > self._reserved[tensor]
        if outside.any():
            access.fail(f"{what} outside of tensors", outside)
        access.check_alignment(within)
        low = tensor.min()
        shift = self._shift[low]
        if low != tensor.max() and (self._shift[tensor] != shift).any():
            access.fail("tensors of several dtypes", self._shift[tensor] != shift)
        n = max(access.width >> shift, 1)
        index = (self._first[tensor] + (within >> shift)) // n
        writer = take(self.writer, index, n)
        if writer.min() == GUARD:
            access.fail(f"{what} outside of tensors", (writer == GUARD).any(1))
        return self._start[tensor] + within, index, n

    def _check_order(self, access: Access, index: Array, writer: Array, what: str) -> None:
        """Raise unless the writers [k, n] are known to have finished."""
        n = writer.shape[1]
        program, epoch = access.of("program")[:, None], take(self._write_epoch, index, n)
        foreign = (writer >= 0) & (writer != program)
        if foreign.any():
            racing = foreign & (self.clock[program, np.maximum(writer, 0)] <= epoch)
            if racing.any():
                access.fail("race: " + what.format("program"), racing.any(1))
        racing = (writer == program) & (epoch == access.of("epoch")[:, None])
        if racing.any():
            racing &= take(self._write_thread, index, n) != access.of("thread")[:, None]
        if racing.any():
            access.fail("race: " + what.format("thread") + ", no barrier between", racing.any(1))

    def _check_readers(self, access: Access, index: Array, n: int) -> None:
        """Raise if another program, not known to have finished, has read the elements."""
        was_read = take(self._was_read, index, n).any(1)
        if not was_read.any():
            return
        every, programs = self._read_epoch.reshape(self.num_programs, -1, n), access.of("program")
        for program in np.unique(programs[was_read]):
            mine = was_read & (programs == program)
            epochs = every[:, index[mine]].max((1, 2))
            racing = (epochs > 0) & (self.clock[program] <= epochs - 1)
            racing[program] = False
            if racing.any():
                access.fail("race: write of what another program has read", mine)

    def _count(self, access: Access, offset: Array, counter: Counter[str]) -> None:
        """Count bytes, each once in a program."""
        size = len(self.data)
        place = np.unique(access.of("program") * size + offset) % size
        tensors, times = np.unique(self._tensor[place // PAGE], return_counts=True)
        for tensor, number in zip(tensors, times, strict=True):
            counter[self.names[tensor]] += int(number) * access.width
