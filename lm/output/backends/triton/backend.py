"""The Triton backend: memory and launches of the fused kernels.

What the kernels compute stands in `kernels`; the batch comes sorted from `routing`. Triton is
imported when the backend is first used, so that a machine without it has the other backend.
"""

import os
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output.backends.reference.backend import compute_dtype
from lm.output.backends.triton.launch import (
    Units,
    arithmetic,
    like,
    num_processors,
    of_batch,
    of_nodes,
)
from lm.output.backends.triton.tile_shapes import Tile, Tiles, compiler_options, tiles
from lm.output.backends.visits import LIGHT, Schedule, Visits
from lm.output.rowwise.row_gradient import RowGradient, Rows
from lm.output.tree.class_tree import TreeArrays

KEPT_BYTES = 1 << 31
"""Most memory for what the forward keeps for the backward, positions × columns on a path. Trees
with wider paths, such as the full softmax of a large vocabulary, are for the reference backend.
"""
_ROWS_PER_ZEROING = 64
"""Rows looked at in turn by the program that writes zeros for nodes without visits."""
_MOST_SPLITS = 16
"""Most programs of a tile: the last of them adds up what the others found."""


def kept_blocks(max_path_columns: int, depth: int, block_c: int) -> int:
    """Blocks of children on the longest path: each level may leave one of them partly empty."""
    return max_path_columns // block_c + depth


class State(NamedTuple):
    """What the forward leaves for the backward; equations (7) and (8) of `kernels`.

    Attributes:
        kept: [P, blocks, block_c] in the dtype of hidden, k of every visit's blocks; empty if there
            is to be no backward.
        block_max: [P, blocks], m; empty likewise.
        lse: [D, P], log-sum-exp of every visit.
        picked: [D, P], logit of every visit's target.
    """

    kept: Tensor
    block_max: Tensor
    lse: Tensor
    picked: Tensor


def obstacle(hidden: Tensor, weight: Tensor, max_path_columns: int, depth: int) -> str | None:
    """Why the kernels cannot take a problem, a sentence without its subject; None if they can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not hidden.is_cuda and not interpreted:
        return f"needs a CUDA device, got {hidden.device}"
    if _capability(hidden) < 80:
        return f"needs compute capability 8.0, got {_capability(hidden) / 10}"
    if hidden.dtype == torch.float64 and not interpreted:
        return "does not take fp64"
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        return f"needs weight rows that are contiguous, got strides {tuple(weight.stride())}"
    if weight.stride(0) < weight.shape[1] and weight.shape[0] > 1:
        return f"needs weight rows that do not overlap, got strides {tuple(weight.stride())}"
    block_c = _tiles_for(hidden, weight).block_c
    blocks = kept_blocks(max_path_columns, depth, block_c)
    num_bytes = hidden.shape[0] * blocks * block_c * hidden.element_size()
    if num_bytes > KEPT_BYTES:
        return (
            f"would keep {num_bytes} bytes, for {hidden.shape[0]} positions with up to"
            f" {max_path_columns} columns each; {KEPT_BYTES} is the most"
        )
    return None


def new_state(
    hidden: Tensor, weight: Tensor, depth: int, max_path_columns: int, keep: bool
) -> State:
    """Memory for the state, not filled in."""
    num_positions, dtype = hidden.shape[0], compute_dtype(hidden.dtype)
    block_c = _tiles_for(hidden, weight).block_c
    num_blocks = kept_blocks(max_path_columns, depth, block_c) if keep else 0
    return State(
        hidden.new_empty(num_positions, num_blocks, block_c),
        hidden.new_empty(num_positions, num_blocks, dtype=dtype),
        hidden.new_empty(depth, num_positions, dtype=dtype),
        hidden.new_empty(depth, num_positions, dtype=dtype),
    )


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    visits: Visits,
    plan: Schedule,
    tree: TreeArrays,
    max_path_columns: int,
    keep: bool,
) -> tuple[Tensor, State]:
    """nll [P], and what the backward needs if `keep`; one launch.

    Args:
        hidden: [P, H], contiguous.
        weight: [R, H], rows contiguous.
        bias: [R] or None, contiguous.
        visits, plan: the batch.
        tree: its arrays.
        max_path_columns: of the tree.
        keep: whether a backward will follow.
    """
    from lm.output.backends.triton import forward_kernel as kernels

    depth, num_positions = visits.node.shape
    shape = _tiles_for(hidden, weight)
    tile, block_c = shape.forward, shape.block_c
    state = new_state(hidden, weight, depth, max_path_columns, keep)
    accumulated = state.lse.dtype
    nll = hidden.new_empty(num_positions, dtype=accumulated)
    num_tiles, num_groups = -(-num_positions // tile.v), plan.light_first.numel()
    splits = _num_splits(max_path_columns, depth, block_c)
    units = Units.of(hidden, weight)
    _launch(
        kernels._forward,
        (num_tiles + num_groups) * splits,
        tile,
        hidden=hidden,
        weight=weight,
        bias=bias,
        **of_batch(visits),
        stop=plan.stop,
        light_level=plan.light_level,
        light_first=plan.light_first,
        **of_nodes(tree),
        kept=state.kept,
        block_max=state.block_max,
        part=hidden.new_empty(splits, depth, num_positions, dtype=accumulated),
        picked=state.picked,
        lse=state.lse,
        arrived=torch.zeros(num_positions, dtype=torch.int32, device=hidden.device),
        nll=nll,
        P=num_positions,
        D=depth,
        num_tiles=num_tiles,
        num_blocks=state.kept.shape[1],
        h_units=units.size,
        hidden_stride=units.hidden_stride,
        weight_stride=units.weight_stride,
        SPLITS=splits,
        LIGHT=LIGHT,
        KEEP=keep,
        **arithmetic(hidden, units),
        BLOCK_V=tile.v,
        BLOCK_C=block_c,
        BLOCK_H=tile.h,
    )
    return nll, state


def backward(
    d_nll: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    visits: Visits,
    plan: Schedule,
    tree: TreeArrays,
    state: State,
    needs: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """d_hidden [P, H], d_weight [R, H], d_bias [R]; None where not needed; three launches at most.

    Args:
        d_nll: [P], gradient of each position's nll.
        state: what `forward` kept.
        needs: which of the three are wanted.
    """
    d_hidden = torch.empty_like(hidden) if needs[0] else None
    d_weight = (
        torch.empty_strided(weight.shape, weight.stride(), **like(weight)) if needs[1] else None
    )
    d_bias = torch.empty_like(bias) if bias is not None and needs[2] else None
    grads = (d_hidden, d_weight, d_bias)
    _launch_backward(d_nll, hidden, weight, visits, plan, tree, state, grads, None)
    return grads


def sparse_backward(
    d_nll: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    visits: Visits,
    plan: Schedule,
    tree: TreeArrays,
    state: State,
    needs: list[bool],
) -> tuple[Tensor | None, RowGradient | None, RowGradient | None]:
    """As `backward`, d_weight and d_bias as the gradients of visited rows, in neighbouring memory;
    waits for their number.
    """
    num_nodes = tree.num_children.numel()
    owner = torch.where(visits.node < 0, num_nodes, visits.node).flatten()
    visited = torch.zeros(num_nodes + 1, dtype=torch.bool, device=hidden.device)
    visited = visited.scatter_(0, owner, True)[:num_nodes]
    width = torch.where(visited, tree.num_children, 0)
    written_row = width.cumsum(0) - width
    index = visited[tree.node_of_row].nonzero().squeeze(1)
    shape, stride = (index.numel(), weight.shape[1]), weight.stride()
    grads = (
        torch.empty_like(hidden) if needs[0] else None,
        torch.empty_strided(shape, stride, **like(weight)) if needs[1] else None,
        bias.new_empty(index.numel()) if bias is not None and needs[2] else None,
    )
    _launch_backward(d_nll, hidden, weight, visits, plan, tree, state, grads, written_row)
    return (
        grads[0],
        None if grads[1] is None else RowGradient(weight, [Rows(index, grads[1])]),
        RowGradient(bias, [Rows(index, grads[2][:, None])])
        if bias is not None and grads[2] is not None
        else None,
    )


def _launch_backward(
    d_nll: Tensor,
    hidden: Tensor,
    weight: Tensor,
    visits: Visits,
    plan: Schedule,
    tree: TreeArrays,
    state: State,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    written_row: Tensor | None,
) -> None:
    """Fill in d_hidden, d_weight and d_bias.

    Args:
        written_row: [I], where in d_weight and d_bias the gradients of each node's rows begin; None
            if at its rows, in which case those of nodes without visits are set to 0.
    """
    d_hidden, d_weight, d_bias = grads
    d_nll = d_nll.to(state.lse.dtype).contiguous()
    partial = None
    shape, units = _tiles_for(hidden, weight), Units.of(hidden, weight)
    depth, num_positions = visits.node.shape
    common = {
        **of_batch(visits),
        **of_nodes(tree),
        **state._asdict(),
        "P": num_positions,
        "num_blocks": state.kept.shape[1],
        "h_units": units.size,
        "weight_stride": units.weight_stride,
        **arithmetic(hidden, units),
        "BLOCK_C": shape.block_c,
    }
    if d_hidden is not None:
        partial = torch.empty(hidden.shape, dtype=state.lse.dtype, device=hidden.device)
        _launch_d_hidden(
            d_nll, weight, plan, d_hidden, partial, shape.d_hidden, units, depth, common
        )
    scale = None
    # d_nll of a mean would leave little of the range of fp16
    if hidden.dtype == torch.float16 and num_positions:
        scale = d_nll.abs().amax().clamp(min=torch.finfo(d_nll.dtype).tiny)
        d_nll = d_nll / scale
    if d_weight is not None or d_bias is not None:
        written = common if written_row is None else common | {"first_row": written_row}
        num_rows = tree.node_of_row.numel() if written_row is None else 0
        _launch_d_weight(
            d_nll, scale, hidden, visits, plan, tree, d_weight, d_bias, shape, units, num_rows,
            written,
        )  # fmt: skip
    tile = shape.d_light
    if written_row is not None and units.align < 4:  # else its second row number spills
        tile = tile._replace(warps=8)
    _launch_d_light(
        d_nll, scale, hidden, weight, plan, partial, d_hidden, d_weight, d_bias, written_row,
        tile, units, depth, common,
    )  # fmt: skip


def _launch_d_hidden(
    d_nll: Tensor,
    weight: Tensor,
    plan: Schedule,
    d_hidden: Tensor,
    partial: Tensor,
    tile: Tile,
    units: Units,
    depth: int,
    common: dict[str, Any],
) -> None:
    from lm.output.backends.triton import backward_kernels as kernels_backward

    num_positions, size = d_hidden.shape
    _launch(
        kernels_backward._d_hidden,
        -(-num_positions // tile.v) * -(-size // tile.h),
        tile,
        d_nll=d_nll,
        weight=weight,
        light_level=plan.light_level,
        d_hidden=d_hidden,
        partial=partial,
        D=depth,
        **common,
        BLOCK_V=tile.v,
        BLOCK_H=tile.h,
    )


def _launch_d_weight(
    d_nll: Tensor,
    scale: Tensor | None,
    hidden: Tensor,
    visits: Visits,
    plan: Schedule,
    tree: TreeArrays,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
    shape: Tiles,
    units: Units,
    num_rows: int,
    common: dict[str, Any],
) -> None:
    """`num_rows`: of which those of nodes without visits are set to 0."""
    from lm.output.backends.triton import backward_kernels as kernels_backward

    tile, num_nodes = shape.d_weight, tree.num_children.numel()
    heavy = plan.heavy_first
    width = tree.num_children[visits.node.flatten()[heavy.clamp(min=0)].clamp(min=0)]
    num_tiles = -(-width // shape.block_c) * -(-hidden.shape[1] // tile.h)
    visited = torch.zeros(num_nodes + 1, dtype=torch.int8, device=hidden.device)
    owner = torch.where(visits.node < 0, num_nodes, visits.node).flatten()
    num_programs = 4 * num_processors(hidden)
    _launch(
        kernels_backward._d_weight,
        num_programs,
        tile,
        d_nll=d_nll,
        scale=scale,
        hidden=hidden,
        heavy_first=heavy,
        tile_stop=torch.where(heavy < 0, 0, num_tiles).cumsum(0),
        node_of_row=tree.node_of_row,
        visited=visited.scatter_(0, owner, 1),
        d_weight=d_weight,
        d_bias=d_bias,
        stop=plan.stop,
        R=num_rows,
        num_heavy=heavy.numel(),
        hidden_stride=units.hidden_stride,
        SEARCH=heavy.numel().bit_length(),
        **common,
        BLOCK_V=tile.v,
        BLOCK_H=tile.h,
        BLOCK_R=_ROWS_PER_ZEROING,
    )


def _launch_d_light(
    d_nll: Tensor,
    scale: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    plan: Schedule,
    partial: Tensor | None,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
    written_row: Tensor | None,
    tile: Tile,
    units: Units,
    depth: int,
    common: dict[str, Any],
) -> None:
    from lm.output.backends.triton import backward_kernels as kernels_backward

    _launch(
        kernels_backward._d_light,
        plan.light_first.numel() * -(-hidden.shape[1] // tile.h),
        tile,
        d_nll=d_nll,
        scale=scale,
        hidden=hidden,
        weight=weight,
        stop=plan.stop,
        light_level=plan.light_level,
        light_first=plan.light_first,
        partial=partial,
        d_hidden=d_hidden,
        d_weight=d_weight,
        d_bias=d_bias,
        written_row=written_row,
        D=depth,
        hidden_stride=units.hidden_stride,
        LIGHT=LIGHT,
        **common,
        BLOCK_H=tile.h,
    )


def _tiles_for(hidden: Tensor, weight: Tensor) -> Tiles:
    return tiles(hidden.dtype, _capability(hidden), Units.of(hidden, weight).align)


def _capability(hidden: Tensor) -> int:
    """Compute capability x 10; in the interpreter, that of a H100."""
    if not hidden.is_cuda:
        return 90
    major, minor = torch.cuda.get_device_capability(hidden.device)
    return 10 * major + minor


def _num_splits(max_path_columns: int, depth: int, block_c: int) -> int:
    """Programs among which each tile's children are shared: one for each block of a node of
    average width.
    """
    return max(1, min(-(-max_path_columns // (depth * block_c)), _MOST_SPLITS))


def _launch(kernel: Any, num_programs: int, tile: Tile, **arguments: Any) -> None:
    device = arguments["position"].device
    if num_programs:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[(num_programs,)](**arguments, **compiler_options(tile))
