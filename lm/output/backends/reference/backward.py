"""The backward of the reference backend: equations (4) to (6), dense or row-wise."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem
from lm.output.backends.reference.forward import Saved, SavedErrors, SavedLogProb, SavedLse
from lm.output.backends.reference.gradient_memory import zeros_except
from lm.output.backends.reference.nodes import (
    Node,
    sorted_hidden,
    target_columns,
    visited_nodes,
    write_logits,
)
from lm.output.rowwise.blocks import Part, Product, Rows
from lm.output.rowwise.row_gradient import RowGradient


class Batch(NamedTuple):
    """A batch in the order of its sorted positions, except for `problem`."""

    problem: Problem
    saved: Saved
    hidden: Tensor  # [P, W]
    d_nll: Tensor  # [P]
    scaled: Tensor  # [P, W], d_nll_p h_p of (6)
    nodes: list[Node]  # the visited ones

    @classmethod
    def of(cls, d_nll: Tensor, problem: Problem, saved: Saved) -> "Batch":
        """The batch of a problem, given the gradient d_nll [P] of the nll."""
        visits, hidden = saved.visits, sorted_hidden(problem, saved.visits)
        d_nll = d_nll.masked_fill(problem.target == problem.ignore_index, 0)  # also of inf
        d_nll = visits.sorted(d_nll.to(hidden.dtype))
        nodes = list(visited_nodes(visits, problem.tree))
        return cls(problem, saved, hidden, d_nll, hidden * d_nll[:, None], nodes)

    def errors(self) -> Iterator[tuple[Node, slice, Tensor]]:
        """(4) of each node, [visits, children], one block of children after another."""
        problem, saved, dtype = self.problem, self.saved, self.hidden.dtype
        columns = None
        if isinstance(saved, SavedErrors):
            columns = saved.error
        elif isinstance(saved, SavedLogProb):
            columns = _errors_of(saved, problem)
        for node in self.nodes:
            for children in node.blocks(problem.weight, dtype, whole=columns is not None):
                if columns is not None:
                    yield node, children, node.columns(columns)[:, children]
                elif isinstance(saved, SavedLse):
                    yield node, children, self._errors_of_block(saved, node, children)

    def _errors_of_block(self, saved: SavedLse, node: Node, children: slice) -> Tensor:
        """(4) for some children of a node, computed again."""
        visits = saved.visits
        log_q = saved.lse.new_empty(node.stop - node.start, children.stop - children.start)
        write_logits(log_q, self.hidden, self.problem, node, children)
        log_q.sub_(saved.lse[node.level, node.visits, None])
        child = visits.child[node.level, node.visits, None] - children.start
        inside = (child >= 0) & (child < log_q.shape[1])
        child = child.clamp(0, log_q.shape[1] - 1)
        target = log_q.gather(1, child)
        return log_q.exp().scatter_(1, child, torch.where(inside, target.expm1(), target.exp()))

    def d_hidden(self, unscaled: Tensor) -> Tensor:
        """(5) in the order of the problem, given Σ W_nᵀ e_v [P, W] by sorted position."""
        scaled = unscaled[:, : self.problem.hidden.shape[1]] * self.d_nll[:, None]
        return self.saved.visits.unsorted(scaled).to(self.problem.hidden.dtype)


def dense_gradients(batch: Batch, needs: Needs) -> Gradients:
    """The gradients that are needed; each row is written once."""
    weight, bias = batch.problem.weight, batch.problem.bias
    unscaled = torch.zeros_like(batch.hidden) if needs.hidden else None
    written = [(node.first_row, node.first_row + node.num_children) for node in batch.nodes]
    d_weight = zeros_except(written, weight) if needs.weight else None
    d_bias = torch.zeros_like(bias) if bias is not None and needs.bias else None
    for node, children, error in batch.errors():
        rows = node.rows(children)
        if unscaled is not None:
            unscaled[node.visits].addmm_(error, weight[rows].to(error.dtype))
        if d_weight is not None:
            _write_product(d_weight[rows], error.T, batch.scaled[node.visits])
        if d_bias is not None:
            _write_product(d_bias[rows], error.T, batch.d_nll[node.visits])
    return Gradients(None if unscaled is None else batch.d_hidden(unscaled), d_weight, d_bias)


def row_wise_gradients(batch: Batch, needs: Needs) -> Gradients:
    """Gradients of weight and bias as products if errors were saved, else as rows."""
    weight, bias, saved = batch.problem.weight, batch.problem.bias, batch.saved
    errors = saved if isinstance(saved, SavedErrors) else None
    unscaled = torch.zeros_like(batch.hidden) if errors is None else errors.d_hidden_unscaled
    d_weight: list[Part] = []
    d_bias: list[Part] = []
    for node, children, error in batch.errors():
        rows = node.rows(children)
        if errors is None and needs.hidden:
            unscaled[node.visits].addmm_(error, weight[rows].to(error.dtype))
        for needed, parts, factor in (
            (needs.weight, d_weight, batch.scaled[node.visits]),
            (bias is not None and needs.bias, d_bias, batch.d_nll[node.visits, None]),
        ):
            if needed and errors is not None:
                parts.append(Product(rows.start, error, factor))
            elif needed:
                index = torch.arange(rows.start, rows.stop, device=error.device)
                parts.append(Rows(index, error.T @ factor))
    return Gradients(
        batch.d_hidden(unscaled) if needs.hidden else None,
        RowGradient(weight, d_weight) if needs.weight else None,
        RowGradient(bias, d_bias) if bias is not None and needs.bias else None,
    )


def _errors_of(saved: SavedLogProb, problem: Problem) -> Tensor:
    """(4) for the flat columns of all visits; q - 1 of the targets without cancellation."""
    _, column, num_columns = target_columns(saved.visits, problem.tree)
    log_q = saved.log_prob[:num_columns]
    error = log_q.exp()
    error[column] = log_q[column].expm1()
    return error


def _write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write a @ b, a matrix or a vector, into `out`, rounded once."""
    multiply = torch.mm if b.dim() == 2 else torch.mv
    if out.dtype == a.dtype:
        multiply(a, b, out=out)  # `torch.matmul` would write a copy first
    else:
        out.copy_(multiply(a, b))
