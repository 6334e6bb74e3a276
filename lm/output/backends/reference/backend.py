"""The reference backend, the definition of correct: node by node over views of the weight.

With visits v = (position p, node n), rows W_n and biases b_n of the node's children, and y_v the
child on the target's path:

    z_v = W_n h_p + b_n                            (1)
    log q_v = z_v - lse_v,  lse_v = log Σ exp z_v  (2)
    nll_p = - Σ_{v of p} log q_v[y_v]              (3)
    e_v = q_v - onehot(y_v)                        (4)
    d h_p = d nll_p · Σ_{v of p} W_nᵀ e_v          (5)
    d W_n = Σ_{v of n} e_v (d nll_p h_p)ᵀ,   d b_n = Σ_{v of n} d nll_p e_v   (6)

Each node is one small matrix product, so a position costs O(H · columns on its path). No weight is
copied, and each row's gradient is complete when it is written, once.

Where the columns of all visits are few, as with classes, the forward saves their errors (4), and
sums up (5) while the rows are in cache. Where they are many, as with the full softmax, it saves
log-sum-exps, and the backward computes the errors again, one block of children after another, which
costs less than reading positions × N numbers from memory. For row-wise gradients of classes the
errors are saved, however many: they are factors of these gradients.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem, compute_dtype, num_targets
from lm.output.backends.nodes import (
    Node,
    node_log_softmax,
    node_logits,
    sorted_hidden,
    visited_nodes,
)
from lm.output.backends.reference.gradient_memory import zeros_except
from lm.output.backends.visits import Visits, check_words, route
from lm.output.rowwise.blocks import Product, Rows
from lm.output.rowwise.row_gradient import RowGradient

SAVED_ELEMENTS = 1 << 26
"""Most errors saved: 256 MB in fp32."""
SAVED_ELEMENTS_OF_ONE_NODE = 1 << 20
"""Most errors saved of a tree of one node, the full softmax."""
CACHED_ELEMENTS = 1 << 18
"""Log-probabilities that are computed at once where none is saved: 1 MB in fp32."""


class Saved(NamedTuple):
    """What the forward saves, by sorted position; without elements if it is not needed."""

    position: Tensor  # [P], node and child [D, P]: see `Visits`
    node: Tensor
    child: Tensor
    error: Tensor  # [P · max_path_columns], (4) of all visits, node by node; the rest undefined
    d_hidden_unscaled: Tensor  # [P, W], Σ W_nᵀ e_v of (5)
    lse: Tensor  # [D, P], (2) of each visit; 0 where there is none
    hidden: Tensor  # [P, …] of the sorted positions, where they are read again


class ReferenceBackend:
    """`Backend` for any device and dtype."""

    name = "reference"
    automatic_on: frozenset[str] = frozenset()

    def obstacle(self, problem: Problem, device: torch.device) -> str | None:
        """None: it solves every problem."""
        return None

    def is_worth_loading(self, problem: Problem, *, has_gradient: bool) -> bool:
        """Always: there is nothing to load."""
        return True

    def verified(self, problem: Problem, device: torch.device) -> bool:
        """Always: the reference is the definition."""
        return True

    def saves_errors(self, problem: Problem, *, row_wise: bool) -> bool:
        """Whether the forward saves the errors of all visits."""
        return saves_errors(problem.depth, problem.num_columns, row_wise)

    def forward(self, problem: Problem, needs: Needs) -> tuple[Tensor, list[Tensor]]:
        """See `Backend.forward`."""
        log_prob, saved = self._target_log_prob(problem, needs)
        return self._nll(log_prob, saved.position, problem, needs), list(saved)

    def _nll(self, log_prob: Tensor, position: Tensor, problem: Problem, _: Needs) -> Tensor:
        """(3) [P] from the log q [D, P] of sorted positions, divided for a mean."""
        total = log_prob.new_zeros(len(problem.hidden))
        for level in log_prob:
            total += level
        nll = torch.empty_like(total).index_copy_(0, position, total.neg_())
        return nll / num_targets(problem) if problem.mean else nll

    def part_size(self, problem: Problem) -> int:
        """All of them."""
        return problem.num_positions

    def nll_by_level(self, problem: Problem) -> Tensor:
        """See `Backend.nll_by_level`."""
        log_prob, saved = self._target_log_prob(problem, Needs(False, False, False))
        return torch.empty_like(log_prob).index_copy_(1, saved.position, 0 - log_prob)

    def partial(self, problem: Problem, needs: Needs) -> tuple[Tensor, Tensor, list[Tensor]]:
        """See `Backend.partial`. Nothing but the visits is saved."""
        check_words("target", problem.target, problem.vocab_size, problem.ignore_index)
        position, visited, child = _route(problem)
        hidden = sorted_hidden(problem.hidden, position, problem.weight.shape[1])
        lse, logit = hidden.new_full(visited.shape, -torch.inf), hidden.new_zeros(visited.shape)
        with torch.autocast(hidden.device.type, enabled=False):
            for node in visited_nodes(visited, problem.tree):
                place, rows = (node.level, node.visits), problem.weight[node.rows]
                bias = None if problem.bias is None else problem.bias[node.rows]
                blocks = node.blocks(problem.weight, hidden.dtype, whole=False)
                node_child = child[place]
                sums = _streamed(hidden[node.visits], rows, bias, node_child, blocks)
                lse[place] = sums.largest + sums.total.log()
                logit[place] = sums.target_logit.where(node_child >= 0, 0)
        lse, logit = (torch.empty_like(x).index_copy_(1, position, x) for x in (lse, logit))
        nothing = hidden.new_empty(0)
        return lse, logit, [position, visited, child, *(nothing for _ in range(4))]

    def partial_backward(
        self, d_nll: Tensor, lse: Tensor, problem: Problem, saved: list[Tensor], needs: Needs
    ) -> Gradients:
        """See `Backend.partial_backward`."""
        return self._backward(d_nll, lse, problem, Saved(*saved), needs)

    def backward(
        self, d_nll: Tensor, problem: Problem, saved: list[Tensor], needs: Needs
    ) -> Gradients:
        """See `Backend.backward`."""
        return self._backward(d_nll, None, problem, Saved(*saved), needs)

    def _backward(
        self, d_nll: Tensor, lse: Tensor | None, problem: Problem, saved: Saved, needs: Needs
    ) -> Gradients:
        """The gradients by the errors that the forward saved, or by log-sum-exps."""
        position, visited, child, saved_error, unscaled, saved_lse, _ = saved
        if lse is not None:
            saved_lse = lse.index_select(1, position)
        weight, bias = problem.weight, problem.bias
        hidden = sorted_hidden(problem.hidden, position, weight.shape[1])
        d_nll = sorted_d_nll(d_nll, problem, position)
        scaled = hidden * d_nll[:, None]  # d_nll_p h_p of (6)
        errors = lse is None and self.saves_errors(problem, row_wise=needs.row_wise)
        if not errors:
            unscaled = torch.zeros_like(hidden)
        nodes = visited_nodes(visited, problem.tree)
        d_weight = _new_gradient(weight, nodes, needs.row_wise) if needs.weight else None
        d_bias = None
        if bias is not None and needs.bias:
            d_bias = _new_gradient(bias, nodes, needs.row_wise)
        with torch.autocast(hidden.device.type, enabled=False):
            for node in nodes:
                blocks = node.blocks(weight, hidden.dtype, whole=errors)
                held = errors or (
                    blocks == node.blocks(weight, hidden.dtype, whole=True)  # as of any batch
                    and node.visits.stop - node.visits.start < weight.shape[1]
                )
                for children in blocks:
                    rows = slice(node.rows.start + children.start, node.rows.start + children.stop)
                    if errors:
                        error = node.columns(saved_error)[:, children]
                    else:
                        block = weight[rows].to(hidden.dtype)
                        row_bias = None if bias is None else bias[rows]
                        error = node_logits(hidden[node.visits], block, row_bias)
                        error.sub_(saved_lse[node.level, node.visits, None])  # so far log q
                        _to_errors(error, child[node.level, node.visits, None] - children.start)
                        if needs.hidden:
                            unscaled[node.visits].addmm_(error, block)
                    if d_weight is not None:
                        _add_product(d_weight, rows, error, scaled[node.visits], held=held)
                    if d_bias is not None:
                        _add_product(d_bias, rows, error, d_nll[node.visits], held=held)
        d_hidden = gradient_of_hidden(unscaled, d_nll, problem, position) if needs.hidden else None
        return Gradients(d_hidden, d_weight, d_bias)

    def new_saved(self, problem: Problem, needs: Needs) -> list[Tensor]:
        """See `Backend.new_saved`."""
        hidden, dtype, depth = problem.hidden, compute_dtype(problem.hidden.dtype), problem.depth
        num_positions, width = hidden.shape[0], problem.weight.shape[1]
        errors = self.saves_errors(problem, row_wise=needs.row_wise)
        return [
            problem.target.new_empty(num_positions),
            *(problem.target.new_empty(depth, num_positions) for _ in range(2)),
            hidden.new_empty(problem.num_columns if needs.any and errors else 0, dtype=dtype),
            hidden.new_empty(num_positions if needs.hidden and errors else 0, width, dtype=dtype),
            hidden.new_empty(depth if needs.any and not errors else 0, num_positions, dtype=dtype),
            hidden.new_empty(0),
        ]

    def _routed(self, problem: Problem, needs: Needs) -> Saved:
        """What is saved, with its visits, and zeros where sums are formed."""
        check_words("target", problem.target, problem.vocab_size, problem.ignore_index)
        visits = _route(problem)
        saved = Saved(*visits, *self.new_saved(problem, needs)[len(visits) :])
        saved.d_hidden_unscaled.zero_()
        saved.lse.zero_()
        return saved

    def _target_log_prob(self, problem: Problem, needs: Needs) -> tuple[Tensor, Saved]:
        """The log q [D, P] of every visit's target, 0 for none, and what is saved."""
        saved, weight = self._routed(problem, needs), problem.weight
        hidden = sorted_hidden(problem.hidden, saved.position, weight.shape[1])
        log_prob = hidden.new_zeros(saved.node.shape)
        errors = self.saves_errors(problem, row_wise=needs.row_wise)
        with torch.autocast(hidden.device.type, enabled=False):
            for node in visited_nodes(saved.node, problem.tree):
                place = (node.level, node.visits)
                child, node_hidden = saved.child[place], hidden[node.visits]
                rows = weight[node.rows]
                bias = None if problem.bias is None else problem.bias[node.rows]
                blocks = node.blocks(weight, hidden.dtype, whole=errors)
                if not errors:
                    sums = _streamed(node_hidden, rows, bias, child, blocks)
                    log_prob[place] = sums.target_logit - sums.largest - sums.total.log()
                    if needs.any:
                        saved.lse[place] = sums.largest + sums.total.log()
                    continue
                rows = rows.to(hidden.dtype) if len(blocks) == 1 else rows  # for both products
                if not needs.any:
                    log_prob[place] = _log_prob_of_child(node_hidden, rows, bias, child)
                    continue
                error = node.columns(saved.error)
                node_log_softmax(node_hidden, rows, bias, error)  # so far log q
                target_log_q = error.gather(1, child[:, None])
                log_prob[place] = target_log_q.squeeze(1)
                error.exp_().scatter_(1, child[:, None], target_log_q.expm1())
                for children in reversed(blocks) if needs.hidden else ():
                    block = rows[children].to(hidden.dtype)
                    saved.d_hidden_unscaled[node.visits].addmm_(error[:, children], block)
        return log_prob, saved


def _route(problem: Problem) -> Visits:
    sizes = (problem.depth, problem.ignore_index)
    return route(problem.target, problem.tree, *sizes, problem.shard)


def sorted_d_nll(d_nll: Tensor, problem: Problem, position: Tensor) -> Tensor:
    """D nll [P] of the sorted positions in the dtype of sums; 0 where the target is ignored.

    Divided for a mean.
    """
    d_nll = d_nll.masked_fill(problem.target == problem.ignore_index, 0)  # also of inf
    if problem.mean:
        d_nll = d_nll / num_targets(problem)
    return d_nll.to(compute_dtype(problem.hidden.dtype)).index_select(0, position)


def gradient_of_hidden(
    unscaled: Tensor, d_nll: Tensor, problem: Problem, position: Tensor
) -> Tensor:
    """(5) [P, H] from its sums [P, W] and d nll [P] of the sorted positions."""
    d_hidden = unscaled[:, : problem.hidden.shape[1]] * d_nll[:, None]
    d_hidden = torch.empty_like(d_hidden).index_copy_(0, position, d_hidden)
    return d_hidden.to(problem.hidden.dtype)


def saves_errors(depth: int, num_columns: int, row_wise: bool) -> bool:
    """Whether the errors of so many columns are saved."""
    if depth == 1:
        return num_columns <= SAVED_ELEMENTS_OF_ONE_NODE
    return row_wise or num_columns <= SAVED_ELEMENTS


def _log_prob_of_child(hidden: Tensor, rows: Tensor, bias: Tensor | None, child: Tensor) -> Tensor:
    """The log q [V] of a node's visits [V, W], `CACHED_ELEMENTS` at a time."""
    visits = max(1, CACHED_ELEMENTS // len(rows))
    parts = zip(torch.split(hidden, visits), torch.split(child, visits), strict=True)
    each = [node_log_softmax(h, rows, bias).gather(1, c[:, None]) for h, c in parts]
    return torch.cat(each).squeeze(1)


class _Sums(NamedTuple):
    """Sums over a node's children for each visit, [V] each; the lse is largest + log total."""

    largest: Tensor  # logit
    total: Tensor  # Σ exp(z - largest)
    target_logit: Tensor  # undefined for a target in another shard


def _streamed(
    hidden: Tensor, rows: Tensor, bias: Tensor | None, child: Tensor, blocks: list[slice]
) -> _Sums:
    """The sums over a node's children, one block after another."""
    largest = hidden.new_full(child.shape, torch.finfo(hidden.dtype).min)
    total, target_logit = torch.zeros_like(largest), torch.empty_like(largest)
    for children in blocks:
        logits = node_logits(hidden, rows[children], None if bias is None else bias[children])
        before, largest = largest, torch.maximum(largest, logits.amax(1))
        total *= (before - largest).exp_()  # sums are rounded relative to 1, not to the lse
        total += (logits - largest[:, None]).exp_().sum(1)
        inside = (child >= children.start) & (child < children.stop)
        visit = inside.nonzero().squeeze(1)
        target_logit[visit] = logits[visit, child[visit] - children.start]
    return _Sums(largest, total, target_logit)


def _to_errors(log_q: Tensor, child: Tensor) -> None:
    """(4) in place of some columns of log q, given those of the targets [V, 1], inside or not."""
    inside = (child >= 0) & (child < log_q.shape[1])
    child = child.clamp(0, log_q.shape[1] - 1)
    target = log_q.gather(1, child)
    log_q.exp_().scatter_(1, child, torch.where(inside, target.expm1(), target.exp()))


def _new_gradient(table: Tensor, nodes: list[Node], row_wise: bool) -> Tensor:
    """The gradient of a table, before the products of the nodes are added."""
    if row_wise:
        return RowGradient(table, [])
    first, stop = (
        torch.tensor([getattr(node.rows, end) for node in nodes], dtype=torch.int64)
        for end in ("start", "stop")
    )
    return zeros_except(first, stop - first, table)


def _add_product(out: Tensor, rows: slice, error: Tensor, factor: Tensor, *, held: bool) -> None:
    """Add errorᵀ factor, a matrix or a vector; row-wise as a product if the error may be held."""
    if isinstance(out, RowGradient):
        factor = factor.view(len(factor), -1)
        if held:
            out.append(Product(rows.start, error, factor))
        else:
            index = torch.arange(rows.start, rows.stop, device=error.device)
            out.append(Rows(index, error.T @ factor))
    elif out.dtype != error.dtype:
        out[rows] = error.T @ factor  # rounded once
    else:  # `torch.matmul` would write a copy first
        (torch.mm if factor.dim() == 2 else torch.mv)(error.T, factor, out=out[rows])
