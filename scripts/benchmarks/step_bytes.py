#!/usr/bin/env python
"""What a training step over a table of N words must move through memory, and hold: on paper.

Targets are drawn by Zipf's law, classes have equal sums of √count. A batch visits the root and the
classes of its targets, V rows in all, and reads as many rows as input vectors as it has positions.

  dense Adam  the gradient of all N rows is zeroed and, where visited, written; the step reads
              gradient, weights and two moments and writes the last three. Rows in fp32.
  by rows     visited rows are read forward and backward; their gradients are written, read by the
              step, and the rows read and written by it, with one fp32 number of state each
              (`RowAdagrad`). On a CPU less: rows are read once for loss and hidden's gradient,
              and their gradients stay in cache.
  floor       visited rows read twice and written once, nothing else.

Seconds are bytes over `--bandwidth`, the least that a step can take on such memory.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

SYMBOLS = "{words:>12,} {dtype:>5} {visited_rows:>12,} {by_rows_gb:>10.2f} {by_rows_ms:>9.2f}"
TABLE = SYMBOLS + " {floor_gb:>9.2f} {floor_ms:>8.2f} {dense_adam_gb:>11.1f} {dense_adam_ms:>9.2f}"
HELD = " {held_gb:>8.1f} {dense_held_gb:>10.1f}"
HEADER = (
    "           N dtype    rows seen by rows GB        ms  floor GB       ms  dense Adam GB     ms"
    "  held GB  Adam's GB"
)


def visited_rows(num_words: int, positions: int, seed: int) -> int:
    """Rows of the visited nodes of √N classes, for one batch.

    Class k holds the ranks from N (k/C)² to N ((k+1)/C)², as Σ √(1/r) grows like √r.
    """
    num_classes = round(num_words**0.5)
    generator = np.random.default_rng(seed)
    weight = generator.random(positions) * (np.log(num_words) + np.euler_gamma)
    rank = np.floor(np.clip(np.exp(weight - np.euler_gamma) - 0.5, 0, num_words - 1))
    number = np.arange(num_classes + 1)
    bounds = -(-num_words * number**2 // num_classes**2)
    visited = np.unique(np.searchsorted(bounds, rank, side="right") - 1)
    return num_classes + int((bounds[visited + 1] - bounds[visited]).sum())


def row(num_words: int, options: argparse.Namespace, dtype: str) -> dict[str, object]:
    """One line of the table."""
    size, positions, bandwidth = options.hidden, options.positions, options.bandwidth * 1e12
    item = 2 if dtype == "bf16" else 4
    seen = visited_rows(num_words, positions, options.seed)
    rows = (seen + positions) * size * item
    moved = {
        "by_rows": 6 * rows + 8 * (seen + positions),
        "floor": 3 * seen * size * item + 2 * positions * size * item,
        "dense_adam": 8 * num_words * size * 4,
    }
    return {
        "words": num_words,
        "dtype": dtype,
        "hidden": size,
        "positions": positions,
        "visited_rows": seen,
        **{f"{name}_gb": round(number / 1e9, 3) for name, number in moved.items()},
        **{f"{name}_ms": round(1e3 * n / bandwidth, 3) for name, n in moved.items()},
        "held_gb": round((num_words * (size * item + 4) + rows) / 1e9, 1),
        "dense_held_gb": round(4 * num_words * size * 4 / 1e9, 1),
    }


def main() -> None:
    """Print the table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [10_000, 100_000, 1_000_000, 10_000_000, 100_000_000]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, metavar="N")
    parser.add_argument("--hidden", type=int, default=300, help="H, default 300")
    parser.add_argument("--positions", type=int, default=16384, help="of a batch, default 16384")
    parser.add_argument(
        "--bandwidth", type=float, default=4.8, help="TB/s, default 4.8: of an H200"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON lines")
    options = parser.parse_args()
    if min(*options.sizes, options.hidden, options.positions) < 1 or options.bandwidth <= 0:
        sys.exit("step_bytes: sizes, hidden, positions and bandwidth must be positive")
    rows = [row(size, options, dtype) for size in options.sizes for dtype in ("fp32", "bf16")]
    print(HEADER)
    for each in rows:
        print((TABLE + HELD).format(**each))
    if options.json:
        options.json.write_text("".join(json.dumps(each) + "\n" for each in rows))


if __name__ == "__main__":
    main()
