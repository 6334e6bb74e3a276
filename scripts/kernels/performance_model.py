"""A performance model of the fused kernels, with the times that were measured on an H100.

One forward and backward of the output layer with the mean of the loss: bf16, dense gradients, no
bias, two levels of √N random classes of one size, inverse-rank targets. A launch uses

  issue    machine instructions of the compiled loops × the iterations that this batch needs;
           programs are put on the processors in order, so that waves and tails count
  latency  of the same schedule, if every iteration waits for its loads, less those in flight
  tensor   multiply-adds of the tensor cores, padding included
  l2       bytes from the second-level cache to the processors, in sectors of 32 bytes
  hbm      bytes from and to memory, every element once in each launch

for some seconds each, which give a range of time:

  low   the longest of them at the best rates, as if everything overlapped
  high  at the worst rates, the longest + the others ÷ stages of the pipeline; `issue` and `tensor`
        are one after the other, as in the instructions of a warp

A range is what these assumptions allow, not an interval of confidence. Not modelled: bank
conflicts, the address and store units.
"""

import heapq
import json
import sys
from collections import Counter
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm.output.backends.triton.launch import Launch
from lm.output.backends.triton.tile_shapes import triton_version
from scripts.benchmarks.reporting import Table, benchmark_parser, problem_size
from scripts.kernels.compilation import compiled_launch, make_problem
from scripts.kernels.compilation_matrix import resources
from scripts.kernels.sass_loops import Loop, loops
from scripts.kernels.work import Counts, Work, work_of

SIZES = [(33_278, 650), (267_735, 1024), (800_000, 1024), (10_000_000, 300)]
CAPABILITY = 90
WRITES_CALLS = (3, 9, 0)
"""The first version of Triton that is known to write the calls around each instruction into the
machine code: 3.7.1 does not, so that loops in called functions have no names.
"""
MEASURED = Path(__file__).parents[1] / "results/h100.jsonl"


class Range(NamedTuple):
    """The least and the most of a number."""

    low: float
    high: float


PROCESSORS, CLOCK, MATRIX_RATE, MEMORY_RATE = 132, 1.75e9, 989e12, 3.35e12
"""An H100 with 80 GB: clocks, bf16 operations and bytes a second. Data sheet, but for the clock: an
assumption between the highest, 1.98 GHz, and lower ones at the limit of power.
"""
CACHE_RATE = 5120 * CLOCK
"""Bytes a second of the second-level cache: NVIDIA's whitepaper of the A100. Not published for the
H100, which is taken to have as many a clock.
"""
REACHED_MEMORY = Range(0.75, 0.9)
"""Share of the peak of memory that kernels reach: a copy of large tensors measures 0.9."""
REACHED_CACHE = Range(0.45, 0.65)
"""Share of the second-level cache's rate: 4.0 to 5.8 TB/s. An assumption."""
REACHED_MATRIX = Range(0.6, 0.8)
"""Share of tensor cores' rate, 590 to 790 TFLOP/s: a large product measures 0.8."""
SCHEDULERS = 4
"""Schedulers of a processor; each issues one instruction a clock."""
CLOCKS_PER_INSTRUCTION = Range(2, 4)
"""Time of an instruction of one warp: those of other warps fill the rest. An instruction that needs
the result of the last one waits for 4 clocks (Jia et al. 2018, of Volta).
"""
CLOCKS_PER_LOAD = Range(480, 800)
"""Until a load arrives, on an idle and on a busy device. Assumptions; microbenchmarks of an idle
H100 are near the first (Luo et al. 2024).
"""


class Use(NamedTuple):
    """Seconds for which a launch uses each resource."""

    issue: float
    latency: float
    tensor: float
    l2: float
    hbm: float


COLUMNS = {
    "N": "{N}",
    "H": "{H}",
    "launch": "{launch}",
    "programs": "{programs}",
    "a processor": "{resident}",
    **{f"{name} µs": f"{{{name}_us:.1f}}" for name in Use._fields},
    "time µs": "{low_us:.1f} – {high_us:.1f}",
    "measured µs": "{measured_us}",
    "bound by": "{bound}",
}


def launch_row(launch: Launch, done: Work) -> dict[str, Any]:
    """The model of a launch that does some work; times in µs."""
    binary, programs = compiled_launch(launch, CAPABILITY), launch.num_programs
    fitting = resources(launch, binary, CAPABILITY, exact=False)["programs"]
    instructions, waits, flops = per_program(launch, binary, done)
    resident = min(max(1, fitting), max(1, -(-programs // PROCESSORS)))
    warps = resident * launch.tile.warps / SCHEDULERS

    def use(clocks: float, load: float, matrix: float, cache: float, memory: float) -> Use:
        return Use(
            issue=makespan(instructions * max(clocks, warps) / CLOCK, resident),
            latency=makespan(waits * load / CLOCK, resident),
            tensor=flops / (MATRIX_RATE * matrix),
            l2=done.loaded / (CACHE_RATE * cache),
            hbm=done.memory / (MEMORY_RATE * memory),
        )

    reached = (each[::-1] for each in (REACHED_MATRIX, REACHED_CACHE, REACHED_MEMORY))
    best, worst = starmap(use, zip(CLOCKS_PER_INSTRUCTION, CLOCKS_PER_LOAD, *reached, strict=True))
    found = seconds_of(best, worst, launch.tile.stages if flops else 1)
    return {
        "launch": launch.kernel.__name__,
        "programs": programs,
        "resident": resident,
        **{f"{name}_us": 1e6 * value for name, value in best._asdict().items()},
        "low_us": 1e6 * found.low,
        "high_us": 1e6 * found.high,
        "bound": max(best._asdict(), key=lambda name: getattr(best, name)),
    }


def seconds_of(best: Use, worst: Use, stages: int) -> Range:
    """The time of a launch, without its overhead."""
    parts = worst.issue + worst.tensor, worst.latency, worst.l2, worst.hbm
    longest = max(parts)
    return Range(max(best), longest + (sum(parts) - longest) / stages)


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


def measured_us() -> dict[tuple[int, int], dict[str, float]]:
    """(N, H) → µs of each kernel with the tile shapes that were chosen."""
    rows = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    found = {}
    for row in rows:
        if row.get("chosen"):
            times = row["microseconds"] | {"_rows_dh": 0.0}  # of row-wise gradients
            found[row["vocab_size"], row["hidden"]] = {k: v for k, v in times.items() if v}
    return found


def main() -> None:
    """Print the table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--sizes", type=problem_size, nargs="+", default=SIZES, metavar="N:H")
    options = parser.parse_args()
    if (triton_version() or WRITES_CALLS) < WRITES_CALLS:
        sys.exit("performance_model: requires Triton 3.9, whose code names calls")
    table, measured = Table(COLUMNS, log=options.json), measured_us()
    for size in options.sizes:
        for launch, done in work_of(make_problem(size[0], size[1], 16_384), CAPABILITY):
            row = {"N": size[0], "H": size[1], **launch_row(launch, done)}
            table.add({**row, "measured_us": measured.get(size, {}).get(row["launch"])})


if __name__ == "__main__":
    main()
