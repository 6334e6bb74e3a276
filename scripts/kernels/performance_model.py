"""A performance model of the fused kernels and of their peers on an H200. Nothing is measured.

One forward and backward of the output layer: bf16, dense gradients, no bias, two levels of √N
classes with words assigned at random, inverse-rank targets. The time of a launch is the largest of

  issue    machine instructions of the compiled loops × the iterations that this batch needs;
           programs are put on the processors in order, so that waves and tails count
  latency  of the same schedule, if every iteration waits for its loads, less those in flight
  tensor   multiply-adds of the tensor cores, padding included
  l2       bytes from the second-level cache to the processors, in sectors of 32 bytes
  hbm      bytes from and to memory, every element once in each launch

plus the overhead of a launch. The floor is what every implementation must do: visited rows and
hidden vectors read twice and their gradients written once, or three products for every position and
column of its path, whichever takes longer. Not modelled: bank conflicts, the address and store
units, clocks under load, and in peers zeros for rows without visits and waiting for the host.
"""

import heapq
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import starmap
from typing import Any
from unittest import mock

import numpy as np
import torch

from lm.output.backends.base import Problem
from lm.output.backends.triton.launch import Launch
from lm.output.backends.triton.tile_shapes import Tiles
from scripts.benchmarks.reporting import Table, benchmark_parser, problem_size
from scripts.kernels.compilation import compiled_launch, launches, make_problem, moved
from scripts.kernels.compilation_matrix import resources
from scripts.kernels.peer_work import PEERS, PROCESSORS, Operation
from scripts.kernels.sass_loops import Loop, loops
from scripts.kernels.work import Counts, Work, count

SIZES = [(33_278, 650), (267_735, 1024), (800_000, 1024), (10_000_000, 300)]
CAPABILITY = 90
SCHEDULERS, CLOCK = 4, 1.75e9
"""Schedulers of a processor of an H200 issue one instruction a clock each."""
CLOCKS_PER_INSTRUCTION = 2
"""Of one warp: independent instructions of other warps fill the rest."""
LATENCY = 600 / CLOCK
"""Seconds until a load arrives."""
L2_RATE, HBM_RATE, FLOP_RATE = 5.5e12, 4.3e12, 989e12
"""Bytes a second from the second-level cache and from memory; dense bf16 operations a second."""
LAUNCH, SMALL_OPERATION = 1.5e-6, 2.25e-6
"""Seconds within a CUDA graph: between the end of a launch and the work of the next; of a torch
operation on a few numbers a position, work included.
"""
BOUNDS = ("issue", "latency", "tensor", "l2", "hbm")
COLUMNS = {
    "N": "{N}",
    "H": "{H}",
    "method": "{method}",
    "launch": "{launch}",
    "programs": "{programs}",
    "a processor": "{resident}",
    **{f"{name} µs": f"{{{name}_us:.1f}}" for name in BOUNDS},
    "launches": "{launches}",
    "time µs": "{us:.1f}",
    "÷ floor": "{ratio:.2f}",
    "bound by": "{bound}",
}


def launch_row(launch: Launch, done: Work) -> dict[str, Any]:
    """The model of a launch that does some work; times in µs."""
    binary, programs = compiled_launch(launch, CAPABILITY), launch.num_programs
    found = resources(launch, binary, CAPABILITY, exact=False)
    instructions, waits, flops = per_program(launch, binary, done)
    resident = min(max(1, found["programs"]), max(1, -(-programs // PROCESSORS)))
    share = max(CLOCKS_PER_INSTRUCTION, resident * launch.tile.warps / SCHEDULERS)
    seconds = {
        "issue": makespan(instructions * share / CLOCK, resident),
        "latency": makespan(waits * LATENCY, resident),
        "tensor": flops / FLOP_RATE,
        "l2": done.loaded / L2_RATE,
        "hbm": done.memory / HBM_RATE,
    }
    row = _row(launch.kernel.__name__, seconds, 1, programs, resident)
    return {**row, "good": found["good"]}


def per_program(launch: Launch, binary: Any, done: Work) -> tuple[Counts, Counts, float]:
    """Instructions of a warp and waits for loads of each program; operations of all."""
    instructions, waits = np.zeros(launch.num_programs), np.zeros(launch.num_programs)
    flops, copies, tile = 0.0, Counter[str](), launch.tile
    for loop in _counted(loops(binary.asm["cubin"]), done):
        iterations: Counts = np.ones(launch.num_programs)  # outside of loops, unless counted
        if ":" in loop.name or loop.name in done.loops:
            iterations = done.loops[loop.name][copies[loop.name]]
            copies[loop.name] += 1
        instructions += loop.instructions * iterations
        pipelined = loop.matrix_flops and loop.innermost
        in_flight = max(1, tile.stages - 1) if pipelined else 1
        waits += iterations * (loop.waits / in_flight)
        flops += loop.matrix_flops * tile.warps * float(iterations.sum())
    return instructions, waits, flops


def _counted(found: list[Loop], done: Work) -> list[Loop]:
    """The loops without what the compiler unrolled: trips are few and run in the shortest copy."""
    kept = list(found)
    for name, counts in done.loops.items():
        copies = [loop for loop in kept if loop.name == name]
        copies.sort(key=lambda loop: (not loop.waits, loop.instructions))
        for loop in copies[len(counts) :]:
            kept.remove(loop)
    return kept


def makespan(seconds: Counts, resident: int) -> float:
    """When the last program ends, if each in order takes the first free place."""
    ends = [0.0] * (PROCESSORS * resident)
    for each in seconds.tolist():
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def _row(
    name: str, seconds: dict[str, float], launches: int, programs: int = 0, resident: int = 0
) -> dict[str, Any]:
    """A row of the table, without its size."""
    bound = max(seconds, key=lambda key: seconds[key])
    overhead = launches * (LAUNCH if seconds[bound] else SMALL_OPERATION)
    total = seconds[bound] + overhead
    return {
        "launch": name,
        "programs": programs,
        "resident": resident,
        **{f"{key}_us": 1e6 * seconds.get(key, 0.0) for key in BOUNDS},
        "launches": launches,
        "us": 1e6 * total,
        "bound": bound if seconds[bound] > overhead else "launches",
    }


def fused_work(
    problem_size: tuple[int, int, int], shapes: Sequence[Tiles | None] = (None,)
) -> list[list[tuple[Launch, Work]]]:
    """Launches of this project's kernels and what they do, for each choice of tile shapes.

    Sizes are those of `make_problem`; shapes of None are the backend's.
    """
    # the lists of what programs work on need kernels that run, which are not compiled
    with (
        mock.patch.dict(os.environ, TRITON_INTERPRET="1"),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        works = pool.submit(count, problem_size, CAPABILITY, shapes).result()
    problem = moved(make_problem(*problem_size), "meta")
    return [
        list(zip(launches(problem, CAPABILITY, tiles), done, strict=True))
        for tiles, done in zip(shapes, works, strict=True)
    ]


def operation_row(each: Operation) -> dict[str, Any]:
    """The model of a peer's operation."""
    seconds = {
        "tensor": each.flops / FLOP_RATE,
        "l2": each.loaded / L2_RATE,
        "hbm": each.memory / HBM_RATE,
    }
    return _row(each.name, seconds, each.launches)


def floor_seconds(problem: Problem) -> float:
    """The least time of any implementation with this tree."""
    tree, (num_positions, size) = problem.tree, problem.hidden.shape
    row = tree.row_of_word[problem.target]
    node = tree.node_of_row[row]
    width, nodes = tree.num_children[node], torch.unique(node)
    num_classes = int(tree.num_children[0])
    rows = int(tree.num_children[nodes].sum()) + num_classes
    num_bytes = 3 * (rows + num_positions) * size * problem.hidden.element_size()
    columns = num_positions * num_classes + int(width.sum())
    return max(num_bytes / HBM_RATE, 3 * 2 * columns * size / FLOP_RATE)


def report(size: tuple[int, int], num_positions: int) -> Iterator[dict[str, Any]]:
    """Rows of every method at one size N, H; the last of each method is its total."""
    vocab_size, hidden_size = size
    problem = make_problem(*size, num_positions)
    floor = 1e6 * floor_seconds(problem)
    (fused,) = fused_work((*size, num_positions))
    methods: dict[str, Iterable[dict[str, Any]]] = {"fused": starmap(launch_row, fused)}
    methods |= {name: map(operation_row, peer(problem)) for name, peer in PEERS.items()}
    for method, found in methods.items():
        rows = list(found)
        total = {key: sum(row[key] for row in rows) for key in ("launches", "us")}
        total |= {f"{key}_us": sum(row[f"{key}_us"] for row in rows) for key in BOUNDS}
        rows.append({"launch": "total", "programs": 0, "resident": 0, **total, "bound": ""})
        for row in rows:
            problem_of = {"N": vocab_size, "H": hidden_size, "positions": num_positions}
            ratio = row["us"] / floor
            yield {**problem_of, "method": method, **row, "floor_us": floor, "ratio": ratio}


def main() -> None:
    """Print the table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--sizes", type=problem_size, nargs="+", default=SIZES, metavar="N:H")
    add("--positions", type=int, default=16_384)
    options = parser.parse_args()
    print("A model of an H200; nothing is measured.", file=sys.stderr)
    table = Table(COLUMNS, log=options.json)
    for size in options.sizes:
        for row in report(size, options.positions):
            table.add({**row, "model": True})


if __name__ == "__main__":
    main()
