"""What the forward of the reference backend saves: three types, chosen by sizes alone.

The log-probabilities (2) of all visits are saved where they are few, as with classes. Where they
are many, as with the full softmax, only log-sum-exps are, and the backward computes the
probabilities again, one block of children after another: every position then needs every row, and
multiplying again what is in cache costs less than reading positions × N numbers from memory.

For row-wise gradients of classes the errors (4) are saved, however many: as factors of these
gradients they have fewer elements than the visited rows, which would replace them.
"""

from typing import NamedTuple

from torch import Tensor

from lm.output.backends.base import Problem, compute_dtype
from lm.output.backends.visits import Visits

SAVED_ELEMENTS = 1 << 26
"""Most log-probabilities saved: 256 MB in fp32."""
SAVED_ELEMENTS_OF_ONE_NODE = 1 << 20
"""The same for a tree of one node, the full softmax."""


class SavedLogProb(NamedTuple):
    """For dense gradients of nodes with few columns.

    Attributes:
        visits: of the targets.
        log_prob: [P · max_path_columns], (2) of all visits, node by node; 0 after the last.
    """

    visits: Visits
    log_prob: Tensor


class SavedErrors(NamedTuple):
    """For row-wise gradients as products.

    Attributes:
        visits: of the targets.
        error: [P · max_path_columns], (4) of all visits, node by node; undefined after the last.
        d_hidden_unscaled: [P, H], Σ W_nᵀ e_v of (5), by sorted position.
    """

    visits: Visits
    error: Tensor
    d_hidden_unscaled: Tensor


class SavedLse(NamedTuple):
    """For nodes with many columns.

    Attributes:
        visits: of the targets.
        lse: [D, P], (2) of each visit; 0 where there is none.
    """

    visits: Visits
    lse: Tensor


Saved = SavedLogProb | SavedErrors | SavedLse


def saved_type(problem: Problem, row_wise: bool) -> type[Saved]:
    """What the forward of a problem saves."""
    depth = problem.depth
    if row_wise and depth > 1:
        return SavedErrors
    limit = SAVED_ELEMENTS_OF_ONE_NODE if depth == 1 else SAVED_ELEMENTS
    if problem.num_positions * problem.max_path_columns > limit:
        return SavedLse
    return SavedErrors if row_wise else SavedLogProb


def new_saved(problem: Problem, visits: Visits, row_wise: bool) -> Saved:
    """Uninitialised memory for what the forward of a problem saves, around its visits."""
    hidden, kind = problem.hidden, saved_type(problem, row_wise)
    dtype = compute_dtype(hidden.dtype)
    if kind is SavedLse:
        return SavedLse(visits, hidden.new_empty(visits.node.shape, dtype=dtype))
    size = problem.num_positions * problem.max_path_columns
    columns = hidden.new_empty(size, dtype=dtype)
    if kind is SavedLogProb:
        return SavedLogProb(visits, columns)
    return SavedErrors(visits, columns, hidden.new_empty(hidden.shape, dtype=dtype))
