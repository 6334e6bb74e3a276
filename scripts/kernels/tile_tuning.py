"""Time tile shapes of the fused kernels on a GPU, one kernel after another.

The search starts from the shapes in `lm/output/backends/triton/tile_shapes.py`. Each in turn tries
every shape that compiles and fits, the others unchanged; the launches that it shapes are timed by
events on the device, the median of the rounds. A shape's score is the geometric mean over the sizes
of their time relative to the starting shape.

Its log is what `--candidates FILE` reads: only its best shapes of each kernel are tried, the best
first. Lines are

  {"kernel": "heavy", "v": 128, "c": 128, "h": 64, "warps": 8, "stages": 3, "step": 64, "score": 1}

Kernels are compiled in parallel before anything is timed. Results are logged as they are found, and
no shape is begun after `--seconds`. `--dry-run` does the same without a GPU: two shapes each, tiny,
in the interpreter.
"""

import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product, starmap, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lm.output.backends.base import Problem
from lm.output.backends.triton.launch import Launch, capability, execute
from lm.output.backends.triton.plan import tiles_for
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from scripts.benchmarks.measure import DTYPES, cpu_clock, event_clock
from scripts.benchmarks.reporting import Table, append_row, benchmark_parser, problem_size
from scripts.kernels.compilation import compile_all, launches, make_problem, moved

Seconds = dict[str, float]
"""By name of the launch."""
Clock = Callable[[Tiles], Seconds | None]
"""The seconds of one problem with some tile shapes; None if they do not compile or fit."""
KERNELS = {
    "forward": ("_forward",),
    "errors": ("_errors",),
    "heavy": ("_heavy", "_rows"),
    "light": ("_rows",),
}
"""Fields of `Tiles`, and the launches that they shape."""
SIZES = [(33_278, 650), (267_735, 1024), (800_000, 1024)]
DRY_RUN = {"sizes": [(97, 8)], "positions": 32, "dtype": "fp32", "rounds": 1}
COLUMNS = {
    "kernel": "{kernel}",
    **{name: f"{{{name}}}" for name in Tile._fields},
    "time ÷ the table's": "{score:.3f}",
}


def problem_on(device: str, dtype: torch.dtype, size: tuple[int, int, int]) -> Problem:
    """The problem of `scripts.kernels.compilation`, with values."""
    problem = moved(make_problem(*size, dtype), device)
    problem.hidden.normal_()
    problem.weight.normal_(std=size[1] ** -0.5)
    return problem


def seconds_of(problem: Problem, num_rounds: int, shapes: Tiles) -> Seconds | None:
    """Median seconds of each launch, as a `Clock`."""
    from triton.errors import TritonError

    seconds: dict[str, list[float]] = defaultdict(list)
    on_gpu = problem.hidden.is_cuda
    clock, num_warm_ups = (event_clock, 2) if on_gpu else (cpu_clock, 0)

    def time_launch(launch: Launch) -> None:
        seconds[launch.kernel.__name__].append(clock(lambda: execute(launch))())

    try:
        for _ in range(num_warm_ups + num_rounds):  # the first one compiles
            launches(problem, tiles=shapes, run=time_launch)
    except (TritonError, RuntimeError) as error:
        print(f"  {shapes}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
        return None
    return {name: statistics.median(values[num_warm_ups:]) for name, values in seconds.items()}


class Candidate(NamedTuple):
    """A shape of one kernel to try."""

    kernel: str
    tile: Tile

    def of(self, start: Tiles) -> Tiles:
        """The shapes of all kernels, the others as in `start`."""
        return start._replace(**{self.kernel: self.tile})  # type: ignore[arg-type]


def candidates(start: Tiles, *, dry: bool) -> list[Candidate]:
    """All shapes that are tried without a file, around those that the search starts from."""
    found: list[Candidate] = []
    for kernel in KERNELS:
        tile: Tile = getattr(start, kernel)
        if dry:
            shapes = [tile._replace(v=16, c=c, stages=1) for c in (16, 32)]
        elif kernel == "errors":
            shapes = [tile._replace(v=v, warps=warps) for v in (8, 16, 32) for warps in (4, 8)]
        elif kernel == "heavy":  # 4 warps have too few registers for the columns
            grid = product((64, 128), (64, 128), (64, 128, 256), (8,), (2, 3), (32, 64))
            shapes = list(starmap(Tile, grid))
        else:
            visits = (tile.v,) if kernel == "light" else (64, 128)
            grid = product(visits, (64, 128), (32, 64, 128), (4, 8), (2, 3, 4), (0,))
            shapes = list(starmap(Tile, grid))
        found += [Candidate(kernel, shape) for shape in shapes]
    return found


def candidates_in(path: Path, best: int) -> list[Candidate]:
    """The best shapes of each kernel in a log; raises SystemExit if it is not as described."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows.sort(key=lambda row: float(row["score"]))
        found = [
            Candidate(row["kernel"], Tile(**{k: row[k] for k in Tile._fields if k in row}))
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"tile_tuning: {path}: expected a log of shapes: {error!r}")
    unknown = {one.kernel for one in found} - set(KERNELS)
    if unknown:
        sys.exit(f"tile_tuning: {path}: no kernel {min(unknown)}, only {', '.join(KERNELS)}")
    kept = [[one for one in found if one.kernel == kernel][:best] for kernel in KERNELS]
    return [one for rank in zip_longest(*kept) for one in rank if one]


def compile_candidates(problems: list[Problem], start: Tiles, tried: list[Candidate]) -> None:
    """Compile the kernels of all shapes in parallel, for the device of the problems."""
    jobs = []
    for problem, candidate in product(problems, tried):
        architecture = capability(problem.hidden.device)
        found = launches(moved(problem, "meta"), architecture, candidate.of(start))
        names = KERNELS[candidate.kernel]
        jobs += [(one, architecture) for one in found if one.kernel.__name__ in names]
    compile_all(jobs)


def tune(
    clocks: list[Clock], start: Tiles, tried: list[Candidate], seconds: float
) -> Iterator[dict[str, Any]]:
    """A row for each shape that runs; the starting shapes must. A clock for each problem."""
    deadline = time.monotonic() + seconds
    base = [clock(start) for clock in clocks]
    if None in base:
        sys.exit("tile_tuning: the starting shapes do not run")
    for number, candidate in enumerate(tried):
        if time.monotonic() > deadline:
            print(f"{len(tried) - number} shapes were not tried within --seconds")
            return
        names, shapes = KERNELS[candidate.kernel], candidate.of(start)
        found = [clock(shapes) for clock in clocks]
        ratios = [
            sum(map(times.__getitem__, names)) / sum(map(known.__getitem__, names))
            for times, known in zip(found, base, strict=True)
            if times and known
        ]
        if len(ratios) == len(clocks):
            score = math.exp(statistics.fmean(map(math.log, ratios)))
            shape = {"kernel": candidate.kernel, **candidate.tile._asdict()}
            rounded = [round(ratio, 4) for ratio in ratios]
            yield {**shape, "score": round(score, 4), "ratios": rounded}


def main() -> None:
    """Print the five best shapes of each kernel, and write a log of all if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--sizes", type=problem_size, nargs="+", default=SIZES, metavar="N:H")
    add("--positions", type=int, default=16_384)
    add("--dtype", choices=DTYPES, default="bf16")
    add("--rounds", type=int, default=10)
    add("--candidates", type=Path, metavar="FILE", help="log of shapes to try; default: many")
    add("--best", type=int, default=8, help="shapes of each kernel in it; default: %(default)s")
    add("--seconds", type=float, default=math.inf, help="begin no shape after them")
    add("--dry-run", action="store_true", help="without a GPU, tiny, interpreted")
    options = parser.parse_args()
    device = "cpu" if options.dry_run else "cuda"
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        vars(options).update(DRY_RUN)
    elif not torch.cuda.is_available():
        sys.exit("tile_tuning: no CUDA device; --dry-run runs without one")
    sizes = [(*size, options.positions) for size in options.sizes]
    problems = [problem_on(device, DTYPES[options.dtype], size) for size in sizes]
    start = tiles_for(problems[0])
    tried = candidates(start, dry=options.dry_run)
    if options.candidates:
        tried = candidates_in(options.candidates, options.best)
    if not options.dry_run:
        forward = start.forward._replace(flatten=not start.forward.flatten)
        tried.insert(0, Candidate("forward", forward))
        compile_candidates(problems, start, tried)
    clocks: list[Clock] = [partial(seconds_of, problem, options.rounds) for problem in problems]
    rows = []
    for row in tune(clocks, start, tried, options.seconds):
        append_row(options.json, row, device)
        rows.append(row)
    print(f"the table's: {start}")
    table = Table(COLUMNS)
    for kernel in KERNELS:
        of_kernel = [row for row in rows if row["kernel"] == kernel]
        for row in sorted(of_kernel, key=lambda row: row["score"])[:5]:
            table.add(row)


if __name__ == "__main__":
    main()
