"""The division of loops over nodes among threads: forward by positions, backward by rows."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from lm.output.backends.compiled.arrays import Array

LEAST_COLUMNS = 1 << 15
"""Columns of all visits from which on work is divided among threads."""
ROW_VISITS = 8
"""The time to write a row of a gradient, as a number of visits."""


def bounds_of(nodes: Array, num: int, *, by_rows: bool) -> list[int]:
    """Where the threads' parts of `num` positions or rows begin, and the end of the last one.

    A row costs its visits, and as much as `ROW_VISITS` to be written.
    """
    num_threads = torch.get_num_threads()
    num_visits, first_row, num_children = nodes[:, 1] - nodes[:, 0], nodes[:, 2], nodes[:, 3]
    if num_threads == 1 or int(num_visits @ num_children) < LEAST_COLUMNS:
        return [0, num]
    if not by_rows:
        return [num * i // num_threads for i in range(num_threads + 1)]
    cost = (num_visits + ROW_VISITS) * num_children
    before = cost.cumsum() - cost
    bounds = [0]
    for i in range(1, num_threads):
        share = int(cost.sum()) * i // num_threads
        node = int(before.searchsorted(share, side="right")) - 1
        inside = (share - before[node]) * num_children[node] // cost[node]
        bounds.append(int(first_row[node] + inside))
    return [*bounds, num]


@cache
def _threads(process: int, num: int) -> ThreadPoolExecutor:
    """Threads of a process; a forked one has none of its parent's."""
    return ThreadPoolExecutor(num, "sqrtlm")


def divide(bounds: list[int], loops: Callable[..., None], nodes: Array, *arguments: Any) -> None:
    """Run loops over nodes for each part, all but the first one in threads of their own."""
    parts = list(pairwise(bounds))
    if len(parts) == 1:
        loops(nodes, *parts[0], *arguments)
        return
    threads = _threads(os.getpid(), len(parts) - 1)
    others = [threads.submit(loops, nodes, *part, *arguments) for part in parts[1:]]
    try:
        loops(nodes, *parts[0], *arguments)
    finally:
        wait(others)
    for other in others:
        other.result()
