#!/usr/bin/env python
"""Time tile shapes of the fused kernels on a GPU, one kernel after another, and print those that
win.

What `lm/output/tiles.py` has is where the search begins. For each number of children in a block,
each kernel in turn tries every shape that compiles and fits, the other kernels kept as they are; a
launch is timed by events on the device, the median of the rounds, shapes in turn. A shape's score
is the geometric mean over the sizes of its time against the table's shape. `--dry-run` goes the
same way without a GPU: two shapes each, tiny, in the interpreter.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from bench_method import zipf  # noqa: E402

from lm.output import ClassTree  # noqa: E402
from lm.output.backends.triton import backend as fused  # noqa: E402
from lm.output.backends.triton.tile_shapes import Tile, Tiles  # noqa: E402
from lm.output.backends.visits import LIGHT, route, schedule  # noqa: E402

KERNELS = ("forward", "d_hidden", "d_weight", "d_light")
SIZES = ["33278:650", "267735:1024", "800000:1024"]
BLOCKS_OF_CHILDREN = (32, 64, 128)


class Problem:
    """A batch of a two-level tree: inverse-rank targets, words dealt to √N classes at random.

    Args:
        vocab_size, size, positions: N, H, P.
        dtype, device: of hidden and weight.
    """

    def __init__(
        self, vocab_size: int, size: int, positions: int, dtype: torch.dtype, device: str
    ) -> None:
        torch.manual_seed(0)
        dealt = torch.randperm(vocab_size)
        self.tree = ClassTree.two_level(dealt * round(vocab_size**0.5) // vocab_size).to(device)
        target = zipf(vocab_size, positions)[0].to(device)
        like = {"dtype": dtype, "device": device}
        self.hidden = torch.randn(positions, size, **like)
        self.weight = torch.randn(self.tree.num_rows, size, **like) / size**0.5
        self.visits = route(target, self.tree.arrays, self.tree.depth, -100)
        self.plan = schedule(self.visits, self.tree.arrays)
        self.d_nll = torch.full((positions,), 1 / positions, device=device)

    def run(self) -> None:
        """Forward and backward."""
        rest = (None, self.visits, self.plan, self.tree.arrays)
        nll, state = fused.forward(
            self.hidden, self.weight, *rest, self.tree.max_path_columns, True
        )
        d_nll = self.d_nll.to(nll.dtype)
        fused.backward(d_nll, self.hidden, self.weight, *rest, state, [True, True, False])


@contextmanager
def timed(seconds: dict[str, list[float]]) -> Iterator[None]:
    """Launches inside add their seconds under the kernel's name."""
    launch = fused._launch

    def noted(kernel: Any, num_programs: int, tile: Tile, **arguments: Any) -> None:
        name = kernel.__name__.removeprefix("_")
        if not arguments["position"].is_cuda:
            start = time.perf_counter()
            launch(kernel, num_programs, tile, **arguments)
            seconds[name].append(time.perf_counter() - start)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch(kernel, num_programs, tile, **arguments)
        end.record()
        end.synchronize()
        seconds[name].append(begin.elapsed_time(end) / 1000)

    fused._launch = noted
    try:
        yield
    finally:
        fused._launch = launch


@contextmanager
def shaped(shapes: Tiles) -> Iterator[None]:
    """The kernels use these shapes."""
    tiles = fused.tiles
    fused.tiles = lambda *_: shapes  # type: ignore[assignment]
    try:
        yield
    finally:
        fused.tiles = tiles


def seconds_of(problem: Problem, shapes: Tiles, rounds: int) -> dict[str, float] | None:
    """Median seconds of each kernel; None if one does not compile or fit."""
    seconds: dict[str, list[float]] = defaultdict(list)
    try:
        with shaped(shapes), timed(seconds):
            for _ in range(rounds + 2):  # the first two compile and warm up
                problem.run()
    except Exception as error:  # triton has no common class for what does not fit
        print(f"  {shapes}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
        return None
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def candidates(kernel: str, dry: bool) -> list[Tile]:
    """Shapes of a kernel."""
    if dry:
        return [Tile(16, h, 4, 1) for h in (16, 32)]
    positions = (LIGHT,) if kernel == "d_light" else (32, 64, 128)
    return [Tile(*shape) for shape in product(positions, (32, 64, 128), (4, 8), (2, 3, 4))]


def tune(
    problems: list[Problem], start: Tiles, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each shape tried."""
    rows = []
    base = [seconds_of(problem, start, options.rounds) for problem in problems]
    if None in base:
        sys.exit("tune_tiles: the table's own shapes do not run")
    for block_c in (16,) if options.dry_run else BLOCKS_OF_CHILDREN:
        for kernel in KERNELS:
            for tile in candidates(kernel, options.dry_run):
                shapes = start._replace(block_c=block_c, **{kernel: tile})
                found = [seconds_of(problem, shapes, options.rounds) for problem in problems]
                ratios = [
                    own[kernel] / known[kernel]
                    for own, known in zip(found, base, strict=True)
                    if own and known
                ]
                if len(ratios) == len(problems):
                    score = math.exp(statistics.fmean(map(math.log, ratios)))
                    rows.append(
                        {
                            "kernel": kernel,
                            "block_c": block_c,
                            **tile._asdict(),
                            "score": round(score, 4),
                        }
                    )
                    rows[-1] |= {"ratios": [round(ratio, 4) for ratio in ratios]}
    return rows


def main() -> None:
    """Time, print the best, and write all if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="N:H")
    parser.add_argument("--positions", type=int, default=16_384)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, tiny, interpreted")
    options = parser.parse_args()
    device, dtype = "cuda", getattr(torch, options.dtype)
    if options.dry_run:
        device, dtype, options.sizes, options.positions, options.rounds = (
            "cpu",
            torch.float32,
            ["97:8"],
            32,
            1,
        )
    elif not torch.cuda.is_available():
        sys.exit("tune_tiles: no CUDA device; --dry-run goes without")
    problems = [
        Problem(*map(int, size.split(":")), options.positions, dtype, device)
        for size in options.sizes
    ]
    start = fused._tiles_for(problems[0].hidden, problems[0].weight)
    rows = sorted(tune(problems, start, options), key=lambda row: (row["kernel"], row["score"]))
    print(f"the table's: {start}\nkernel    block_c    v    h  warps  stages  time ÷ the table's")
    for kernel in KERNELS:
        for row in [row for row in rows if row["kernel"] == kernel][:5]:
            print(
                "{kernel:<9} {block_c:7} {v:4} {h:4} {warps:6} {stages:7} {score:10.3f}".format(
                    **row
                )
            )
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
