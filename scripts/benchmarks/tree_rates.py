"""The constants of the cost model of trees, fitted to logs by least squares on the relative error.

Each constant is the seconds of a unit of `lm.output.cost.work`, at least 0, that the rows of the
log of `scripts.benchmarks.trees` with the role `fit` determine. They are printed as in
`lm.output.cost.rates`, with the errors on these rows and on those with other roles.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls

from lm.output.cost.rates import TOP_K, kind_of, seconds
from lm.output.cost.work import (
    Batch,
    Decoding,
    Shape,
    Work,
    gradient_of,
    work_of_sample,
    work_of_step,
    work_of_topk,
)
from scripts import run
from scripts.benchmarks.reporting import Row, benchmark_parser
from scripts.benchmarks.trees import trees

LOG = Path(__file__).parents[1] / "results" / "trees.jsonl"
TILE = 4
"""Visits, and children, of the tiles of the compiled loops."""


class Measured(NamedTuple):
    """The work of a row, and which constants it has."""

    kind: str
    work: Work | Decoding
    seconds: float
    row: Row


@cache
def shape_of(vocab_size: int, name: str) -> tuple[Shape, float]:
    """The shape of a measured tree for Zipf targets, and the share of the `TOP_K`-th word."""
    counts = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    return Shape.of(_trees(vocab_size)[name], counts), float(counts[TOP_K - 1] / counts.sum())


_trees = cache(trees)


def measured(row: Row, tile: int = TILE) -> Measured:
    """The work of a row of the log."""
    shape, kth_share = shape_of(row["vocab_size"], row["tree"])
    kind, size = row["kind"], row["hidden_size"]
    if kind in ("sample", "topk"):
        work: Work | Decoding = (
            work_of_sample(shape, size)
            if kind == "sample"
            else work_of_topk(shape, kth_share, size)
        )
        return Measured("decoding", work, row["seconds"], row)
    batch, row_wise = Batch(row["positions"], size), kind == "row_wise"
    step = work_of_step(shape, batch, tile, gradient_of(shape, batch, row_wise=row_wise))
    return Measured(kind_of(shape, batch, row_wise=row_wise), step, row["seconds"], row)


def read(log: Path) -> list[Row]:
    """The last row of each tree, size, kind and role."""
    rows = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    names = "vocab_size", "hidden_size", "positions", "tree", "kind", "role"
    return list({tuple(row[name] for name in names): row for row in rows}.values())


def fitted(rows: Sequence[Measured]) -> Work | Decoding:
    """The constants, at least 0, with the least Σ (predicted / measured - 1)²."""
    ratios = np.array([[float(each) / row.seconds for each in row.work] for row in rows])
    scale = ratios.max(0, initial=1e-300)
    found, _ = nnls(ratios / scale, np.ones(len(rows)))
    return type(rows[0].work)(*(float(f"{each:.3g}") for each in found / scale))


def errors(units: Work | Decoding, rows: Iterable[Measured]) -> list[float]:
    """Predicted ÷ measured of each row."""
    return [float(seconds(units, row.work)) / row.seconds for row in rows]


def main() -> None:
    """Print the constants and their errors."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--worst", type=int, default=5, help="rows printed with the largest errors")
    options = parser.parse_args()
    rows = [measured(row) for row in read(options.log)]
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        units = fitted([row for row in own if row.row["role"] == "fit"])
        print(f"\n{kind}: {units}")
        for role in dict.fromkeys(row.row["role"] for row in own):
            of_role = [row for row in own if row.row["role"] == role]
            found = errors(units, of_role)
            off = [abs(each - 1) for each in found]
            print(f"{role}: {len(off)} rows, median error {statistics.median(off):.1%}")
            order = sorted(range(len(off)), key=lambda i: -off[i])[: options.worst]
            for i in order:
                row = of_role[i].row
                name = f"{row['vocab_size']:,} {row['hidden_size']} {row['tree']}, {row['kind']}"
                print(f"  {found[i]:.2f} {row['seconds'] * 1e3:.2f} ms {name}")


if __name__ == "__main__":
    run(main)
