"""The routing of a batch by numpy: what `_sort`, `_merge` and `_plan` write, without running them.

Entries of lists are in the order in which programs reserve them one after the other.
"""

from typing import Any

import numpy as np
import torch

from lm.output.backends.triton.launch import Launch

KERNELS = ("_sort", "_merge", "_plan")
TILES = ("row_tiles", "chunk_tiles", "split_tiles")
"""Lists whose entries are four numbers."""
_Arrays = dict[str, Any]


def write_routing(launches: list[Launch]) -> None:
    """Write all that a launch of each of `KERNELS` writes and that later launches read."""
    named = {name: value for each in launches for name, value in each.arguments.items()}
    a = {
        name: value.numpy() if torch.is_tensor(value) and not value.is_floating_point() else value
        for name, value in named.items()
    }
    a |= {name: a[name].reshape(a["D"], -1) for name in ("node", "child")}
    a |= {name: a[name].reshape(-1, 4) for name in TILES}
    _write_paths(a)
    _write_lists(a, launches[-1].tile.v)


def _write_paths(a: _Arrays) -> None:
    """The sorted positions, and their nodes and children."""
    target = a["target"]
    valid = (target >= 0) & (target < a["N"]) & (target != a["ignore_index"])
    row = a["row_of_word"][np.where(valid, target, 0)]
    a["num_entries"][7] = a["mean"] * valid.sum()
    key = np.where(valid, a["preorder"][a["node_of_row"][row]], len(a["visited"]))
    a["position"][:] = np.argsort(key, kind="stable")
    order = a["position"]
    a["rank"][:], row, valid = key[order], row[order], valid[order]
    for d in reversed(range(a["D"])):
        n = a["node_of_row"][row]
        on_path = valid & (a["level"][n] == d)
        visits = on_path & (a["num_children"][n] > 1)
        a["node"][d] = np.where(visits, n, -1)
        a["child"][d] = np.where(visits, row - a["first_row"][n], 0)
        row = np.where(on_path, np.maximum(a["row_of_node"][n], 0), row)


def _write_lists(a: _Arrays, block_v: int) -> None:
    """The lists of what programs work on; letters and names as in `_plan_visits`."""
    positions, depth = a["P"], a["D"]
    v = np.arange(positions)
    top = np.full(positions, depth)
    found = []
    a["visited"][:] = 0
    for d in range(depth):
        n = a["node"][d]
        start, stop = (np.searchsorted(a["rank"], a[k][n]) for k in ("preorder", "preorder_stop"))
        visits, first, heavy = n >= 0, v == start, stop - start > a["LIGHT"]
        light = visits & ~heavy
        heavy_tile = visits & heavy & ((v - start) % a["TILE_V"] == 0)
        group = light & first & (top == depth)
        top = np.where(light & (top == depth), d, top)
        a["visited"][n[visits]] = 1
        rows = visits & heavy & first
        kinds = heavy_tile, light & first, group, rows
        level = np.full(positions, d)
        fields = [v, level, start, stop, a["num_children"][n], *kinds]
        found.append(np.stack([each.astype(np.int64) for each in fields]))
    v, d, start, stop, width, *chosen = np.concatenate(found, axis=1)
    order = np.lexsort((v, d, v // block_v))
    flat = d * positions + v
    lists = [flat[order][kind[order] > 0] for kind in chosen]
    rows = order[chosen[-1][order] > 0]
    lists[3:], num_sums = _tiles(a, flat[rows], start[rows], stop[rows], width[rows])
    for name, entries in zip(
        ("heavy_tiles", "light_nodes", "light_groups", *TILES), lists, strict=True
    ):
        a[name][: len(entries)] = entries
    a["num_entries"][:] = [*map(len, lists), num_sums, a["num_entries"][7]]
    a["light_level"][:] = top


def _tiles(a: _Arrays, flat: Any, start: Any, stop: Any, width: Any) -> tuple[list[Any], int]:
    """The entries of `row_tiles`, `chunk_tiles` and `split_tiles`, and the rows of sums."""
    blocks, chunks = -(-width // a["TILE_C"]), -(-(stop - start) // a["chunk"])
    sums = np.where(chunks > 1, chunks * width, 0)
    first_sum, count = np.cumsum(sums) - sums, blocks * chunks
    of = np.repeat(np.arange(len(flat)), count)
    i = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    part, block = i // blocks[of], i % blocks[of]
    end = np.minimum(start[of] + (part + 1) * a["chunk"], stop[of])
    row = first_sum[of] + part * width[of]
    tiles = np.stack([flat[of] + part * a["chunk"], end, block, row], axis=1)
    split = chunks[of] > 1
    added = np.stack([flat[of], chunks[of], block, row], axis=1)
    return [tiles[~split], tiles[split], added[split & (part == 0)]], int(sums.sum())
