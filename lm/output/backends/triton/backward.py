"""The launches of the backward: at most three, for dense and for row-wise gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem
from lm.output.backends.triton.launch import (
    Launch,
    Units,
    arithmetic_arguments,
    node_arguments,
    num_processors,
    submit,
    tiles_for,
    visit_arguments,
)
from lm.output.backends.triton.saved import Saved
from lm.output.backends.triton.schedule import LIGHT
from lm.output.backends.triton.tile_shapes import Tiles
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
            are all rows, of which those of nodes without visits are set to 0.
    """

    d_hidden: Tensor | None
    d_weight: Tensor | None
    d_bias: Tensor | None
    written_row: Tensor | None


class _Batch(NamedTuple):
    """What all launches take.

    Attributes:
        problem: hidden contiguous, rows of the weight contiguous.
        saved: by the forward.
        output: to be written.
        shape: tile shapes.
        units: of hidden and weight.
    """

    problem: Problem
    saved: Saved
    output: _Output
    shape: Tiles
    units: Units

    def arguments(self) -> dict[str, Any]:
        """The arguments that all kernels share."""
        problem, saved, units = self.problem, self.saved, self.units
        return {
            **visit_arguments(saved.visits),
            **node_arguments(problem.tree),
            "exp_logits": saved.exp_logits,
            "block_max": saved.block_max,
            "lse": saved.lse,
            "target_logit": saved.target_logit,
            "P": problem.num_positions,
            "num_blocks": saved.exp_logits.shape[1],
            "h_units": units.size,
            "weight_stride": units.weight_stride,
            **arithmetic_arguments(problem.hidden, units),
            "BLOCK_C": self.shape.block_c,
        }


def dense_gradients(d_nll: Tensor, problem: Problem, saved: Saved, needs: Needs) -> Gradients:
    """The dense gradients that are needed; arguments as in `Backend.backward`."""
    hidden, weight, bias = problem.hidden, problem.weight, problem.bias
    output = _Output(
        torch.empty_like(hidden) if needs.hidden else None,
        _empty_rows(weight, weight.shape[0]) if needs.weight else None,
        torch.empty_like(bias) if bias is not None and needs.bias else None,
        None,
    )
    _launch(d_nll, problem, saved, output)
    return Gradients(output.d_hidden, output.d_weight, output.d_bias)


def row_wise_gradients(d_nll: Tensor, problem: Problem, saved: Saved, needs: Needs) -> Gradients:
    """The same with `RowGradient`s of the rows of visited nodes, in contiguous memory.

    The host waits for the number of these rows.
    """
    hidden, weight, bias = problem.hidden, problem.weight, problem.bias
    tree = problem.tree
    visited = _visited(problem, saved, torch.bool)
    width = torch.where(visited, tree.num_children, 0)
    index = visited[tree.node_of_row].nonzero().squeeze(1)
    num_rows = index.numel()
    output = _Output(
        torch.empty_like(hidden) if needs.hidden else None,
        _empty_rows(weight, num_rows) if needs.weight else None,
        bias.new_empty(num_rows) if bias is not None and needs.bias else None,
        width.cumsum(0) - width,
    )
    _launch(d_nll, problem, saved, output)
    d_weight = d_bias = None
    if output.d_weight is not None:
        d_weight = RowGradient(weight, [Rows(index, output.d_weight)])
    if bias is not None and output.d_bias is not None:
        d_bias = RowGradient(bias, [Rows(index, output.d_bias[:, None])])
    return Gradients(output.d_hidden, d_weight, d_bias)


def _empty_rows(weight: Tensor, num_rows: int) -> Tensor:
    """Uninitialised rows with the strides of the weight's."""
    return torch.empty_strided(
        (num_rows, weight.shape[1]), weight.stride(), dtype=weight.dtype, device=weight.device
    )


def _visited(problem: Problem, saved: Saved, dtype: torch.dtype) -> Tensor:
    """Which nodes have visits, [I + 1]; the last element is not a node."""
    node, num_nodes = saved.visits.node, problem.tree.num_children.numel()
    owner = torch.where(node < 0, num_nodes, node).flatten()
    visited = torch.zeros(num_nodes + 1, dtype=dtype, device=node.device)
    return visited.scatter_(0, owner, 1)


def _launch(d_nll: Tensor, problem: Problem, saved: Saved, output: _Output) -> None:
    batch = _Batch(problem, saved, output, tiles_for(problem), Units.of(problem))
    d_nll = d_nll.to(saved.lse.dtype).contiguous()
    partial = scale = None
    if output.d_hidden is not None:
        partial = torch.empty(problem.hidden.shape, dtype=d_nll.dtype, device=d_nll.device)
        submit(_d_hidden(batch, d_nll, partial))
    # the d_nll of a mean would leave little of the range of fp16
    if problem.hidden.dtype == torch.float16 and problem.num_positions:
        scale = d_nll.abs().amax().clamp(min=torch.finfo(d_nll.dtype).tiny)
        d_nll = d_nll / scale
    if output.d_weight is not None or output.d_bias is not None:
        submit(_d_weight(batch, d_nll, scale))
    submit(_d_light(batch, d_nll, scale, partial))


def _d_hidden(batch: _Batch, d_nll: Tensor, partial: Tensor) -> Launch:
    from lm.output.backends.triton import backward_kernels

    tile, (num_positions, size) = batch.shape.d_hidden, batch.problem.hidden.shape
    arguments = {
        "d_nll": d_nll,
        "weight": batch.problem.weight,
        "light_level": batch.saved.schedule.light_level,
        "d_hidden": batch.output.d_hidden,
        "partial": partial,
        "D": batch.problem.depth,
        **batch.arguments(),
        "BLOCK_V": tile.v,
        "BLOCK_H": tile.h,
    }
    num_programs = -(-num_positions // tile.v) * -(-size // tile.h)
    return Launch(backward_kernels._d_hidden, num_programs, tile, arguments)


def _d_weight(batch: _Batch, d_nll: Tensor, scale: Tensor | None) -> Launch:
    from lm.output.backends.triton import backward_kernels

    problem, saved, output, shape, units = batch
    tile, hidden, tree = shape.d_weight, problem.hidden, problem.tree
    heavy = saved.schedule.heavy_first
    width = tree.num_children[saved.visits.node.flatten()[heavy.clamp(min=0)].clamp(min=0)]
    num_tiles = -(-width // shape.block_c) * -(-hidden.shape[1] // tile.h)
    arguments = {
        "d_nll": d_nll,
        "scale": scale,
        "hidden": hidden,
        "heavy_first": heavy,
        "tile_stop": torch.where(heavy < 0, 0, num_tiles).cumsum(0),
        "node_of_row": tree.node_of_row,
        "visited": _visited(problem, saved, torch.int8),
        "d_weight": output.d_weight,
        "d_bias": output.d_bias,
        "stop": saved.schedule.stop,
        "R": tree.node_of_row.numel() if output.written_row is None else 0,
        "num_heavy": heavy.numel(),
        "hidden_stride": units.hidden_stride,
        "SEARCH": heavy.numel().bit_length(),
        **batch.arguments(),
        "BLOCK_V": tile.v,
        "BLOCK_H": tile.h,
        "BLOCK_R": _ROWS_PER_ZEROING,
    }
    if output.written_row is not None:
        arguments["first_row"] = output.written_row
    num_programs = 4 * num_processors(hidden.device)
    return Launch(backward_kernels._d_weight, num_programs, tile, arguments)


def _d_light(
    batch: _Batch, d_nll: Tensor, scale: Tensor | None, partial: Tensor | None
) -> Launch:
    from lm.output.backends.triton import backward_kernels

    problem, saved, output, shape, units = batch
    plan, tile = saved.schedule, shape.d_light
    if output.written_row is not None and units.align < 4:  # else its second row number spills
        tile = tile._replace(warps=8)
    arguments = {
        "d_nll": d_nll,
        "scale": scale,
        "hidden": problem.hidden,
        "weight": problem.weight,
        "stop": plan.stop,
        "light_level": plan.light_level,
        "light_first": plan.light_first,
        "partial": partial,
        **output._asdict(),
        "D": problem.depth,
        "hidden_stride": units.hidden_stride,
        "LIGHT": LIGHT,
        **batch.arguments(),
        "BLOCK_H": tile.h,
    }
    num_programs = plan.light_first.numel() * -(-problem.hidden.shape[1] // tile.h)
    return Launch(backward_kernels._d_light, num_programs, tile, arguments)
