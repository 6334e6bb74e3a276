"""The bytes that launches of the fused kernels move, counted from their arguments and lists.

Of tensors that grow with rows, positions × H or positions × columns. Tests compare the counts with
those of the emulator.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lm.output.backends.triton.launch import SLOT, Launch
from lm.output.backends.triton.routing import Routing
from scripts.kernels.compilation import values

Counts = NDArray[Any]
"""Numbers of the programs, visits, nodes or entries of a launch."""
SECTOR = 32
"""Bytes of the smallest piece that the caches move."""
SINGLE = 4
"""Bytes of a number that sums are formed in."""


class Work(NamedTuple):
    """Bytes of a launch."""

    loaded: float = 0  # from the second-level cache to the processors, in whole sectors
    memory: float = 0  # from and to memory, every element once


def work(launch: Launch) -> Work:
    """Count the bytes of a launch whose lists are written."""
    counter = COUNTERS.get(launch.kernel.__name__)
    if counter is None or values(launch).get("sorted_hidden", True) is None:
        return Work()
    return counter(_Arguments(launch))


class _Arguments:
    """A launch's arguments as numbers and arrays, and what the counters derive from them."""

    def __init__(self, launch: Launch) -> None:
        given = values(launch)
        self.P, self.tile = given["P"], launch.tile
        self.meta: Any = launch.arguments.get("META")
        depth, width = given["D"], given["num_children"]
        self.values = given | Routing.of(given["routing"], self.P, depth)._asdict()
        self.item: int = given["errors" if "errors" in given else "sorted_hidden"].element_size()
        if self.meta is not None:
            self.hidden_bytes: int = given["h_units"] * self.meta.align * self.item
            self.padded: int = -(-given["h_units"] * self.meta.align // SLOT) * SLOT
            self.vector_bytes = self.padded * self.item  # of a sorted hidden vector
        if self.meta is not None and given.get("weight") is not None:
            self.weight_item: int = given["weight"].element_size()
            self.row_bytes = given["weight_units"] * self.meta.weight_align * self.weight_item
        self.width: Counts = width.numpy()
        self.node: Counts = self["node"].reshape(depth, self.P)
        self.slots = -(-self.width // SLOT) * SLOT  # saved columns of each node

    def __getitem__(self, name: str) -> Any:
        value = self.values[name]
        return value.numpy() if torch.is_tensor(value) and value.dtype != torch.bfloat16 else value

    def item_size(self, name: str) -> int:
        """Bytes of a number of a tensor; 0 if it is not given."""
        return 0 if self.values[name] is None else int(self.values[name].element_size())

    def entries(self, name: str, place: int) -> Counts:
        """The entries of a list of the routing."""
        found: Counts = self[name][: self["num_entries"][place]]
        return found

    def sectors(self, columns: int, *, halves: bool = True) -> float:
        """Bytes moved for each byte of some columns of a weight row, wherever rows begin.

        Twice as many if rows are cast when they are read, in halves of sectors: a thread has as
        many columns as of hidden vectors, 16 bytes at a time, next to those of its neighbours.
        """
        size: int = min(columns * self.weight_item, self.row_bytes)
        times = 2 if halves and self.weight_item > self.item else 1
        return times * (size + SECTOR - math.gcd(self.row_bytes, SECTOR)) / size

    def stop(self) -> Counts:
        """Where the run of visits of the same node ends on its level, [D, P]."""
        last = np.ones(self.node.shape, bool)
        last[:, :-1] = self.node[:, 1:] != self.node[:, :-1]
        stop = np.where(last, np.arange(self.P) + 1, self.P)
        found: Counts = np.minimum.accumulate(stop[:, ::-1], 1)[:, ::-1]
        return found

    def in_tiles(self, entry: Counts) -> Counts:
        """Whether a position is in a tile of rows, [P]."""
        found = np.zeros(self.P, bool)
        for flat, end, *_ in entry.tolist():
            found[flat % self.P : end] = True
        return found

    def pairs(self, unit: Counts, chosen: Counts) -> tuple[Counts, Counts, Counts]:
        """Unit [P] and node of the chosen visits [D, P], each pair once, and its visits."""
        unit, num_nodes = np.broadcast_to(unit, self.node.shape)[chosen], len(self.width)
        key, visits = np.unique(unit * num_nodes + self.node[chosen], return_counts=True)
        return key // num_nodes, key % num_nodes, visits


def _plan(a: _Arguments) -> Work:
    size = a.tile.h * a.item
    sectors = (size + SECTOR - math.gcd(a.hidden_bytes, SECTOR)) / size
    memory = a.P * (a.hidden_bytes + a.vector_bytes)
    return Work(a.P * a.hidden_bytes * sectors, memory)


def _forward(a: _Arguments) -> Work:
    stop = a.stop().ravel()
    heavy, light = a.entries("heavy_tiles", 0), a.entries("light_nodes", 1)
    loaded = rows = saved = 0.0
    for flat, most in ((heavy, a.tile.v), (light, a.meta.light.v)):
        node = a.node.ravel()[flat]
        visits, width = np.minimum(stop[flat] - flat % a.P, most), a.width[node]
        num_blocks = -(-width // a.tile.c)
        loaded += float((num_blocks * visits).sum()) * a.vector_bytes
        halves = a.tile.c * a.tile.h <= 1024 * a.tile.warps
        loaded += float(width.sum()) * a.row_bytes * a.sectors(a.tile.h, halves=halves)
        rows += float(a.width[np.unique(node)].sum())
        saved += float((visits * (a.slots[node] * a.item + num_blocks * SINGLE)).sum())
    memory = rows * a.row_bytes + (a.node >= 0).any(0).sum() * a.vector_bytes
    return Work(loaded, memory + saved * (a["exp_logits"] is not None))


def _errors(a: _Arguments) -> Work:
    node = a.node[a.node >= 0]
    saved = float(a.slots[node].sum()) * a.item
    maxima = float((-(-a.width[node] // a.tile.c)).sum()) * SINGLE
    return Work(saved, 2 * saved + maxima)


def _heavy_rows(a: _Arguments, entry: Counts, columns: int) -> tuple[float, float]:
    """Bytes loaded for tiles of rows with so many columns, and those of the errors, once."""
    flat, end, block, _ = entry.T
    visits, c0 = end - flat % a.P, block * a.tile.c
    inside = np.minimum(a.tile.c, a.slots[a.node.ravel()[flat]] - c0)
    saved = float((visits * inside).sum()) * a.item
    num_h = -(-columns // a.tile.h)
    return float(visits.sum()) * a.vector_bytes + saved * num_h, saved


def _tile_rows(a: _Arguments, entry: Counts) -> float:
    """Rows of the weight in tiles."""
    flat, _, block, _ = entry.T
    return float(np.minimum(a.tile.c, a.width[a.node.ravel()[flat]] - block * a.tile.c).sum())


def _heavy(a: _Arguments) -> Work:
    entry, num_h = a.entries("chunk_tiles", 4), -(-a.padded // a.tile.h)
    loaded, _ = _heavy_rows(a, entry, a.padded)
    memory = _tile_rows(a, entry) * a.padded * SINGLE
    level = a["light_level"]
    chosen = (a.node >= 0) & (np.arange(len(a.node))[:, None] < level)
    _, node, visits = a.pairs(np.arange(a.P) // a.tile.v, chosen)
    saved = float((visits * a.slots[node]).sum()) * a.item
    rows_loaded = float(a.width[node].sum()) * a.row_bytes * a.sectors(a.tile.h)
    loaded += rows_loaded + saved * num_h
    light = int((level < a["D"]).sum())
    final, sums = (a.P - light) * a.hidden_bytes, light * a.padded * SINGLE
    once = float(a.width[np.unique(node)].sum()) * a.row_bytes
    once += float(a.in_tiles(entry).sum()) * a.vector_bytes
    return Work(loaded, memory + once + saved + final + sums)


def _rows(a: _Arguments) -> Work:
    entry, columns = a.entries("row_tiles", 3), a.meta.light.h
    loaded, errors = _heavy_rows(a, entry, a.row_bytes // a.weight_item)
    num_h = -(-a.row_bytes // (a.weight_item * columns))
    flat = a.entries("light_groups", 2)
    stop, top = a.stop().ravel(), flat // a.P
    group, light_level = np.full(a.P, -1), np.full(a.P, a["D"])
    for index, (begin, end) in enumerate(zip(flat % a.P, stop[flat], strict=True)):
        group[begin:end], light_level[begin:end] = index, top[index]
    light = (a.node >= 0) & (np.arange(len(a.node))[:, None] >= light_level)
    _, node, visits = a.pairs(group, light)
    _, chunks, block, _ = (split := a.entries("split_tiles", 5)).T
    split_rows = np.minimum(a.tile.c, a.width[a.node.ravel()[split[:, 0]]] - block * a.tile.c)
    empty = a["visited"][a["node_of_row"][: a["R"]]] == 0
    positions = float((group >= 0).sum())
    rows = float(a.width[node].sum())
    saved = float((visits * a.slots[node]).sum()) * a.item
    sums = (float((chunks * split_rows).sum()) + positions) * a.padded * SINGLE
    once = rows * a.row_bytes + positions * a.vector_bytes
    loaded += once + rows * a.row_bytes * (a.sectors(columns) - 1) + saved * num_h + sums
    written = _tile_rows(a, entry) + rows + float(split_rows.sum()) + float(empty.sum())
    owners = a["R"] * 8.0
    once += float((a.in_tiles(entry) & (group < 0)).sum()) * a.vector_bytes + errors
    memory = once + saved + sums + written * a.row_bytes + positions * a.hidden_bytes + owners
    return Work(loaded + owners, memory)


def _update(a: _Arguments) -> Work:
    """Bytes, not in whole sectors, of the norm or of a rule for rows; nothing for those of a bias.

    Rows and their state are loaded once. What a gradient is formed from is loaded in each pass over
    the columns, of which there are two if a rule needs norms that are not given: sums of chunks,
    hidden vectors for each block of children, and errors for each block of columns, except of few
    visits. What is updated is written once.
    """
    heavy, split, light = (
        a.entries("row_tiles", 3),
        a.entries("split_tiles", 5),
        a.entries("light_nodes", 1),
    )
    nodes, tile = a.node.ravel(), a.meta.rows
    columns, single = a["weight_units"] * a.meta.weight_align, a.values["numbers"].element_size()
    is_norm = a.values["table"] is None
    has_norms = a.values["total"] is None or a.values["squares"] is not None
    passes = 1 if is_norm or has_norms else 2
    flat, c0 = np.append(heavy[:, 0], light), np.append(heavy[:, 2] * tile, light * 0)
    end = np.append(heavy[:, 1], a.stop().ravel()[light])
    most = np.where(np.arange(len(flat)) < len(heavy), tile, a.width.max(initial=0) + SLOT)
    visits, inside = end - flat % a.P, np.minimum(a.slots[nodes[flat]] - c0, most)
    rows = np.minimum(a.width[nodes[flat]] - c0, most)
    split_rows = np.minimum(tile, a.width[nodes[split[:, 0]]] - split[:, 2] * tile)
    times = passes * -(-columns // a.tile.h) + (a["bias_sums"] is not None)
    loaded = passes * float((visits * -(-rows // a.tile.c)).sum()) * a.vector_bytes
    loaded += float((visits * inside * np.where(visits <= a.tile.step, 1, times)).sum()) * a.item
    sums = float((split[:, 1] * split_rows).sum()) * a.padded * single
    positions = np.zeros(a.P, bool)
    for begin, stop in zip(flat % a.P, end, strict=True):
        positions[begin:stop] = True
    once = float(positions.sum()) * a.vector_bytes + float((visits * inside).sum()) * a.item
    num_rows = float(rows.sum()) + float(split_rows.sum())
    per_row = columns * sum(a.item_size(name) for name in ("table", "mean", "square"))
    read = num_rows * (per_row + a.item_size("total"))
    if is_norm:
        num_tiles = int((-(-rows // a.tile.c)).sum()) + int((-(-split_rows // a.tile.c)).sum())
        once += (num_rows + num_tiles) * single
    else:
        once += read + num_rows * a.item_size("squares")
        loaded += num_rows * a.item_size("squares")
    return Work(loaded + read + passes * sums, once + read + sums)


COUNTERS: dict[str, Callable[[_Arguments], Work]] = {
    counter.__name__: counter for counter in (_plan, _forward, _errors, _heavy, _rows, _update)
}
"""By name of the kernel."""
