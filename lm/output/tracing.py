"""Functions outside of `torch.compile` and of traces, or differentiable only once."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
ONCE = "the loss of a tree is differentiable once: its gradient has no derivative (create_graph)"


def not_compiled(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """`torch.compiler.disable`, which imports the compiler, only where it is already imported."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        compiler = sys.modules.get("torch._dynamo")
        run: Callable[P, Tensor] = function if compiler is None else compiler.disable(function)
        return run(*args, **kwargs)

    return call


def is_recorded() -> bool:
    """Whether `torch.jit.trace` or `torch.export` records what is called."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch._C._get_tracing_state() is not None


def refuse_recording(what: str) -> None:
    """Raise a RuntimeError if a call is recorded: it evaluates other nodes for other inputs."""
    if is_recorded():
        raise RuntimeError(
            f"{what} cannot be traced or exported, because the nodes that it evaluates depend on"
            " its input: loss, forward and log_prob can"
        )


def constant_when_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.assume_constant_result` without importing the compiler.

    The function runs while its caller is traced; arguments and result are Python constants.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward raise where it would be differentiated, instead of giving constants."""

    @wraps(backward)
    def refusing(ctx: Any, *upstream: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(ONCE)
        return backward(ctx, *upstream)

    return refusing
