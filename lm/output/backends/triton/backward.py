"""The backward of the Triton backend: three launches; row-wise gradients remain factors."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem, compute_dtype
from lm.output.backends.triton.launch import Saved, arguments, launch, path_blocks, tiles_for
from lm.output.backends.triton.routing import sizes
from lm.output.backends.triton.rows import ROW_PROGRAMS, Factors, write_rows
from lm.output.rowwise.blocks import Factored
from lm.output.rowwise.row_gradient import RowGradient


def gradients(d_nll: Tensor, problem: Problem, saved: Saved, needs: Needs) -> Gradients:
    """The gradients that are needed; arguments as in `Backend.backward`.

    Row-wise ones remain factors, of which nothing is read by the host.

    Raises:
        RuntimeError: if the tile shapes are others than in the forward.
    """
    _check_tiles(problem, saved)
    bias = problem.bias if needs.bias else None
    d_hidden = torch.empty_like(problem.hidden) if needs.hidden else None
    sums = _sums(d_hidden, d_nll, problem, saved, needs)
    shape = tiles_for(problem)
    if not needs.row_wise:
        d_weight = torch.empty_like(problem.weight) if needs.weight else None
        d_bias = None if bias is None else torch.empty_like(bias)
        output = {"d_hidden": d_hidden, "d_weight": d_weight, "d_bias": d_bias}
        write_rows(problem, saved, shape, sums, **output)
        return Gradients(d_hidden, d_weight, d_bias)
    if d_hidden is not None:
        write_rows(problem, saved, shape, sums, d_hidden=d_hidden)
    tables = {name: getattr(problem, name).detach() for name in ("hidden", "weight")}
    held = Factors(
        problem=problem._replace(**tables, bias=None),
        saved=saved._replace(exp_logits=sums["errors"]),
        shape=shape,
        scale=sums["scale"],
        partial_rows=sums["partial_rows"],
        partial_bias=None,
    )
    of_bias = replace(held, partial_rows=None, partial_bias=sums["partial_bias"])
    return Gradients(
        d_hidden,
        RowGradient(problem.weight, [Factored(held, 1)]) if needs.weight else None,
        None if bias is None else RowGradient(bias, [Factored(of_bias, 1)]),
    )


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


def _check_tiles(problem: Problem, saved: Saved) -> None:
    """What was saved is laid out by tile shapes, which depend on the precision of fp32 products."""
    lengths = (saved.routing.heavy_tiles.numel(), saved.block_max.shape[1])
    if lengths != (sizes(problem, tiles_for(problem)).heavy_tiles, path_blocks(problem)):
        raise RuntimeError(
            "the precision of fp32 products (torch.set_float32_matmul_precision) must be the same"
            " in the forward and the backward"
        )


def _largest(d_nll: Tensor, problem: Problem, saved: Saved) -> Tensor:
    """The s of (9), of d_nll divided for the mean."""
    if d_nll.stride(0) == 0:
        largest = d_nll[0].abs()
    else:
        ignored = problem.target == problem.ignore_index  # their d_nll is not read otherwise
        largest = torch.linalg.vector_norm(d_nll.masked_fill(ignored, 0), torch.inf)
    return largest / saved.routing.num_entries[-1].clamp(min=1) if problem.mean else largest


def _sums(
    d_hidden: Tensor | None, d_nll: Tensor, problem: Problem, saved: Saved, needs: Needs
) -> dict[str, Any]:
    """Launch the first kernels: errors, sums of chunks and heavy nodes' share of d_hidden."""
    from lm.output.backends.triton import backward_kernels

    num_positions, shape = problem.num_positions, tiles_for(problem)
    padded_size, lists = saved.sorted_hidden.shape[1], sizes(problem, shape)
    chunk_tiles = lists.chunk_tiles if needs.weight or needs.bias else 0
    new = saved.lse.new_empty
    sums: dict[str, Any] = {
        "scale": None,
        "errors": torch.empty_like(saved.exp_logits),
        "partial_hidden": None if d_hidden is None else new(num_positions, padded_size),
        "partial_rows": new(lists.partial_rows, padded_size) if needs.weight else None,
        "partial_bias": new(lists.partial_rows) if needs.bias else None,
    }
    if problem.hidden.dtype == torch.float16 and num_positions:
        sums["scale"] = _largest(d_nll, problem, saved)
    special = {**sums, "d_hidden": d_hidden, "d_nll": d_nll, "d_nll_stride": d_nll.stride(0)}
    errors = shape.errors._replace(c=shape.forward.c)
    known = arguments(problem, saved)
    launch(backward_kernels._errors, -(-num_positions // errors.v), errors, known, **special)
    tile = shape.heavy
    hidden_tiles = 0 if d_hidden is None else -(-num_positions // tile.v)
    num_h = -(-padded_size // tile.h)
    special["row_programs"] = min(chunk_tiles * num_h, ROW_PROGRAMS)
    num_programs = special["row_programs"] + hidden_tiles * num_h
    launch(backward_kernels._heavy, num_programs, tile, known, **special)
    return sums
