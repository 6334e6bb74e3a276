"""The fused kernels' loads and stores, played through a second-level cache.

What a launch touches, program by program in the order of the kernels' own loops, goes through a
cache that throws out what was used longest ago; what misses must come from memory. As many programs
run side by side as a GPU has room for, a load or store of each in turn. Every launch begins with an
empty cache.

A line is `granule` neighbouring rows of one portion of columns: a line that a tile touches in part
is read whole.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from lm.output import ClassTree
from lm.output.backends.triton.backend import _num_splits, kept_blocks
from lm.output.backends.triton.tile_shapes import Tiles
from lm.output.backends.visits import Schedule, Visits

Ints = NDArray[np.int64]
HIDDEN, WEIGHT, KEPT, D_WEIGHT = range(4)
"""Tensors; `KEPT` with its block maxima. d_hidden and its partial sums are touched once, and left
out.
"""


class Trace(NamedTuple):
    """What one launch touches.

    Attributes:
        kernel: which.
        program: [A] which program; ascending.
        touched: [A, 4] tensor, first row, end row, portion of columns.
        row_bytes: [4] bytes of a row of a portion of each tensor.
        portions: [4] portions of each tensor.
        last_bytes: [4] bytes of a row of the last portion.
    """

    kernel: str
    program: Ints
    touched: Ints
    row_bytes: Ints
    portions: Ints
    last_bytes: Ints


class Node(NamedTuple):
    """A node in a tile of positions.

    Attributes:
        begin, end: its visits there.
        first_row, width: its children.
        block: where its blocks begin among those of a path.
    """

    begin: int
    end: int
    first_row: int
    width: int
    block: int


class Launches:
    """The traces of a batch.

    Args:
        visits, plan, tree: the batch.
        size: H.
        item: bytes of an element of hidden and weight.
        shape: the tiles.
    """

    def __init__(
        self, visits: Visits, plan: Schedule, tree: ClassTree, size: int, item: int, shape: Tiles
    ) -> None:
        self.node = visits.node.numpy()
        self.stop, self.light_level = plan.stop.numpy(), plan.light_level.numpy()
        groups, heavy = plan.light_first.numpy(), plan.heavy_first.numpy()
        self.depth, self.num_positions = self.node.shape
        self.groups, self.heavy = groups[groups < self.num_positions], heavy[heavy >= 0]
        self.first_row, self.width, self.column = (
            getattr(tree.arrays, name).numpy() for name in ("first_row", "num_children", "column")
        )
        self.num_blocks = kept_blocks(tree.max_path_columns, self.depth, shape.block_c)
        self.size, self.item, self.shape = size, item, shape
        self.splits = _num_splits(tree.max_path_columns, self.depth, shape.block_c)

    def __iter__(self) -> Iterator[Trace]:
        yield self._forward()
        yield self._d_hidden()
        yield self._d_weight()
        yield self._d_light()

    def _nodes(
        self, begin: int, end: int, top: int, heavy: bool, backwards: bool = False
    ) -> list[Node]:
        """The heavy or the light nodes of positions begin … end, in the order of the kernels."""
        nodes = []
        for d in range(top, self.depth):
            level, s = [], begin
            while s < end:
                s_stop = min(int(self.stop[d, s]), end) if self.node[d, s] >= 0 else s + 1
                if self.node[d, s] >= 0 and (d < self.light_level[s]) == heavy:
                    level.append(self._node(d, s, s_stop))
                s = s_stop
            nodes += level[::-1] if backwards else level
        return nodes

    def _node(self, d: int, begin: int, end: int) -> Node:
        n = self.node[d, begin]
        block = int(self.column[n]) // self.shape.block_c + d
        return Node(begin, end, int(self.first_row[n]), int(self.width[n]), block)

    def _tiles(self, v: int) -> Iterator[tuple[int, int]]:
        for begin in range(0, self.num_positions, v):
            yield begin, min(begin + v, self.num_positions)

    def _groups(self) -> Iterator[tuple[int, int, int]]:
        for begin in self.groups:
            top = int(self.light_level[begin])
            yield int(begin), int(self.stop[top, begin]), top

    def _forward(self) -> Trace:
        trace = _Builder("_forward", self, self.shape.forward.h)
        work = [
            self._nodes(*tile, 0, True, number % 2 == 1)
            for number, tile in enumerate(self._tiles(self.shape.forward.v))
        ]
        work += [self._nodes(*group, False) for group in self._groups()]
        for tile, nodes in enumerate(work):
            for split in range(self.splits):
                program = tile * self.splits + split
                for node in nodes:
                    every = list(trace.blocks(node))
                    share = -(-len(every) // self.splits)
                    for block, rows in every[split * share : (split + 1) * share]:
                        for h in range(trace.num_h):
                            trace.add(program, HIDDEN, node.begin, node.end, h)
                            trace.add(program, WEIGHT, *rows, h)
                        trace.add(program, KEPT, node.begin, node.end, block)
        return trace.done()

    def _d_hidden(self) -> Trace:
        trace = _Builder("_d_hidden", self, self.shape.d_hidden.h)
        program = 0
        for tile, (begin, end) in enumerate(self._tiles(self.shape.d_hidden.v)):
            nodes = self._nodes(begin, end, 0, True, tile % 2 == 1)
            for h in range(trace.num_h):
                for node in nodes:
                    for block, rows in trace.blocks(node):
                        trace.add(program, KEPT, node.begin, node.end, block)
                        trace.add(program, WEIGHT, *rows, h)
                program += 1
        return trace.done()

    def _d_weight(self) -> Trace:
        trace = _Builder("_d_weight", self, self.shape.d_weight.h)
        step, program = self.shape.d_weight.v, 0
        for flat in self.heavy:
            d, s = divmod(int(flat), self.num_positions)
            node = self._node(d, s, int(self.stop[d, s]))
            for block, rows in trace.blocks(node):
                for h in range(trace.num_h):
                    for v in range(node.begin, node.end, step):
                        trace.add(program, KEPT, v, min(v + step, node.end), block)
                        trace.add(program, HIDDEN, v, min(v + step, node.end), h)
                    trace.add(program, D_WEIGHT, *rows, h)
                    program += 1
        return trace.done()

    def _d_light(self) -> Trace:
        trace = _Builder("_d_light", self, self.shape.d_light.h)
        program = 0
        for begin, end, top in self._groups():
            nodes = self._nodes(begin, end, top, False)
            for h in range(trace.num_h):
                trace.add(program, HIDDEN, begin, end, h)
                for node in nodes:
                    for block, rows in trace.blocks(node):
                        trace.add(program, KEPT, node.begin, node.end, block)
                        trace.add(program, WEIGHT, *rows, h)
                        trace.add(program, D_WEIGHT, *rows, h)
                program += 1
        return trace.done()


class _Builder:
    """A trace in the making."""

    def __init__(self, kernel: str, launches: Launches, block_h: int) -> None:
        self.kernel, self.block_c = kernel, launches.shape.block_c
        self.num_h = -(-launches.size // block_h)
        item, last = launches.item, launches.size - (self.num_h - 1) * block_h
        kept = self.block_c * item + 4
        self.row_bytes = np.array([block_h * item, block_h * item, kept, block_h * item])
        self.last_bytes = np.array([last * item, last * item, kept, last * item])
        self.portions = np.array([self.num_h, self.num_h, launches.num_blocks, self.num_h])
        self.programs: list[int] = []
        self.touched: list[tuple[int, int, int, int]] = []

    def blocks(self, node: Node) -> Iterator[tuple[int, tuple[int, int]]]:
        """Blocks of a node's children: their number in what is kept, and their rows."""
        for k, c0 in enumerate(range(0, node.width, self.block_c)):
            first = node.first_row + c0
            yield node.block + k, (first, node.first_row + min(c0 + self.block_c, node.width))

    def add(self, program: int, tensor: int, begin: int, end: int, portion: int) -> None:
        """One load or store of rows begin … end."""
        self.programs.append(program)
        self.touched.append((tensor, begin, end, portion))

    def done(self) -> Trace:
        """The trace."""
        touched = np.array(self.touched, dtype=np.int64).reshape(-1, 4)
        program = np.array(self.programs, dtype=np.int64)
        return Trace(self.kernel, program, touched, self.row_bytes, self.portions, self.last_bytes)


def traffic(trace: Trace, capacity: int, side_by_side: int, granule: int) -> dict[int, int]:
    """Bytes of each tensor that miss a cache.

    Args:
        trace: of a launch.
        capacity: bytes that the cache holds.
        side_by_side: programs that run at a time.
        granule: rows of a line.
    """
    lines = np.zeros(len(trace.portions), dtype=np.int64)
    for tensor in range(len(lines)):
        ends = trace.touched[trace.touched[:, 0] == tensor, 2]
        lines[tensor] = -(-int(ends.max(initial=0)) // granule) * trace.portions[tensor]
    start = np.searchsorted(trace.program, np.arange(trace.program.max(initial=-1) + 2))
    missed = _play(
        start, trace.touched, trace.portions, trace.row_bytes, trace.last_bytes,
        np.cumsum(lines) - lines, int(lines.sum()), capacity, side_by_side, granule,
    )  # fmt: skip
    return dict(enumerate(missed.tolist()))


@numba.njit(cache=True)
def _play(
    start: Ints, touched: Ints, portions: Ints, row_bytes: Ints, last_bytes: Ints,
    first_line: Ints, num_lines: int, capacity: int, side_by_side: int, granule: int,
) -> Ints:  # fmt: skip
    """Bytes missed by tensor [4]: programs take turns, one load or store each."""
    older, newer = np.full(num_lines, -1), np.full(num_lines, -1)  # neighbours by last use
    held = np.zeros(num_lines, dtype=np.int64)  # bytes of a line in the cache, 0 outside
    oldest, newest, used = -1, -1, 0
    missed = np.zeros(len(portions), dtype=np.int64)
    num_programs = len(start) - 1
    slots = min(side_by_side, num_programs)
    program = np.arange(slots)
    place = start[program]
    waiting, running = slots, slots
    while running > 0:
        for slot in range(slots):
            while program[slot] >= 0 and place[slot] == start[program[slot] + 1]:
                program[slot] = waiting if waiting < num_programs else -1
                if program[slot] >= 0:
                    place[slot] = start[waiting]
                    waiting += 1
                else:
                    running -= 1
            if program[slot] < 0:
                continue
            tensor, begin, end, portion = touched[place[slot]]
            place[slot] += 1
            bytes_of_row = (
                last_bytes[tensor] if portion == portions[tensor] - 1 else row_bytes[tensor]
            )
            for row in range(begin // granule, (end - 1) // granule + 1):
                line = first_line[tensor] + row * portions[tensor] + portion
                if held[line] == 0:
                    size = bytes_of_row * granule
                    missed[tensor] += size
                    if size > capacity:
                        continue
                    while used + size > capacity and oldest >= 0:
                        out = oldest
                        oldest = newer[out]
                        if oldest >= 0:
                            older[oldest] = -1
                        else:
                            newest = -1
                        used -= held[out]
                        held[out], newer[out] = 0, -1
                    held[line] = size
                    used += size
                elif line == newest:
                    continue
                else:  # take it out of the middle
                    if older[line] >= 0:
                        newer[older[line]] = newer[line]
                    else:
                        oldest = newer[line]
                    older[newer[line]] = older[line]
                older[line], newer[line] = newest, -1
                if newest >= 0:
                    newer[newest] = line
                else:
                    oldest = line
                newest = line
    return missed
