"""Seconds of the units of work, for the backends that users get, and the time of a tree by them.

`scripts/benchmarks/tree_rates.py` fits them to the logs that they name. Those of a GPU are fitted
to a performance model: nothing was measured on one.
"""

from typing import Any, Literal, NamedTuple

from lm.output.backends.reference.backend import saves_errors
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

Kind = Literal["dense", "row_wise", "blocks"]
"""dense, row_wise: errors of all visits are saved. blocks: they are too many, as those of the full
softmax, and are computed again in the backward."""
TOP_K = 10
"""Words that `topk_seconds` are for."""


class Rates(NamedTuple):
    """The constants of a kind of device."""

    device: str
    source: str  # log in scripts/results
    tile: int  # visits, and children, of a tile
    dense: Work  # seconds per unit of a forward and backward
    row_wise: Work  # with the update by SGD
    blocks: Work
    decoding: Decoding | None  # None: not known


class Cost(NamedTuple):
    """The predicted cost of a tree."""

    seconds: float  # of a forward and backward, row-wise with the update
    sample_seconds: float | None  # of one position
    topk_seconds: float | None
    visits: float  # of a position
    columns: float  # of a position
    visited_rows: float  # of a batch
    work: Work


def kind_of(shape: Shape, batch: Batch, *, row_wise: bool) -> Kind:
    """Which constants a step has on a CPU."""
    num_columns = batch.num_positions * shape.max_path_columns
    if not saves_errors(shape.depth, num_columns, row_wise):
        return "blocks"
    return "row_wise" if row_wise else "dense"


def seconds(rates: Work | Decoding, work: Work | Decoding) -> Any:
    """The time of some work: Σ constant · amount, of the shape of the amounts."""
    return sum(rate * amount for rate, amount in zip(rates, work, strict=True) if rate)


def cost_of(
    shape: Shape, batch: Batch, rates: Rates, *, row_wise: bool = False, kth_share: float = 0.0
) -> Cost:
    """The cost of a tree; `kth_share` is the share of tokens of the `TOP_K`-th word."""
    work = work_of_step(shape, batch, rates.tile, gradient_of(shape, batch, row_wise=row_wise))
    units: Work = getattr(rates, kind_of(shape, batch, row_wise=row_wise))
    size, sample, topk = batch.hidden_size, None, None
    if rates.decoding is not None:
        sample = float(seconds(rates.decoding, work_of_sample(shape, size)))
        topk = float(seconds(rates.decoding, work_of_topk(shape, kth_share, size)))
    return Cost(
        float(seconds(units, work)),
        sample,
        topk,
        visits=float(work.visits) / batch.num_positions,
        columns=float(work.columns) / batch.num_positions,
        visited_rows=float(work.row_numbers) * batch.num_positions / float(work.vectors),
        work=work,
    )


CPU = Rates(
    device="x",
    source="trees.jsonl",
    tile=4,
    dense=Work(
        steps=5e-4,
        levels=1e-8,
        vectors=3e-9,
        nodes=2e-6,
        visits=2e-7,
        visit_numbers=1e-10,
        columns=3e-9,
        products=2e-11,
        row_numbers=1e-9,
        zero_numbers=2e-10,
        mapped_numbers=1e-9,
    ),
    row_wise=Work(nodes=1e-4, products=2e-11),
    blocks=Work(products=2e-11),
    decoding=Decoding(steps=1e-4, levels=5e-4),
)
GPU = CPU
