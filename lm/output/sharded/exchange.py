"""What processes exchange for the loss: hidden vectors, log-sum-exps and target logits, never rows.

Every process has positions of its own and some rows of every node. All processes receive all hidden
vectors and targets, and compute the log-sum-exps over their rows; the log-sum-exps and the target
logits are combined; each process then knows the loss of every position and the errors of its rows.
Of d_hidden, it computes what its rows add, for all positions; each share is sent to the process of
the position and added up there, in at least fp32. With P positions per process, W processes and
depth D, a process receives W P (H + 1) numbers for hidden vectors and targets, 3 D W P for
log-sum-exps and logits (twice that in a ring), W P for d_nll, and W P H for d_hidden.

Batches may differ in size between processes: positions are padded to the largest number with
targets that are ignored.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lm.output.backends import BACKENDS, choose_backend
from lm.output.backends.base import Backend, Needs, Problem
from lm.output.rowwise.eager import differentiable_once, not_compiled
from lm.output.sharded.rows import gathered, sum_of_shares


def combined(lse: Tensor, logit: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """The log-sum-exps [D, P] over all shards, 0 for no visit, and the target logits [D, P]."""
    largest = lse.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    visited = largest > -torch.inf
    largest = torch.where(visited, largest, 0)
    sums = torch.stack([(lse - largest).exp_(), logit])
    dist.all_reduce(sums, group=group)
    total = largest + torch.where(visited, sums[0], 1).log()
    return total, sums[1]


class _Levels(NamedTuple):
    """What a forward leaves."""

    nll: Tensor  # [D, P] of the process's positions
    problem: Problem  # of the positions of all processes
    backend: Backend
    lse: Tensor  # [D, W · size], over all shards
    saved: list[Tensor]


def nll_by_level(backend_name: str, problem: Problem, needs: Needs, group: Any) -> _Levels:
    """The terms of the nll of this process's positions, on each level."""
    num_positions = problem.num_positions
    longest = torch.tensor(num_positions, device=problem.hidden.device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    size = int(longest)
    problem = problem._replace(
        hidden=gathered(problem.hidden, size, 0, group),
        target=gathered(problem.target, size, problem.ignore_index, group),
    )
    backend = BACKENDS[choose_backend(backend_name, problem, problem.hidden.device)]
    lse, logit, saved = backend.partial(problem, needs)
    lse, logit = combined(lse, logit, group)
    begin = dist.get_rank(group) * size
    nll = (lse - logit)[:, begin : begin + num_positions]
    return _Levels(nll, problem, backend, lse, saved)


class _ShardedNll(torch.autograd.Function):
    """The nll [P] of the positions of one process."""

    @staticmethod
    def forward(
        ctx: Any,
        backend_name: str,
        needs: Needs,
        group: Any,
        problem: Problem,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        done = nll_by_level(backend_name, problem, needs, group)
        ctx.backend, ctx.row_wise, ctx.group = done.backend, needs.row_wise, group
        ctx.problem = done.problem._replace(hidden=hidden[:0], weight=hidden[:0], bias=None)
        ctx.num_positions = len(hidden)
        ctx.save_for_backward(done.problem.hidden, weight, bias, done.lse, *done.saved)
        return done.nll.sum(0)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, lse, *saved = ctx.saved_tensors
        world_size, needed = dist.get_world_size(ctx.group), ctx.needs_input_grad
        problem = ctx.problem._replace(hidden=hidden, weight=weight, bias=bias)
        size = len(hidden) // world_size
        d_nll = gathered(upstream[0] / world_size, size, 0, ctx.group)
        needs = Needs(needed[4], needed[5], needed[6], ctx.row_wise)
        d_hidden, d_weight, d_bias = ctx.backend.partial_backward(d_nll, lse, problem, saved, needs)
        if d_hidden is not None:
            d_hidden = sum_of_shares(d_hidden, ctx.num_positions, ctx.group) * world_size
        return None, None, None, None, d_hidden, d_weight, d_bias


@not_compiled
def sharded_nll(backend_name: str, needs: Needs, group: Any, problem: Problem) -> Tensor:
    """The nll [P] of this process's positions; all processes call it, and its backward, together.

    d_weight and d_bias are those of the mean over processes of their upstream losses, as DDP gives
    the gradients of other parameters.
    """
    nll: Tensor = _ShardedNll.apply(  # type: ignore[no-untyped-call]
        backend_name, needs, group, problem, problem.hidden, problem.weight, problem.bias
    )
    return nll
