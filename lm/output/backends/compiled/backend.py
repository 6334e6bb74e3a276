"""The backend for CPUs: the loops of the reference backend over nodes, compiled by numba.

It computes what the reference backend computes, from the same equations, and saves the errors (4).
A visit costs no call of PyTorch, rows are read where they are, and they are still in the cache when
(5) follows (1). Work is divided among PyTorch's number of threads, forward by positions and
backward by rows; the results are the same bit for bit for any number.

This file says what the backend takes; `step` has the forward and the backward, of the loops in
`loops`. The reference backend computes softmaxes with so many columns that errors are not saved
(such as most full softmaxes, which are one large product, best left to PyTorch) and shards.
"""

import sys
from importlib.util import find_spec

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem
from lm.output.backends.compiled.memory import Saved, new_saved, saves_errors
from lm.output.backends.reference import ReferenceBackend
from lm.output.backends.verify import Failures, Kind, verified
from lm.output.tracing import constant_when_compiled

DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


class CompiledBackend:
    """`Backend` for CPUs with numba."""

    name = "compiled"
    automatic_on: frozenset[str] = frozenset({"cpu"})
    _reference = ReferenceBackend()

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

    def part_size(self, problem: Problem) -> int:
        """All of them."""
        return problem.num_positions

    def num_words(self, saved: list[Tensor]) -> Tensor | None:
        """See `Backend.num_words`."""
        return None

    def new_saved(self, problem: Problem, needs: Needs) -> list[Tensor]:
        """See `Backend.new_saved`."""
        if not needs.any:
            return []
        if not saves_errors(problem, needs):
            return self._reference.new_saved(problem, needs)
        return list(new_saved(problem, needs))

    def forward(self, problem: Problem, needs: Needs) -> tuple[Tensor, list[Tensor]]:
        """See `Backend.forward`."""
        if saves_errors(problem, needs):
            from lm.output.backends.compiled import step

            nll, saved = step.forward(problem, needs)
        else:
            nll, saved = self._reference.forward(problem, needs)
        return nll, saved if needs.any else []

    def backward(
        self, d_nll: Tensor, problem: Problem, saved: list[Tensor], needs: Needs
    ) -> Gradients:
        """See `Backend.backward`."""
        if not saves_errors(problem, needs):
            return self._reference.backward(d_nll, problem, saved, needs)
        from lm.output.backends.compiled import step

        return step.backward(d_nll, problem, Saved(*saved), needs)

    def nll_by_level(self, problem: Problem) -> Tensor:
        """See `Backend.nll_by_level`."""
        needs = Needs(hidden=False, weight=False, bias=False)
        if not saves_errors(problem, needs):
            return self._reference.nll_by_level(problem)
        from lm.output.backends.compiled import step

        log_prob, saved = step.target_log_prob(problem, needs)
        return torch.empty_like(log_prob).index_copy_(1, saved.position, 0 - log_prob)

    def partial(self, problem: Problem, needs: Needs) -> tuple[Tensor, Tensor, list[Tensor]]:
        """See `Backend.partial`; by the reference."""
        return self._reference.partial(problem, needs)

    def partial_backward(
        self, d_nll: Tensor, lse: Tensor, problem: Problem, saved: list[Tensor], needs: Needs
    ) -> Gradients:
        """See `Backend.partial_backward`; by the reference."""
        return self._reference.partial_backward(d_nll, lse, problem, saved, needs)


def failures() -> Failures:
    """What compiling and running loops raises where it does not work."""
    from numba.core.errors import NumbaError

    return NumbaError, RuntimeError, OSError


@constant_when_compiled
def has_numba() -> bool:
    """Whether loops can be compiled."""
    return "numba" in sys.modules or find_spec("numba") is not None
