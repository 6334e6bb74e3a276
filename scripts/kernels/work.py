"""The work of the fused kernels' launches, counted from their arguments: iterations and bytes.

A counter mirrors its kernel: how often each program runs each loop, and the bytes that all programs
load and store of tensors that grow with rows, positions × H or positions × columns. Tests compare
the counts with those of the emulator.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lm.output.backends.base import Problem
from lm.output.backends.triton.launch import SLOT, Launch
from scripts.kernels.compilation import launches
from scripts.kernels.routed import KERNELS, TILES, write_routing

Counts = NDArray[Any]
"""Numbers of the programs, visits, nodes or entries of a launch."""
SECTOR = 32
"""Bytes of the smallest piece that the caches move."""
SINGLE = 4
"""Bytes of a number that sums are formed in."""


class Work(NamedTuple):
    """What a launch does."""

    loops: dict[str, list[Counts]]  # iterations of each program, for each inlined copy of a loop
    loaded: float = 0  # bytes from the second-level cache to the processors, in whole sectors
    memory: float = 0  # bytes from and to memory, every element once


def work_of(problem: Problem, capability: int) -> list[tuple[Launch, Work]]:
    """The launches of a forward and backward, with their work. Nothing is executed."""
    found: list[Launch] = []
    done: list[tuple[Launch, Work]] = []

    def run(launch: Launch) -> None:
        found.append(launch)
        if launch.kernel.__name__ == KERNELS[-1]:
            write_routing(found)
        done.append((launch, work(launch)))

    launches(problem, capability, run=run)
    return done


def work(launch: Launch) -> Work:
    """Count the work of a launch whose routing is written."""
    return COUNTERS[launch.kernel.__name__](_Arguments(launch))


class _Arguments:
    """A launch's arguments as numbers and arrays, and what the counters derive from them."""

    def __init__(self, launch: Launch) -> None:
        self.arguments, self.num_programs = launch.arguments, launch.num_programs
        self.name: str = launch.kernel.__name__
        self.P, self.tile = self["P"], launch.tile
        if self.arguments.get("sorted_hidden") is not None:
            self.item: int = launch.arguments["sorted_hidden"].element_size()
            self.padded: int = self["sorted_units"] * SLOT
            if "h_units" in self.arguments:
                self.hidden_bytes: int = self["h_units"] * self["ALIGN"] * self.item
            if "weight" in self.arguments:
                self.weight_item: int = launch.arguments["weight"].element_size()
                self.row_bytes = self["weight_units"] * self["WEIGHT_ALIGN"] * self.weight_item
            self.vector_bytes = self.padded * self.item  # of a sorted hidden vector
        if "num_children" in self.arguments:
            self.width: Counts = self["num_children"]
            self.node: Counts = self["node"].reshape(-1, self.P)
            self.slots = -(-self.width // SLOT) * SLOT  # saved columns of each node

    def __getitem__(self, name: str) -> Any:
        value = self.arguments[name]
        return value.numpy() if torch.is_tensor(value) and value.dtype != torch.bfloat16 else value

    def item_size(self, name: str) -> int:
        """Bytes of a number of a tensor; 0 if it is not given."""
        return 0 if self.arguments[name] is None else int(self.arguments[name].element_size())

    def entries(self, name: str, place: int) -> Counts:
        """The entries of a list of the routing."""
        entries = self[name].reshape(-1, 4) if name in TILES else self[name]
        found: Counts = entries[: self["num_entries"][place]]
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

    def by_visits(self, light: Counts) -> list[tuple[int, Counts]]:
        """Sizes of the tiles of light nodes, and which of the nodes have such a tile."""
        few: Counts = self.stop().ravel()[light] - light % self.P <= SLOT
        return [(SLOT, few), (self["LIGHT"], ~few)][: 1 + (self["LIGHT"] > SLOT)]

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

    def sums(self, program: Counts, values: Any, *, first: int = 0, repeat: int = 1) -> Counts:
        """Values added by program, each for `repeat` neighbouring programs from `first` on."""
        program = (first + program[:, None] * repeat + np.arange(repeat)).ravel()
        weights = np.repeat(np.broadcast_to(values, program.size // repeat), repeat)
        return np.bincount(program, weights, minlength=self.num_programs)


def _sort(a: _Arguments) -> Work:
    steps = -(-a["num_nodes"] // a.tile.v) - np.arange(a.num_programs)
    return Work({"_sort:n0": [np.maximum(0, -(-steps // a.num_programs))]})


def _merge(a: _Arguments) -> Work:
    passes = -(-a["num_runs"] // a["RUNS"])
    loops = {"_merge:run0": passes, "_lower_bound:i": passes * a["steps"], "_merge:climbed": a["D"]}
    return Work({name: [np.full(a.num_programs, each)] for name, each in loops.items()})


def _plan(a: _Arguments) -> Work:
    node, width, num_plans = a.node, a.width, a["num_plans"]
    start = np.maximum.accumulate(
        np.where(np.diff(node, axis=1, prepend=-2) != 0, np.arange(a.P), 0), axis=1
    )
    visits, first = a.stop() - start, start == np.arange(a.P)
    blocks = -(-width[node] // a["TILE_C"]) * -(-visits // a["chunk"])
    blocks = np.where(first & (node >= 0) & (visits > a["LIGHT"]), blocks, 0)
    padded = np.zeros((len(node), num_plans * a["BLOCK_V"]), blocks.dtype)
    padded[:, : a.P] = blocks
    most = padded.reshape(len(node), num_plans, -1).max(2).sum(0)
    plans = (np.arange(a.num_programs) < num_plans).astype(int)
    loops = {
        "_plan_visits": plans,
        "_plan_visits:d": plans * a["D"],
        "_plan_visits:i": np.pad(most, (0, a.num_programs - num_plans)),
        "_plan:h0": (1 - plans) * -(-a.padded // a["COLUMNS"]),
    }
    searches = plans * a["D"] * a["steps"]
    found = {"_lower_bound:i": [searches, searches]} | {k: [v] for k, v in loops.items()}
    size = a["COLUMNS"] * a.item
    sectors = (size + SECTOR - math.gcd(a.hidden_bytes, SECTOR)) / size
    memory = a.P * (a.hidden_bytes + a.vector_bytes)
    return Work(found, a.P * a.hidden_bytes * sectors, memory)


def _forward(a: _Arguments) -> Work:
    splits, stop = a["num_splits"], a.stop().ravel()
    heavy, light = a.entries("heavy_tiles", 0), a.entries("light_nodes", 1)
    units = np.arange(len(light)) + a["max_heavy"]
    parts = [(heavy, np.arange(len(heavy)), a.tile.v)]
    parts += [(light[chosen], units[chosen], v) for v, chosen in a.by_visits(light)]
    names = "_forward_tile", "_forward_tile:c0", "_logits:h0", "_finish:d", "_finish:split"
    loops: dict[str, list[Counts]] = {name: [] for name in names}
    loaded = rows = saved = 0.0
    for flat, unit, most in parts:
        node = a.node.ravel()[flat]
        visits, width = np.minimum(stop[flat] - flat % a.P, most), a.width[node]
        num_blocks = -(-width // a.tile.c)
        share = -(-num_blocks // splits)
        split = np.arange(splits)
        blocks = np.clip(num_blocks[:, None] - split * share[:, None], 0, share[:, None])
        program = (unit[:, None] * splits + split).ravel()
        inner = a.sums(program, blocks.ravel())
        ran = a.sums(program, 1)
        inner_steps, levels = inner * -(-a.padded // a.tile.h), ran * a["D"]
        counts = (ran, inner, inner_steps, levels, levels * (splits - 1))
        for name, found in zip(names, counts, strict=True):
            loops[name].append(found)
        loaded += float((num_blocks * visits).sum()) * a.vector_bytes
        loaded += float(width.sum()) * a.row_bytes * a.sectors(a.tile.h, halves=a.tile.warps > 4)
        rows += float(a.width[np.unique(node)].sum())
        saved += float((visits * (a.slots[node] * a.item + num_blocks * SINGLE)).sum())
    memory = rows * a.row_bytes + (a.node >= 0).any(0).sum() * a.vector_bytes
    return Work(loops, loaded, memory + saved * a["SAVE"])


def _errors(a: _Arguments) -> Work:
    width = np.zeros((len(a.node), a.num_programs * a.tile.v), a.width.dtype)
    width[:, : a.P] = np.where(a.node >= 0, a.width[a.node], 0)
    blocks = -(-width.reshape(len(a.node), a.num_programs, -1).max(2) // a.tile.c)
    loops = {"_errors:d": np.full(a.num_programs, a["D"]), "_errors:c0": blocks.sum(0)}
    item = a.arguments["errors"].element_size()
    saved = float(a.slots[a.node[a.node >= 0]].sum()) * item
    maxima = float((-(-width // a.tile.c)).sum()) * SINGLE
    return Work({name: [each] for name, each in loops.items()}, saved, 2 * saved + maxima)


def _heavy_rows(
    a: _Arguments, entry: Counts, columns: int
) -> tuple[dict[str, Counts], float, float]:
    """Iterations of the first programs, for tiles of rows with so many columns.

    Then bytes loaded; and those of the errors, once.
    """
    num_h, first = -(-columns // a.tile.h), a["row_programs"]
    flat, end, block, _ = entry.T
    visits, c0 = end - flat % a.P, block * a.tile.c
    program = np.arange(len(entry) * num_h) % max(1, first)
    inside = np.minimum(a.tile.c, a.slots[a.node.ravel()[flat]] - c0)
    loops = {
        f"{a.name}:i": a.sums(program, 1),
        "_row_sums:v0": a.sums(program, np.repeat(-(-visits // a.tile.step), num_h)),
    }
    saved = float((visits * inside).sum()) * a.item
    return loops, float(visits.sum()) * a.vector_bytes + saved * num_h, saved


def _tile_rows(a: _Arguments, entry: Counts) -> float:
    """Rows of the weight in tiles."""
    flat, _, block, _ = entry.T
    return float(np.minimum(a.tile.c, a.width[a.node.ravel()[flat]] - block * a.tile.c).sum())


def _heavy(a: _Arguments) -> Work:
    entry, first, num_h = a.entries("chunk_tiles", 4), a["row_programs"], -(-a.padded // a.tile.h)
    loops, loaded, _ = _heavy_rows(a, entry, a.padded)
    memory = _tile_rows(a, entry) * a.padded * SINGLE
    level = a["light_level"]
    chosen = (a.node >= 0) & (np.arange(len(a.node))[:, None] < level)
    tile, node, visits = a.pairs(np.arange(a.P) // a.tile.v, chosen)
    blocks = -(-a.width[node] // a.tile.step)
    tiles = np.arange(-(-a.P // a.tile.v))
    loops |= {
        "_heavy_hidden": a.sums(tiles, 1, first=first, repeat=num_h),
        "_heavy_hidden:d": a.sums(tiles, a["D"], first=first, repeat=num_h),
        "_heavy_hidden:while": a.sums(tile, 1, first=first, repeat=num_h),
        "_heavy_hidden:c0": a.sums(tile, blocks, first=first, repeat=num_h),
    }
    saved = float((visits * a.slots[node]).sum()) * a.item
    rows_loaded = float(a.width[node].sum()) * a.row_bytes * a.sectors(a.tile.h, halves=False)
    loaded += rows_loaded + saved * num_h
    light = int((level < a["D"]).sum())
    final, sums = (a.P - light) * a.hidden_bytes, light * a.padded * SINGLE
    once = float(a.width[np.unique(node)].sum()) * a.row_bytes
    once += float(a.in_tiles(entry).sum()) * a.vector_bytes
    return Work({k: [v] for k, v in loops.items()}, loaded, memory + once + saved + final + sums)


def _rows(a: _Arguments) -> Work:
    entry, first, columns = a.entries("row_tiles", 3), a["row_programs"], a["LIGHT_H"]
    loops, loaded, errors = _heavy_rows(a, entry, a.row_bytes // a.weight_item)
    num_h = -(-a.row_bytes // (a.weight_item * columns))
    flat = a.entries("light_groups", 2)
    stop, top = a.stop().ravel(), flat // a.P
    group, light_level = np.full(a.P, -1), np.full(a.P, a["D"])
    for index, (begin, end) in enumerate(zip(flat % a.P, stop[flat], strict=True)):
        group[begin:end], light_level[begin:end] = index, top[index]
    light = (a.node >= 0) & (np.arange(len(a.node))[:, None] >= light_level)
    unit, node, visits = a.pairs(group, light)
    blocks = -(-a.width[node] // a["LIGHT_C"])
    split, before = a.entries("split_tiles", 5), first + a["max_groups"] * num_h
    _, chunks, block, _ = split.T
    split_rows = np.minimum(a.tile.c, a.width[a.node.ravel()[split[:, 0]]] - block * a.tile.c)
    zeros, zero_rows = _zeros(a, before + a["max_split_tiles"] * num_h, num_h)
    added = a.sums(np.arange(len(split)), chunks, first=before, repeat=num_h)
    groups = np.arange(len(flat))
    counted: dict[str, tuple[Counts, Any]] = {
        "_light_group": (groups, 1),
        "_light_group:d": (groups, a["D"] - top),
        "_light_group:while": (unit, 1),
        "_light_group:c0": (unit, blocks),
    }
    of_groups = {
        name: [
            a.sums(index, np.where(chosen[index], count, 0), first=first, repeat=num_h)
            for _, chosen in a.by_visits(flat)
        ]
        for name, (index, count) in counted.items()
    }
    loops |= {
        "_add_chunks": np.sign(added),
        "_chunk_sums:chunk": added,
        **zeros,
    }
    positions = float((group >= 0).sum())
    rows = float(a.width[node].sum())
    saved = float((visits * a.slots[node]).sum()) * a.item
    sums = (float((chunks * split_rows).sum()) + positions) * a.padded * SINGLE
    once = rows * a.row_bytes + positions * a.vector_bytes
    loaded += once + rows * a.row_bytes * (a.sectors(columns) - 1) + saved * num_h + sums
    written = (_tile_rows(a, entry) + rows + float(split_rows.sum()) + zero_rows) * a.row_bytes
    owners = a["R"] * 8.0
    once += float((a.in_tiles(entry) & (group < 0)).sum()) * a.vector_bytes + errors
    memory = once + saved + sums + written + positions * a.hidden_bytes + owners
    return Work({k: [v] for k, v in loops.items()} | of_groups, loaded + owners, memory)


def _update(a: _Arguments) -> Work:
    """Bytes, not in whole sectors, of the norm or of a rule for rows; nothing for those of a bias.

    Rows and their state are loaded once. What a gradient is formed from is loaded in each pass over
    the columns, of which there are two if a rule needs norms that are not given: sums of chunks,
    hidden vectors for each block of children, and errors for each block of columns, except of few
    visits. What is updated is written once.
    """
    if a.arguments["sorted_hidden"] is None:
        return Work({})
    heavy, split, light = a.entries("row_tiles", 3), a.entries("split_tiles", 5), a["light_nodes"]
    light, nodes, tile = light[: a["num_entries"][1]], a.node.ravel(), a["TILE_C"]
    columns, single = a["weight_units"] * a["WEIGHT_ALIGN"], a.arguments["numbers"].element_size()
    is_norm = a.arguments["table"] is None
    has_norms = a.arguments["total"] is None or a.arguments["squares"] is not None
    passes = 1 if is_norm or has_norms else 2
    flat, c0 = np.append(heavy[:, 0], light), np.append(heavy[:, 2] * tile, light * 0)
    end = np.append(heavy[:, 1], a.stop().ravel()[light])
    most = np.where(np.arange(len(flat)) < len(heavy), tile, a.width.max(initial=0) + SLOT)
    visits, inside = end - flat % a.P, np.minimum(a.slots[nodes[flat]] - c0, most)
    rows = np.minimum(a.width[nodes[flat]] - c0, most)
    split_rows = np.minimum(tile, a.width[nodes[split[:, 0]]] - split[:, 2] * tile)
    times = passes * -(-columns // a.tile.h) + (a.arguments["bias_sums"] is not None)
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
    return Work({}, loaded + read + passes * sums, once + read + sums)


def _zeros(a: _Arguments, first: int, num_h: int) -> tuple[dict[str, Counts], float]:
    """Iterations of the programs from `first` on that write zeros, and the rows they write."""
    block, num_rows, num_programs = a.tile.c, a["R"], a.num_programs - first
    empty = np.zeros(-(-num_rows // block) * block, bool)
    empty[:num_rows] = a["visited"][a["node_of_row"][:num_rows]] == 0
    any_empty: Counts = np.logical_or.reduce(empty.reshape(-1, block), axis=1)
    program = np.arange(len(any_empty)) % max(1, num_programs)
    loops = {
        "_rows:r0": a.sums(program, 1, first=first),
        "_write_zeros:h0": a.sums(program, any_empty * num_h, first=first),
    }
    return loops, float(empty.sum())


COUNTERS: dict[str, Callable[[_Arguments], Work]] = {
    counter.__name__: counter
    for counter in (_sort, _merge, _plan, _forward, _errors, _heavy, _rows, _update)
}
"""By name of the kernel."""
