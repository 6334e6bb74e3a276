"""What the forward saves for the backward, and for which problems it does."""

from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Needs, Problem, compute_dtype

ALIGN = 32
"""Hidden vectors are followed by zeros up to a multiple of so many numbers."""
SAVED_ELEMENTS = 1 << 26
"""Most errors saved: 256 MB in fp32; for row-wise gradients of classes, whose factors they are, as
many as there are."""
SAVED_ELEMENTS_OF_ONE_NODE = 1 << 20
"""Most errors saved of a tree of one node, the full softmax."""
FULL_SAVED_ELEMENTS = 1 << 28
"""Most errors saved of a full softmax whose products are of bf16 numbers: 1 GB, a third
of what PyTorch's `cross_entropy` of as many logits takes. It takes half to two thirds of the time
of computing logits again in PyTorch's products."""


class Saved(NamedTuple):
    """What the forward saves, by sorted position; without elements if it is not needed."""

    position: Tensor  # [P], node and child [D, P]: see `Visits`
    node: Tensor
    child: Tensor
    error: Tensor  # [P · max_path_columns], (4) of all visits, node by node; the rest undefined
    d_hidden_unscaled: Tensor  # [P, W], Σ W_nᵀ e_v of (5)
    hidden: Tensor  # [P, …], where they are read again


def saves_errors(problem: Problem, needs: Needs) -> bool:
    """Whether the loops compute, which save the errors of all visits, and not PyTorch."""
    if problem.depth > 1:
        return needs.row_wise or problem.num_columns <= SAVED_ELEMENTS
    is_bf16 = multiplies_bf16(problem)
    return problem.num_columns <= (FULL_SAVED_ELEMENTS if is_bf16 else SAVED_ELEMENTS_OF_ONE_NODE)


def new_saved(problem: Problem, needs: Needs) -> Saved:
    """Memory for what is saved."""
    num, depth, dtype = problem.num_positions, problem.depth, compute_dtype(problem.hidden.dtype)
    is_read = (needs.weight or needs.bias) and multiplies_bf16(problem)
    none = problem.hidden.new_empty(0, dtype=dtype)
    position, node, child = map(problem.target.new_empty, ((num,), (depth, num), (depth, num)))
    return Saved(
        position,
        node,
        child,
        error=none.new_empty(problem.num_columns if needs.any else 0),
        d_hidden_unscaled=none.new_empty(num if needs.hidden else 0, problem.weight.shape[1]),
        hidden=new_sorted(problem, torch.bfloat16) if is_read else none,
    )


def new_sorted(problem: Problem, dtype: torch.dtype) -> Tensor:
    """Memory for the hidden vectors of the sorted positions.

    [P, W up to a multiple of `ALIGN`], so that each begins a line of a cache.
    """
    size = -(-problem.weight.shape[1] // ALIGN) * ALIGN
    return problem.hidden.new_empty(problem.num_positions, size, dtype=dtype)


def multiplies_bf16(problem: Problem) -> bool:
    """Whether the processor multiplies bf16 numbers, and hidden vectors have them.

    Rows in fp32 are then rounded, as autocast rounds those of a linear layer.
    """
    if problem.hidden.dtype != torch.bfloat16:
        return False
    from lm.output.backends.compiled.codegen import vectors

    return vectors.HAS_BF16 and problem.weight.dtype in (torch.bfloat16, torch.float32)
