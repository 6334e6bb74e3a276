"""What processes exchange for the loss: hidden vectors, log-sum-exps and target logits, never rows.

Every process has positions of its own and some rows. It sends the hidden vector and the target of a
position to the processes that hold a part of a node on the target's path: to all, by word; by class
to one, to all if the class is split. They compute the log-sum-exps over their rows and send these
and the target's logits back, 2 D numbers. In the backward, the process of the position sends the
log-sum-exps over all rows and d_nll, D + 1 numbers, and gets what each adds to d_hidden: in all
2 H + 3 D + 2 numbers for each process. Ignored positions are not sent.

The rows of gathered nodes, about √N, are sent to all before the forward, and their gradients are
added up in the processes that hold them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from lm.output.backends import BACKENDS, choose_backend
from lm.output.backends.base import Gradients, Needs, Problem, Softmaxes, Solver, Tensors
from lm.output.inputs import compute_dtype
from lm.output.rowwise.factors import RowFactors, as_rows
from lm.output.rowwise.row_gradient import RowGradient
from lm.output.sharded.rows import interleaved, sum_of_shares


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

    part: dict[str, Any]  # fields of a `Problem`
    num_held: int  # of them, the first rows of this process

    def problem(self, held: Problem, group: Any) -> Problem:
        """The problem with the rows of all processes, given one with those of this process."""
        num_rows = len(self.part["tree"].node_of_row)
        weight, bias = (
            None if table is None else interleaved(table[: self.num_held], num_rows, group)
            for table in (held.weight, held.bias)
        )
        return held._replace(weight=cast(Tensor, weight), bias=bias, **self.part)

    def summed(self, d_rows: Tensor, group: Any) -> Tensor:
        """The sum of all processes' gradients [U, ...] for the rows that this one holds."""
        world_size = dist.get_world_size(group)
        size = -(-len(d_rows) // world_size)
        padded = F.pad(d_rows.view(len(d_rows), -1), (0, 0, 0, size * world_size - len(d_rows)))
        dealt = padded.view(size, world_size, -1).transpose(0, 1).flatten(0, 1)
        return sum_of_shares(dealt, self.num_held, group).view(-1, *d_rows.shape[1:])


class Solved(NamedTuple):
    """What is saved of softmaxes: positions received, or the process's own with gathered rows."""

    tensors: dict[str, Tensor | None]  # of the problem
    saved: Tensors


class ShardedSolver(Solver):
    """The softmaxes of a batch of this process's positions over the rows of all processes.

    All processes call it, and its backward, together: gradients of hidden vectors are exchanged
    whether the process needs its own or not. d_weight and d_bias are those of the mean
    over processes of their upstream losses, as DDP gives the gradients of other parameters.

    Args:
        of_rows: name of the backend for the rows of this process, or auto.
        gathered: the rows that all processes gather, if there are any.
        recipients: [W, P] bool, which process gets which position.
        group: the processes.
    """

    def __init__(
        self, of_rows: str, gathered: Gathered | None, recipients: Tensor, group: Any
    ) -> None:
        self.of_rows, self.gathered, self.group = of_rows, gathered, group
        self.route = Route.of(recipients, group)
        self.sizes = list[tuple[Problem, Solver]]()  # of each part

    def softmaxes(
        self, target: Tensor, problem: Problem, needs: Needs
    ) -> tuple[Softmaxes, Tensors]:
        """See `Solver.softmaxes`; `problem` has the rows that this process holds."""
        route, gathered, needs = self.route, self.gathered, needs._replace(hidden=needs.any)
        received = problem._replace(hidden=route.send(problem.hidden))
        found, solved = self._solved(route.send(target), received, needs)
        parts = [solved]
        if gathered is None:
            total = found.new_zeros(problem.num_positions, 2, problem.depth)
            total[:, 0] = -torch.inf
        else:
            own = gathered.problem(problem, self.group)
            total, solved = self._solved(target, own, needs)
            parts.append(solved)
        for position, part in route.returned(found):
            so_far = total[position]
            lse = torch.logaddexp(so_far[:, 0], part[:, 0])
            total[position] = torch.stack([lse, so_far[:, 1] + part[:, 1]], 1)
        lse, logit = total.permute(1, 2, 0)
        saved, self.structure = tree_flatten((lse, parts))
        return Softmaxes(lse, torch.zeros_like(lse), logit), tuple(saved)

    def _solved(self, target: Tensor, problem: Problem, needs: Needs) -> tuple[Tensor, Solved]:
        """Log-sum-exps and logits [P, 2, D], and what is saved."""
        backend = BACKENDS[choose_backend(self.of_rows, problem, problem.hidden.device)]
        (largest, log_total, logit), saved = backend.softmaxes(target, problem, needs)
        self.sizes.append((problem.sizes(), backend))
        tensors = {name: getattr(problem, name) for name in ("hidden", "weight", "bias")}
        return torch.stack([(largest + log_total).T, logit.T], 1), Solved(tensors, saved)

    def backward(
        self, d_nll: Tensor, problem: Problem, saved: Any, needs: Needs, lse: Tensor | None = None
    ) -> Gradients:
        """See `Solver.backward`."""
        route, world_size = self.route, dist.get_world_size(self.group)
        lse, parts = tree_unflatten(saved, self.structure)
        own = torch.cat([d_nll[:, None] / world_size, lse.T], 1)
        received, gradients = route.send(own), list[Gradients]()
        for (sizes, backend), (tensors, saved_part) in zip(self.sizes, parts, strict=True):
            given = own if gradients else received
            d_part, lse = given[:, 0].contiguous(), given[:, 1:].T.contiguous()
            asked, solved = needs._replace(hidden=True), sizes._replace(**tensors)
            gradients.append(backend.backward(d_part, solved, saved_part, asked, lse))
        (d_hidden, d_weight, d_bias), *of_gathered = gradients
        assert d_hidden is not None
        total = d_hidden.new_zeros(len(own), d_hidden.shape[1], dtype=compute_dtype(d_hidden.dtype))
        for each in of_gathered:
            assert each.d_hidden is not None
            assert self.gathered is not None
            total += each.d_hidden
            _add_first(d_weight, each.d_weight, self.gathered, self.group)
            _add_first(d_bias, each.d_bias, self.gathered, self.group)
        for position, d_part in route.returned(d_hidden):
            total[position] += d_part
        d_hidden = (total * world_size).to(d_hidden.dtype) if needs.hidden else None
        return Gradients(d_hidden, d_weight, d_bias)


def _add_first(
    gradient: Tensor | None, d_rows: Tensor | None, gathered: Gathered, group: Any
) -> None:
    """Put the gradient of the gathered rows into that of the held rows.

    Of a row-wise one, the rows of nodes that a process visits.
    """
    if gradient is None or d_rows is None:
        return
    if isinstance(gradient, RowGradient):
        of_visited = d_rows.to_sparse()
        marked = F.pad(as_rows(of_visited.values()), (0, 1), value=1)
        dense = marked.new_zeros(len(d_rows), marked.shape[1])
        dense[of_visited.indices()[0]] = marked
        first = gathered.summed(dense, group)
        row = first[:, -1].nonzero().squeeze(1)
        values = first[row, :-1].to(compute_dtype(first.dtype))
        gradient.factors = gradient.factors.plus(RowFactors(rows=((row, values),)))
    else:
        first = gathered.summed(d_rows, group)
        gradient[: len(first)] = first
