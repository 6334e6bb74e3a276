"""Time tile shapes of the fused kernels on a GPU, one kernel after another.

The search starts from the shapes in `lm/output/backends/triton/tile_shapes.py`. Each kernel in turn
tries every shape that compiles and fits, the other kernels unchanged; a launch is timed by events
on the device, the median of the rounds. A shape's score is the geometric mean over the sizes of its
time relative to the starting shape. `--dry-run` does the same without a GPU: two shapes each, tiny,
in the interpreter.
"""

import argparse
import math
import os
import statistics
import sys
from collections import defaultdict
from itertools import product
from typing import Any

import torch

from lm.output import ClassTree
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import Launch, execute, instrumented, tiles_for
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from scripts.benchmarks.measure import cpu_clock, event_clock
from scripts.benchmarks.methods import zipf
from scripts.benchmarks.reporting import Column, Table, append_row, benchmark_parser, problem_size

KERNELS = ("forward", "errors", "heavy", "light")
SIZES = [(33_278, 650), (267_735, 1024), (800_000, 1024)]
DRY_RUN = {"sizes": [(97, 8)], "positions": 32, "dtype": "float32", "rounds": 1}
COLUMNS = (
    Column("kernel", "kernel", width=9),
    *(Column(name, name, "d", width=4) for name in ("v", "c", "h", "warps", "stages", "step")),
    Column("time ÷ the table's", "score", ".3f"),
)


def make_problem(
    vocab_size: int, hidden_size: int, num_positions: int, dtype: torch.dtype, device: str
) -> Problem:
    """Inverse-rank targets in a tree of two levels, words assigned to √N classes at random."""
    torch.manual_seed(0)
    word_class = torch.randperm(vocab_size) * round(vocab_size**0.5) // vocab_size
    tree = ClassTree.two_level(word_class).to(device)
    target = zipf(vocab_size, num_positions)[0].to(device)
    hidden = torch.randn(num_positions, hidden_size, dtype=dtype, device=device)
    weight = torch.randn(tree.num_rows, hidden_size, dtype=dtype, device=device)
    return Problem.of(hidden, weight / hidden_size**0.5, None, target, tree)


def seconds_of(problem: Problem, shapes: Tiles, num_rounds: int) -> dict[str, float] | None:
    """Median seconds of each kernel; None if one does not compile or fit."""
    from triton.errors import TritonError

    seconds: dict[str, list[float]] = defaultdict(list)
    clock = event_clock if problem.hidden.is_cuda else cpu_clock

    def time_launch(launch: Launch) -> None:
        name = launch.kernel.__name__.removeprefix("_")
        seconds[name].append(clock(lambda: execute(launch))())

    backend, needs = TritonBackend(), Needs(hidden=True, weight=True, bias=False)
    try:
        with instrumented(run=time_launch, tiles=shapes):
            for _ in range(num_rounds + 2):  # the first two compile and warm up
                nll, saved = backend.forward(problem, needs)
                d_nll = torch.full_like(nll, 1 / len(nll))
                backend.backward(d_nll, problem, saved, needs)
    except (TritonError, RuntimeError) as error:
        print(f"  {shapes}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
        return None
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def candidates(kernel: str, start: Tile, *, dry: bool) -> list[Tile]:
    """Shapes of a kernel that are tried, around the one it starts from."""
    if dry:
        return [start._replace(v=16, c=c, stages=1) for c in (16, 32)]
    if kernel == "errors":
        return [start._replace(v=v, warps=warps) for v in (8, 16, 32) for warps in (4, 8)]
    positions = (start.v,) if kernel == "light" else (64, 128)
    columns, steps = (32, 64, 128), (32, 64) if kernel == "heavy" else (0,)
    return [
        Tile(*shape) for shape in product(positions, (64, 128), columns, (4, 8), (2, 3, 4), steps)
    ]


def tune(
    problems: list[Problem], start: Tiles, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each shape that runs; the starting shapes must."""
    rows = []
    base = [seconds_of(problem, start, options.rounds) for problem in problems]
    if None in base:
        sys.exit("tile_tuning: the starting shapes do not run")
    for kernel in KERNELS:
        for tile in candidates(kernel, getattr(start, kernel), dry=options.dry_run):
            shapes = start._replace(**{kernel: tile})
            found = [seconds_of(problem, shapes, options.rounds) for problem in problems]
            ratios = [
                seconds[kernel] / known[kernel]
                for seconds, known in zip(found, base, strict=True)
                if seconds and known
            ]
            if len(ratios) == len(problems):
                score = math.exp(statistics.fmean(map(math.log, ratios)))
                shape = {"kernel": kernel, **tile._asdict()}
                rounded = [round(ratio, 4) for ratio in ratios]
                rows.append({**shape, "score": round(score, 4), "ratios": rounded})
    return rows


def main() -> None:
    """Print the five best shapes of each kernel, and write a log of all if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--sizes", type=problem_size, nargs="+", default=SIZES, metavar="N:H")
    add("--positions", type=int, default=16_384)
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--rounds", type=int, default=10)
    add("--dry-run", action="store_true", help="without a GPU, tiny, interpreted")
    options = parser.parse_args()
    device = "cpu" if options.dry_run else "cuda"
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        vars(options).update(DRY_RUN)
    elif not torch.cuda.is_available():
        sys.exit("tile_tuning: no CUDA device; --dry-run runs without one")
    dtype = getattr(torch, options.dtype)
    problems = [make_problem(n, h, options.positions, dtype, device) for n, h in options.sizes]
    start = tiles_for(problems[0])
    rows = sorted(tune(problems, start, options), key=lambda row: (row["kernel"], row["score"]))
    print(f"the table's: {start}")
    table = Table(COLUMNS)
    for kernel in KERNELS:
        for row in [row for row in rows if row["kernel"] == kernel][:5]:
            table.add(row)
    for row in rows:
        append_row(options.json, row, device)


if __name__ == "__main__":
    main()
