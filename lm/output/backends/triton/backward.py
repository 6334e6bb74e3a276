"""The backward of the Triton backend: at most three launches, for dense or row-wise gradients."""

from typing import Any

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem
from lm.output.backends.triton.launch import Saved, alignment, launch, tiles_for
from lm.output.rowwise.blocks import Rows
from lm.output.rowwise.row_gradient import RowGradient

_ROWS_PER_ZEROING = 64
"""Rows that a program examines at a time when it writes zeros for nodes without visits."""


def gradients(d_nll: Tensor, problem: Problem, saved: Saved, needs: Needs) -> Gradients:
    """The gradients that are needed; arguments as in `Backend.backward`.

    Row-wise ones have the rows of visited nodes in contiguous memory; the host waits for their
    number.
    """
    (num_rows, size), bias = problem.weight.shape, problem.bias
    index = written_row = None
    if needs.row_wise:
        visited = _visited(problem, saved, torch.bool)
        width = torch.where(visited, problem.tree.num_children, 0)
        written_row = width.cumsum(0) - width
        index = visited[problem.tree.node_of_row].nonzero().squeeze(1)
        num_rows = index.numel()
    strided = problem.weight.new_empty_strided
    output = Gradients(
        torch.empty_like(problem.hidden) if needs.hidden else None,
        strided((num_rows, size), problem.weight.stride()) if needs.weight else None,
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


def _visited(problem: Problem, saved: Saved, dtype: torch.dtype) -> Tensor:
    """Which nodes have visits, [I]."""
    node, num_nodes = saved.visits.node, problem.tree.num_children.numel()
    owner = torch.where(node < 0, num_nodes, node).flatten()
    visited = torch.zeros(num_nodes + 1, dtype=dtype, device=node.device)
    return visited.scatter_(0, owner, 1)[:-1]  # the last collects what is not a visit


def _write(
    output: Gradients, written_row: Tensor | None, d_nll: Tensor, problem: Problem, saved: Saved
) -> None:
    """Launch the kernels that write the output.

    `written_row` [I] is where each node's rows begin in d_weight and d_bias; None if these have all
    rows, of which those of nodes without visits are set to 0.
    """
    from lm.output.backends.triton import backward_kernels as kernels

    (num_positions, size), shape = problem.hidden.shape, tiles_for(problem)
    d_nll = d_nll.to(saved.lse.dtype).contiguous()
    special: dict[str, Any] = {**output._asdict(), "d_nll": d_nll, "written_row": written_row}
    special["scale"] = special["partial"] = None
    if output.d_hidden is not None:
        special["partial"] = d_nll.new_empty(problem.hidden.shape)
        tile = shape.d_hidden
        num_programs = -(-num_positions // tile.v) * -(-size // tile.h)
        launch(kernels._d_hidden, num_programs, tile, problem, saved, **special)
    # the d_nll of a mean would leave little of the range of fp16
    if problem.hidden.dtype == torch.float16 and num_positions:
        scale = d_nll.abs().amax().clamp(min=torch.finfo(d_nll.dtype).tiny)
        special |= {"d_nll": d_nll / scale, "scale": scale}
    if output.d_weight is not None or output.d_bias is not None:
        _write_heavy_rows(special, problem, saved)
    tile = shape.d_light
    if written_row is not None and alignment(problem) < 4:
        tile = tile._replace(warps=8)  # else the second row number spills
    num_programs = saved.schedule.light_first.numel() * -(-size // tile.h)
    launch(kernels._d_light, num_programs, tile, problem, saved, **special)


def _write_heavy_rows(special: dict[str, Any], problem: Problem, saved: Saved) -> None:
    """Launch the kernel for the rows of heavy nodes, and of nodes without visits."""
    from lm.output.backends.triton import backward_kernels as kernels

    shape, hidden, tree = tiles_for(problem), problem.hidden, problem.tree
    tile, heavy = shape.d_weight, saved.schedule.heavy_first
    width = tree.num_children[saved.visits.node.flatten()[heavy.clamp(min=0)].clamp(min=0)]
    num_tiles = -(-width // shape.block_c) * -(-hidden.shape[1] // tile.h)
    dense = special["written_row"] is None
    of_heavy = {
        "tile_stop": torch.where(heavy < 0, 0, num_tiles).cumsum(0),
        "first_row": tree.first_row if dense else special["written_row"],
        "visited": _visited(problem, saved, torch.int8),
        "R": tree.node_of_row.numel() if dense else 0,
        "num_heavy": heavy.numel(),
        "SEARCH": heavy.numel().bit_length(),
        "BLOCK_R": _ROWS_PER_ZEROING,
    }
    num_processors = 1
    if hidden.is_cuda:
        num_processors = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    num_programs = 4 * num_processors
    launch(kernels._d_weight, num_programs, tile, problem, saved, **special, **of_heavy)
