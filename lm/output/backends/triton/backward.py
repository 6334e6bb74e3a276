"""The backward of the Triton backend: three launches; row-wise gradients remain factors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem
from lm.output.backends.triton.launch import launch
from lm.output.backends.triton.plan import Memory, Plan
from lm.output.backends.triton.routing import Routing
from lm.output.backends.triton.rows import (
    BatchFactors,
    Errors,
    Outputs,
    Partial,
    TritonFactors,
    write,
)
from lm.output.inputs import compute_dtype
from lm.output.rowwise.row_gradient import RowGradient


def gradients(
    d_nll: Tensor, plan: Plan, problem: Problem, memory: Memory, needs: Needs
) -> Gradients:
    """The gradients that are needed; arguments as in `Solver.backward`.

    Row-wise ones remain factors, of which nothing is read by the host.
    """
    bias = problem.bias if needs.bias else None
    d_hidden = torch.empty_like(problem.hidden) if needs.hidden else None
    factors, outputs = _factors(d_nll, plan, problem, memory, needs), Outputs(d_hidden)
    if not needs.row_wise:
        d_weight = torch.empty_like(problem.weight) if needs.weight else None
        outputs = Outputs(d_hidden, d_weight, None if bias is None else torch.empty_like(bias))
    write(factors, outputs, with_chunks=needs.weight or needs.bias)
    if not needs.row_wise:
        return Gradients(*outputs[:3])
    factors = factors.kept()
    weight, bias = (
        None if t is None else RowGradient(t, TritonFactors(factors=factors, of_bias=of_bias))
        for t, of_bias in ((problem.weight if needs.weight else None, False), (bias, True))
    )
    return Gradients(d_hidden, weight, bias)


def summed(parts: Iterable[Gradients], problem: Problem) -> Gradients:
    """The gradients of a batch, given those of consecutive parts of its positions.

    Dense gradients of tables are rounded to their dtype in every part, and added in at least fp32.
    """
    d_hidden: list[Tensor] = []
    totals: list[Any] = [None, None]
    dtype = compute_dtype(problem.weight.dtype)
    for part in parts:
        d_hidden += [] if part.d_hidden is None else [part.d_hidden]
        for i, more in enumerate(part[1:]):
            if totals[i] is not None:
                totals[i] += more
            elif more is not None:
                totals[i] = more if isinstance(more, RowGradient) else more.to(dtype)
    for i, table in enumerate((problem.weight, problem.bias)):
        if totals[i] is not None and not isinstance(totals[i], RowGradient):
            totals[i] = totals[i].to(table)
    return Gradients(torch.cat(d_hidden) if d_hidden else None, *totals)


def _largest(d_nll: Tensor, plan: Plan, memory: Memory) -> Tensor:
    """The largest |d nll|, for the s of (9)."""
    if d_nll.stride(0) == 0:
        return d_nll[0].abs()
    routing = Routing.of(memory.routing, plan.num_positions, plan.strides.D)
    ignored = routing.rank == plan.num_nodes  # their d_nll is not read otherwise
    d_nll = d_nll.index_select(0, routing.position).masked_fill(ignored, 0)
    largest: Tensor = torch.linalg.vector_norm(d_nll, torch.inf)
    return largest


def _factors(
    d_nll: Tensor, plan: Plan, problem: Problem, memory: Memory, needs: Needs
) -> BatchFactors:
    """Launch the first kernel; memory for what the others share."""
    num_positions, most = plan.num_positions, plan.most
    is_half = problem.hidden.dtype == torch.float16 and num_positions
    scale = _largest(d_nll, plan, memory) if is_half else None
    new, padded = memory.visit_lse.new_empty, plan.padded_size
    partial = Partial(
        new(num_positions, padded) if needs.hidden else None,
        new(most.partial_rows, padded) if needs.weight else None,
        new(most.partial_rows) if needs.bias else None,
    )
    errors = Errors(torch.empty_like(memory.exp_logits), scale)
    factors = BatchFactors(problem, memory, plan, errors, partial)
    tile = plan.errors_tile
    launch(
        "_errors", -(-num_positions // tile.v), tile,
        d_nll=d_nll, saved=memory.results, d_nll_stride=d_nll.stride(0), TILE=tile,
        **factors.shared,
    )  # fmt: skip
    return factors
