"""The forward and the backward of the compiled backend.

`loops` has the arithmetic; its equations are those of the reference backend.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem
from lm.output.backends.compiled import loops
from lm.output.backends.compiled.division import bounds_of, divide
from lm.output.backends.compiled.memory import (
    Array,
    Saved,
    as_array,
    multiplies_bf16,
    new_saved,
    new_sorted,
    own,
    zeros_except,
)
from lm.output.backends.compiled.row_updates import CompiledFactors
from lm.output.backends.visits import sorted_upstream
from lm.output.inputs import check_words
from lm.output.rowwise.factors import Visited, with_places
from lm.output.rowwise.row_gradient import RowGradient
from lm.output.tree.arrays import TreeArrays

FORMED_VISITS = 16
"""Visits from which on a node's rows are formed once, not at each use."""
NARROW = 8
"""Most children of a node of which the same is true: its factors are larger than its rows."""
LEAST_ZEROS = 1 << 18
"""Numbers from which on threads divide the rows that are set to zero."""


def nll(target: Tensor, problem: Problem, needs: Needs) -> tuple[Tensor, None, Saved]:
    """The nll [P], and what is saved."""
    log_prob, saved = target_log_prob(target, problem, needs)
    nll = log_prob.new_empty(problem.num_positions)
    loops.add_levels(own(saved.position), own(log_prob), own(nll))
    return nll, None, saved


def target_log_prob(target: Tensor, problem: Problem, needs: Needs) -> tuple[Tensor, Saved]:
    """The log q [D, P] of every visit's target, by sorted position, 0 for none; what is saved."""
    saved, weight = new_saved(problem, needs), problem.weight
    target, visits = target.contiguous(), (saved.position, saved.node, saved.child)
    tree: Any = TreeArrays(*map(own, problem.tree))  # type: ignore[arg-type]
    if not loops.route(own(target), problem.ignore_index, tree, *map(own, visits)):
        check_words("target", target, problem.vocab_size, problem.ignore_index)
    log_prob = saved.error.new_zeros(saved.node.shape)
    is_bf16, ones = multiplies_bf16(problem), log_prob[0, :0]
    hidden = saved.hidden
    if len(hidden) == 0:
        hidden = new_sorted(problem, torch.bfloat16 if is_bf16 else log_prob.dtype)
    nodes = _nodes(saved, problem)
    widest = int(nodes[:, 3].max(initial=0))
    bias = ones.new_zeros(widest) if problem.bias is None else problem.bias.to(ones.dtype)
    bias = bias.contiguous()  # which the loops read by address
    divide(
        bounds_of(nodes, len(hidden), by_rows=False),
        loops.forward_bf16 if is_bf16 else loops.forward,
        nodes,
        (own(saved.position), as_array(problem.hidden.contiguous()), own(ones)),
        own(hidden),
        *map(as_array, (weight, bias)),
        *map(own, (saved.child, log_prob, saved.error, saved.d_hidden_unscaled)),
        widest,
    )
    return log_prob, saved


def backward(d_nll: Tensor, problem: Problem, saved: Saved, needs: Needs) -> Gradients:
    """The gradients that are needed, given d_nll [P]."""
    weight, bias, position = problem.weight, problem.bias, saved.position
    d_nll = sorted_upstream(d_nll, position, saved.node)
    nodes = _nodes(saved, problem)
    d_hidden = None
    if needs.hidden:
        d_hidden = problem.hidden.new_empty(problem.hidden.shape)
        rows = map(own, (position, saved.d_hidden_unscaled, d_nll))
        bounds = bounds_of(nodes, len(d_hidden), by_rows=False)
        divide(bounds, loops.scatter_rows, *rows, as_array(d_hidden))
    if needs.row_wise:
        return Gradients(d_hidden, *_row_gradients(nodes, problem, saved, needs, d_nll))
    d_weight, d_bias = weight.new_empty(0, weight.shape[1]), d_nll.new_empty(0)
    if needs.weight:
        d_weight = zeros_except(int(nodes[:, 3].sum()), weight, partial(_zero_gaps, nodes))
    if bias is not None and needs.bias:
        d_bias = d_nll.new_zeros(bias.shape)
    if needs.weight or needs.bias:
        is_bf16 = multiplies_bf16(problem)
        hidden = saved.hidden if is_bf16 else _scaled_hidden(problem, position, d_nll)
        _form(saved.error, hidden, d_nll, nodes, d_weight, d_bias)
    return Gradients(
        d_hidden,
        d_weight if needs.weight else None,
        d_bias.to(bias.dtype) if bias is not None and needs.bias else None,
    )


def _row_gradients(
    nodes: Array, problem: Problem, saved: Saved, needs: Needs, d_nll: Tensor
) -> tuple[RowGradient | None, RowGradient | None]:
    """Gradients of weight and bias, if needed, given d_nll [P] of the sorted positions."""
    scaled = _scaled_hidden(problem, saved.position, d_nll)
    hidden = saved.hidden if multiplies_bf16(problem) else scaled
    listed, found = _formed_once(nodes)
    num_formed = int(found[:, 3].sum())
    d_weight = d_nll.new_empty(num_formed if needs.weight else 0, problem.weight.shape[1])
    d_bias = d_nll.new_zeros(num_formed if needs.bias else 0)
    _form(saved.error, hidden, d_nll, found, d_weight, d_bias)

    of_weight, of_bias = (
        None
        if t is None
        else RowGradient(t, CompiledFactors(visited=(Visited(listed, saved.error, *v),)))
        for t, *v in (
            (problem.weight if needs.weight else None, scaled, d_weight),
            (problem.bias if needs.bias else None, d_nll[:, None], d_bias[:, None]),
        )
    )
    return of_weight, of_bias


def _formed_once(nodes: Array) -> tuple[Tensor, Array]:
    """`Visited.nodes`, given those of `list_nodes`; and the nodes whose rows are formed here.

    The first rows of the latter are those in `Visited.formed`.
    """
    visited = torch.from_numpy(nodes)
    is_formed = (visited[:, 1] - visited[:, 0] >= FORMED_VISITS) | (visited[:, 3] <= NARROW)
    listed = with_places(visited, is_formed)
    found = listed[is_formed]
    found[:, 2] = found[:, 5]
    return listed, found.numpy()


def _form(
    error: Tensor, hidden: Tensor, d_nll: Tensor, nodes: Array, d_weight: Tensor, d_bias: Tensor
) -> None:
    """(6) of the rows of some nodes, see `loops.backward`."""
    arrays = (*map(own, (error, hidden, d_nll)), *map(as_array, (d_weight, d_bias)))
    bounds = bounds_of(nodes, max(len(d_weight), len(d_bias)), by_rows=True)
    loop = loops.backward_bf16 if hidden.dtype == torch.bfloat16 else loops.backward
    divide(bounds, loop, nodes, *arrays)


def _scaled_hidden(problem: Problem, position: Tensor, d_nll: Tensor) -> Tensor:
    """The hidden vectors of the sorted positions times their d_nll [P]."""
    hidden = new_sorted(problem, d_nll.dtype)
    source = as_array(problem.hidden.contiguous())
    loops.gather_rows(0, len(hidden), own(position), source, own(d_nll), own(hidden))
    return hidden


def _zero_gaps(nodes: Array, out: Tensor) -> None:
    """See `zeros_except`."""
    num_zeros = (len(out) - int(nodes[:, 3].sum())) * out.shape[1]
    num_threads = torch.get_num_threads() if num_zeros >= LEAST_ZEROS else 1
    bounds = [len(out) * i // num_threads for i in range(num_threads + 1)]
    divide(bounds, loops.zero_gaps, nodes, own(out))


def _nodes(saved: Saved, problem: Problem) -> Array:
    """See `loops.list_nodes`."""
    tree = problem.tree
    nodes: Array = loops.list_nodes(*map(own, (saved.node, tree.first_row, tree.num_children)))
    return nodes
