"""The Triton backend: fused kernels, three launches that route, one forward, three backward.

`routing_kernels`, `forward_kernel`, `backward_kernels` and `row_kernel` define what they compute.
Triton is imported at the first launch, so that the other backends work without it.
"""

import os
from collections.abc import Iterator
from subprocess import CalledProcessError
from typing import Any

import torch
from torch import Tensor

from lm.output.backends.base import Backend, Gradients, Needs, Problem, Softmaxes, Tensors
from lm.output.backends.triton.backward import gradients, summed
from lm.output.backends.triton.launch import capability, launch
from lm.output.backends.triton.plan import (
    Children,
    InParts,
    Inputs,
    Memory,
    Paths,
    Plan,
    Results,
    alignment,
    path_slots,
    plan_for,
)
from lm.output.backends.triton.routing import ALL_VALID, MERGE, MOST_RUNS, NUM_VALID, PLAN, Routing
from lm.output.backends.triton.tile_shapes import tf32, triton_version
from lm.output.backends.verify import Failures, Kind, verified
from lm.output.inputs import check_words
from lm.output.tracing import constant_when_compiled

MAX_SAVED_BYTES = 1 << 31
"""Most memory for `Memory.exp_logits`, positions × columns on a path. A batch that needs more saves
nothing: its backward takes it in parts, each with a forward of its own.
"""
MAX_COLUMNS = 1 << 24
"""On a path: within a tile of 128 rows of `Memory.exp_logits`, offsets have 32 bits."""

VERIFIED = frozenset({"cuda"})
"""Types of devices whose results are compared with those of the reference first."""
OLDEST_WITH_FENCES = (3, 7, 1)
"""The first version of Triton that puts a fence between asynchronous copies and the asynchronous
products that read them, on devices of compute capability 9.0 and above.
"""
NEWER_TRITON = (
    "`pip install --no-deps triton==3.9.0` installs one that works with PyTorch 2.11; on an H100 a"
    " step of the layer takes 26 to 76 times as long with the reference"
)
"""What to do about an older version; times of scripts.benchmarks.output_layer at 33,278 to 800,000
words.
"""
TIMING_ONLY = "SQRTLM_UNSAFE_TRITON"
"""The environment variable that, as "1", accepts older versions. For timing only: their results may
be wrong.
"""


@constant_when_compiled
def _accepted() -> bool:
    """Whether older versions are; torch 2.11 cannot trace this."""
    return os.environ.get(TIMING_ONLY) == "1"


def failures() -> Failures:
    """What Triton raises where it does not work: without a C compiler, for example."""
    from triton.errors import TritonError

    return TritonError, RuntimeError, OSError, CalledProcessError


class TritonBackend(Backend):
    """`Backend` for CUDA devices from compute capability 8.0 on; in Triton's interpreter for CPUs.

    It never waits for the device, except for the number of visited rows where row-wise gradients
    are formed in memory.
    """

    name = "triton"
    automatic_on = frozenset({"cuda"})
    saved_types = (Memory, InParts)

    def obstacle(self, problem: Problem, device: torch.device) -> str | None:
        """See `Backend.obstacle`."""
        hidden, weight, sm = problem.hidden, problem.weight, capability(device)
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if device.type != "cuda" and not interpreted:
            return f"requires a CUDA device, got {device}"
        if sm < 80:
            return f"requires compute capability 8.0, got {sm / 10}"
        version = triton_version()
        if version is None:
            return "requires Triton: pip install triton"
        if sm >= 90 and version < OLDEST_WITH_FENCES and not (interpreted or _accepted()):
            return (
                f"requires Triton {'.'.join(map(str, OLDEST_WITH_FENCES))} on devices of compute"
                f" capability 9.0 and above, got {'.'.join(map(str, version))}: its matrix products"
                f" may read shared memory before copies to it are visible. {NEWER_TRITON}"
            )
        if hidden.dtype == torch.float64 and not interpreted:
            return "does not support fp64"
        if not weight.is_contiguous():
            return f"requires a contiguous weight, got strides {tuple(weight.stride())}"
        if path_slots(problem) > MAX_COLUMNS:
            return f"takes at most {MAX_COLUMNS} columns on a path, got {problem.max_path_columns}"
        return None

    def verified(self, problem: Problem, device: torch.device) -> bool:
        """See `lm.output.backends.verify`. The interpreter, which takes seconds, is not."""
        if device.type not in VERIFIED:
            return True
        bias = problem.weight if problem.bias is None else problem.bias
        dtypes = (problem.hidden.dtype, problem.weight.dtype, bias.dtype)
        return self._verified(device, dtypes, alignment(problem))

    @constant_when_compiled
    def _verified(
        self,
        device: torch.device,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        align: tuple[int, int],
    ) -> bool:
        return verified(self, device, Kind(*dtypes, *align, tf32()), failures)

    def softmaxes(
        self, target: Tensor, problem: Problem, needs: Needs
    ) -> tuple[Softmaxes, Tensors]:
        """See `Solver.softmaxes`."""
        _, memory, saved = self._forward(target, problem, needs)
        routing, lse, logit = _visits(problem, memory)
        lse = torch.where(routing.node >= 0, lse, -torch.inf)
        logit = torch.where((routing.node >= 0) & (routing.child >= 0), logit, 0)
        zero = torch.zeros_like(lse)
        return Softmaxes.by_position(routing.position.long(), lse, zero, logit), saved

    def nll(
        self, target: Tensor, problem: Problem, needs: Needs
    ) -> tuple[Tensor, Tensor | None, Tensors]:
        """See `Solver.nll`: the kernel of the softmaxes forms it."""
        nll, memory, saved = self._forward(target, problem, needs)
        return nll, memory.routing[NUM_VALID], saved

    def _forward(
        self, target: Tensor, problem: Problem, needs: Needs
    ) -> tuple[Tensor, Memory, Memory | InParts]:
        """The nll, what the kernels have written, and what is saved of it."""
        if target.device.type == "cpu":
            check_words("target", target, problem.vocab_size, problem.ignore_index)
        in_parts = needs.any and self.saved_type(problem, needs) is InParts
        problem, plan = _contiguous(problem), plan_for(problem)
        memory = plan.new(problem, has_gradient=needs.any and not in_parts)
        nll = memory.visit_lse.new_empty(plan.num_positions)
        _route(target.contiguous(), plan, problem, memory, nll)
        most, splits = plan.most, plan.num_splits
        results = memory.results
        if in_parts or not needs.any:
            results = Results(None, None, memory.visit_lse)
        launch(
            "_forward", (most.heavy_tiles + most.light_nodes) * splits, plan.tiles.forward,
            inputs=Inputs(memory.sorted_hidden, problem.weight, problem.bias),
            tree=Children.of(problem.tree),
            saved=results, nll=nll, routing=memory.routing, strides=plan.strides,
            P=plan.num_positions, max_heavy=most.heavy_tiles, num_splits=splits,
            ACC=plan.acc, META=plan.meta(plan.tiles.forward),
        )  # fmt: skip
        if nll.is_cuda and plan.num_positions:
            all_valid = memory.routing[ALL_VALID]
            torch._assert_async(all_valid, "a target is neither a word nor ignore_index")
        return nll, memory, InParts(target.clone()) if in_parts else memory

    def backward(
        self, d_nll: Tensor, problem: Problem, saved: Any, needs: Needs, lse: Tensor | None = None
    ) -> Gradients:
        """See `Solver.backward`."""
        problem = _contiguous(problem)
        if not isinstance(saved, Memory):
            return summed(self._by_part(d_nll, problem, saved.target, needs, lse), problem)
        plan = plan_for(problem)
        if not plan.fits(saved):
            raise RuntimeError(
                "the precision of fp32 products (torch.set_float32_matmul_precision) must be the"
                " same in the forward and the backward"
            )
        if lse is not None:
            routing, _, logit = _visits(problem, saved)
            lse = lse.index_select(1, routing.position)
            saved = saved._replace(visit_lse=torch.cat([logit, lse]))
        return gradients(d_nll, plan, problem, saved, needs)

    def _by_part(
        self, d_nll: Tensor, problem: Problem, target: Tensor, needs: Needs, lse: Tensor | None
    ) -> Iterator[Gradients]:
        """The gradients of some positions after others, each after a forward of its own."""
        size = self.part_size(problem)
        for start in range(0, problem.num_positions, size):
            at = slice(start, start + size)
            part = problem._replace(hidden=problem.hidden[at])
            _, memory, _ = self._forward(target[at], part, needs)
            yield self.backward(d_nll[at], part, memory, needs, None if lse is None else lse[:, at])

    def part_size(self, problem: Problem) -> int:
        """See `Backend.part_size`."""
        num_bytes = path_slots(problem) * problem.hidden.element_size()
        return min(problem.num_positions, max(1, MAX_SAVED_BYTES // num_bytes))

    def saved_type(self, problem: Problem, needs: Needs) -> Any:
        """See `Backend.saved_type`."""
        return InParts if self.part_size(problem) < problem.num_positions else Memory

    def new_saved(self, problem: Problem, needs: Needs) -> Tensors:
        """See `Backend.new_saved`."""
        if self.saved_type(problem, needs) is InParts:
            return InParts(problem.hidden.new_empty(problem.num_positions, dtype=torch.int64))
        return plan_for(problem).new(problem, has_gradient=True)


def _visits(problem: Problem, memory: Memory) -> tuple[Routing, Tensor, Tensor]:
    """The routing with nodes and children [D, P], and the lse and target's logits [D, P]."""
    routing = Routing.of(memory.routing, problem.num_positions, problem.depth)
    by_level = {name: getattr(routing, name).view(problem.depth, -1) for name in ("node", "child")}
    logit, lse = memory.visit_lse[: 2 * problem.depth].chunk(2)
    return routing._replace(**by_level), lse, logit


def _contiguous(problem: Problem) -> Problem:
    bias = None if problem.bias is None else problem.bias.contiguous()
    return problem._replace(hidden=problem.hidden.contiguous(), bias=bias)


def _route(target: Tensor, plan: Plan, problem: Problem, memory: Memory, nll: Tensor) -> None:
    """Launch the kernels that write the routing, and 0 for positions without visits."""
    positions, tree = plan.num_positions, problem.tree
    routing, (num_runs, run_size) = memory.routing, plan.runs
    is_sorted, tile = num_runs <= MOST_RUNS, plan.sort_tile
    node_of_row, local_row = problem.shard or (tree.node_of_row, None)
    keys = target.new_empty(num_runs * run_size)
    launch(
        "_sort", num_runs, tile,
        target=target, row_of_word=tree.row_of_word, node_of_row=node_of_row,
        preorder=tree.preorder, keys=keys, visited=memory.visited, routing=routing,
        P=positions, N=problem.vocab_size, num_nodes=plan.num_nodes,
        ignore_index=problem.ignore_index, SORTED=is_sorted, TILE=tile,
    )  # fmt: skip
    if not is_sorted:
        run_size, keys = keys.numel(), torch.sort(keys)[0]
    paths = Paths(
        tree.row_of_word, node_of_row, local_row, tree.row_of_node, tree.level, tree.first_row,
        tree.num_children,
    )  # fmt: skip
    launch(
        "_merge", -(-positions // MERGE.v), MERGE,
        target=target, paths=paths, keys=keys, routing=routing, nll=nll,
        P=positions, N=problem.vocab_size, D=problem.depth, ignore_index=problem.ignore_index,
        run_size=run_size, steps=-(-run_size.bit_length() // MERGE.step),
        num_splits=plan.num_splits, TILE=MERGE,
    )  # fmt: skip
    launch(
        "_plan", -(-positions // PLAN.v) + -(-plan.padded_rows // PLAN.c), PLAN,
        hidden=problem.hidden, sorted_hidden=memory.sorted_hidden, preorder=tree.preorder,
        preorder_stop=tree.preorder_stop, num_children=tree.num_children, visited=memory.visited,
        routing=routing, P=positions, D=problem.depth, chunk=plan.chunk,
        steps=-(-positions.bit_length() // PLAN.step), META=plan.meta(PLAN),
    )  # fmt: skip
