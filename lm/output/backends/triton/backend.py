"""The Triton backend: fused kernels, one launch forward and at most three backward.

`forward_kernel` and `backward_kernels` define what they compute. Triton is imported at the first
launch, so that the other backends work without it.
"""

import os

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem, compute_dtype
from lm.output.backends.triton import verify
from lm.output.backends.triton.backward import gradients
from lm.output.backends.triton.launch import Saved, capability, launch, splits_for, tiles_for
from lm.output.backends.triton.schedule import Schedule, blocks_per_path, schedule
from lm.output.backends.triton.tile_shapes import triton_version
from lm.output.backends.visits import Visits, assert_targets, check_targets, route

MAX_SAVED_BYTES = 1 << 31
"""Most memory for `Saved.exp_logits`, positions × columns on a path. Trees with wider paths, such
as the full softmax of a large vocabulary, need the reference backend.
"""

OLDEST_WITH_FENCES = (3, 7)
"""The first version of Triton that puts a fence between asynchronous copies and the asynchronous
products that read them, on devices of compute capability 9.0 and above.
"""


class TritonBackend:
    """`Backend` for CUDA devices from compute capability 8.0 on; in Triton's interpreter for CPUs.

    It never waits for the device, except for the number of visited rows of row-wise gradients.
    """

    name = "triton"
    automatic_on: frozenset[str] | None = frozenset({"cuda"})

    def obstacle(self, problem: Problem, device: torch.device) -> str | None:
        """See `Backend.obstacle`."""
        hidden, weight = problem.hidden, problem.weight
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if device.type != "cuda" and not interpreted:
            return f"requires a CUDA device, got {device}"
        if capability(device) < 80:
            return f"requires compute capability 8.0, got {capability(device) / 10}"
        version = triton_version()
        if version is None:
            return "requires the package triton"
        if version < OLDEST_WITH_FENCES and capability(device) >= 90 and not interpreted:
            return (
                f"requires Triton {OLDEST_WITH_FENCES[0]}.{OLDEST_WITH_FENCES[1]} on devices of"
                f" compute capability 9.0 and above, got {version[0]}.{version[1]}: its matrix"
                " products may read shared memory before copies to it are visible"
            )
        if hidden.dtype == torch.float64 and not interpreted:
            return "does not support fp64"
        if weight.stride(1) != 1 and weight.shape[1] > 1:
            return f"requires contiguous weight rows, got strides {tuple(weight.stride())}"
        if weight.stride(0) < weight.shape[1] and weight.shape[0] > 1:
            return f"requires disjoint weight rows, got strides {tuple(weight.stride())}"
        block_c = tiles_for(problem).block_c
        blocks = blocks_per_path(problem.max_path_columns, problem.depth, block_c)
        num_bytes = problem.num_positions * blocks * block_c * hidden.element_size()
        if num_bytes > MAX_SAVED_BYTES:
            return (
                f"would save {num_bytes} bytes, for {problem.num_positions} positions with up to"
                f" {problem.max_path_columns} columns each; the limit is {MAX_SAVED_BYTES}"
            )
        return None

    def verified(self, device: torch.device, dtype: torch.dtype) -> bool:
        """See `lm.output.backends.triton.verify`."""
        return verify.verified(device, dtype)

    def forward(self, problem: Problem, needs: Needs) -> tuple[Tensor, Saved]:
        """See `Backend.forward`."""
        from lm.output.backends.triton import forward_kernel

        target, bounds = problem.target, (problem.vocab_size, problem.ignore_index)
        if target.device.type == "cpu":
            check_targets(target, *bounds)
        else:
            target = assert_targets(target, *bounds)
        visits = route(target, problem.tree, problem.depth, problem.ignore_index)
        problem = _contiguous(problem)
        saved = _new_saved(problem, visits, schedule(visits, problem.tree), needs)
        (num_positions, _), tile = problem.hidden.shape, tiles_for(problem).forward
        num_tiles, num_groups = -(-num_positions // tile.v), saved.schedule.light_first.numel()
        splits, nll = splits_for(problem), torch.empty_like(saved.lse[0])
        special = {
            "partial_lse": nll.new_empty(splits, problem.depth, num_positions),
            "num_arrived": torch.zeros_like(nll, dtype=torch.int32),
            "nll": nll,
            "num_tiles": num_tiles,
            "SPLITS": splits,
            "SAVE": needs.any,
        }
        num_programs = (num_tiles + num_groups) * splits
        launch(forward_kernel._forward, num_programs, tile, problem, saved, **special)
        return nll, saved

    def backward(self, d_nll: Tensor, problem: Problem, saved: Saved, needs: Needs) -> Gradients:
        """See `Backend.backward`."""
        return gradients(d_nll, _contiguous(problem), saved, needs)

    def nll_by_level(self, problem: Problem) -> Tensor:
        """See `Backend.nll_by_level`."""
        _, saved = self.forward(problem, Needs(hidden=False, weight=False, bias=False))
        nll = torch.where(saved.visits.node >= 0, saved.lse - saved.target_logit, 0)
        return saved.visits.unsorted(nll, dim=1)

    def saved_type(self, problem: Problem, needs: Needs) -> type[Saved]:
        """See `Backend.saved_type`."""
        return Saved

    def new_saved(self, problem: Problem, needs: Needs) -> Saved:
        """See `Backend.new_saved`."""
        target, num_nodes = problem.target, problem.tree.num_children.numel()
        visits = Visits.empty(target, problem.depth)
        return _new_saved(problem, visits, Schedule.empty(target, num_nodes, problem.depth), needs)


def _contiguous(problem: Problem) -> Problem:
    bias = None if problem.bias is None else problem.bias.contiguous()
    return problem._replace(hidden=problem.hidden.contiguous(), bias=bias)


def _new_saved(problem: Problem, visits: Visits, plan: Schedule, needs: Needs) -> Saved:
    hidden, dtype = problem.hidden, compute_dtype(problem.hidden.dtype)
    block_c = tiles_for(problem).block_c
    blocks = blocks_per_path(problem.max_path_columns, problem.depth, block_c) if needs.any else 0
    return Saved(
        visits,
        plan,
        exp_logits=hidden.new_empty(problem.num_positions, blocks, block_c),
        block_max=hidden.new_empty(problem.num_positions, blocks, dtype=dtype),
        lse=hidden.new_empty(visits.node.shape, dtype=dtype),
        target_logit=hidden.new_empty(visits.node.shape, dtype=dtype),
    )
