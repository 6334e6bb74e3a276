"""The reference backend, the definition of correct: node by node, in PyTorch, for any device.

With visits v = (position p, node n), rows W_n and biases b_n of the node's children, and y_v the
child on the target's path:

    z_v = W_n h_p + b_n                            (1)
    log q_v = z_v - lse_v,  lse_v = log Σ exp z_v  (2)
    nll_p = - Σ_{v of p} log q_v[y_v]              (3)
    e_v = q_v - onehot(y_v)                        (4)
    d h_p = d nll_p · Σ_{v of p} W_nᵀ e_v          (5)
    d W_n = Σ_{v of n} e_v (d nll_p h_p)ᵀ,   d b_n = Σ_{v of n} d nll_p e_v   (6)

Each node is one small matrix product, so a position costs O(H · columns on its path). A node with
many visits or children is computed in blocks of children that fit in a cache. The forward saves
log-sum-exps, and the backward computes the logits again. Weights are copied only to a higher
precision, a block at a time, and each row's gradient is complete when it is written, once.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.backends.base import Backend, Gradients, Needs, Problem, Softmaxes, Tensors
from lm.output.backends.nodes import sorted_hidden, visited_nodes
from lm.output.backends.visits import Visits, route, sorted_upstream
from lm.output.inputs import check_words, compute_dtype
from lm.output.rowwise.factors import RowFactors, Visited, with_places
from lm.output.rowwise.row_gradient import RowGradient


class Saved(NamedTuple):
    """Visits and log-sum-exps of the sorted positions, see `Visits` and `Softmaxes`."""

    position: Tensor
    node: Tensor
    child: Tensor
    largest: Tensor
    log_total: Tensor


class ReferenceBackend(Backend):
    """`Backend` for any device and dtype."""

    name = "reference"
    saved_types: tuple[Any, ...] = (Saved,)

    def new_saved(self, problem: Problem, needs: Needs) -> Tensors:
        """See `Backend.new_saved`."""
        size, new = (problem.depth, problem.num_positions), problem.hidden.new_empty
        position, *visits = (new(shape, dtype=torch.int64) for shape in (size[1:], size, size))
        lse = (new(size, dtype=compute_dtype(problem.hidden.dtype)) for _ in range(2))
        return Saved(position, *visits, *lse)

    def softmaxes(
        self, target: Tensor, problem: Problem, needs: Needs
    ) -> tuple[Softmaxes, Tensors]:
        """See `Solver.softmaxes`."""
        tree, ignore_index = problem.tree, problem.ignore_index
        check_words("target", target, problem.vocab_size, ignore_index)
        visits = route(target, tree, problem.depth, ignore_index, problem.shard)
        hidden = sorted_hidden(problem, visits.position)
        largest = hidden.new_full(visits.node.shape, torch.finfo(hidden.dtype).min)
        total, target_logit = torch.zeros_like(largest), torch.zeros_like(largest)
        with torch.autocast(hidden.device.type, enabled=False):
            for block in _blocks(problem, hidden, visits):
                at, logits = block.visits, block.logits
                logit = logits.gather(1, block.child).where(block.is_inside, 0)
                target_logit[at] += logit.squeeze(1)
                before, after = largest[at], torch.maximum(largest[at], logits.amax(1))
                total[at] *= (before - after).exp_()  # sums are rounded relative to 1, not to lse
                total[at] += logits.sub_(after[:, None]).exp_().sum(1)
                largest[at] = after
        lse = largest, total.log_()
        return Softmaxes.by_position(visits.position, *lse, target_logit), Saved(*visits, *lse)

    def backward(
        self, d_nll: Tensor, problem: Problem, saved: Any, needs: Needs, lse: Tensor | None = None
    ) -> Gradients:
        """See `Solver.backward`."""
        visits = Visits(saved.position, saved.node, saved.child)
        largest, log_total = saved.largest, saved.log_total
        if lse is not None:
            largest, log_total = lse.index_select(1, visits.position), torch.zeros_like(lse)
        hidden = sorted_hidden(problem, visits.position)
        d_nll = sorted_upstream(d_nll, *visits[:2]).to(hidden.dtype)[:, None]
        scaled, d_hidden = d_nll * hidden, torch.zeros_like(hidden)
        tables = problem.weight if needs.weight else None, problem.bias if needs.bias else None
        vectors, nodes, errors = (scaled, d_nll), list[tuple[int, ...]](), [hidden.new_empty(0)]
        num_held = 0
        found: list[Any] = [  # dense, or of rows that have been formed
            None if t is None else [v[:0]] if needs.row_wise else t.new_zeros(t.shape)
            for t, v in zip(tables, vectors, strict=True)
        ]
        with torch.autocast(hidden.device.type, enabled=False):
            for block in _blocks(problem, hidden, visits, row_wise=needs.row_wise):
                at = block.visits
                error = block.logits.sub_(largest[at][:, None]).sub_(log_total[at][:, None])
                target = error.gather(1, block.child)  # so far log q
                target = torch.where(block.is_inside, target.expm1(), target.exp())
                error.exp_().scatter_(1, block.child, target)
                if needs.hidden:
                    d_hidden[at[1]].addmm_(error, block.weight)
                if not (needs.weight or needs.bias):
                    continue
                rows, visited = block.rows, (at[1].start, at[1].stop)
                nodes.append((*visited, rows.start, error.shape[1], num_held, block.is_held))
                if block.is_held:
                    errors.append(error.flatten())
                    num_held += error.numel()
                    continue
                for each, of in zip(found, vectors, strict=True):
                    if isinstance(each, list):
                        each.append(error.T @ of[at[1]])
                    elif each is not None:
                        each[rows] = (error.T @ of[at[1]]).view(each[rows].shape)  # rounded once
        if needs.row_wise:
            listed = torch.tensor(nodes, dtype=torch.int64, device="cpu").view(-1, 6)
            listed, flat = with_places(listed, listed[:, 5] == 0), torch.cat(errors)
            for i, table in enumerate(tables):
                if table is not None:
                    of_batch = Visited(listed, flat, vectors[i], torch.cat(found[i]))
                    found[i] = RowGradient(table, RowFactors(visited=(of_batch,)))
        if not needs.hidden:
            return Gradients(None, *found)
        d_hidden = d_nll * d_hidden[:, : problem.hidden.shape[1]]
        d_hidden = torch.empty_like(d_hidden).index_copy_(0, visits.position, d_hidden)
        return Gradients(d_hidden.to(problem.hidden.dtype), *found)


class _Block(NamedTuple):
    """Some children of a node, and the logits of its visits V."""

    visits: tuple[int, slice]  # their place in tensors [D, P] of the sorted positions
    rows: slice
    weight: Tensor  # [children, W], in the dtype that sums are formed in
    logits: Tensor  # [V, children]
    child: Tensor  # [V, 1], the target's if `is_inside`
    is_inside: Tensor  # [V, 1]
    is_held: bool  # by a row-wise gradient


def _blocks(
    problem: Problem, hidden: Tensor, visits: Visits, *, row_wise: bool = False
) -> Iterator[_Block]:
    """The nodes that hidden vectors [P, W] visit, in blocks whose logits fit in a cache.

    Row-wise gradients hold the errors of a node's visits, of all children at once, where these are
    fewer numbers than the gradients of its rows.
    """
    weight, bias, dtype = problem.weight, problem.bias, hidden.dtype
    for node in visited_nodes(visits.node, problem.tree):
        at = node.level, node.visits
        is_held = row_wise and node.visits.stop - node.visits.start < weight.shape[1]
        for rows in node.blocks(weight, dtype, whole=is_held):
            block_weight = weight[rows].to(dtype)
            block_bias = None if bias is None else bias[rows].to(dtype)
            logits = F.linear(hidden[node.visits], block_weight, block_bias)
            child = visits.child[at][:, None] + (node.rows.start - rows.start)
            is_inside = (child >= 0) & (child < logits.shape[1])
            child = child.clamp(0, logits.shape[1] - 1)
            yield _Block(at, rows, block_weight, logits, child, is_inside, is_held)
