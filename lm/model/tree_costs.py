"""The predicted cost of trees of several shapes over the words of a run: `lm info --trees`."""

from typing import Any

import torch
from torch import Tensor

from lm.config import Config
from lm.output import ClassTree
from lm.output.backends import choose_backend, saved_bytes
from lm.output.backends.base import Problem
from lm.output.cost.best import best_classes, best_tree
from lm.output.cost.candidates import by_frequency, candidates, even_tree
from lm.output.cost.rates import TOP_K, Rates, cost_of
from lm.output.cost.work import Batch, Shape

ROOT = "two_level, √N classes"
"""The tree that others are compared with."""


def tree_costs(
    config: Config,
    counts: Tensor,
    own: ClassTree | None,
    batch: Batch,
    rates: Rates,
    *,
    row_wise: bool,
) -> list[dict[str, Any]]:
    """A row for each tree, the fastest first; `own` is that of the run.

    Times are of the output layer alone: of forward and backward of a batch (row-wise: with the
    update), and of decoding one position if P(w) is the frequency of w. Classes of data are taken
    to have words of all frequencies; with classes.method: frequency, neighbouring ones.
    """
    by_data = config.classes.method != "frequency"
    trees = {ROOT: even_tree(by_frequency(counts), [round(len(counts) ** 0.5)], dealt=by_data)}
    trees |= candidates(counts, dealt=by_data)
    if own is not None:
        trees[f"this run: {config.output.tree}"] = own
    trees["best by frequency"] = best_tree(counts, batch, rates, row_wise=row_wise)
    sizes = best_classes(counts, batch, rates, row_wise=row_wise)
    if sizes is not None:
        order, classes, shortlist = by_frequency(counts), *sizes
        name = f"best classes of data: C = {classes:,}, shortlist {shortlist:,}"
        trees[name] = even_tree(order, [classes], shortlist, dealt=True)
    rows = [
        {"tree": name, **_row(tree, counts, batch, rates, row_wise=row_wise)}
        for name, tree in trees.items()
    ]
    base = rows[0]["step_ms"]
    rows = [row | {"ratio": row["step_ms"] / base} for row in rows]
    return sorted(rows, key=lambda row: float(row["step_ms"]))


def _row(
    tree: ClassTree, counts: Tensor, batch: Batch, rates: Rates, *, row_wise: bool
) -> dict[str, Any]:
    kth = counts.topk(min(TOP_K, len(counts))).values[-1] / counts.sum()
    shape = Shape.of(tree, counts)
    cost = cost_of(shape, batch, rates, row_wise=row_wise, kth_share=float(kth))
    problem = Problem.without_values(*batch, tree, torch.float32)
    backend = choose_backend("auto", problem, torch.device("cpu"))
    table = problem.weight.nbytes * (1 if row_wise else 2)
    memory = table + saved_bytes(backend, problem, row_wise=row_wise)
    return {
        "depth": tree.depth,
        "nodes": tree.num_nodes,
        "visits": cost.visits,
        "columns": cost.columns,
        "visited_rows": cost.visited_rows,
        "flops": cost.work.flops,
        "bytes": cost.work.bytes,
        "step_ms": 1e3 * cost.seconds,
        "sample_ms": None if cost.sample_seconds is None else 1e3 * cost.sample_seconds,
        "topk_ms": None if cost.topk_seconds is None else 1e3 * cost.topk_seconds,
        "memory_mib": memory / 2**20,
    }
