"""The backend for CPUs: the loops of the reference backend over nodes, compiled by numba.

It computes what the reference backend computes, from the same equations, and saves the errors (4).
A visit costs no call of PyTorch, rows are read where they are, and they are still in the cache when
(5) follows (1). Work is divided among PyTorch's number of threads, forward by positions and
backward by rows; the results are the same bit for bit for any number.

This file says what the backend takes; `passes` has the forward and the backward, of the loops in
`loops`. The reference backend computes softmaxes with so many columns that errors are not saved
(such as most full softmaxes, which are one large product, best left to PyTorch) and shards.
"""

import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lm.output.backends import reference
from lm.output.backends.base import Gradients, Needs, Problem, Softmaxes, Tensors
from lm.output.backends.compiled.memory import Saved, new_saved, saves_errors
from lm.output.backends.verify import Failures, Kind, verified
from lm.output.tracing import constant_when_compiled

DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


class CompiledBackend(reference.ReferenceBackend):
    """`Backend` for CPUs with numba."""

    name = "compiled"
    automatic_on = frozenset({"cpu"})
    saved_types = (Saved, reference.Saved)

    def obstacle(self, problem: Problem, device: torch.device) -> str | None:
        """See `Backend.obstacle`."""
        if device.type != "cpu":
            return f"requires a CPU, got {device}"
        if not has_numba():
            return "requires numba: pip install numba"
        weight, bias = problem.weight, problem.bias
        if weight.stride(1) != 1:
            return f"requires rows without gaps, got strides {tuple(weight.stride())}"
        dtypes = {tensor.dtype for tensor in (problem.hidden, weight, bias) if tensor is not None}
        if not dtypes <= DTYPES:
            return f"does not support {next(iter(dtypes - DTYPES))}"
        return None

    def verified(self, problem: Problem, device: torch.device) -> bool:
        """See `lm.output.backends.verify`."""
        bias = problem.weight if problem.bias is None else problem.bias
        return self._verified(device, (problem.hidden.dtype, problem.weight.dtype, bias.dtype))

    @constant_when_compiled
    def _verified(
        self, device: torch.device, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    ) -> bool:
        return verified(self, device, Kind(*dtypes), failures)

    def saved_type(self, problem: Problem, needs: Needs) -> Any:
        """See `Backend.saved_type`."""
        return Saved if saves_errors(problem, needs) else reference.Saved

    def new_saved(self, problem: Problem, needs: Needs) -> Tensors:
        """See `Backend.new_saved`."""
        saves = self.saved_type(problem, needs) is Saved
        return new_saved(problem, needs) if saves else super().new_saved(problem, needs)

    def softmaxes(
        self, target: Tensor, problem: Problem, needs: Needs
    ) -> tuple[Softmaxes, Tensors]:
        """See `Solver.softmaxes`; `logit` holds the whole term, of which the others are 0."""
        if self.saved_type(problem, needs) is not Saved:
            return super().softmaxes(target, problem, needs)
        from lm.output.backends.compiled import passes

        log_prob, saved = passes.target_log_prob(target, problem, needs)
        zero = log_prob.new_zeros(1, 1)
        log_prob = torch.empty_like(log_prob).index_copy_(1, saved.position, log_prob)
        return Softmaxes(zero, zero, log_prob), saved

    def nll(
        self, target: Tensor, problem: Problem, needs: Needs
    ) -> tuple[Tensor, Tensor | None, Tensors]:
        """See `Solver.nll`; levels are added in their order."""
        if self.saved_type(problem, needs) is not Saved:
            return super().nll(target, problem, needs)
        from lm.output.backends.compiled import passes

        return passes.nll(target, problem, needs)

    def backward(
        self, d_nll: Tensor, problem: Problem, saved: Any, needs: Needs, lse: Tensor | None = None
    ) -> Gradients:
        """See `Solver.backward`."""
        if not isinstance(saved, Saved):
            return super().backward(d_nll, problem, saved, needs, lse)
        from lm.output.backends.compiled import passes

        return passes.backward(d_nll, problem, saved, needs)


def failures() -> Failures:
    """What compiling and running loops raises where it does not work."""
    from numba.core.errors import NumbaError

    return NumbaError, RuntimeError, OSError


@constant_when_compiled
def has_numba() -> bool:
    """Whether loops can be compiled."""
    return "numba" in sys.modules or find_spec("numba") is not None
