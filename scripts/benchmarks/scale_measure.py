"""One measurement of `scale`: the work and the time of a method's steps, in this process."""

import argparse
import signal
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output.backends.visits import route
from scripts.benchmarks.measure import DTYPES, PROCESS, proc_bytes
from scripts.benchmarks.scale_methods import METHODS, Method, Task, Work

LOOP_POSITIONS = 16
"""Positions that `loop` is run on; its time is proportional to their number."""


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
