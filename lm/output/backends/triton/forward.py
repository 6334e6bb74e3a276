"""The launch of the forward."""

import torch
from torch import Tensor

from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton.launch import (
    Launch,
    Units,
    arithmetic_arguments,
    node_arguments,
    num_splits,
    submit,
    tiles_for,
    visit_arguments,
)
from lm.output.backends.triton.saved import Saved
from lm.output.backends.triton.schedule import LIGHT


def forward(problem: Problem, saved: Saved, needs: Needs) -> Tensor:
    """The nll [P], in one launch.

    Args:
        problem: hidden and bias contiguous, rows of the weight contiguous.
        saved: filled in; `exp_logits` and `block_max` if `needs.any`.
        needs: the gradients that will be asked for.
    """
    from lm.output.backends.triton import forward_kernel

    hidden, visits, plan = problem.hidden, saved.visits, saved.schedule
    num_positions, depth = problem.num_positions, problem.depth
    shape, units = tiles_for(problem), Units.of(problem)
    tile, splits = shape.forward, num_splits(problem, shape.block_c)
    num_tiles, num_groups = -(-num_positions // tile.v), plan.light_first.numel()
    nll = torch.empty_like(saved.lse[0])
    arguments = {
        "hidden": hidden,
        "weight": problem.weight,
        "bias": problem.bias,
        **visit_arguments(visits),
        "stop": plan.stop,
        "light_level": plan.light_level,
        "light_first": plan.light_first,
        **node_arguments(problem.tree),
        "exp_logits": saved.exp_logits,
        "block_max": saved.block_max,
        "partial_lse": saved.lse.new_empty(splits, depth, num_positions),
        "target_logit": saved.target_logit,
        "lse": saved.lse,
        "num_arrived": torch.zeros(num_positions, dtype=torch.int32, device=hidden.device),
        "nll": nll,
        "P": num_positions,
        "D": depth,
        "num_tiles": num_tiles,
        "num_blocks": saved.exp_logits.shape[1],
        "h_units": units.size,
        "hidden_stride": units.hidden_stride,
        "weight_stride": units.weight_stride,
        "SPLITS": splits,
        "LIGHT": LIGHT,
        "SAVE": needs.any,
        **arithmetic_arguments(hidden, units),
        "BLOCK_V": tile.v,
        "BLOCK_C": shape.block_c,
        "BLOCK_H": tile.h,
    }
    num_programs = (num_tiles + num_groups) * splits
    submit(Launch(forward_kernel._forward, num_programs, tile, arguments))
    return nll
