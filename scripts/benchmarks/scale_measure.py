"""One measurement of `scale`: the work and the time of a method's steps, in this process."""

import argparse
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output.backends.visits import route
from scripts.benchmarks.measure import PROCESS, proc_bytes
from scripts.benchmarks.scale_methods import (
    Method,
    Task,
    dense,
    full,
    gather,
    host,
    layer,
    loop,
    step,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOOP_POSITIONS = 16
"""Positions that `loop` is run on; its time is proportional to their number."""


class Work(NamedTuple):
    """What a step has to do.

    Attributes:
        visited: Distinct rows of the visited nodes, and the rows read as input vectors.
        rows: R, rows of the table.
        columns: Children on the paths of all positions, together.
        copied: Positions × words of the widest visited class.
        positions: P.
        hidden: H.
    """

    visited: int
    rows: int
    columns: int
    copied: int
    positions: int
    hidden: int


def work(task: Task, words: Tensor, *, reads_inputs: bool) -> Work:
    """The work of one step with `words` [2, P]."""
    tree = task.tree
    inputs, targets = words.to(task.table_device)
    node = route(targets, tree.arrays, tree.depth, ignore_index=-100).node
    width = torch.where(node >= 0, tree.num_children[node], 0)
    nodes = torch.unique(node[node >= 0])
    visited = int(tree.num_children[nodes].sum())
    if reads_inputs:
        row = torch.unique(tree.row_of_word[inputs])
        visited += int((~torch.isin(tree.node_of_row[row], nodes)).sum())
    return Work(
        visited=visited,
        rows=tree.num_rows,
        columns=int(width.sum()),
        copied=int(width[-1].max()) * len(targets),
        positions=len(targets),
        hidden=task.hidden.shape[1],
    )


class Kind(NamedTuple):
    """A method and the work of its step.

    Attributes:
        build: Makes the method.
        moved: Numbers that its step must read or write.
        every_row: Whether its step reads all rows, visited or not.
    """

    build: Callable[[Task], Method]
    moved: Callable[[Work], int]
    every_row: bool = False


METHODS = {
    # rows read once for the loss and d_hidden, then read and written by the update
    "layer": Kind(layer, lambda w: 3 * w.visited * w.hidden),
    "step": Kind(step, lambda w: 3 * w.visited * w.hidden),
    # rows read twice; the whole gradient written and read, all rows read and written
    "dense": Kind(dense, lambda w: (2 * w.visited + 4 * w.rows) * w.hidden, every_row=True),
    # the same for all rows; logits, log-probabilities and their gradients written and read
    "full": Kind(full, lambda w: 6 * w.rows * w.hidden + 9 * w.positions * w.rows, every_row=True),
    # copies made (2), read twice, their gradient made (1), read and added up (3); the rest as dense
    "gather": Kind(gather, lambda w: (8 * w.copied + 4 * w.rows) * w.hidden, every_row=True),
    # copied to the device (2), read twice, gradient made (1), copied back (2), subtracted (3)
    "host": Kind(host, lambda w: 10 * w.visited * w.hidden),
    # rows read twice, gradient made (1) and added (3), at each position; rows updated (3)
    "loop": Kind(loop, lambda w: (6 * w.columns + 3 * w.visited) * w.hidden),
}


class Timing(NamedTuple):
    """Wall-clock seconds and CPU seconds of one step, and its loss."""

    wall: float
    cpu: float
    loss: float


def timed(task: Task, method: Method, words: Tensor, limit: float) -> Timing:
    """Make a step; the operating system ends the process after `limit` seconds."""
    signal.setitimer(signal.ITIMER_REAL, limit)
    task.hidden.grad = None
    start = time.perf_counter(), time.process_time()
    loss = method.loss(words)
    torch.autograd.backward(loss)
    method.update()
    value = float(loss.detach())
    if task.hidden.is_cuda:
        torch.cuda.synchronize()
    stop = time.perf_counter(), time.process_time()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return Timing(stop[0] - start[0], stop[1] - start[1], value)


def measure(name: str, vocab_size: int, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one method, measured in this process."""
    kind, num_positions = METHODS[name], options.positions
    task = Task(name, vocab_size, DTYPES[dtype], options)
    method = kind.build(task)
    num_run = min(LOOP_POSITIONS, num_positions) if name == "loop" else num_positions
    with torch.no_grad():
        first_loss = None if num_run == num_positions else float(method.loss(task.words[0]))
    times = [timed(task, method, words[:, :num_run], options.time_limit) for words in task.words]
    scale = num_positions / num_run
    seconds = scale * statistics.median(timing.wall for timing in times[1:])
    loads = [work(task, words, reads_inputs=name == "step") for words in task.words[1:]]
    peak = torch.cuda.max_memory_allocated() if task.hidden.is_cuda else None
    itemsize = DTYPES[dtype].itemsize
    return {
        "outcome": "time" if seconds > options.time_limit else "done",
        "seconds": seconds,
        "cpu_seconds": scale * statistics.median(timing.cpu for timing in times[1:]),
        "run_positions": num_run,
        "microseconds_per_position": 1e6 * seconds / num_positions,
        "steps_per_minute": 60 / seconds,
        "rows_visited": statistics.median(w.rows if kind.every_row else w.visited for w in loads),
        "bytes_per_position": statistics.median(
            itemsize * kind.moved(w) / num_positions for w in loads
        ),
        "peak_bytes": proc_bytes(PROCESS / "status", "VmHWM"),
        "device_peak_bytes": peak,
        "table_bytes": task.tree.num_rows * options.hidden * itemsize,
        "num_rows": task.tree.num_rows,
        "loss": times[0].loss if first_loss is None else first_loss,
    }
