"""The nll of any backend as a differentiable function.

For dense gradients it is a registered custom op; for row-wise ones, which a custom op cannot
return, a function outside of `torch.compile`. Only this module turns a `Problem` and what a backend
saved into the flat arguments of PyTorch's interfaces.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lm.output.backends.base import Backend, Needs, Problem, compute_dtype, flatten, unflatten
from lm.output.rowwise.eager import differentiable_once, not_compiled
from lm.output.tree.class_tree import TreeArrays

Op = Callable[..., Any]
"""A registered custom op: fields of a `Problem` and `Needs` → nll [P] and the tensors saved."""
_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor[] tree, SymInt depth,"
    " SymInt max_path_columns, SymInt ignore_index, bool[] needs"
)


def differentiable_nll(backend: Backend[Any], op: Op, problem: Problem, needs: Needs) -> Tensor:
    """The nll [P] of a backend, by its registered op or, for row-wise gradients, a function."""
    if needs.row_wise:
        return _row_wise_nll(backend, problem, needs)
    floats = (problem.hidden, problem.weight, problem.bias)
    if not torch.compiler.is_compiling() and any(map(_has_tangent, floats)):
        raise RuntimeError("the nll of a tree does not support forward-mode differentiation")
    nll: Tensor = op(*problem, needs)[0]
    return nll


def _has_tangent(tensor: Tensor | None) -> bool:
    """Whether the tensor is a dual number, whose tangent an op would silently drop."""
    if tensor is None:
        return False
    dual = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return dual.tangent is not None


def register_op(backend: Backend[Any]) -> Op:
    """Register `sqrtlm::<name>_nll` for a backend, with a fake kernel and a backward."""
    name = f"sqrtlm::{backend.name}_nll"
    backward = _register_backward(backend, name)

    @torch.library.custom_op(
        name, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor nll, Tensor[] saved)"
    )
    def forward(*inputs: Any) -> tuple[Tensor, list[Tensor]]:
        nll, saved = backend.forward(*_unpack(inputs))
        return nll, flatten(saved)

    @forward.register_fake
    def _(*inputs: Any) -> tuple[Tensor, list[Tensor]]:
        problem, needs = _unpack(inputs)
        dtype = compute_dtype(problem.hidden.dtype)
        nll = problem.hidden.new_empty(problem.num_positions, dtype=dtype)
        return nll, flatten(backend.new_saved(problem, needs))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.mark_non_differentiable(*output[1])
        ctx.set_materialize_grads(False)
        _save(ctx, *inputs[:-1], saved=output[1])

    def gradients(ctx: Any, d_nll: Tensor | None, _: Any) -> tuple[Any, ...]:
        hidden, weight, bias, _, tree, *rest = ctx.needs_input_grad
        found: tuple[Tensor | None, ...] = (None, None, None)
        if d_nll is not None:
            problem, saved = _restored(ctx)
            needs = Needs(hidden, weight, bias)
            found = backward(d_nll, saved, *problem, needs)
            found = tuple(d if need else None for d, need in zip(found, needs, strict=False))
        return (*found, None, [None for _ in tree], *(None for _ in rest))

    forward.register_autograd(gradients, setup_context=setup_context)
    return forward


def _register_backward(backend: Backend[Any], name: str) -> Op:
    """Register `<name>_backward`, which returns an empty tensor for gradients not needed."""

    @torch.library.custom_op(
        f"{name}_backward",
        mutates_args=(),
        schema=f"(Tensor d_nll, Tensor[] saved, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    )
    def backward(d_nll: Tensor, saved: list[Tensor], *inputs: Any) -> tuple[Tensor, ...]:
        problem, needs = _unpack(inputs)
        kind = backend.saved_type(problem, needs)
        gradients = backend.backward(d_nll, problem, unflatten(kind, iter(saved)), needs)
        return tuple(d_nll.new_empty(0) if grad is None else grad for grad in gradients)

    @backward.register_fake
    def _(d_nll: Tensor, saved: list[Tensor], *inputs: Any) -> tuple[Tensor, ...]:
        (hidden, weight, bias, *_), needs = _unpack(inputs)
        of = zip((hidden, weight, bias), needs, strict=False)
        needed = [x if need else None for x, need in of]
        return tuple(d_nll.new_empty(0) if x is None else x.new_empty(x.shape) for x in needed)

    return backward


class _RowWiseNll(torch.autograd.Function):
    """The nll [P] whose backward gives weight and bias a `RowGradient`."""

    @staticmethod
    def forward(ctx: Any, backend: Backend[Any], needs: Needs, *problem: Any) -> Tensor:
        nll, saved = backend.forward(Problem(*problem), needs)
        ctx.backend = backend
        _save(ctx, *problem, saved=flatten(saved))
        return nll

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *d_nll: Tensor) -> tuple[Any, ...]:
        _, _, hidden, weight, bias, *rest = ctx.needs_input_grad
        needs = Needs(hidden, weight, bias, row_wise=True)
        problem, tensors = _restored(ctx)
        saved = unflatten(ctx.backend.saved_type(problem, needs), iter(tensors))
        gradients = ctx.backend.backward(*d_nll, problem, saved, needs)
        return (None, None, *gradients, *(None for _ in rest))


@not_compiled
def _row_wise_nll(backend: Backend[Any], problem: Problem, needs: Needs) -> Tensor:
    nll: Tensor = _RowWiseNll.apply(backend, needs, *problem)  # type: ignore[no-untyped-call]
    return nll


def _unpack(inputs: tuple[Any, ...]) -> tuple[Problem, Needs]:
    """The arguments of an op, whose tree and needs are lists."""
    problem, needs = Problem(*inputs[:-1]), Needs(*inputs[-1])
    return problem._replace(tree=TreeArrays(*problem.tree)), needs


def _save(ctx: Any, *problem: Any, saved: list[Tensor]) -> None:
    hidden, weight, bias, target, tree, *ctx.sizes = problem
    ctx.save_for_backward(hidden, weight, bias, target, *tree, *saved)


def _restored(ctx: Any) -> tuple[Problem, list[Tensor]]:
    hidden, weight, bias, target, *rest = ctx.saved_tensors
    num_arrays = len(TreeArrays._fields)
    tree = TreeArrays(*rest[:num_arrays])
    return Problem(hidden, weight, bias, target, tree, *ctx.sizes), rest[num_arrays:]
