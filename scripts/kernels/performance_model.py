"""A performance model of the fused kernels and of their peers on an H200, which measures nothing.

One forward and backward of the output layer with the mean of the loss: bf16, dense gradients, no
bias, two levels of √N classes, inverse-rank targets. A launch uses

  issue    machine instructions of the compiled loops × the iterations that this batch needs;
           programs are put on the processors in order, so that waves and tails count
  latency  of the same schedule, if every iteration waits for its loads, less those in flight
  tensor   multiply-adds of the tensor cores, padding included
  l2       bytes from the second-level cache to the processors, in sectors of 32 bytes
  hbm      bytes from and to memory, every element once in each launch

and `scripts.kernels.rates` makes a range of time of them, to which the overhead of a launch is
added. These are times within a CUDA graph. In eager mode, the step takes as long as the host if
that is longer: for peers an assumption per launch, for the fused kernels the measured time of
`scripts.kernels.host_time`, or that of its log, `--host`. Methods whose ranges overlap are "level
with" each other.

Classes are random ones of one size, or of equal sums of √count. With rows in fp32, hidden vectors
are cast to bf16 as under autocast.

The floor is what every implementation must do: visited rows and hidden vectors read twice and their
gradients written once, or three products for every position and column of its path, whichever takes
longer at the best rates. Not modelled: bank conflicts, the address and store units, and in peers
instructions and waits, and zeros for rows without visits in `adaptive`.
"""

import heapq
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product, starmap
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from lm.output.backends.base import Problem
from lm.output.backends.triton.launch import Launch
from lm.output.backends.triton.tile_shapes import Tiles, triton_version
from scripts.benchmarks.reporting import Table, benchmark_parser, problem_size
from scripts.kernels.compilation import Classes, compiled_launch, launches, make_problem, moved
from scripts.kernels.compilation_matrix import resources
from scripts.kernels.host_time import PYTHON, host_seconds, logged_seconds
from scripts.kernels.peer_work import PEERS, Operation, loss_operations
from scripts.kernels.rates import (
    CLOCKS_PER_INSTRUCTION,
    CLOCKS_PER_LOAD,
    H200,
    HOST_LAUNCH,
    LAUNCH,
    SCHEDULERS,
    SMALL_OPERATION,
    Device,
    Range,
    Use,
    seconds_of,
    transferred,
)
from scripts.kernels.sass_loops import Loop, loops
from scripts.kernels.work import Counts, Work, count

SIZES = [(33_278, 650), (267_735, 1024), (800_000, 1024), (10_000_000, 300)]
CAPABILITY = 90
WRITES_CALLS = (3, 9, 0)
"""The first version of Triton that is known to write the calls around each instruction into the
machine code: 3.7.1 does not, so that loops in called functions have no names.
"""
_resources: dict[str, dict[str, Any]] = {}  # by hash of the binary
ROWS = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Dtypes of the weight."""
RANGE = Range._fields
ENDS = [f"{prefix}{end}" for prefix in ("", "host_") for end in RANGE]
"""Names of times in rows."""
COLUMNS = {
    "N": "{N}",
    "H": "{H}",
    "classes": "{classes}",
    "rows": "{rows}",
    "method": "{method}",
    "launch": "{launch}",
    "programs": "{programs}",
    "a processor": "{resident}",
    **{f"{name} µs": f"{{{name}_us:.1f}}" for name in Use._fields},
    "launches": "{launches}",
    "time µs": "{low_us:.1f} – {high_us:.1f}",
    "host µs": "{host_low_us:.0f} – {host_high_us:.0f}",
    "÷ floor": "{low_ratio:.2f} – {high_ratio:.2f}",
    "bound by": "{bound}",
}


def launch_row(launch: Launch, done: Work, host: Range = HOST_LAUNCH) -> dict[str, Any]:
    """The model of a launch that does some work; times in µs."""
    binary, programs = compiled_launch(launch, CAPABILITY), launch.num_programs
    if binary.hash not in _resources:
        _resources[binary.hash] = resources(launch, binary, CAPABILITY, exact=False)
    found = _resources[binary.hash]
    instructions, waits, flops = per_program(launch, binary, done)
    resident = min(max(1, found["programs"]), max(1, -(-programs // H200.processors)))
    warps = resident * launch.tile.warps / SCHEDULERS

    def scheduled(moved: Use, clocks: float, clocks_per_load: float) -> Use:
        issue = makespan(instructions * max(clocks, warps) / H200.clock, resident)
        latency = makespan(waits * clocks_per_load / H200.clock, resident)
        return moved._replace(issue=issue, latency=latency)

    each = zip(
        transferred(H200, flops, done.loaded, done.memory),
        CLOCKS_PER_INSTRUCTION,
        CLOCKS_PER_LOAD,
        strict=True,
    )
    stages = launch.tile.stages if flops else 1
    best, worst = starmap(scheduled, each)
    row = _row(launch.kernel.__name__, best, worst, stages, 1, host)
    return {**row, "programs": programs, "resident": resident, "good": found["good"]}


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
    ends = [0.0] * (H200.processors * resident)
    for each in seconds.tolist():
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def _row(
    name: str, best: Use, worst: Use, stages: int, launches: int, host: Range
) -> dict[str, Any]:
    """A row of the table, without its size; `host` is for all launches."""
    seconds = seconds_of(best, worst, stages)
    overhead = (LAUNCH if seconds.high else SMALL_OPERATION) * launches
    total = seconds.plus(overhead)
    bound = max(best._asdict(), key=lambda key: getattr(best, key))
    return {
        "launch": name,
        "programs": 0,
        "resident": 0,
        **{f"{key}_us": 1e6 * value for key, value in best._asdict().items()},
        "launches": launches,
        "low_us": 1e6 * total.low,
        "high_us": 1e6 * total.high,
        "host_low_us": 1e6 * host.low,
        "host_high_us": 1e6 * host.high,
        "bound": bound if seconds.low > overhead.low else "launches",
    }


def fused_work(
    problem_size: tuple[int, int, int],
    shapes: Sequence[Tiles | None] = (None,),
    rows: Sequence[torch.dtype] = (torch.bfloat16,),
    classes: Classes = "equal",
) -> list[list[tuple[Launch, Work]]]:
    """Launches of this project's kernels and what they do, as `scripts.kernels.work.count`.

    Sizes and classes are those of `make_problem`; shapes of None are the backend's.
    """
    works = count(problem_size, CAPABILITY, shapes, rows, classes)
    found = []
    for (dtype, tiles), done in zip(product(rows, shapes), works, strict=True):
        problem = make_problem(*problem_size, weight_dtype=dtype, classes=classes)
        found.append(
            list(zip(launches(moved(problem, "meta"), CAPABILITY, tiles), done, strict=True))
        )
    return found


def operation_row(each: Operation) -> dict[str, Any]:
    """The model of an operation of torch or of a peer."""
    uses = transferred(H200, each.flops, each.loaded, each.memory)
    return _row(each.name, *uses, each.stages, each.launches, HOST_LAUNCH * each.launches)


def operation_seconds(each: Operation, device: Device) -> Range:
    """The time of an operation on a device, within a CUDA graph."""
    seconds = seconds_of(*transferred(device, each.flops, each.loaded, each.memory), each.stages)
    return seconds.plus((LAUNCH if seconds.high else SMALL_OPERATION) * each.launches)


def floor_seconds(problem: Problem) -> float:
    """The least time of any implementation with this tree."""
    tree, (num_positions, size) = problem.tree, problem.hidden.shape
    row = tree.row_of_word[problem.target]
    node = tree.node_of_row[row]
    width, nodes = tree.num_children[node], torch.unique(node)
    num_classes = int(tree.num_children[0])
    rows = int(tree.num_children[nodes].sum()) + num_classes
    num_bytes = rows * problem.weight.element_size() + num_positions * problem.hidden.element_size()
    columns = num_positions * num_classes + int(width.sum())
    best, _ = transferred(H200, 3 * 2 * columns * size, 0, 3 * size * num_bytes)
    return max(best)


def report(
    size: tuple[int, int],
    num_positions: int,
    host: Mapping[str, Range],
    rows: Sequence[str] = tuple(ROWS),
    classes: Classes = "equal",
) -> Iterator[dict[str, Any]]:
    """Rows of every method at one size N, H; the last of each method is its total."""
    dtypes = [ROWS[name] for name in rows]
    works = fused_work((*size, num_positions), rows=dtypes, classes=classes)
    for name, dtype, fused in zip(rows, dtypes, works, strict=True):
        problem = make_problem(*size, num_positions, weight_dtype=dtype, classes=classes)
        floor, ours = 1e6 * floor_seconds(problem), None
        of: dict[str, Any] = {"N": size[0], "H": size[1], "positions": num_positions}
        of |= {"classes": classes, "rows": name}
        for method, found in methods(problem, fused, host).items():
            total = total_row(found)
            ours = ours or total
            total |= {f"{key}vs_fused": compared(total, ours, key) for key in ("", "eager_")}
            for row in [*found, total]:
                ratios = {f"{end}_ratio": row[f"{end}_us"] / floor for end in RANGE}
                yield {**of, "method": method, **row, "floor_us": floor, **ratios}


def methods(
    problem: Problem, fused: Iterable[tuple[Launch, Work]], host: Mapping[str, Range]
) -> dict[str, list[dict[str, Any]]]:
    """Rows of the launches of each method, ours first."""
    loss, ours_loss = (
        [operation_row(each) for each in loss_operations(problem, fused=fused_mean)]
        for fused_mean in (False, True)
    )
    ours = [launch_row(*each, host[each[0].kernel.__name__]) for each in fused]
    ours.append(_row(PYTHON, Use(), Use(), 1, 0, host[PYTHON]))
    ours.append(operation_row(Operation("assert that targets are words", 1)))
    peers = {name: [*map(operation_row, peer(problem))] for name, peer in PEERS.items()}
    return {"fused": ours + ours_loss} | {name: each + loss for name, each in peers.items()}


def total_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of a method's launches, and its time in eager mode."""
    names = ["launches", *(f"{key}_us" for key in (*Use._fields, *ENDS))]
    total: dict[str, Any] = {name: sum(row[name] for row in rows) for name in names}
    eager = {f"eager_{end}_us": max(total[f"{end}_us"], total[f"host_{end}_us"]) for end in RANGE}
    return {"launch": "total", "programs": 0, "resident": 0, **total, **eager, "bound": ""}


def compared(row: Mapping[str, Any], ours: Mapping[str, Any], key: str) -> str:
    """How a method compares with ours, by its times in a graph or, by key, in eager mode."""
    if row is ours:
        return "–"
    low_high = (Range(*(each[f"{key}{end}_us"] for end in RANGE)) for each in (row, ours))
    return next(low_high).compared(next(low_high))


def main() -> None:
    """Print the table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--sizes", type=problem_size, nargs="+", default=SIZES, metavar="N:H")
    add("--positions", type=int, default=16_384)
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="dtypes of the weight")
    add("--host", type=Path, metavar="FILE", help="a log of scripts.kernels.host_time")
    kinds = get_args(Classes)
    add("--classes", nargs="+", choices=kinds, default=kinds, help="of one size, or unequal")
    options = parser.parse_args()
    if (triton_version() or WRITES_CALLS) < WRITES_CALLS:
        sys.exit("performance_model: requires Triton 3.9, whose code names calls")
    print("A model of an H200; nothing is measured on it.", file=sys.stderr)
    table = Table(COLUMNS, log=options.json)
    host = logged_seconds(options.host) if options.host else host_seconds(CAPABILITY)
    for classes, size in product(options.classes, options.sizes):
        for row in report(size, options.positions, host, options.rows, classes):
            table.add({**row, "model": True})


if __name__ == "__main__":
    main()
