"""The forward of the reference backend: equations (1) to (3), and (5) for row-wise gradients.

One of three types is saved, chosen by sizes alone. The log-probabilities (2) of all visits are
saved where they are few, as with classes. Where they are many, as with the full softmax, only
log-sum-exps are, and the backward computes the probabilities again, one block of children after
another: every position then needs every row, and multiplying again what is in cache costs less than
reading positions × N numbers from memory. For row-wise gradients of classes the errors (4) are
saved, however many: as factors of these gradients they have fewer elements than the visited rows,
which would replace them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Problem, compute_dtype
from lm.output.backends.reference.nodes import (
    sorted_hidden,
    target_columns,
    visited_nodes,
    write_logits,
)
from lm.output.backends.visits import Visits, check_targets, route

SAVED_ELEMENTS = 1 << 26
"""Most log-probabilities saved: 256 MB in fp32."""
SAVED_ELEMENTS_OF_ONE_NODE = 1 << 20
"""The same for a tree of one node, the full softmax."""


class SavedLogProb(NamedTuple):
    """For dense gradients of nodes with few columns."""

    visits: Visits
    log_prob: Tensor  # [P · max_path_columns], (2) of all visits, node by node; 0 after the last


class SavedErrors(NamedTuple):
    """For row-wise gradients as products."""

    visits: Visits
    error: Tensor  # [P · max_path_columns], (4) of all visits, node by node; the rest undefined
    d_hidden_unscaled: Tensor  # [P, W], Σ W_nᵀ e_v of (5), by sorted position


class SavedLse(NamedTuple):
    """For nodes with many columns."""

    visits: Visits
    lse: Tensor  # [D, P], (2) of each visit; 0 where there is none


Saved = SavedLogProb | SavedErrors | SavedLse


def saved_type(problem: Problem, row_wise: bool) -> type[Saved]:
    """What the forward of a problem saves."""
    depth = problem.depth
    if row_wise and depth > 1:
        return SavedErrors
    limit = SAVED_ELEMENTS_OF_ONE_NODE if depth == 1 else SAVED_ELEMENTS
    if problem.num_positions * problem.max_path_columns > limit:
        return SavedLse
    return SavedErrors if row_wise else SavedLogProb


def new_saved(problem: Problem, visits: Visits, row_wise: bool) -> Saved:
    """Uninitialised memory for what the forward of a problem saves, around its visits."""
    hidden, kind = problem.hidden, saved_type(problem, row_wise)
    dtype = compute_dtype(hidden.dtype)
    if kind is SavedLse:
        return SavedLse(visits, hidden.new_empty(visits.node.shape, dtype=dtype))
    size = problem.num_positions * problem.max_path_columns
    columns = hidden.new_empty(size, dtype=dtype)
    if kind is SavedLogProb:
        return SavedLogProb(visits, columns)
    unscaled = hidden.new_empty(problem.num_positions, problem.weight.shape[1], dtype=dtype)
    return SavedErrors(visits, columns, unscaled)


def target_log_prob(problem: Problem, row_wise: bool) -> tuple[Tensor, Saved]:
    """The log q [D, P] of every visit's target by sorted position, 0 for none; and what is saved.

    Raises:
        IndexError: if a target is neither a word nor `ignore_index`.
    """
    check_targets(problem.target, problem.vocab_size, problem.ignore_index)
    visits = route(problem.target, problem.tree, problem.depth, problem.ignore_index)
    saved = new_saved(problem, visits, row_wise)
    if isinstance(saved, SavedLogProb):
        return _saving_log_prob(problem, saved), saved
    if isinstance(saved, SavedErrors):
        return _saving_errors(problem, saved), saved
    return _saving_lse(problem, saved), saved


def _saving_log_prob(problem: Problem, saved: SavedLogProb) -> Tensor:
    visits = saved.visits
    hidden = sorted_hidden(problem, visits)
    for node in visited_nodes(visits, problem.tree):
        logits = hidden.new_empty(node.shape)
        for children in node.blocks(problem.weight, hidden.dtype, whole=True):
            write_logits(logits[:, children], hidden, problem, node, children)
        torch.log_softmax(logits, dim=1, out=node.columns(saved.log_prob))
    visit, column, num_columns = target_columns(visits, problem.tree)
    log_prob = hidden.new_zeros(visits.node.shape)
    log_prob.view(-1)[visit] = saved.log_prob[column]
    saved.log_prob[num_columns:] = 0
    return log_prob


def _saving_errors(problem: Problem, saved: SavedErrors) -> Tensor:
    """Also adds up d_hidden while the rows are in cache."""
    visits = saved.visits
    hidden = sorted_hidden(problem, visits)
    saved.d_hidden_unscaled.zero_()
    log_prob = hidden.new_zeros(visits.node.shape)
    for node in visited_nodes(visits, problem.tree):
        blocks = list(node.blocks(problem.weight, hidden.dtype, whole=True))
        logits, error = hidden.new_empty(node.shape), node.columns(saved.error)
        for children in blocks:
            rows = write_logits(logits[:, children], hidden, problem, node, children)
        torch.log_softmax(logits, dim=1, out=error)
        child = visits.child[node.level, node.visits, None]
        target_log_q = error.gather(1, child)
        log_prob[node.level, node.visits] = target_log_q.squeeze(1)
        error.exp_().scatter_(1, child, target_log_q.expm1())
        for number, children in enumerate(reversed(blocks)):
            if number:
                rows = problem.weight[node.rows(children)].to(hidden.dtype)
            saved.d_hidden_unscaled[node.visits].addmm_(error[:, children], rows)
    return log_prob


def _saving_lse(problem: Problem, saved: SavedLse) -> Tensor:
    """One block of children after another."""
    visits, all_lse = saved.visits, saved.lse.zero_()
    hidden = sorted_hidden(problem, visits)
    log_prob = hidden.new_zeros(visits.node.shape)
    for node in visited_nodes(visits, problem.tree):
        child = visits.child[node.level, node.visits]
        largest = hidden.new_full(child.shape, torch.finfo(hidden.dtype).min)
        total, target_logit = torch.zeros_like(largest), torch.empty_like(largest)
        for children in node.blocks(problem.weight, hidden.dtype, whole=False):
            logits = hidden.new_empty(len(child), children.stop - children.start)
            write_logits(logits, hidden, problem, node, children)
            before, largest = largest, torch.maximum(largest, logits.amax(1))
            total *= (before - largest).exp_()  # sums are rounded relative to 1, not to the lse
            total += (logits - largest[:, None]).exp_().sum(1)
            inside = (child >= children.start) & (child < children.stop)
            visit = inside.nonzero().squeeze(1)
            target_logit[visit] = logits[visit, child[visit] - children.start]
        all_lse[node.level, node.visits] = largest + total.log()
        log_prob[node.level, node.visits] = target_logit - largest - total.log()
    return log_prob
