"""The backward of the Triton backend: three launches, for dense or row-wise gradients."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem, compute_dtype
from lm.output.backends.triton.launch import Saved, launch, path_blocks, tiles_for
from lm.output.backends.triton.routing import sizes
from lm.output.rowwise.blocks import Rows
from lm.output.rowwise.row_gradient import RowGradient

_ROW_PROGRAMS = 2048
"""Most programs for tiles of heavy nodes' rows: they step through a list that may be short."""
_ZEROING_PROGRAMS = 512
"""Most programs that write zeros for rows of nodes without visits."""


def gradients(d_nll: Tensor, problem: Problem, saved: Saved, needs: Needs) -> Gradients:
    """The gradients that are needed; arguments as in `Backend.backward`.

    Row-wise ones have the rows of visited nodes in contiguous memory; the host waits for their
    number.

    Raises:
        RuntimeError: if the tile shapes are others than in the forward.
    """
    _check_tiles(problem, saved)
    (num_rows, columns), bias, tree = problem.weight.shape, problem.bias, problem.tree
    index = written_row = None
    if needs.row_wise:
        visited = saved.routing.visited.bool()
        width = torch.where(visited, tree.num_children, 0)
        written_row = width.cumsum(0) - width
        index = visited[tree.node_of_row].nonzero().squeeze(1)
        num_rows = index.numel()
    output = Gradients(
        torch.empty_like(problem.hidden) if needs.hidden else None,
        problem.weight.new_empty(num_rows, columns) if needs.weight else None,
        bias.new_empty(num_rows) if bias is not None and needs.bias else None,
    )
    _write(output, written_row, d_nll, problem, saved)
    if index is None:
        return output
    d_hidden, d_weight, d_bias = output
    if d_weight is not None:
        d_weight = RowGradient(problem.weight, [Rows(index, d_weight)])
    if bias is not None and d_bias is not None:
        d_bias = RowGradient(bias, [Rows(index, d_bias[:, None])])
    return Gradients(d_hidden, d_weight, d_bias)


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


def _write(
    output: Gradients, written_row: Tensor | None, d_nll: Tensor, problem: Problem, saved: Saved
) -> None:
    """Launch the kernels that write the output.

    `written_row` [I] is where each node's rows begin in d_weight and d_bias; None if these have all
    rows, of which those of nodes without visits are set to 0.
    """
    from lm.output.backends.triton import backward_kernels, row_kernel

    num_positions, shape = problem.num_positions, tiles_for(problem)
    padded_size, columns = saved.sorted_hidden.shape[1], problem.weight.shape[1]
    lists = sizes(problem, shape)
    of_rows = output.d_weight is not None or output.d_bias is not None
    row_tiles, chunk_tiles, split_tiles = (
        (lists.row_tiles, lists.chunk_tiles, lists.split_tiles) if of_rows else (0, 0, 0)
    )
    num_rows = problem.tree.node_of_row.numel() if of_rows and written_row is None else 0
    sums = saved.lse.new_empty
    special: dict[str, Any] = {
        **output._asdict(),
        "d_nll": d_nll,
        "d_nll_stride": d_nll.stride(0),
        "scale": None,
        "errors": torch.empty_like(saved.exp_logits),
        "written_row": written_row,
        "partial_hidden": sums(num_positions, padded_size) if output.d_hidden is not None else None,
        "partial_rows": sums(lists.partial_rows, padded_size)
        if output.d_weight is not None
        else None,
        "partial_bias": sums(lists.partial_rows) if output.d_bias is not None else None,
        "max_split_tiles": split_tiles,
        "max_groups": lists.light_groups,
        "R": num_rows,
        "LIGHT_C": shape.light.c,
        "LIGHT_H": shape.light.h,
        "LIGHT_STAGES": shape.light.stages,
    }
    if problem.hidden.dtype == torch.float16 and num_positions:
        ignored = problem.target == problem.ignore_index  # their d_nll is not read otherwise
        special["scale"] = torch.linalg.vector_norm(d_nll.masked_fill(ignored, 0), torch.inf)
    errors = shape.errors._replace(c=shape.forward.c)
    launch(
        backward_kernels._errors, -(-num_positions // errors.v), errors, problem, saved, **special
    )
    tile = shape.heavy
    hidden_tiles = -(-num_positions // tile.v) if output.d_hidden is not None else 0
    num_h = -(-padded_size // tile.h)
    special["row_programs"] = min(chunk_tiles * num_h, _ROW_PROGRAMS)
    num_programs = special["row_programs"] + hidden_tiles * num_h
    launch(backward_kernels._heavy, num_programs, tile, problem, saved, **special)
    special["row_programs"] = min(row_tiles * -(-columns // tile.h), _ROW_PROGRAMS)
    num_programs = (lists.light_groups + split_tiles) * -(-columns // shape.light.h)
    num_programs += special["row_programs"] + min(-(-num_rows // tile.c), _ZEROING_PROGRAMS)
    tile = tile._replace(warps=shape.light.warps)
    launch(row_kernel._rows, num_programs, tile, problem, saved, **special)
