"""The work of the fused kernels' launches, counted from their arguments: iterations, bytes.

A counter mirrors its kernel: how often each program runs each loop, and what all programs load and
store. Tests compare the counts with Triton's interpreter. Small tensors (a few bytes a visit) are
left out.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.output.backends.triton.launch import Launch

Counts = NDArray[Any]
"""A number for each program of a launch."""
SECTOR = 32
"""Bytes of the smallest piece that the caches move."""


class Work(NamedTuple):
    """What a launch does."""

    loops: dict[str, list[Counts]]  # iterations by source loop; one item for each inlined copy
    loaded: float  # bytes from the second-level cache to the processors, in whole sectors
    elements: float  # bytes that the kernel asks for: `loaded` without what sectors add
    memory: float  # bytes from and to memory, every element once


def work(launch: Launch) -> Work:
    """Count the work of a launch."""
    return COUNTERS[launch.kernel.__name__](_Arguments(launch))


class _Arguments:
    """A launch's arguments as numbers and arrays, and what all counters derive from them."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.arguments = launch, launch.arguments
        self.num_programs, self.BLOCK_C = launch.num_programs, launch.arguments["BLOCK_C"]
        self.H = self["h_units"] * self["ALIGN"]
        self.num_h = -(-self.H // launch.tile.h)
        matrix = self["hidden"] if "hidden" in self.arguments else self["weight"]
        self.item = matrix.element_size()
        self.row_bytes = self.H * self.item
        self.node, self.width = self["node"].numpy(), self["num_children"].numpy()
        self.P = self.node.shape[1]
        self.level = np.arange(len(self.node))[:, None]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def blocks(self, width: Any) -> Any:
        """Blocks of children."""
        return -(-width // self.BLOCK_C)

    def sectors(self, columns: int) -> float:
        """Bytes moved for each byte of `columns` columns of a row, which may begin anywhere."""
        size: int = columns * self.item
        return (size + SECTOR - math.gcd(self.row_bytes, SECTOR)) / size

    def heavy(self) -> Any:
        """Whether a visit [D, P] is one of a heavy node."""
        return (self.node >= 0) & (self.level < self["light_level"].numpy())

    def tiles(self, size: int) -> tuple[Any, Any, Any]:
        """Tile, node and number of visits, for each heavy node of each tile of positions."""
        num_nodes = len(self.width)
        tile = np.broadcast_to(np.arange(self.P) // size, self.node.shape)
        chosen = self.heavy()
        key = tile[chosen] * num_nodes + self.node[chosen]
        key, visits = np.unique(key, return_counts=True)
        return key // num_nodes, key % num_nodes, visits

    def groups(self) -> tuple[Any, Any, Any]:
        """Group, node and number of visits, for each node of each light group."""
        first = self["light_first"].numpy()
        group_at = np.full(self.P + 1, -1)
        group_at[np.minimum(first, self.P)] = np.arange(len(first))
        group = np.maximum.accumulate(np.where(group_at[:-1] >= 0, np.arange(self.P), 0))
        chosen = (self.node >= 0) & ~self.heavy()
        num_nodes = len(self.width)
        owner = np.broadcast_to(group_at[group], self.node.shape)[chosen]
        key, visits = np.unique(owner * num_nodes + self.node[chosen], return_counts=True)
        return key // num_nodes, key % num_nodes, visits

    def sums(self, program: Any, values: Any) -> Counts:
        """Values added by program."""
        weights = np.broadcast_to(values, np.shape(program))
        return np.bincount(program, weights, minlength=self.num_programs).astype(float)

    def rows(self, node: Any) -> float:
        """Bytes of the rows of nodes, each node once."""
        return float(self.width[np.unique(node)].sum() * self.row_bytes)

    def saved_bytes(self, node: Any, visits: Any) -> float:
        """Bytes of the blocks that the forward saves of visits, with their maxima."""
        block_bytes = self.BLOCK_C * self.item + 4
        return float((visits * self.blocks(self.width[node]) * block_bytes).sum())


def _forward(a: _Arguments) -> Work:
    splits, levels = a["SPLITS"], len(a.node)
    parts = [a.tiles(a.launch.tile.v), a.groups()]
    first = [0, a["num_tiles"]]
    names = "_forward_tile:d", "_forward_tile:while", "_forward_node:c0", "_forward_node:h0"
    loops: dict[str, list[Counts]] = {name: [] for name in (*names, "_finish:d")}
    elements = saved = 0.0
    for (unit, node, visits), offset in zip(parts, first, strict=True):
        share = -(-a.blocks(a.width[node]) // splits)
        inner = np.zeros(a.num_programs)
        for split in range(splits):
            num_blocks = np.clip(a.blocks(a.width[node]) - split * share, 0, share)
            inner += a.sums((unit + offset) * splits + split, num_blocks)
        every = np.repeat(np.isin(np.arange(a.num_programs // splits), unit + offset), splits)
        nodes = np.repeat(np.bincount(unit + offset, minlength=a.num_programs // splits), splits)
        for name, count in zip(names, (every * levels, nodes, inner, inner * a.num_h), strict=True):
            loops[name].append(count.astype(float))
        loops["_finish:d"].append(every * float(levels))
        blocks = a.blocks(a.width[node])
        elements += float(((blocks * visits + a.width[node]) * a.row_bytes).sum())
        saved += a.saved_bytes(node, visits)
    nodes = np.concatenate([part[1] for part in parts])
    memory = a.rows(nodes) + a.P * a.row_bytes + saved * a["SAVE"]
    return Work(loops, elements * a.sectors(a.launch.tile.h), elements, memory)


def _d_hidden(a: _Arguments) -> Work:
    tile, node, visits = a.tiles(a.launch.tile.v)
    h = np.arange(a.num_h)
    programs = (tile[:, None] * a.num_h + h).ravel()
    nodes = a.sums(programs, 1)
    inner = a.sums(programs, np.repeat(a.blocks(a.width[node]), a.num_h))
    rows, errors = a.width[node].sum() * a.row_bytes, a.saved_bytes(node, visits)
    loops = {"_d_hidden:d": np.full(a.num_programs, len(a.node)), "_d_hidden:while": nodes}
    loaded = rows * a.sectors(a.launch.tile.h) + errors * a.num_h
    light = int((a["light_level"] < len(a.node)).sum())
    sums = (a.P - light) * a.row_bytes + light * a.H * 4
    all_loops = {name: [count] for name, count in (loops | {"_d_hidden:c0": inner}).items()}
    return Work(all_loops, loaded, rows + errors * a.num_h, a.rows(node) + errors + sums)


def _d_weight(a: _Arguments) -> Work:
    flat = a["heavy_first"].numpy()
    flat = flat[flat >= 0]
    node = a.node.reshape(-1)[flat]
    visits = a["stop"].numpy().reshape(-1)[flat] - flat % a.P
    num_tiles = a.blocks(a.width[node]) * a.num_h
    steps = np.repeat(-(-visits // a.launch.tile.v), num_tiles)
    program = np.arange(len(steps)) % a.num_programs
    num_rows, block = a["R"], a["BLOCK_R"]
    not_visited = a["visited"].numpy() == 0
    zero_rows = float(a.width[not_visited].sum())
    checks = np.full(a.num_programs, -(-num_rows // block) / a.num_programs)
    zeroed = checks * (zero_rows / max(1, num_rows)) ** (1 / block)  # if any row of it is empty
    loops = {
        "_d_weight:tile": a.sums(program, 1),
        "_write_rows:v0": a.sums(program, steps),
        "_d_weight:r0": checks,
        "_write_zeros:h0": zeroed * a.num_h,
    }
    hidden = float((visits * a.blocks(a.width[node])).sum() * a.row_bytes)
    errors = a.saved_bytes(node, visits)
    owners = num_rows * 8.0
    written = a.rows(node) + zero_rows * a.row_bytes
    covered = np.bincount(flat % a.P, minlength=a.P + 1) - np.bincount(
        flat % a.P + visits, minlength=a.P + 1
    )
    positions = float((covered.cumsum() > 0).sum() * a.row_bytes)
    loaded = hidden * a.sectors(a.launch.tile.h) + errors * a.num_h + owners
    memory = positions + errors + written + owners
    elements = hidden + errors * a.num_h + owners
    return Work({name: [count] for name, count in loops.items()}, loaded, elements, memory)


def _d_light(a: _Arguments) -> Work:
    group, node, visits = a.groups()
    programs = (group[:, None] * a.num_h + np.arange(a.num_h)).ravel()
    per_node = np.repeat(a.blocks(a.width[node]), a.num_h)
    top = np.minimum(a["light_level"].numpy()[np.minimum(a["light_first"].numpy(), a.P - 1)], 9)
    exists = a["light_first"].numpy() < a.P
    loops = {
        "_d_light:d": np.repeat(np.where(exists, len(a.node) - top, 0), a.num_h),
        "_d_light:while": a.sums(programs, 1),
        "_d_light:c0": a.sums(programs, per_node),
    }
    positions = float((a["light_level"] < len(a.node)).sum())
    rows, errors = a.rows(node), a.saved_bytes(node, visits)
    hidden, partial = positions * a.row_bytes, positions * a.H * 4
    elements = rows + hidden + partial + errors * a.num_h
    loaded = (rows + hidden) * a.sectors(a.launch.tile.h) + partial + errors * a.num_h
    memory = 2 * (rows + hidden) + partial + errors
    return Work({name: [count] for name, count in loops.items()}, loaded, elements, memory)


COUNTERS: dict[str, Callable[[_Arguments], Work]] = {
    "_forward": _forward,
    "_d_hidden": _d_hidden,
    "_d_weight": _d_weight,
    "_d_light": _d_light,
}
"""By name of the kernel."""
