"""The predicted cost of trees of several shapes over the words of a run: `lm info --trees`."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lm.model.best_tree import batch_and_rates
from lm.output import ClassTree
from lm.output.backends import choose_backend, saved_bytes
from lm.output.backends.base import Problem
from lm.output.cost.best import best_classes, best_tree
from lm.output.cost.candidates import by_frequency, candidates, even_tree
from lm.output.cost.rates import TOP_K, Rates, cost_of
from lm.output.cost.work import Batch, Shape

if TYPE_CHECKING:
    from lm.run import Run

ROOT = "two_level, √N classes"
"""The tree that others are compared with."""


def tree_costs(run: "Run") -> tuple[Rates, list[dict[str, Any]]]:
    """The constants, and a row for each tree, the fastest first.

    Times are of the output layer alone: of forward and backward of a batch (row-wise: with the
    update), and of decoding one position if P(w) is the frequency of w. Classes of data are taken
    to have words of all frequencies; with classes.method: frequency, neighbouring ones.
    """
    counts, config = torch.tensor(run.prepared.counts()), run.config
    batch, rates = batch_and_rates(config, run.num_devices, on_gpu=run.on_gpu)
    row_wise, by_data = run.word_table.row_wise, config.classes.method != "frequency"
    trees = {ROOT: even_tree(by_frequency(counts), [round(len(counts) ** 0.5)], dealt=by_data)}
    trees |= candidates(counts, dealt=by_data)
    if run.tree is not None:
        trees[f"this run: {config.output.tree}"] = run.tree
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
    return rates, sorted(rows, key=lambda row: float(row["step_ms"]))


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
