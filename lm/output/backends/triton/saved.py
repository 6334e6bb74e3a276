"""What the forward of the fused kernels saves for the backward."""

from typing import NamedTuple

from torch import Tensor

from lm.output.backends.base import Needs, Problem, compute_dtype
from lm.output.backends.triton.launch import tiles_for
from lm.output.backends.triton.schedule import Schedule, blocks_per_path
from lm.output.backends.visits import Visits


class Saved(NamedTuple):
    """The batch, and the results of equations (7) and (8) of `forward_kernel`.

    Attributes:
        visits: of the targets.
        schedule: of the visits.
        exp_logits: [P, blocks, block_c] in the dtype of hidden, k of every visit's blocks; no
            blocks if there is no backward.
        block_max: [P, blocks], m; likewise.
        lse: [D, P], log-sum-exp of every visit; undefined where there is none.
        target_logit: [D, P], logit of every visit's target; likewise.
    """

    visits: Visits
    schedule: Schedule
    exp_logits: Tensor
    block_max: Tensor
    lse: Tensor
    target_logit: Tensor


def new_saved(problem: Problem, visits: Visits, plan: Schedule, needs: Needs) -> Saved:
    """Uninitialised memory for what the forward saves, around its visits and their schedule."""
    hidden, num_positions = problem.hidden, problem.num_positions
    by_level = visits.node.shape
    dtype, block_c = compute_dtype(hidden.dtype), tiles_for(problem).block_c
    blocks = blocks_per_path(problem.max_path_columns, problem.depth, block_c) if needs.any else 0
    return Saved(
        visits,
        plan,
        hidden.new_empty(num_positions, blocks, block_c),
        hidden.new_empty(num_positions, blocks, dtype=dtype),
        hidden.new_empty(by_level, dtype=dtype),
        hidden.new_empty(by_level, dtype=dtype),
    )
