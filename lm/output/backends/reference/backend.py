"""The reference backend, the definition of correct: node by node over views of the weight.

With visits v = (position p, node n), rows W_n and biases b_n of the node's children, and y_v the
child on the target's path:

    z_v = W_n h_p + b_n                            (1)
    log q_v = z_v - lse_v,  lse_v = log Σ exp z_v  (2)
    nll_p = - Σ_{v of p} log q_v[y_v]              (3)
    e_v = q_v - onehot(y_v)                        (4)
    d h_p = d nll_p · Σ_{v of p} W_nᵀ e_v          (5)
    d W_n = Σ_{v of n} e_v (d nll_p h_p)ᵀ,   d b_n = Σ_{v of n} d nll_p e_v   (6)

Each node is one small matrix product, so a position costs O(H · columns on its path). No weight is
copied, and each row's gradient is complete when it is written, once.
"""

import torch
from torch import Tensor

from lm.output.backends.base import Gradients, Needs, Problem
from lm.output.backends.reference.backward import Batch, dense_gradients, row_wise_gradients
from lm.output.backends.reference.forward import Saved, new_saved, saved_type, target_log_prob
from lm.output.backends.visits import Visits


class ReferenceBackend:
    """`Backend` for any device and dtype."""

    name = "reference"
    automatic_on: frozenset[str] | None = None

    def obstacle(self, problem: Problem, device: torch.device) -> str | None:
        """None: it solves every problem."""
        return None

    def verified(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Always: the reference is the definition."""
        return True

    def forward(self, problem: Problem, needs: Needs) -> tuple[Tensor, Saved]:
        """See `Backend.forward`."""
        log_prob, saved = target_log_prob(problem, needs.row_wise)
        total = log_prob.new_zeros(problem.num_positions)
        for level in log_prob:
            total += level
        return saved.visits.unsorted(total.neg_()), saved

    def backward(self, d_nll: Tensor, problem: Problem, saved: Saved, needs: Needs) -> Gradients:
        """See `Backend.backward`."""
        batch = Batch.of(d_nll, problem, saved)
        gradients = row_wise_gradients if needs.row_wise else dense_gradients
        with torch.autocast(d_nll.device.type, enabled=False):
            return gradients(batch, needs)

    def nll_by_level(self, problem: Problem) -> Tensor:
        """See `Backend.nll_by_level`."""
        log_prob, saved = target_log_prob(problem, row_wise=False)
        return saved.visits.unsorted(0 - log_prob, dim=1)

    def saved_type(self, problem: Problem, needs: Needs) -> type[Saved]:
        """See `Backend.saved_type`."""
        return saved_type(problem, needs.row_wise)

    def new_saved(self, problem: Problem, needs: Needs) -> Saved:
        """See `Backend.new_saved`."""
        visits = Visits.empty(problem.target, problem.depth)
        return new_saved(problem, visits, needs.row_wise)
