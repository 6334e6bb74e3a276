"""The nll of any backend as a differentiable function.

For dense gradients it is a registered custom op; for row-wise ones, which a custom op cannot
return, a function outside of `torch.compile`. Only this module turns a `Problem` and what a backend
saved into the flat arguments of PyTorch's interfaces.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lm.output.backends.base import Backend, Needs, Problem, compute_dtype, flatten, unflatten
from lm.output.rowwise.eager import differentiable_once, not_compiled
from lm.output.tree.class_tree import TreeArrays

NllOp = Callable[..., tuple[Tensor, list[Tensor]]]
"""Fields of a `Problem` and of `Needs` → nll [P] and the tensors saved for the backward."""
_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor[] tree, SymInt depth,"
    " SymInt max_path_columns, SymInt ignore_index, bool[] needs"
)


def differentiable_nll(backend: Backend[Any], op: NllOp, problem: Problem, needs: Needs) -> Tensor:
    """The nll [P] of a backend, differentiable once in hidden, weight and bias.

    Args:
        backend: computes it.
        op: the custom op registered for the backend.
        problem: the positions.
        needs: which gradients will be asked for; row-wise ones not within `torch.compile`.
    """
    if needs.row_wise:
        return _row_wise_nll(backend, problem, needs)
    nll, _ = op(*_op_inputs(problem, needs))
    return nll


def register_op(backend: Backend[Any]) -> NllOp:
    """Register `sqrtlm::<name>_nll` for a backend, with a fake kernel and a backward."""
    name = f"sqrtlm::{backend.name}_nll"

    @torch.library.custom_op(
        name, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor nll, Tensor[] saved)"
    )
    def forward(*inputs: Any) -> tuple[Tensor, list[Tensor]]:
        nll, saved = backend.forward(*_problem_and_needs(*inputs))
        return nll, flatten(saved)

    @forward.register_fake
    def _(*inputs: Any) -> tuple[Tensor, list[Tensor]]:
        problem, needs = _problem_and_needs(*inputs)
        dtype = compute_dtype(problem.hidden.dtype)
        nll = problem.hidden.new_empty(problem.num_positions, dtype=dtype)
        return nll, flatten(backend.new_saved(problem, needs))

    @torch.library.custom_op(
        f"{name}_backward",
        mutates_args=(),
        schema=f"(Tensor d_nll, Tensor[] saved, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    )
    def backward(d_nll: Tensor, saved: list[Tensor], *inputs: Any) -> tuple[Tensor, ...]:
        problem, needs = _problem_and_needs(*inputs)
        kind = backend.saved_type(problem, needs)
        gradients = backend.backward(d_nll, problem, unflatten(kind, iter(saved)), needs)
        empty = problem.hidden.new_empty
        return tuple(empty(0) if gradient is None else gradient for gradient in gradients)

    @backward.register_fake
    def _(d_nll: Tensor, saved: list[Tensor], *inputs: Any) -> tuple[Tensor, ...]:
        (hidden, weight, bias, *_), needs = _problem_and_needs(*inputs)
        of = ((hidden, needs.hidden), (weight, needs.weight), (bias, needs.bias))
        return tuple(
            tensor.new_empty(tensor.shape if needed else (0,))
            if tensor is not None
            else hidden.new_empty(0)
            for tensor, needed in of
        )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        problem, _ = _problem_and_needs(*inputs)
        _, saved = output
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        _save(ctx, problem, saved)

    def gradients(ctx: Any, d_nll: Tensor | None, _: Any) -> tuple[Any, ...]:
        hidden, weight, bias, *_ = ctx.needs_input_grad
        problem, saved = _restored(ctx)
        rest = (None, [None] * len(problem.tree), None, None, None, None)
        if d_nll is None:
            return (None, None, None, *rest)
        needs = Needs(hidden, weight, bias)
        found = backward(d_nll, saved, *_op_inputs(problem, needs))
        needed = (d if need else None for d, need in zip(found, needs, strict=False))
        return (*needed, *rest)

    forward.register_autograd(gradients, setup_context=setup_context)
    return forward


class _RowWiseNll(torch.autograd.Function):
    """The nll [P] whose backward gives weight and bias a `RowGradient`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *fields, backend, needs = inputs
        problem = Problem(*fields)
        nll, saved = backend.forward(problem, needs)
        ctx.backend, ctx.saved_type = backend, type(saved)
        _save(ctx, problem, flatten(saved))
        return nll

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *d_nll: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, *rest = ctx.needs_input_grad
        needs = Needs(hidden, weight, bias, row_wise=True)
        problem, tensors = _restored(ctx)
        saved = unflatten(ctx.saved_type, iter(tensors))
        return (*ctx.backend.backward(*d_nll, problem, saved, needs), *(None for _ in rest))


@not_compiled
def _row_wise_nll(backend: Backend[Any], problem: Problem, needs: Needs) -> Tensor:
    nll: Tensor = _RowWiseNll.apply(*problem, backend, needs)  # type: ignore[no-untyped-call]
    return nll


def _op_inputs(problem: Problem, needs: Needs) -> tuple[Any, ...]:
    return (*problem._replace(tree=list(problem.tree)), list(needs))  # type: ignore[arg-type]


def _problem_and_needs(*inputs: Any) -> tuple[Problem, Needs]:
    *fields, needs = inputs
    problem = Problem(*fields)
    return problem._replace(tree=TreeArrays(*problem.tree)), Needs(*needs)


def _save(ctx: Any, problem: Problem, saved: list[Tensor]) -> None:
    hidden, weight, bias, target, tree, *ctx.sizes = problem
    ctx.save_for_backward(hidden, weight, bias, target, *tree, *saved)


def _restored(ctx: Any) -> tuple[Problem, list[Tensor]]:
    hidden, weight, bias, target, *rest = ctx.saved_tensors
    num_arrays = len(TreeArrays._fields)
    tree = TreeArrays(*rest[:num_arrays])
    return Problem(hidden, weight, bias, target, tree, *ctx.sizes), rest[num_arrays:]
