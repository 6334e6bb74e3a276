"""Bytes that a training step over a table of N words must move, and memory that it holds, computed.

Targets are drawn by Zipf's law, classes have equal sums of √count. A batch visits the root and the
classes of its targets, V rows in all, and reads as many rows as input vectors as it has positions.

  dense Adam  the gradient of all N rows is zeroed and, where visited, written; the update reads
              gradient, weights and two moments and writes the last three. Rows in fp32.
  row-wise    visited rows are read forward and backward; their gradients are written, read by the
              update, and the rows read and written by it, with one fp32 number of state each
              (`RowAdagrad`). Less on a CPU: rows are read once for the loss and d_hidden, and
              their gradients stay in cache.
  floor       visited rows read twice and written once, nothing else.

Milliseconds are bytes over `--bandwidth`, the least that a step can take with such memory.
"""

import argparse
from itertools import product
from typing import Any

import numpy as np

from scripts.benchmarks.reporting import Table, benchmark_parser, require_positive


def visited_rows(vocab_size: int, num_positions: int, seed: int) -> int:
    """Rows of the visited nodes of √N classes, for one batch.

    Class k holds the ranks from N (k/C)² to N ((k+1)/C)², as Σ √(1/r) grows like √r.
    """
    num_classes: int = round(vocab_size**0.5)
    generator = np.random.default_rng(seed)
    weight = generator.random(num_positions) * (np.log(vocab_size) + np.euler_gamma)
    rank = np.floor(np.clip(np.exp(weight - np.euler_gamma) - 0.5, 0, vocab_size - 1))
    number = np.arange(num_classes + 1)
    bounds = -(-vocab_size * number**2 // num_classes**2)
    visited = np.unique(np.searchsorted(bounds, rank, side="right") - 1)
    visited_words = int((bounds[visited + 1] - bounds[visited]).sum())
    return num_classes + visited_words


def row(vocab_size: int, options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """One line of the table."""
    size, positions, bandwidth = options.hidden, options.positions, options.bandwidth * 1e12
    item = 2 if dtype == "bf16" else 4
    visited = visited_rows(vocab_size, positions, options.seed)
    rows = (visited + positions) * size * item
    moved = {
        "row_wise": 6 * rows + 8 * (visited + positions),
        "floor": 3 * visited * size * item + 2 * positions * size * item,
        "dense_adam": 8 * vocab_size * size * 4,
    }
    return {
        "words": vocab_size,
        "dtype": dtype,
        "hidden": size,
        "positions": positions,
        "visited_rows": visited,
        **{f"{name}_gb": round(number / 1e9, 3) for name, number in moved.items()},
        **{f"{name}_ms": round(1e3 * n / bandwidth, 3) for name, n in moved.items()},
        "held_gb": round((vocab_size * (size * item + 4) + rows) / 1e9, 1),
        "dense_held_gb": round(4 * vocab_size * size * 4 / 1e9, 1),
    }


def main() -> None:
    """Print the table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    sizes = [10_000, 100_000, 1_000_000, 10_000_000, 100_000_000]
    add("--sizes", type=int, nargs="+", default=sizes, metavar="N")
    add("--hidden", type=int, default=300, help="H, default 300")
    add("--positions", type=int, default=16384, help="of a batch, default 16384")
    add("--bandwidth", type=float, default=4.8, help="TB/s, default 4.8: of an H200")
    add("--seed", type=int, default=1)
    options = parser.parse_args()
    require_positive(parser, options, ["sizes", "hidden", "positions", "bandwidth"])
    table = Table(log=options.json)
    for size, dtype in product(options.sizes, ("fp32", "bf16")):
        table.add(row(size, options, dtype))


if __name__ == "__main__":
    main()
