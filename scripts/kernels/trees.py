"""The time of a step by the shape of its tree on an H200: a model, nothing is measured.

The trees, targets and sizes are those of `scripts.benchmarks.trees`; rows and hidden vectors are
bf16, gradients dense. The time is that of all launches of the fused kernels in a CUDA graph, by
`scripts.kernels.performance_model`; `seconds` is the middle of its range.
"""

import sys
from collections.abc import Iterator

import torch

from lm.output import ClassTree
from lm.output.backends.base import Problem, row_size
from scripts import run
from scripts.benchmarks.methods import zipf
from scripts.benchmarks.reporting import Row, Table, benchmark_parser, problem_size
from scripts.benchmarks.tree_shapes import BASELINE, trees
from scripts.kernels.compilation import launches, moved
from scripts.kernels.performance_model import CAPABILITY, launch_row
from scripts.kernels.work import work_of

COLUMNS = {
    "tree": "{tree}",
    "depth": "{depth}",
    "µs": "{low_us:.0f} – {high_us:.0f}",
    "÷ two_level": "{ratio:.2f}",
}


def modelled(tree: ClassTree, hidden_size: int, num_positions: int) -> Row:
    """The range of a step's time, in µs."""
    torch.manual_seed(0)
    target, _ = zipf(tree.vocab_size, num_positions)
    hidden = torch.empty(num_positions, hidden_size, dtype=torch.bfloat16)
    weight = torch.empty(tree.num_rows, row_size(hidden_size), dtype=torch.bfloat16)
    problem = Problem.of(hidden, weight, target, tree)
    done = work_of(problem, CAPABILITY)
    found = launches(moved(problem, "meta"), CAPABILITY)
    rows = [launch_row(*each) for each in zip(found, done, strict=True)]
    return {end: sum(row[end] for row in rows) for end in ("low_us", "high_us")}


def report(size: tuple[int, int], num_positions: int, names: list[str] | None) -> Iterator[Row]:
    """A row for each tree."""
    base = None
    for name, tree in trees(size[0]).items():
        if names is None or name in names or name == BASELINE:
            row = modelled(tree, size[1], num_positions)
            seconds = (row["low_us"] + row["high_us"]) / 2e6
            base = base or seconds
            yield {
                "tree": name,
                "vocab_size": size[0],
                "hidden_size": size[1],
                "positions": num_positions,
                "depth": tree.depth,
                "kind": "gpu",
                "role": "fit",
                **row,
                "seconds": seconds,
                "ratio": seconds / base,
                "model": True,
            }


def main() -> None:
    """Print a table for each size, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=problem_size, nargs="+", metavar="N:H", help="words, hidden size")
    add("--positions", type=int, default=2048)
    add("--trees", nargs="+", metavar="NAME", help="default: all")
    options = parser.parse_args()
    print("A model of an H200; nothing is measured on it.", file=sys.stderr)
    for size in options.rows or [(10_000, 300), (33_278, 300), (267_735, 300)]:
        print(f"\nN = {size[0]:,}, H = {size[1]}, {options.positions:,} positions")
        table = Table(COLUMNS, options.json)
        for row in report(size, options.positions, options.trees):
            table.add(row)


if __name__ == "__main__":
    run(main)
