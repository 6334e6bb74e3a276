"""What processes exchange for the loss: hidden vectors, log-sum-exps and target logits, never rows.

Every process has positions of its own and some rows. It sends the hidden vector and the target of a
position to the processes that hold a part of a node on the target's path: to all, by word; to one,
by class. They compute the log-sum-exps over their rows and send these and the target's logits back,
2 D numbers. In the backward, the process of the position sends the log-sum-exps over all rows and
d_nll, D + 1 numbers, and gets what each adds to d_hidden. So a position costs 2 H + 3 D + 2 numbers
for each process that it is sent to. Ignored ones are not sent.

The rows of gathered nodes, about √N, are sent to all before the forward, and their gradients are
added up in the processes that hold them.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lm.output.backends import BACKENDS, choose_backend
from lm.output.backends.base import Backend, Gradients, Needs, Problem
from lm.output.rowwise.blocks import Rows
from lm.output.rowwise.row_gradient import RowGradient
from lm.output.sharded.rows import interleaved, sum_of_shares
from lm.output.tracing import differentiable_once, not_compiled
from lm.output.tree.arrays import Shard, TreeArrays


class Route(NamedTuple):
    """Which positions of this process go to which process."""

    position: Tensor  # [S] int64, those for process 0 first
    sent: list[int]  # how many to each process
    received: list[int]  # how many from each
    group: Any

    @classmethod
    def of(cls, recipients: Tensor, group: Any) -> "Route":
        """For recipients [W, P] bool, whether each process gets a position."""
        counts = recipients.sum(1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        return cls(recipients.nonzero()[:, 1], counts.tolist(), received.tolist(), group)

    def send(self, tensor: Tensor) -> Tensor:
        """Send [P, ...] to its recipients; returns what this process receives, by sender."""
        received = tensor.new_empty(sum(self.received), *tensor.shape[1:])
        sent = tensor.index_select(0, self.position)
        dist.all_to_all_single(received, sent, self.received, self.sent, group=self.group)
        return received

    def returned(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions and what each process found for them, given what this one found for those."""
        back = tensor.new_empty(len(self.position), *tensor.shape[1:])
        found = tensor.contiguous()
        dist.all_to_all_single(back, found, self.sent, self.received, group=self.group)
        yield from zip(
            torch.split(self.position, self.sent), torch.split(back, self.sent), strict=True
        )


class Gathered(NamedTuple):
    """The rows that all processes gather, U of them."""

    tree: TreeArrays
    shard: Shard
    max_path_columns: int
    num_held: int  # of them, the first rows of this process

    def whole(self, held: Tensor, group: Any) -> Tensor:
        """The rows of all processes, [U, ...]."""
        return interleaved(held[: self.num_held], len(self.tree.node_of_row), group)

    def summed(self, d_rows: Tensor, group: Any) -> Tensor:
        """The sum of all processes' gradients [U, ...] for the rows that this one holds."""
        world_size = dist.get_world_size(group)
        size = -(-len(d_rows) // world_size)
        padded = F.pad(d_rows.view(len(d_rows), -1), (0, 0, 0, size * world_size - len(d_rows)))
        dealt = padded.view(size, world_size, -1).transpose(0, 1).flatten(0, 1)
        return sum_of_shares(dealt, self.num_held, group).view(-1, *d_rows.shape[1:])


class Forward(NamedTuple):
    """What a forward leaves."""

    nll: Tensor  # [P, D], the terms of each level
    lse: Tensor  # [P, D] over all rows, 0 for no visit
    route: Route
    solved: list[tuple[Problem, Backend, list[Tensor]]]
    """The positions received and the rows held, with what the backend saved; with gathered rows,
    the process's positions and these."""


def forward(
    name: str,
    problem: Problem,
    gathered: Gathered | None,
    recipients: Tensor,
    needs: Needs,
    group: Any,
) -> Forward:
    """The terms of the nll of this process's positions; all processes call it together."""
    route = Route.of(recipients, group)
    sent = problem._replace(hidden=route.send(problem.hidden), target=route.send(problem.target))
    problems = [(sent, needs)]
    if gathered is not None:
        own = problem._replace(
            weight=gathered.whole(problem.weight, group),
            bias=None if problem.bias is None else gathered.whole(problem.bias, group),
            tree=gathered.tree,
            shard=gathered.shard,
            max_path_columns=gathered.max_path_columns,
        )
        problems.append((own, needs._replace(row_wise=False)))
    solved, found = [], []
    for each, asked in problems:
        backend = BACKENDS[choose_backend(name, each, each.hidden.device)]
        lse, logit, saved = backend.partial(each, asked)
        solved.append((each, backend, saved))
        found.append(torch.stack([lse.T, logit.T], 1))
    if gathered is None:
        total = found[0].new_zeros(problem.num_positions, 2, problem.depth)
        total[:, 0] = -torch.inf
    else:
        total = found[1]
    for position, part in route.returned(found[0]):
        so_far = total[position]
        lse = torch.logaddexp(so_far[:, 0], part[:, 0])
        total[position] = torch.stack([lse, so_far[:, 1] + part[:, 1]], 1)
    lse, logit = total.unbind(1)
    lse = torch.where(lse > -torch.inf, lse, 0)
    return Forward(lse - logit, lse, route, solved)


class _ShardedNll(torch.autograd.Function):
    """The nll [P] of this process's positions; all processes call it, and its backward, together.

    d_weight and d_bias are those of the mean over processes of their upstream losses, as DDP gives
    the gradients of other parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        name: str,  # of the backend
        problem: Problem,  # of the process's positions and the rows that it holds
        gathered: Gathered | None,
        recipients: Tensor,  # [W, P] bool, which process gets which position
        needs: Needs,
        group: Any,
        *inputs: Tensor | None,  # hidden, weight and bias of the problem, for autograd
    ) -> Tensor:
        done = forward(name, problem, gathered, recipients, needs, group)
        ctx.row_wise, ctx.gathered, ctx.route = needs.row_wise, gathered, done.route
        tensors: list[Tensor | None] = [done.lse]
        ctx.solved = []
        for solved, backend, saved in done.solved:
            begin = len(tensors)
            tensors += [solved.hidden, solved.target, solved.weight, solved.bias, *saved]
            nothing = done.lse.new_empty(0)
            sizes = solved._replace(hidden=nothing, target=nothing, weight=nothing, bias=None)
            ctx.solved.append((sizes, backend, slice(begin, len(tensors))))
        ctx.save_for_backward(*tensors)
        return done.nll.sum(1)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        tensors, route = ctx.saved_tensors, ctx.route
        world_size, needed = dist.get_world_size(route.group), ctx.needs_input_grad
        needs = Needs(needed[-3], needed[-2], needed[-1], ctx.row_wise)
        own = torch.cat([upstream[0][:, None] / world_size, tensors[0]], 1)  # d_nll and lse
        gradients: list[Gradients] = []
        received = route.send(own)
        for problem, backend, which in ctx.solved:
            given = own if gradients else received
            hidden, target, weight, bias, *saved = tensors[which]
            problem = problem._replace(hidden=hidden, target=target, weight=weight, bias=bias)
            d_nll, lse = given[:, 0].contiguous(), given[:, 1:].T.contiguous()
            asked = needs._replace(row_wise=needs.row_wise and not gradients)
            gradients.append(backend.partial_backward(d_nll, lse, problem, saved, asked))
        d_hidden, d_weight, d_bias = gradients[0]
        if d_hidden is not None:
            dtype = torch.promote_types(d_hidden.dtype, torch.float32)
            total = d_hidden.new_zeros(len(own), d_hidden.shape[1], dtype=dtype)
            for of_gathered in gradients[1:]:
                assert of_gathered.d_hidden is not None
                total += of_gathered.d_hidden
            for position, part in route.returned(d_hidden):
                total[position] += part
            d_hidden = (total * world_size).to(d_hidden.dtype)
        for of_gathered in gradients[1:]:
            _add_first(d_weight, of_gathered.d_weight, ctx.gathered, route.group)
            _add_first(d_bias, of_gathered.d_bias, ctx.gathered, route.group)
        return *(None for _ in needed[:-3]), d_hidden, d_weight, d_bias


def _add_first(
    gradient: Tensor | None, d_rows: Tensor | None, gathered: Gathered, group: Any
) -> None:
    """Put the gradient of the gathered rows into that of the held rows."""
    if gradient is None or d_rows is None:
        return
    first = gathered.summed(d_rows, group)
    if isinstance(gradient, RowGradient):
        row = torch.arange(len(first), device=first.device)
        gradient.append(Rows(row, first[:, None] if first.dim() == 1 else first))
    else:
        gradient[: len(first)] = first


sharded_nll: Callable[..., Tensor] = not_compiled(_ShardedNll.apply)
"""See `_ShardedNll`; kept out of `torch.compile`."""
