"""Shared memory of the programs of a batch, and what is known of each of its elements.

A race is an access by two warps, of which one writes, without a barrier between. Copies in flight
(cp.async) become visible when their thread waits for them. What a running wgmma reads may not be
written until it has been waited for. wgmma reads through the asynchronous proxy: what ordinary
stores and cp.async wrote must be behind a proxy fence.

A program's time advances at barriers and proxy fences. A write or read is kept as its time and
warp in one number. Accesses are aligned to their width, so that the elements of one are a row of
the state, if that is seen as a matrix.
"""

from typing import NamedTuple

import numpy as np

from .access import Access, Array, Lanes, put, take
from .ptx import Instruction

BASE = 1024
"""Address of the first byte: swizzles repeat after so many."""
IN_FLIGHT, UNWRITTEN = -2, -1
WARP_BITS = 6
SEVERAL = (1 << WARP_BITS) - 1
"""Takes the place of a warp, where several have read since the last barrier."""
PIECE = 16
"""Bytes of a row that are contiguous in all layouts of the operands of wgmma."""


class Pending(NamedTuple):
    """An asynchronous copy, or the reads of a product, until it is waited for."""

    access: Access
    group: Array  # [k], the number of the commit that ends it
    raw: Array  # [k, width], what a copy writes

    def part(self, which: Array) -> "Pending":
        """What some of the threads do."""
        which = np.flatnonzero(which)
        return Pending(self.access.part(which), self.group[which], self.raw[which])


class SharedMemory:
    """Shared memory of `num_bytes` for each program of a batch.

    Attributes:
        useful: waits and fences that found something to order.
        product_commits: groups of products that each warp group has closed, [programs, groups].
        product_waits: those that it has waited for.
    """

    def __init__(self, lanes: Lanes, num_bytes: int, element_bytes: int) -> None:
        self.lanes, self.num_bytes, self._element_bytes = lanes, num_bytes, element_bytes
        self._size = -(-num_bytes // PIECE) * PIECE + PIECE
        num_programs = len(lanes.ids)
        self.data = np.full(num_programs * self._size, 0xFF, np.uint8)
        self._time = np.zeros(num_programs, np.int32)
        self._barrier = np.zeros(num_programs, np.int32)  # time of the last one
        self._fence = np.zeros(num_programs, np.int32)
        self._set_marks()
        total = self.data.size // element_bytes
        self._write = np.full(total, UNWRITTEN, np.int32)  # time and warp
        self._read = np.full(total, -1, np.int32)  # time of the barrier before, and warp
        self._unfenced = np.zeros(num_programs, np.bool_)  # whether any write is
        self.useful: set[int] = set()
        self._copies: list[Pending] = []
        self._copy_commits = np.zeros(lanes.size, np.int32)
        self._copy_waits = np.zeros(lanes.size, np.int32)
        num_groups = -(-lanes.num_threads // 128)
        self._products: list[list[Pending]] = [[] for _ in range(num_groups)]  # for the trace
        self._product: list[Array] = []  # by warp group: 1 + the commit of the last one that reads
        self.product_commits = np.zeros((num_programs, num_groups), np.int32)
        self.product_waits = np.zeros((num_programs, num_groups), np.int32)
        self._products_ordered = self.product_waits.copy()  # waited for before the last barrier

    def _set_marks(self) -> None:
        """What is kept of a write or read by each lane, and the least of what no barrier orders."""
        row, warp = self.lanes.row, self.lanes.warp.astype(np.int32)
        self._since = ((self._barrier << WARP_BITS)[row])[:, None]
        self._read_mark = self._since + warp[:, None]
        self._write_mark = ((self._time << WARP_BITS)[row] + warp)[:, None]

    def pass_barrier(self, rows: Array) -> None:
        """Order what the warps of some programs have done."""
        self._time[rows] += 1
        self._barrier[rows] = self._time[rows]
        self._products_ordered[rows] = self.product_waits[rows]
        self._set_marks()

    def fence_proxies(self, rows: Array, by: Instruction) -> None:
        """Make what programs wrote visible to wgmma."""
        if self._unfenced[rows].any():
            self.useful.add(by.index)
        self._unfenced[rows] = False
        self._time[rows] += 1
        self._fence[rows] = self._time[rows]
        self._set_marks()

    def load(self, access: Access) -> Array:
        """Bytes [k, width]."""
        index, n = self._rows(access)
        access.note("shared", index, n, write=False)
        write = take(self._write, index, n)
        self._check_written(access, write, "read")
        since, mark = self._since[access.chosen], self._read_mark[access.chosen]
        self._check_writer(access, write, since, "read of what another warp wrote")
        before = take(self._read, index, n)
        put(self._read, index, n, mark)
        several = take(self._read, index, n) != mark
        if before.max() >= since.min():
            several |= (before >= since) & (before != mark)
        if several.any():
            which = several.any(1)
            marks = np.where(several, since + SEVERAL, mark)[which]
            put(self._read, index[which], n, marks)
        return take(self.data, index, access.width)

    def store(self, access: Access, raw: Array) -> None:
        """Write bytes [k, width]."""
        index, n = self._rows(access)
        access.note("shared", index, n, raw, write=True)
        self._check_write(access, index, n)
        put(self.data, index, access.width, raw)
        differs = (take(self.data, index, access.width) != raw).any(1)
        if differs.any():
            access.fail("threads write different values to one place", differs)
        self._set_written(access, index, n)

    def _set_written(self, access: Access, index: Array, n: int) -> None:
        put(self._write, index, n, self._write_mark[access.chosen])
        self._unfenced[access.of("row")] = True

    def copy(self, access: Access, raw: Array) -> None:
        """Issue an asynchronous copy of bytes [k, width]."""
        index, n = self._rows(access)
        access.note("shared", index, n, raw, write=True)
        self._check_write(access, index, n)
        put(self._write, index, n, np.array(IN_FLIGHT))
        self._copies.append(Pending(access, self._copy_commits[access.chosen].copy(), raw))

    def commit_copies(self, chosen: Array | slice) -> None:
        """Close the group of the copies that some lanes have issued."""
        self._copy_commits[chosen] += 1

    def wait_for_copies(self, chosen: Array | slice, num_pending: int, by: Instruction) -> None:
        """Let the copies of some lanes arrive, but for the newest groups."""
        done = self._copy_commits[chosen] - num_pending
        self._copy_waits[chosen] = np.maximum(self._copy_waits[chosen], done)
        remaining = []
        for copy in self._copies:
            landed = copy.group < self._copy_waits[copy.access.chosen]
            if landed.any():
                self.useful.add(by.index)
                access, _, raw = copy if landed.all() else copy.part(landed)
                index, n = self._rows(access)
                access.note("shared", index, n, write=True)
                put(self.data, index, access.width, raw)
                self._set_written(access, index, n)
            if not landed.all():
                remaining.append(copy.part(~landed))
        self._copies = remaining

    def operand(self, by: Instruction, rows: Array, warpgroup: int, address: Array) -> Array:
        """What a warp group's wgmma reads at addresses [...], for programs: [k, ..., PIECE]."""
        thread = 128 * warpgroup
        lanes = (rows[:, None] * self.lanes.num_threads + thread).repeat(address.size, 1).ravel()
        every = np.tile(address.ravel(), len(rows))
        access = Access(by, every, PIECE, self.lanes, lanes)
        index, n = self._rows(access)
        access.note("shared", index, n, write=False)
        write, row = take(self._write, index, n), access.of("row")
        self._check_written(access, write, "wgmma")
        latest = write.reshape(len(rows), -1).max(1) >> WARP_BITS
        if (latest >= self._barrier[rows]).any():
            racing = (write >= self._since[lanes]).any(1)
            access.fail("race: wgmma of what was written since the last barrier", racing)
        if (latest >= self._fence[rows]).any():
            unfenced = (write >> WARP_BITS >= self._fence[row][:, None]).any(1)
            access.fail("wgmma of what ordinary stores wrote, no proxy fence between", unfenced)
        if not self._product:
            self._product = [np.zeros_like(self._write) for _ in self._products]
        commit = self.product_commits[row, warpgroup]
        put(self._product[warpgroup], index, n, commit[:, None] + 1)
        raw = take(self.data, index, PIECE)
        if self.lanes.trace:
            self._products[warpgroup].append(Pending(access, commit, raw))
        return raw.reshape(len(rows), *address.shape, PIECE)

    def wait_for_products(self, rows: Array, num_pending: int, by: Instruction) -> None:
        """Let the products of programs end, but for the newest groups."""
        done = self.product_commits[rows] - num_pending
        if (done > self.product_waits[rows]).any():
            self.useful.add(by.index)
        self.product_waits[rows] = np.maximum(self.product_waits[rows], done)
        for group, products in enumerate(self._products):
            remaining = []
            for product in products:
                ended = product.group < self.product_waits[product.access.of("row"), group]
                if ended.any():
                    access = product.part(ended).access
                    access.note("shared", *self._rows(access), write=False)
                if not ended.all():
                    remaining.append(product.part(~ended))
            self._products[group] = remaining

    def _rows(self, access: Access) -> tuple[Array, int]:
        """Where an access is: rows [k], of `width` bytes, and how many elements a row has."""
        offset, width = access.address - BASE, access.width
        if int(offset.view(np.uint64).max()) + width > self.num_bytes:
            outside = (offset < 0) | (offset + width > self.num_bytes)
            access.fail("address outside of memory", outside)
        access.check_alignment(offset)
        return (offset + access.of("row") * self._size) // width, width // self._element_bytes

    def _check_written(self, access: Access, write: Array, what: str) -> None:
        if write.min() < 0:
            early = (write == IN_FLIGHT).any(1)
            if early.any():
                access.fail(f"{what} of an asynchronous copy before it was waited for", early)
            access.fail(f"{what} of shared memory that nobody wrote", (write < 0).any(1))

    def _check_writer(self, access: Access, write: Array, since: Array, what: str) -> None:
        """Raise if another warp has written since the last barrier."""
        if write.max() >= since.min():
            racing = (write >= since) & (write & SEVERAL != access.of("warp")[:, None])
            if racing.any():
                access.fail(f"race: {what}, no barrier between", racing.any(1))

    def _check_write(self, access: Access, index: Array, n: int) -> None:
        """Raise if a write is not ordered behind what has been done with rows of elements."""
        write, since = take(self._write, index, n), self._since[access.chosen]
        if write.min() == IN_FLIGHT:
            access.fail("write into an asynchronous copy", (write == IN_FLIGHT).any(1))
        self._check_writer(access, write, since, "write where another warp wrote")
        read = take(self._read, index, n)
        reads = [(read >= since) & (read != self._read_mark[access.chosen])]
        for group, products in enumerate(self._product):
            product, row = take(products, index, n), access.of("row")
            running = product > self.product_waits[row, group][:, None]
            if running.any():
                what = "write into an operand of a wgmma that is running"
                access.fail(what, running.any(1))
            reads.append(product > self._products_ordered[row, group][:, None])
        for racing in reads:
            if racing.any():
                what = "race: write of what another warp has read, no barrier between"
                access.fail(what, racing.any(1))
