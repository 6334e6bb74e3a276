"""Functions outside of `torch.compile` and of traces, or differentiable only once."""

import builtins
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
_REPLACED = ((builtins, "max", max), (builtins, "min", min), (math, "pow", math.pow))
"""Functions of Python that `torch.export` replaces while it traces."""
_NO_GRAPH = "it cannot be a part of one graph: compile without fullgraph=True"
ONCE = "the loss of a tree is differentiable once: its gradient has no derivative (create_graph)"


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, which imports the compiler, only where it is already imported."""
    disabled: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        compiler = sys.modules.get("torch._dynamo")
        if compiler is None:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(compiler.disable(function))
        return disabled[0](*args, **kwargs)

    vars(call).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_NO_GRAPH)
    return call


def is_recorded() -> bool:
    """Whether `torch.jit.trace` or `torch.export` records what is called."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch._C._get_tracing_state() is not None


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph captures what is done on a device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_for_onnx() -> bool:
    """Whether `torch.onnx.export` records what is called."""
    return "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


def refuse_recording(what: str) -> None:
    """Raise a RuntimeError if a call is recorded: it evaluates other nodes for other inputs."""
    if is_recorded():
        raise RuntimeError(
            f"{what} cannot be traced or exported, because the nodes that it evaluates depend on"
            " its input: loss, forward, log_prob and candidate_log_prob can"
        )


def constant_when_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.assume_constant_result` without importing the compiler.

    The function runs while its caller is traced; arguments and result are Python constants.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


@contextmanager
def without_replaced_functions() -> Iterator[None]:
    """Python's own functions while a model is exported: numba knows no others."""
    found = [getattr(module, name) for module, name, _ in _REPLACED]
    for module, name, function in _REPLACED:
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name, _), function in zip(_REPLACED, found, strict=True):
            setattr(module, name, function)


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward raise where it would be differentiated, instead of giving constants."""

    @wraps(backward)
    def refusing(ctx: Any, *upstream: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(ONCE)
        return backward(ctx, *upstream)

    return refusing
