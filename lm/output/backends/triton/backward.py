"""The backward of the Triton backend: three launches; row-wise gradients remain factors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem, compute_dtype
from lm.output.backends.triton.launch import launch
from lm.output.backends.triton.plan import Plan, Saved, arguments
from lm.output.backends.triton.routing import NUM_LISTS
from lm.output.backends.triton.rows import ROW_PROGRAMS, Factors, Unwritten, write_rows
from lm.output.rowwise.blocks import Factored
from lm.output.rowwise.row_gradient import RowGradient


def gradients(d_nll: Tensor, plan: Plan, problem: Problem, saved: Saved, needs: Needs) -> Gradients:
    """The gradients that are needed; arguments as in `Backend.backward`.

    Row-wise ones remain factors, of which nothing is read by the host.
    """
    bias = problem.bias if needs.bias else None
    d_hidden = torch.empty_like(problem.hidden) if needs.hidden else None
    known = arguments(plan, problem, saved)
    sums = _sums(d_hidden, d_nll, plan, problem, known, needs)
    if not needs.row_wise:
        d_weight = torch.empty_like(problem.weight) if needs.weight else None
        d_bias = None if bias is None else torch.empty_like(bias)
        output = {"d_hidden": d_hidden, "d_weight": d_weight, "d_bias": d_bias}
        write_rows(plan, known, **output)
        return Gradients(d_hidden, d_weight, d_bias)
    if d_hidden is not None:
        write_rows(plan, known, d_hidden=d_hidden)
    tables = {name: getattr(problem, name).detach() for name in ("hidden", "weight")}
    factors = Factors(
        problem=problem._replace(**tables, bias=None),
        saved=saved._replace(exp_logits=sums["errors"]),
        plan=plan,
        scale=sums["scale"],
        partial_rows=sums["partial_rows"],
        partial_bias=sums["partial_bias"],
    )
    weight, bias = (
        None if table is None else RowGradient(table, [Factored(Unwritten(factors, of_bias), 1)])
        for table, of_bias in ((problem.weight if needs.weight else None, False), (bias, True))
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


def _largest(d_nll: Tensor, problem: Problem, num_entries: Tensor) -> Tensor:
    """The s of (9), of d_nll divided for the mean."""
    if d_nll.stride(0) == 0:
        largest = d_nll[0].abs()
    else:
        ignored = problem.target == problem.ignore_index  # their d_nll is not read otherwise
        largest = torch.linalg.vector_norm(d_nll.masked_fill(ignored, 0), torch.inf)
    return largest / num_entries[NUM_LISTS - 1].clamp(min=1) if problem.mean else largest


def _sums(
    d_hidden: Tensor | None,
    d_nll: Tensor,
    plan: Plan,
    problem: Problem,
    known: dict[str, Any],
    needs: Needs,
) -> dict[str, Any]:
    """Launch the first kernels: errors, sums of chunks and heavy nodes' share of d_hidden.

    What they write becomes `known`, and is returned.
    """
    from lm.output.backends.triton import backward_kernels

    num_positions, tiles, lists = problem.num_positions, plan.tiles, plan.sizes
    padded_size = plan.padded_size
    chunk_tiles = lists.chunk_tiles if needs.weight or needs.bias else 0
    new = known["lse"].new_empty
    sums: dict[str, Any] = {
        "scale": None,
        "errors": torch.empty_like(known["exp_logits"]),
        "partial_hidden": None if d_hidden is None else new(num_positions, padded_size),
        "partial_rows": new(lists.partial_rows, padded_size) if needs.weight else None,
        "partial_bias": new(lists.partial_rows) if needs.bias else None,
    }
    if problem.hidden.dtype == torch.float16 and num_positions:
        sums["scale"] = _largest(d_nll, problem, known["num_entries"])
    known |= {**sums, "d_hidden": d_hidden, "d_nll": d_nll, "d_nll_stride": d_nll.stride(0)}
    errors = tiles.errors._replace(c=tiles.forward.c)
    launch(backward_kernels._errors, -(-num_positions // errors.v), errors, known)
    hidden_tiles = 0 if d_hidden is None else -(-num_positions // tiles.heavy.v)
    num_h = -(-padded_size // tiles.heavy.h)
    row_programs = min(chunk_tiles * num_h, ROW_PROGRAMS)
    num_programs = row_programs + hidden_tiles * num_h
    heavy = backward_kernels._heavy
    launch(heavy, num_programs, tiles.heavy, known, row_programs=row_programs)
    return sums
