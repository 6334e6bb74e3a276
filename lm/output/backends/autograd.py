"""The nll of any backend as a differentiable function.

In eager mode it is a `torch.autograd.Function`, which has less host overhead than a registered
custom op. Within `torch.compile`, `torch.jit.trace` and dispatch modes, and for tensor subclasses,
it is a custom op, which takes a problem without shards as flat arguments and cannot return row-wise
gradients.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from lm.output.backends.base import Backend, Needs, Problem, Solver
from lm.output.inputs import compute_dtype
from lm.output.tracing import ONCE, differentiable_once, not_compiled
from lm.output.tree.arrays import TreeArrays

Op = Callable[..., Any]
"""A registered custom op: targets, a `Problem`'s fields, `Needs` → nll [P], the tensors saved."""
_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor[] tree, Tensor? bias, SymInt depth,"
    " SymInt max_path_columns, SymInt ignore_index, int[] needs"
)
_FIELDS = (*(name for name in Problem._fields if name != "shard"), "needs")
_NUM_ARRAYS = len(TreeArrays._fields)


def refuse_transforms(*inputs: object) -> None:
    """Raise a RuntimeError within `torch.func` transforms and for dual numbers.

    An op would silently drop their tangents.
    """
    if torch.compiler.is_compiling():
        return
    transformed = torch._C._functorch.maybe_current_level() is not None
    if not transformed and forward_ad._current_level >= 0:
        tensors = (each for each in inputs if isinstance(each, Tensor))
        duals = map(forward_ad.unpack_dual, tensors)
        transformed = any(dual.tangent is not None for dual in duals)
    if transformed:
        raise RuntimeError(
            "the loss of a tree does not support forward-mode differentiation or the transforms of"
            " torch.func (grad, vmap, …): use backward() or torch.autograd.grad"
        )


def register_op(backend: Backend) -> Op:
    """Register `sqrtlm::<name>_nll` for a backend, and `…_backward`, with their fake kernels.

    The backward returns an empty tensor for gradients that are not needed.
    """
    name = f"sqrtlm::{backend.name}_nll"

    @torch.library.custom_op(
        f"{name}_backward",
        mutates_args=(),
        schema=f"(Tensor d_nll, Tensor[] saved, int kind, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    )
    def backward(d_nll: Tensor, saved: list[Tensor], kind: int, *inputs: Any) -> tuple[Tensor, ...]:
        problem, needs = _unpack(inputs)
        gradients = backend.backward(d_nll, problem, backend.saved_types[kind](*saved), needs)
        return tuple(d_nll.new_empty(0) if grad is None else grad for grad in gradients)

    @backward.register_fake
    def _(d_nll: Tensor, saved: list[Tensor], kind: int, *inputs: Any) -> tuple[Tensor, ...]:
        problem, needs = _unpack(inputs)
        parameters = zip((problem.hidden, problem.weight, problem.bias), needs, strict=False)
        needed = [x if need else None for x, need in parameters]
        return tuple(d_nll.new_empty(0) if x is None else x.new_empty(x.shape) for x in needed)

    backward.register_autograd(_refuse)

    @torch.library.custom_op(
        name, mutates_args=(), schema=f"(Tensor target, {_INPUTS}) -> (Tensor nll, Tensor[] saved)"
    )
    def forward(target: Tensor, *inputs: Any) -> tuple[Tensor, list[Tensor]]:
        problem, needs = _unpack(inputs)
        nll, _, saved = backend.nll(target, problem, needs)
        return nll, [*saved] if needs.any else []

    @forward.register_fake
    def _(target: Tensor, *inputs: Any) -> tuple[Tensor, list[Tensor]]:
        problem, needs = _unpack(inputs)
        dtype = compute_dtype(problem.hidden.dtype)
        nll = problem.hidden.new_empty(problem.num_positions, dtype=dtype)
        return nll, [*backend.new_saved(problem, needs)] if needs.any else []

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        (_, hidden, weight, tree, bias, *ctx.sizes, ctx.saved_for), (_, saved) = inputs, output
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, *tree, *saved)
        ctx.kind = backend.saved_types.index(backend.saved_type(*_unpack(inputs[1:])))

    def gradients(ctx: Any, d_nll: Tensor | None, _: Any) -> tuple[Any, ...]:
        asked = dict(zip(_FIELDS, ctx.needs_input_grad[1:], strict=True))
        needs = Needs(asked["hidden"], asked["weight"], asked["bias"])
        found: dict[str, Any] = {"tree": [None] * _NUM_ARRAYS}
        if any(need > saved for need, saved in zip(needs, ctx.saved_for, strict=True)):
            raise RuntimeError("the loss was exported without gradients, under torch.no_grad()")
        if d_nll is not None:
            hidden, weight, bias, *others = ctx.saved_tensors
            arrays, saved = others[:_NUM_ARRAYS], others[_NUM_ARRAYS:]
            inputs = (hidden, weight, arrays, bias, *ctx.sizes, needs)
            each = zip(Needs._fields, backward(d_nll, saved, ctx.kind, *inputs), strict=False)
            found |= {name: gradient for name, gradient in each if asked[name]}
        return None, *map(found.get, _FIELDS)

    forward.register_autograd(gradients, setup_context=setup_context)
    return forward


def _refuse(ctx: Any, *upstream: Tensor) -> NoReturn:
    raise RuntimeError(ONCE)


def _unpack(inputs: tuple[Any, ...]) -> tuple[Problem, Needs]:
    """The arguments of an op, whose tree and needs are lists."""
    hidden, weight, tree, *rest, needs = inputs
    return Problem(hidden, weight, TreeArrays(*tree), *rest), Needs(*map(bool, needs))


class _EagerNll(torch.autograd.Function):
    """The nll [P] in eager mode, whose backward can give weight and bias a `RowGradient`.

    Also the number of targets that are not ignored, if the backend has counted them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # weight and bias too: those of the problem, for autograd
        weight: Tensor,
        bias: Tensor | None,
        backend: Solver,
        target: Tensor,
        needs: Needs,
        problem: Problem,
    ) -> tuple[Tensor, Tensor | None]:
        nll, num_words, saved = backend.nll(target, problem, needs)
        ctx.set_materialize_grads(False)  # that of the number would be a launch
        ctx.backend, ctx.row_wise, ctx.saved_type = backend, needs.row_wise, type(saved)
        ctx.sizes = problem.sizes()
        ctx.save_for_backward(hidden, weight, bias, *saved)
        if num_words is not None:
            ctx.mark_non_differentiable(num_words)
        return nll, num_words

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, d_nll: Tensor | None, _: Any) -> tuple[Any, ...]:
        if d_nll is None:  # as for a result that is not used
            return (None,) * len(ctx.needs_input_grad)
        of_hidden, of_weight, of_bias, *_ = ctx.needs_input_grad
        hidden, weight, bias, *saved = ctx.saved_tensors
        problem = ctx.sizes._replace(hidden=hidden, weight=weight, bias=bias)
        needs = Needs(of_hidden, of_weight, of_bias, ctx.row_wise)
        saved = tuple.__new__(ctx.saved_type, saved)
        return *ctx.backend.backward(d_nll, problem, saved, needs), None, None, None, None


def eager_nll(
    backend: Solver, target: Tensor, needs: Needs, problem: Problem
) -> tuple[Tensor, Tensor | None]:
    """The nll [P], and how many targets [P] are not ignored if the backend has counted them."""
    inputs = problem.hidden, problem.weight, problem.bias, backend, target, needs, problem
    found: tuple[Tensor, Tensor | None] = _EagerNll.apply(*inputs)  # type: ignore[no-untyped-call]
    return found


row_wise_nll = not_compiled(eager_nll)
"""`eager_nll`, kept out of `torch.compile`."""


def recorded_nll(op: Op, target: Tensor, needs: Needs, problem: Problem) -> Tensor:
    """The nll [P] of targets [P], by the custom op of a backend."""
    inputs = problem._asdict() | {"needs": needs}
    nll: Tensor
    nll, _ = op(target, *(inputs[name] for name in _FIELDS))
    return nll


def eager(*tensors: Tensor | None) -> bool:
    """Whether PyTorch itself executes the operations of these tensors as they are called."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    present = [tensor for tensor in tensors if tensor is not None]
    return {*map(type, present)} <= {Tensor, Parameter} and not present[0].is_meta
