#!/usr/bin/env python
"""Training steps as the vocabulary grows: what they cost, and which ways of making them survive.

A step is forward, backward and the optimizer's update. Ours costs what the rows that a batch visits
cost, not what N rows would. The usual ways of writing a softmax over classes do not:

  layer    ours, the output layer alone: gradients of the visited rows, Adagrad by rows
  step     ours, a whole language model (LSTM, tied, 32 sequences): forward, backward, clipping,
           AdamW of the backbone, Adagrad by rows of the table of words
  dense    ours with gradients of the table's size, SGD: what it costs not to be sparse
  full     the ordinary softmax: linear + cross_entropy, SGD
  gather   the rows of each position's class copied, padded to the widest class of the batch, as
           one batched product wants them; dense gradient, SGD
  host     the table in host memory, a numpy array: rows of the batch's classes are looked up there,
           copied to the device in one piece, their gradients copied back and subtracted there
  loop     one position after the other, every class a parameter of its own, SGD; run on few
           positions, its time scaled to all (its peak of memory is that of the few)

Words are drawn by inverse rank (Zipf), anew for each step and outside the clock; √N classes have
equal sums of √count. Every measurement is a process of its own, whose memory the operating system
limits, so that a method that does not fit fails alone; larger N of it are not tried then. Methods
over classes must agree in their loss on the same words and weights, or the run stops.

A figure is the median over the steps after the first. On a shared machine the processor's seconds
are steadier than those on the wall. The peak is that of the whole process, of which the libraries
are some 0.4 GB. Rows visited are those whose weights a step reads: all of them, where its update
does. Bytes that must move are counted, not measured: numbers read and written by each part of a
step as if no cache held them over from the part before. Linux only.
"""

import argparse
import errno
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from bench_measure import told_bytes  # noqa: E402
from bench_table import environment  # noqa: E402
from scale_methods import (  # noqa: E402
    SEQUENCES,
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

from lm.output.backends.visits import route  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest relative difference of two losses that should be equal."""
LOOP_POSITIONS = 16
"""As many are run of the loop over positions, whose time grows with their number alone."""


class Work(NamedTuple):
    """What a step has to do.

    Attributes:
        visited: distinct rows of the visited nodes, and the rows read as input vectors.
        rows: R, of the table.
        columns: children on the paths of all positions, together.
        copied: positions × words of the widest visited class.
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
    """Of one step with `words` [2, P]."""
    tree = task.tree
    inputs, targets = words.to(task.home)
    node = route(targets, tree.arrays, tree.depth, ignore_index=-100).node
    width = torch.where(node >= 0, tree.num_children[node], 0)
    nodes = torch.unique(node[node >= 0])
    visited = int(tree.num_children[nodes].sum())
    if reads_inputs:
        row = torch.unique(tree.row_of_word[inputs])
        visited += int((~torch.isin(tree.node_of_row[row], nodes)).sum())
    sizes = len(targets), task.hidden.shape[1]
    return Work(
        visited, tree.num_rows, int(width.sum()), int(width[-1].max()) * len(targets), *sizes
    )


class Kind(NamedTuple):
    """What is known of a method.

    Attributes:
        build: makes it.
        moved: numbers that its step must read or write.
        every_row: whether its step reads all rows, visited or not.
    """

    build: Callable[[Task], Method]
    moved: Callable[[Work], int]
    every_row: bool = False


METHODS = {
    # rows read once for loss and hidden's gradient, then read and written by the update
    "layer": Kind(layer, lambda w: 3 * w.visited * w.hidden),
    "step": Kind(step, lambda w: 3 * w.visited * w.hidden),
    # rows read twice; all of the gradient written and read, all rows read and written
    "dense": Kind(dense, lambda w: (2 * w.visited + 4 * w.rows) * w.hidden, every_row=True),
    # the same of all rows; logits, log-probabilities and their gradients written and read
    "full": Kind(full, lambda w: 6 * w.rows * w.hidden + 9 * w.positions * w.rows, every_row=True),
    # copies made (2), read twice, their gradient made (1), read and added up (3); the rest as dense
    "gather": Kind(gather, lambda w: (8 * w.copied + 4 * w.rows) * w.hidden, every_row=True),
    # copied there (2), read twice, gradient made (1), copied back (2), subtracted (3)
    "host": Kind(host, lambda w: 10 * w.visited * w.hidden),
    # rows read twice, gradient made (1) and added (3), at each position; rows updated (3)
    "loop": Kind(loop, lambda w: (6 * w.columns + 3 * w.visited) * w.hidden),
}
AGREEING = ("layer", "dense", "gather", "host", "loop")
"""Methods of the same loss."""


class Timing(NamedTuple):
    """Of one step: seconds on the wall and of the processor, and its loss."""

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
    """The figures of one method, in this process."""
    kind, num_positions = METHODS[name], options.positions
    task = Task(name, vocab_size, DTYPES[dtype], options)
    method = kind.build(task)
    run = min(LOOP_POSITIONS, num_positions) if name == "loop" else num_positions
    with torch.no_grad():
        first_loss = None if run == num_positions else float(method.loss(task.words[0]))
    times = [timed(task, method, words[:, :run], options.time_limit) for words in task.words]
    scale = num_positions / run
    seconds = scale * statistics.median(timing.wall for timing in times[1:])
    loads = [work(task, words, reads_inputs=name == "step") for words in task.words[1:]]
    peak = torch.cuda.max_memory_allocated() if task.hidden.is_cuda else None
    itemsize = DTYPES[dtype].itemsize
    return {
        "outcome": "time" if seconds > options.time_limit else "done",
        "seconds": seconds,
        "cpu_seconds": scale * statistics.median(timing.cpu for timing in times[1:]),
        "run_positions": run,
        "microseconds_per_position": 1e6 * seconds / num_positions,
        "steps_per_minute": 60 / seconds,
        "rows_visited": statistics.median(w.rows if kind.every_row else w.visited for w in loads),
        "bytes_per_position": statistics.median(
            itemsize * kind.moved(w) / num_positions for w in loads
        ),
        "peak_bytes": told_bytes(Path("/proc/self/status"), "VmHWM"),
        "device_peak_bytes": peak,
        "table_bytes": task.tree.num_rows * options.hidden * itemsize,
        "num_rows": task.tree.num_rows,
        "loss": times[0].loss if first_loss is None else first_loss,
    }


def limit_memory(num_bytes: int, device: torch.device) -> None:
    """Let allocations beyond so many bytes fail: of the process's own data, and of the GPU's.

    RLIMIT_DATA counts private writable memory alone. RLIMIT_AS fails as cleanly, but would count
    mapped libraries too, and the address space that CUDA reserves.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / there))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch, numpy and the system each have their own way of saying so."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in ("allocate memory", "bad_alloc"))


def measure_here(options: argparse.Namespace) -> None:
    """Print the figures of the one measurement that is asked for, as a JSON line."""
    torch.set_num_threads(options.threads)
    limit_memory(int(options.memory_limit_gb * 1e9), options.device)
    try:
        row = measure(options.methods[0], options.sizes[0], options.dtype[0], options)
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        row = {"outcome": "memory"}
    print(json.dumps(row))


def measure_alone(
    name: str, vocab_size: int, dtype: str, options: argparse.Namespace
) -> dict[str, Any]:
    """The same in a process of its own. Its complaints go to stderr."""
    row = {
        "vocab_size": vocab_size,
        "method": name,
        "dtype": dtype,
        "positions": options.positions,
        "hidden": options.hidden,
        "steps": options.steps,
        "memory_limit_gb": options.memory_limit_gb,
        "time_limit_seconds": options.time_limit,
        "seed": options.seed,
    }
    if name == "host" and dtype == "bf16":
        return row | {"outcome": "refused: numpy has no bf16"}
    command = [sys.executable, __file__, "--here"]
    command += ["--sizes", str(vocab_size), "--methods", name, "--dtype", dtype]
    for option in ("positions", "hidden", "steps", "threads", "seed", "device"):
        command += [f"--{option}", str(getattr(options, option))]
    command += ["--memory-limit-gb", str(options.memory_limit_gb)]
    command += ["--time-limit", str(options.time_limit)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    ended = {-signal.SIGALRM: "time", -signal.SIGKILL: "memory"}  # the latter by the system
    if done.returncode:
        return row | {"outcome": ended.get(done.returncode, f"failed: {done.returncode}")}
    figures: dict[str, Any] = json.loads(done.stdout)
    return row | figures


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All that is asked for, printed and written as it comes; no N larger than one that failed.

    Raises:
        SystemExit: if methods that compute the same do not agree.
    """
    where = environment(options.device) | {"threads": options.threads, "cpus": os.cpu_count()}
    print(
        f"{where['device']}, {options.threads} threads of {where['cpus']} processors,"
        f" torch {where['torch']}: {options.positions:,} positions, H = {options.hidden}\n{TITLES}"
    )
    rows: list[dict[str, Any]] = []
    broken: set[tuple[str, str]] = set()
    for vocab_size, dtype in product(sorted(options.sizes), options.dtype):
        found = []
        for name in options.methods:
            if (name, dtype) in broken:
                continue
            row = measure_alone(name, vocab_size, dtype, options) | where
            found.append(row)
            print(table_line(row), flush=True)
            if row["outcome"] != "done":
                broken.add((name, dtype))
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        check_losses(found)
        rows += found
    return rows


TITLES = (
    "         N  method  dtype    s/step     CPU s  µs/position  rows visited  kB/position"
    "  peak GB  table GB  steps/min"
)


def table_line(row: dict[str, Any]) -> str:
    """A row for people."""
    line = f"{row['vocab_size']:10,}  {row['method']:<6}  {row['dtype']:<5}"
    if "seconds" not in row:
        return f"{line}  {explained(row)}"
    scaled = row["run_positions"] < row["positions"]
    notes = [f"run on {row['run_positions']} positions and scaled"] if scaled else []
    notes += [explained(row)] if row["outcome"] != "done" else []
    return (
        f"{line} {row['seconds']:9.4f} {row['cpu_seconds']:9.4f}"
        f" {row['microseconds_per_position']:12.1f} {row['rows_visited']:13,.0f}"
        f" {row['bytes_per_position'] / 1e3:12,.1f} {row['peak_bytes'] / 1e9:8.2f}"
        f" {row['table_bytes'] / 1e9:9.3f} {row['steps_per_minute']:10,.1f}"
        f"  {'; '.join(notes)}"
    ).rstrip()


def explained(row: dict[str, Any]) -> str:
    """Why a row has no figures, or should have none."""
    reasons = {
        "memory": f"memory: more than {row['memory_limit_gb']:g} GB",
        "time": f"time: more than {row['time_limit_seconds']:g} s a step",
    }
    outcome: str = row["outcome"]
    return reasons.get(outcome, outcome)


def check_losses(rows: list[dict[str, Any]]) -> None:
    """Stop if methods of the same loss do not agree on it."""
    same = [row for row in rows if row["method"] in AGREEING and "loss" in row]
    for first, row in product(same[:1], same[1:]):
        tolerance = TOLERANCE[row["dtype"]] * abs(first["loss"])
        if not abs(row["loss"] - first["loss"]) <= tolerance:
            raise SystemExit(
                f"bench_scale: N = {row['vocab_size']:,}: loss of {row['method']} is"
                f" {row['loss']}, of {first['method']} {first['loss']}"
            )


def survivors(rows: list[dict[str, Any]]) -> list[str]:
    """For each method, the largest N that it survives and why it goes no further."""
    lines = []
    for name, dtype in dict.fromkeys((row["method"], row["dtype"]) for row in rows):
        own = [row for row in rows if (row["method"], row["dtype"]) == (name, dtype)]
        largest = max((row["vocab_size"] for row in own if row["outcome"] == "done"), default=None)
        last = own[-1]
        line = f"{name:<6}  {dtype}  " + ("none" if largest is None else f"N = {largest:,}")
        if last["outcome"] != "done":
            line += f" (at {last['vocab_size']:,} {explained(last)})"
        lines.append(line)
    return lines


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    sizes = [10_000, 100_000, 1_000_000, 10_000_000]
    add("--sizes", type=int, nargs="+", default=sizes, metavar="N", help="numbers of words")
    add("--positions", type=int, default=2048, help=f"of a batch, a multiple of {SEQUENCES}")
    add("--hidden", type=int, default=300, metavar="H")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    add("--dtype", nargs="+", choices=DTYPES, default=["fp32"], help="of the table")
    add("--steps", type=int, default=5, help="timed, after one to warm up")
    add("--memory-limit-gb", type=float, default=18.0, metavar="GB", help="of a process")
    add("--time-limit", type=float, default=60.0, metavar="SECONDS", help="of a step")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--seed", type=int, default=1)
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--json", type=Path, metavar="FILE", help="append JSON lines")
    add("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("positions", "hidden", "steps", "memory_limit_gb", "time_limit", "threads"):
        if not getattr(options, name) > 0:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be positive, got {getattr(options, name)}")
    if min(options.sizes) < 2:
        parser.error(f"--sizes must be at least 2, got {min(options.sizes)}")
    if options.positions % SEQUENCES:
        parser.error(f"--positions must be a multiple of {SEQUENCES}, got {options.positions}")
    options.device = torch.device(options.device)
    return options


def main() -> None:
    """Print a table and the largest N that each method survives; exit code 1 if one failed for
    another reason than memory or time.
    """
    options = parse_options()
    if options.here:
        measure_here(options)
        return
    rows = measure_all(options)
    print("\nThe largest N that each method survives:", *survivors(rows), sep="\n")
    if any(row["outcome"].startswith("failed") for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
