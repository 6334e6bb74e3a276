"""The backends of the output layer: their registry, and the choice among them."""

import warnings

import torch

from lm.output.backends.autograd import Op, register_op
from lm.output.backends.base import Backend, Needs, Problem
from lm.output.backends.compiled.backend import CompiledBackend
from lm.output.backends.reference import ReferenceBackend
from lm.output.backends.triton.backend import TritonBackend
from lm.output.tracing import constant_when_compiled

BACKENDS: dict[str, Backend] = {
    "triton": TritonBackend(),
    "compiled": CompiledBackend(),
    "reference": ReferenceBackend(),
}
"""By name; "auto" chooses the first that is made for a device and can solve a problem there."""
OPS: dict[str, Op] = {name: register_op(backend) for name, backend in BACKENDS.items()}
"""The custom op `sqrtlm::<name>_nll` of each backend."""


def check_backend(requested: str) -> None:
    """Raise a ValueError unless it is "auto" or the name of a backend."""
    if requested != "auto" and requested not in BACKENDS:
        names = ", ".join(sorted(BACKENDS))
        raise ValueError(f"backend must be auto or one of {names}, got {requested!r}")


def choose_backend(
    requested: str, problem: Problem, device: torch.device, *, verify: bool = True
) -> str:
    """The name of the backend that solves a problem, by its sizes, dtypes and strides, on a device.

    A warning says why "auto" cannot choose a backend that is made for the device. Without `verify`,
    its code is taken to be right, and is not compiled.

    Raises:
        ValueError: if the requested backend cannot solve the problem, or there is no such backend.
    """
    check_backend(requested)
    if requested != "auto":
        obstacle = BACKENDS[requested].obstacle(problem, device)
        if obstacle is not None:
            raise ValueError(f"backend {requested} {obstacle}")
        return requested
    for name, backend in BACKENDS.items():
        if device.type in backend.automatic_on:
            obstacle = backend.obstacle(problem, device)
            if obstacle is not None:
                _warn(f"the output layer computes slowly on {device}: backend {name} {obstacle}")
            elif not verify or backend.verified(problem, device):
                return name
    return "reference"


@constant_when_compiled
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def saved_bytes(backend_name: str, problem: Problem, *, row_wise: bool) -> int:
    """Memory that a backend's forward saves for its backward, in bytes; from sizes alone."""
    needs = Needs(hidden=True, weight=True, bias=True, row_wise=row_wise)
    backend = BACKENDS[backend_name]
    size = backend.part_size(problem)
    part = problem._replace(hidden=problem.hidden[:size])
    return sum(tensor.nbytes for tensor in backend.new_saved(part, needs))
