"""The Triton backend: fused kernels, one launch forward and at most three backward.

`forward_kernel`, `backward_kernels`, `row_kernel` and `update_kernel` define what they compute.
Triton is imported at the first launch, so that the other backends work without it.
"""

import os
from subprocess import CalledProcessError
from typing import Any

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem, compute_dtype, num_targets
from lm.output.backends.triton.backward import gradients, summed
from lm.output.backends.triton.launch import capability, launch
from lm.output.backends.triton.plan import Plan, alignment, arguments, path_slots, plan_for
from lm.output.backends.triton.routing import MOST_RUNS, RUN_SIZES
from lm.output.backends.triton.tile_shapes import Tile, tf32, triton_version
from lm.output.backends.verify import Failures, Kind, verified
from lm.output.backends.visits import check_words
from lm.output.tracing import constant_when_compiled

MAX_SAVED_BYTES = 1 << 31
"""Most memory for `Saved.exp_logits`, positions × columns on a path. A batch that needs more saves
nothing: its backward takes it in parts, each with a forward of its own.
"""
MAX_COLUMNS = 1 << 24
"""On a path: within a tile of 128 rows of `Saved.exp_logits`, offsets have 32 bits."""

_MERGE, _PLAN = Tile(32, 0, 0, 8, 1), Tile(128, 0, 0, 4, 1)
_COPIED_ROWS, _MERGED_RUNS, _MERGE_BITS, _SEARCH_BITS = 16, 32, 2, 3
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
def _lacks_fences() -> bool:
    """Whether the installed version is older, and not accepted; torch 2.11 cannot trace this."""
    version = triton_version()
    assert version is not None
    return version < OLDEST_WITH_FENCES and os.environ.get(TIMING_ONLY) != "1"


def failures() -> Failures:
    """What Triton raises where it does not work: without a C compiler, for example."""
    from triton.errors import TritonError

    return TritonError, RuntimeError, OSError, CalledProcessError


class TritonBackend:
    """`Backend` for CUDA devices from compute capability 8.0 on; in Triton's interpreter for CPUs.

    It never waits for the device, except for the number of visited rows where row-wise gradients
    are formed in memory.
    """

    name = "triton"
    automatic_on: frozenset[str] = frozenset({"cuda"})

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
        if capability(device) >= 90 and not interpreted and _lacks_fences():
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
        return verified(self, device, Kind(*dtypes, *align, tf32()), failures())

    def forward(self, problem: Problem, needs: Needs) -> tuple[Tensor, list[Tensor]]:
        """See `Backend.forward`."""
        from lm.output.backends.triton import forward_kernel

        if problem.target.device.type == "cpu":
            check_words("target", problem.target, problem.vocab_size, problem.ignore_index)
        if needs.any and self.part_size(problem) < problem.num_positions:
            return self.forward(problem, Needs(False, False, False))[0], []
        problem, plan, dtype = _contiguous(problem), plan_for(problem), self._sums(problem)
        memory = plan.new(problem, dtype, has_gradient=needs.any)
        hidden, splits, lists = problem.hidden, plan.num_splits, plan.sizes
        nll = hidden.new_empty(problem.num_positions, dtype=dtype)
        partial_lse = hidden.new_empty(splits * problem.depth * problem.num_positions, dtype=dtype)
        known = arguments(plan, problem, plan.unflatten(memory)) | {
            "partial_lse": partial_lse,
            "nll": nll,
            "mean": int(problem.mean),
            "max_heavy": lists.heavy_tiles,
            "num_splits": splits,
            "SAVE": needs.any,
        }
        all_valid = _route(plan, problem, known)
        num_programs = (lists.heavy_tiles + lists.light_nodes) * splits
        launch(forward_kernel._forward, num_programs, plan.tiles.forward, known)
        if nll.is_cuda and problem.num_positions:
            torch._assert_async(all_valid, "a target is neither a word nor ignore_index")
        return nll, memory

    def backward(
        self, d_nll: Tensor, problem: Problem, saved: list[Tensor], needs: Needs
    ) -> Gradients:
        """See `Backend.backward`."""
        return self._backward(d_nll, None, problem, saved, needs)

    def partial(self, problem: Problem, needs: Needs) -> tuple[Tensor, Tensor, list[Tensor]]:
        """See `Backend.partial`."""
        if self.part_size(problem) < problem.num_positions:
            needs = Needs(False, False, False)
        _, memory = self.forward(problem, needs)
        position, node, child, lse, logit = _by_level(problem, memory)
        lse = torch.where(node >= 0, lse, -torch.inf)
        logit = torch.where((node >= 0) & (child >= 0), logit, 0)
        lse, logit = (torch.empty_like(x).index_copy_(1, position, x) for x in (lse, logit))
        return lse, logit, memory if needs.any else []

    def partial_backward(
        self, d_nll: Tensor, lse: Tensor, problem: Problem, saved: list[Tensor], needs: Needs
    ) -> Gradients:
        """See `Backend.partial_backward`."""
        return self._backward(d_nll, lse, problem, saved, needs)

    def _backward(
        self,
        d_nll: Tensor,
        lse: Tensor | None,
        problem: Problem,
        memory: list[Tensor],
        needs: Needs,
    ) -> Gradients:
        """The gradients, by the log-sum-exps of the forward or by those of all shards."""
        problem = _contiguous(problem)
        if not memory and problem.num_positions:
            if problem.mean:  # over all parts
                d_nll, problem = d_nll / num_targets(problem), problem._replace(mean=False)
            size = self.part_size(problem)
            parts = (slice(i, i + size) for i in range(0, problem.num_positions, size))
            each = (self._of_part(d_nll, lse, problem, part, needs) for part in parts)
            return summed(each, problem)
        plan = plan_for(problem)
        if not plan.fits(memory):
            raise RuntimeError(
                "the precision of fp32 products (torch.set_float32_matmul_precision) must be the"
                " same in the forward and the backward"
            )
        saved = plan.unflatten(memory)
        if lse is not None:
            saved = saved._replace(lse=lse.index_select(1, saved.routing.position))
        return gradients(d_nll, plan, problem, saved, needs)

    def _of_part(
        self, d_nll: Tensor, lse: Tensor | None, problem: Problem, part: slice, needs: Needs
    ) -> Gradients:
        """The gradients of some positions, whose forward is made again."""
        some = problem._replace(hidden=problem.hidden[part], target=problem.target[part])
        memory = self.forward(some, needs)[1]
        lse = None if lse is None else lse[:, part]
        return self._backward(d_nll[part], lse, some, memory, needs)

    def nll_by_level(self, problem: Problem) -> Tensor:
        """See `Backend.nll_by_level`."""
        _, memory = self.forward(problem, Needs(hidden=False, weight=False, bias=False))
        position, node, _, lse, logit = _by_level(problem, memory)
        nll = torch.where(node >= 0, lse - logit, 0)
        return torch.empty_like(nll).index_copy_(1, position, nll)

    def part_size(self, problem: Problem) -> int:
        """See `Backend.part_size`."""
        num_bytes = path_slots(problem) * problem.hidden.element_size()
        if problem.num_positions * num_bytes <= MAX_SAVED_BYTES:
            return problem.num_positions
        return max(1, MAX_SAVED_BYTES // num_bytes)

    def new_saved(self, problem: Problem, needs: Needs) -> list[Tensor]:
        """See `Backend.new_saved`."""
        if needs.any and self.part_size(problem) < problem.num_positions:
            return []
        return plan_for(problem).new(problem, self._sums(problem), has_gradient=needs.any)

    def _sums(self, problem: Problem) -> torch.dtype:
        return compute_dtype(problem.hidden.dtype)


def _by_level(problem: Problem, memory: list[Tensor]) -> list[Tensor]:
    """The sorted positions [P] int64; nodes, children, lse and target's logit of visits [D, P]."""
    routing, *sums = plan_for(problem).unflatten(memory)[:3]
    visits = (each.view(problem.depth, -1) for each in (routing.node, routing.child, *sums))
    return [routing.position.long(), *visits]


def _contiguous(problem: Problem) -> Problem:
    bias = None if problem.bias is None else problem.bias.contiguous()
    hidden, target = problem.hidden.contiguous(), problem.target.contiguous()
    return problem._replace(hidden=hidden, bias=bias, target=target)


def _route(plan: Plan, problem: Problem, known: dict[str, Any]) -> Tensor:
    """Launch the kernels that write the routing, and 0 for positions without visits.

    Returns:
        Whether all targets are words or ignored, a number.
    """
    from lm.output.backends.triton import routing_kernels as kernels

    positions, target = problem.num_positions, problem.target
    run_size = next((size for size in RUN_SIZES if size >= positions), RUN_SIZES[-1])
    num_runs = max(1, -(-positions // run_size))
    is_sorted = num_runs <= MOST_RUNS
    scratch = target.new_empty(plan.scratch.total, dtype=torch.int32)
    rank, known["num_missing"], all_valid = plan.scratch.tensors(scratch)
    known |= {
        "keys": target.new_empty(num_runs * run_size),
        "rank": rank,
        "all_valid": all_valid,
        "chunk": plan.chunk,
        "SORTED": is_sorted,
        "RUNS": _MERGED_RUNS,
        "TILE_V": plan.tiles.forward.v,
        "TILE_C": plan.tiles.heavy.c,
        "local_row": None,
        **({} if problem.shard is None else problem.shard._asdict()),
    }
    launch(kernels._sort, num_runs, Tile(run_size, 0, 0, 8, 1), known)
    if not is_sorted:
        num_runs, run_size, known["keys"] = 1, known["keys"].numel(), torch.sort(known["keys"])[0]
    steps = -(-run_size.bit_length() // _MERGE_BITS)
    special = {"num_runs": num_runs, "run_size": run_size, "BITS": _MERGE_BITS, "steps": steps}
    launch(kernels._merge, -(-positions // _MERGE.v), _MERGE, known, **special)
    plans, copies = -(-positions // _PLAN.v), -(-positions // _COPIED_ROWS)
    steps = -(-positions.bit_length() // _SEARCH_BITS)
    special = {"num_plans": plans, "BITS": _SEARCH_BITS, "steps": steps}
    special |= {"ROWS": _COPIED_ROWS, "COLUMNS": 128}
    launch(kernels._plan, plans + copies, _PLAN, known, **special)
    return all_valid
