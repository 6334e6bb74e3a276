"""Shared memory of the programs of a batch, and what is known of each of its elements.

A race is an access by two warps, of which one writes, without a barrier between. Copies in flight
(cp.async) become visible when their thread waits for them. Operands of a running wgmma are pinned
until it has been waited for. wgmma reads through the asynchronous proxy: what ordinary stores and
cp.async wrote must be behind a proxy fence.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from .access import Access, Array, Lanes, gather, scatter
from .parser import Instruction

BASE = 1024
"""Address of the first byte."""
UNWRITTEN, IN_FLIGHT = -2, -1
_WARP_BITS = 6


class Copy(NamedTuple):
    """An asynchronous copy that has been issued."""

    access: Access
    raw: Array  # [k, width]
    group: Array  # [k], the number of the commit that each thread will make


class Product(NamedTuple):
    """The operand of an issued wgmma."""

    rows: Array  # programs of the batch, [k]
    warpgroup: int
    element: Array  # [k, n]
    group: Array  # [k], the number of the commit that each program's warp group will make


class SharedMemory:
    """Shared memory of `num_bytes` for each program of a batch."""

    def __init__(self, lanes: Lanes, num_bytes: int, element_bytes: int) -> None:
        self.lanes, self.num_bytes = lanes, num_bytes
        self._size = -(-num_bytes // 16) * 16 + 16
        self._shift = element_bytes.bit_length() - 1
        num_programs, num_elements = len(lanes.ids), self._size >> self._shift
        self._num_elements = num_elements
        self.data = np.full(num_programs * self._size, 0xFF, np.uint8)
        total = num_programs * num_elements
        self._write = np.full(total, UNWRITTEN, np.int64)  # epoch and warp
        num_warps = -(-lanes.num_threads // 32)
        self._read = np.full((total, num_warps), -1, np.int32)  # epoch of each warp's last read
        self._generic = np.zeros(total, np.bool_)  # not behind a proxy fence
        self._pins = np.zeros(total, np.int16)  # running products that read it
        self.ambiguous: Counter[str] = Counter()  # values of one warp's threads for one place
        self.useful: set[int] = set()  # waits that found something in flight
        self._copies: list[Copy] = []
        self._copy_commits = np.zeros(lanes.size, np.int32)
        self._copy_waits = np.zeros(lanes.size, np.int32)
        self._products: list[Product] = []
        num_groups = -(-num_warps // 4)
        self.product_commits = np.zeros((num_programs, num_groups), np.int32)
        self.product_waits = np.zeros((num_programs, num_groups), np.int32)

    def load(self, access: Access) -> Array:
        """Bytes [k, width]."""
        place = self._place(access)
        element = self._elements(access, place)
        self._check_written(access, element, "read")
        warp = access.warp
        write = self._write[element]
        now = (access.epoch << _WARP_BITS)[:, None]
        racing = (write >= now) & (write != now + warp[:, None])
        if racing.any():
            access.fail("race: read of what another warp wrote, no barrier between", racing.any(1))
        self._read[element, warp[:, None]] = access.epoch[:, None]
        return gather(self.data, place, access.width)

    def store(self, access: Access, raw: Array) -> None:
        """Write bytes [k, width]."""
        place = self._place(access)
        element = self._elements(access, place)
        self._check_write(access, element)
        scatter(self.data, place, raw)
        differs = (gather(self.data, place, access.width) != raw).any(1)
        if differs.any():
            self._check_values(access, place, differs)
        self._write[element] = ((access.epoch << _WARP_BITS) + access.warp)[:, None]
        self._generic[element] = True

    def _check_values(self, access: Access, place: Array, differs: Array) -> None:
        """Raise if warps write different values to one place; note it of threads of a warp."""
        which = np.isin(place, place[differs])
        warps = np.unique(np.stack([place[which], access.warp[which]]), axis=1)
        if len(np.unique(warps[0])) < warps.shape[1]:
            access.fail("race: warps write different values to one place", differs)
        self.ambiguous[access.by.text] += int(differs.sum())

    def copy(self, access: Access, raw: Array) -> None:
        """Issue an asynchronous copy of bytes [k, width]."""
        element = self._elements(access, self._place(access))
        self._check_write(access, element)
        self._write[element] = IN_FLIGHT
        self._copies.append(Copy(access, raw, self._copy_commits[access.chosen].copy()))

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
                where = np.flatnonzero(landed)
                access = copy.access.part(where)
                place = self._place(access)
                element = self._elements(access, place)
                scatter(self.data, place, copy.raw[where])
                self._write[element] = ((access.epoch << _WARP_BITS) + access.warp)[:, None]
                self._generic[element] = True
            if not landed.all():
                where = np.flatnonzero(~landed)
                rest = Copy(copy.access.part(where), copy.raw[where], copy.group[where])
                remaining.append(rest)
        self._copies = remaining

    def fence_proxies(self, rows: Array) -> None:
        """Make what programs wrote visible to wgmma."""
        self._generic.reshape(-1, self._num_elements)[rows] = False

    def operand(
        self, by: Instruction, kernel: str, rows: Array, warpgroup: int, address: Array, item: int
    ) -> Array:
        """A matrix that a warp group's wgmma reads, for programs: bytes [k, ..., item].

        `address` [...] is the same for all of them.
        """
        count = address.size
        lanes = (rows[:, None] * self.lanes.num_threads + 128 * warpgroup).repeat(count, 1).ravel()
        every = np.tile(address.ravel(), len(rows))
        access = Access(by, kernel, every, item, self.lanes, lanes)
        place = self._place(access)
        element = self._elements(access, place)
        self._check_written(access, element, "wgmma")
        now = (access.epoch << _WARP_BITS)[:, None]
        if (self._write[element] >= now).any():
            racing = (self._write[element] >= now).any(1)
            access.fail("race: wgmma of what was written since the last barrier", racing)
        if self._generic[element].any():
            unfenced = self._generic[element].any(1)
            access.fail("wgmma of what ordinary stores wrote, no proxy fence between", unfenced)
        self._mark_read(element, warpgroup, access.epoch)
        group = self.product_commits[rows, warpgroup].copy()
        product = Product(rows, warpgroup, element.reshape(len(rows), -1), group)
        np.add.at(self._pins, product.element, 1)
        self._products.append(product)
        raw = gather(self.data, place, item)
        return raw.reshape(len(rows), *address.shape, item)

    def finish_products(self, by: Instruction) -> None:
        """Release the operands of products that have been waited for."""
        remaining = []
        for product in self._products:
            rows, warpgroup = product.rows, product.warpgroup
            done = product.group < self.product_waits[rows, warpgroup]
            if done.any():
                self.useful.add(by.index)
                np.add.at(self._pins, product.element[done], -1)
                self._mark_read(product.element[done], warpgroup, self.lanes.epoch_of[rows[done]])
            if not done.all():
                left = ~done
                part = Product(rows[left], warpgroup, product.element[left], product.group[left])
                remaining.append(part)
        self._products = remaining

    def _mark_read(self, element: Array, warpgroup: int, epoch: Array) -> None:
        """Elements [k, n] are read by all warps of a warp group."""
        self._read[element, 4 * warpgroup : 4 * warpgroup + 4] = epoch[:, None, None]

    def _place(self, access: Access) -> Array:
        """Offsets [k] into the data of all programs."""
        offset = access.address - BASE
        access.check(offset, self.num_bytes)
        return np.asarray(offset + access.row * self._size)

    def _elements(self, access: Access, place: Array) -> Array:
        """Elements [k, n]."""
        return np.asarray(
            (place >> self._shift)[:, None] + np.arange(max(access.width >> self._shift, 1))
        )

    def _check_written(self, access: Access, element: Array, what: str) -> None:
        write = self._write[element]
        if write.min() < 0:
            if (write == IN_FLIGHT).any():
                early = (write == IN_FLIGHT).any(1)
                access.fail(f"{what} of an asynchronous copy before it was waited for", early)
            access.fail(f"{what} of shared memory that nobody wrote", (write < 0).any(1))

    def _check_write(self, access: Access, element: Array) -> None:
        """Raise if another warp has accessed elements [k, n] since the last barrier."""
        write, warp = self._write[element], access.warp[:, None]
        if (write == IN_FLIGHT).any():
            access.fail("write into an asynchronous copy", (write == IN_FLIGHT).any(1))
        now = (access.epoch << _WARP_BITS)[:, None]
        racing = (write >= now) & (write != now + warp)
        if racing.any():
            access.fail("race: write where another warp wrote, no barrier between", racing.any(1))
        readers = self._read[element] >= access.epoch[:, None, None]
        readers &= np.arange(self._read.shape[1]) != warp[:, :, None]
        if readers.any():
            racing = readers.any((1, 2))
            access.fail("race: write of what another warp has read, no barrier between", racing)
        if self._pins[element].any():
            pinned = self._pins[element].any(1)
            access.fail("write into an operand of a wgmma that is running", pinned)
