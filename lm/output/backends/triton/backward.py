"""The backward of the Triton backend: at most three launches, for dense or row-wise gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem
from lm.output.backends.triton.launch import Saved, Units, launch, tiles_for
from lm.output.rowwise.blocks import Rows
from lm.output.rowwise.row_gradient import RowGradient

_ROWS_PER_ZEROING = 64
"""Rows that a program examines at a time when it writes zeros for nodes without visits."""


class _Output(NamedTuple):
    """Memory that the kernels write; None for gradients that are not needed.

    Attributes:
        d_hidden: [P, H].
        d_weight: [R, H], or [K, H] of the K rows of visited nodes.
        d_bias: [R] or [K].
        written_row: [I], where in d_weight and d_bias the rows of each node begin; None if they
            have all rows, of which those of nodes without visits are set to 0.
    """

    d_hidden: Tensor | None
    d_weight: Tensor | None
    d_bias: Tensor | None
    written_row: Tensor | None


def dense_gradients(d_nll: Tensor, problem: Problem, saved: Saved, needs: Needs) -> Gradients:
    """The dense gradients that are needed; arguments as in `Backend.backward`."""
    hidden, weight, bias = problem.hidden, problem.weight, problem.bias
    output = _Output(
        torch.empty_like(hidden) if needs.hidden else None,
        _empty_rows(weight, weight.shape[0]) if needs.weight else None,
        torch.empty_like(bias) if bias is not None and needs.bias else None,
        None,
    )
    _write(output, d_nll, problem, saved)
    return Gradients(output.d_hidden, output.d_weight, output.d_bias)


def row_wise_gradients(d_nll: Tensor, problem: Problem, saved: Saved, needs: Needs) -> Gradients:
    """The same with `RowGradient`s of the rows of visited nodes, in contiguous memory.

    The host waits for the number of these rows.
    """
    hidden, weight, bias, tree = problem.hidden, problem.weight, problem.bias, problem.tree
    visited = _visited(problem, saved, torch.bool)
    width = torch.where(visited, tree.num_children, 0)
    index = visited[tree.node_of_row].nonzero().squeeze(1)
    output = _Output(
        torch.empty_like(hidden) if needs.hidden else None,
        _empty_rows(weight, index.numel()) if needs.weight else None,
        bias.new_empty(index.numel()) if bias is not None and needs.bias else None,
        width.cumsum(0) - width,
    )
    _write(output, d_nll, problem, saved)
    d_weight = d_bias = None
    if output.d_weight is not None:
        d_weight = RowGradient(weight, [Rows(index, output.d_weight)])
    if bias is not None and output.d_bias is not None:
        d_bias = RowGradient(bias, [Rows(index, output.d_bias[:, None])])
    return Gradients(output.d_hidden, d_weight, d_bias)


def _empty_rows(weight: Tensor, num_rows: int) -> Tensor:
    """Uninitialised rows with the strides of the weight's."""
    shape = (num_rows, weight.shape[1])
    return torch.empty_strided(shape, weight.stride(), dtype=weight.dtype, device=weight.device)


def _visited(problem: Problem, saved: Saved, dtype: torch.dtype) -> Tensor:
    """Which nodes have visits, [I]."""
    node, num_nodes = saved.visits.node, problem.tree.num_children.numel()
    owner = torch.where(node < 0, num_nodes, node).flatten()
    visited = torch.zeros(num_nodes + 1, dtype=dtype, device=node.device)
    return visited.scatter_(0, owner, 1)[:-1]  # the last collects what is not a visit


def _write(output: _Output, d_nll: Tensor, problem: Problem, saved: Saved) -> None:
    """Launch the kernels that write the output."""
    from lm.output.backends.triton import backward_kernels as kernels

    (num_positions, size), shape = problem.hidden.shape, tiles_for(problem)
    d_nll = d_nll.to(saved.lse.dtype).contiguous()
    partial = scale = None
    if output.d_hidden is not None:
        partial = torch.empty(problem.hidden.shape, dtype=d_nll.dtype, device=d_nll.device)
        special: dict[str, Any] = {"d_nll": d_nll, "d_hidden": output.d_hidden, "partial": partial}
        tile = shape.d_hidden
        num_programs = -(-num_positions // tile.v) * -(-size // tile.h)
        launch(kernels._d_hidden, num_programs, tile, problem, saved, **special)
    # the d_nll of a mean would leave little of the range of fp16
    if problem.hidden.dtype == torch.float16 and num_positions:
        scale = d_nll.abs().amax().clamp(min=torch.finfo(d_nll.dtype).tiny)
        d_nll = d_nll / scale
    if output.d_weight is not None or output.d_bias is not None:
        _write_heavy_rows(output, d_nll, scale, problem, saved)
    tile = shape.d_light
    if output.written_row is not None and Units.of(problem).align < 4:
        tile = tile._replace(warps=8)  # else the second row number spills
    special = {"d_nll": d_nll, "scale": scale, "partial": partial, **output._asdict()}
    num_programs = saved.schedule.light_first.numel() * -(-size // tile.h)
    launch(kernels._d_light, num_programs, tile, problem, saved, **special)


def _write_heavy_rows(
    output: _Output, d_nll: Tensor, scale: Tensor | None, problem: Problem, saved: Saved
) -> None:
    """Launch the kernel for the rows of heavy nodes, and of nodes without visits."""
    from lm.output.backends.triton import backward_kernels as kernels

    shape, hidden, tree = tiles_for(problem), problem.hidden, problem.tree
    tile, heavy = shape.d_weight, saved.schedule.heavy_first
    width = tree.num_children[saved.visits.node.flatten()[heavy.clamp(min=0)].clamp(min=0)]
    num_tiles = -(-width // shape.block_c) * -(-hidden.shape[1] // tile.h)
    dense = output.written_row is None
    special = {
        "d_nll": d_nll,
        "scale": scale,
        "tile_stop": torch.where(heavy < 0, 0, num_tiles).cumsum(0),
        "first_row": tree.first_row if dense else output.written_row,
        "visited": _visited(problem, saved, torch.int8),
        **output._asdict(),
        "R": tree.node_of_row.numel() if dense else 0,
        "num_heavy": heavy.numel(),
        "SEARCH": heavy.numel().bit_length(),
        "BLOCK_R": _ROWS_PER_ZEROING,
    }
    num_processors = 1
    if hidden.is_cuda:
        properties = torch.cuda.get_device_properties(hidden.device)
        num_processors = properties.multi_processor_count
    launch(kernels._d_weight, 4 * num_processors, tile, problem, saved, **special)
