"""Seconds of the units of work, for the backends that users get, and the time of a tree by them.

`scripts/benchmarks/tree_rates.py` fits them to the logs that they name. Those of a GPU are fitted
to a performance model: nothing was measured on one.
"""

from typing import Any, Literal, NamedTuple

from lm.output.backends.base import row_size
from lm.output.backends.reference.backend import saves_errors
from lm.output.backends.reference.gradient_memory import is_mapped
from lm.output.cost.work import (
    ITEM,
    Batch,
    Decoding,
    Gradient,
    Shape,
    Work,
    is_visited,
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
    on_gpu: bool
    tile: int  # visits, and children, of a tile
    dense: Work  # seconds per unit of a forward and backward
    row_wise: Work  # with the update by SGD; of a GPU as dense
    blocks: Work  # of a GPU as dense
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


def gradient_of(shape: Shape, batch: Batch, *, on_gpu: bool, row_wise: bool) -> Gradient:
    """How the gradient of the table is stored."""
    nodes = is_visited(shape.share, batch.num_positions)
    share = float(nodes @ shape.num_children.double()) / shape.num_rows
    return _stored(shape.num_rows, share, batch, on_gpu=on_gpu, row_wise=row_wise)


def gradients(
    num_words: int, batch: Batch, rates: Rates, *, row_wise: bool = False
) -> list[Gradient]:
    """How it may be stored, depending on the tree."""
    flags = {"on_gpu": rates.on_gpu, "row_wise": row_wise}
    found = [_stored(num_words, share, batch, **flags) for share in (0.0, 1.0)]
    return list(dict.fromkeys(found))


def _stored(
    num_rows: int, visited_share: float, batch: Batch, *, on_gpu: bool, row_wise: bool
) -> Gradient:
    num_bytes = num_rows * row_size(batch.hidden_size) * ITEM
    if row_wise:
        return "row_wise"
    return "mapped" if not on_gpu and is_mapped(num_bytes, visited_share) else "zeroed"


def kind_of(shape: Shape, batch: Batch, *, on_gpu: bool, row_wise: bool) -> Kind:
    """Which constants a step has."""
    if on_gpu:
        return "dense"
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
    gradient = gradient_of(shape, batch, on_gpu=rates.on_gpu, row_wise=row_wise)
    work = work_of_step(shape, batch, rates.tile, gradient)
    units: Work = getattr(rates, kind_of(shape, batch, on_gpu=rates.on_gpu, row_wise=row_wise))
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
    device="AMD EPYC, avx2, avx512f, avx512_bf16, one thread",
    source="scripts/results/trees.jsonl",
    on_gpu=False,
    tile=4,
    dense=Work(
        steps=0.000203,
        levels=1.65e-08,
        vectors=3.14e-09,
        nodes=2.27e-06,
        visit_numbers=1.73e-10,
        columns=1.93e-09,
        products=9.52e-12,
        row_numbers=2.34e-10,
        zero_numbers=2.06e-10,
        mapped_numbers=1.51e-09,
    ),
    row_wise=Work(steps=0.00364, nodes=2.5e-06, products=1.05e-11, row_numbers=5e-10),
    blocks=Work(products=2.75e-11),
    decoding=Decoding(steps=7e-05, nodes=1.19e-06, products=1.54e-10),
)
_GPU = Work(
    levels=9.28e-09,
    nodes=1.55e-07,
    products=1e-14,
    row_numbers=2.64e-12,
    zero_numbers=4.47e-13,
)
GPU = Rates(
    device="H200, a model of the kernels",
    source="scripts/results/trees_gpu.jsonl",
    on_gpu=True,
    tile=16,
    dense=_GPU,
    row_wise=_GPU,
    blocks=_GPU,
    decoding=None,
)
