"""The constants of the cost model of trees, fitted to logs by least squares on the relative error.

Each constant is the seconds of a unit of `lm.output.cost.work`, at least 0, that the rows of the
log of `scripts.benchmarks.trees` with the role `fit` determine. They are printed as in
`lm.output.cost.rates`, with the errors on these rows and on those with other roles.
"""

import json
import math
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls

from lm.output.cost.rates import CPU, GPU, TOP_K, Rates, gradient_of, kind_of, seconds
from lm.output.cost.work import (
    Batch,
    Decoding,
    Shape,
    Work,
    work_of_sample,
    work_of_step,
    work_of_topk,
)
from scripts import run
from scripts.benchmarks.reporting import Row, benchmark_parser
from scripts.benchmarks.tree_shapes import trees

LOG = Path(__file__).parents[1] / "results" / "trees.jsonl"


OMITTED = {
    "row_wise": {"columns"},
    "decoding": {"columns"},
    "blocks": set(Work._fields) - {"products"},
}
"""Units that logs do not tell apart from others, by the kind of constants: with one H, columns from
products; with the full softmax alone, all units."""


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


def measured(row: Row, rates: Rates) -> Measured:
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
    gradient = gradient_of(shape, batch, on_gpu=rates.on_gpu, row_wise=row_wise)
    step = work_of_step(shape, batch, rates.tile, gradient)
    name = kind_of(shape, batch, on_gpu=rates.on_gpu, row_wise=row_wise)
    return Measured(name, step, row["seconds"], row)


def read(log: Path) -> list[Row]:
    """The last row of each tree, size, kind and role, but for trees that a model chose."""
    rows = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    names = "vocab_size", "hidden_size", "positions", "tree", "kind", "role"
    last = {tuple(row[name] for name in names): row for row in rows}
    timed = [row for row in last.values() if row["kind"] != "memory"]
    return [row for row in timed if not row["tree"].startswith("best")]


def fitted(rows: Sequence[Measured]) -> Work | Decoding:
    """The constants, at least 0, with the least Σ (predicted / measured - 1)²."""
    omitted = OMITTED.get(rows[0].kind, set())
    work = [row.work._replace(**dict.fromkeys(omitted, 0.0)) for row in rows]
    pairs = zip(work, rows, strict=True)
    ratios = np.array([[float(each) / row.seconds for each in amounts] for amounts, row in pairs])
    scale = ratios.max(0, initial=1e-300)
    found, _ = nnls(ratios / scale, np.ones(len(rows)))
    return type(rows[0].work)(*(float(f"{each:.3g}") for each in found / scale))


def fitted_rates(rates: Rates, log: Path) -> Rates:
    """The constants of a kind of device, fitted to the rows of a log with the role `fit`."""
    rows = [measured(row, rates) for row in read(log) if row["role"] == "fit"]
    kinds = {row.kind for row in rows}
    found: dict[str, Any]
    found = {kind: fitted([row for row in rows if row.kind == kind]) for kind in kinds}
    return rates._replace(**found)


def main() -> None:
    """Print the constants and their errors."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--log", type=Path, default=LOG)
    parser.add_argument("--gpu", action="store_true", help="a log of scripts.kernels.trees")
    parser.add_argument("--worst", type=int, default=3, help="rows printed with the largest errors")
    options = parser.parse_args()
    rates = fitted_rates(GPU if options.gpu else CPU, options.log)
    rows = [measured(row, rates) for row in read(options.log)]
    for kind in dict.fromkeys(row.kind for row in rows):
        units = getattr(rates, kind)
        print(f"\n{kind}: {units}")
        for role in dict.fromkeys(row.row["role"] for row in rows if row.kind == kind):
            found = {
                float(seconds(units, row.work)) / row.seconds: row.row
                for row in rows
                if row.kind == kind and row.row["role"] == role
            }
            off = statistics.median(abs(ratio - 1) for ratio in found)
            print(f"{role}: {len(found)} rows, median error {off:.1%}")
            for ratio in sorted(found, key=lambda each: -abs(math.log(each)))[: options.worst]:
                row = found[ratio]
                names = "{vocab_size:,} {hidden_size} {tree}, {kind}: {seconds:.4f} s"
                print(f"  predicted ÷ measured {ratio:.2f}: " + names.format(**row))


if __name__ == "__main__":
    run(main)
