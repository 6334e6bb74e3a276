"""The output layer as functions: their contract, checks, and the choice of a backend."""

from typing import Literal

import torch
from torch import Tensor

from lm.output.backends import BACKENDS, OPS, choose_backend
from lm.output.backends.autograd import differentiable_nll
from lm.output.backends.base import Needs, Problem
from lm.output.rowwise.eager import not_compiled
from lm.output.tree.class_tree import ClassTree

BackendName = Literal["auto", "reference", "triton"]
Reduction = Literal["mean", "sum", "none"]


def hierarchical_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    tree: ClassTree,
    bias: Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    backend: BackendName = "auto",
    row_wise: bool = False,
) -> Tensor:
    """Negative log-likelihood of words under a tree of softmaxes, for all positions at once.

    nll = - Σ over the nodes on the target's path of log softmax(W_node h + b_node)[child on the
    path]

    With `ClassTree.full(N)` it is `torch.nn.functional.cross_entropy(hidden @ weight.T + bias,
    target)`. Differentiable once, in `hidden`, `weight` and `bias`. Sums are formed in fp32 (fp64
    for fp64) for inputs of any dtype, and the result has that dtype. `weight` and `bias` may have
    a lower precision than `hidden`, under autocast also a higher one; the weight is never cast as
    a whole.

    Rows may be longer than hidden vectors, which then count as followed by zeros: further columns
    of the weight are multiplied by 0, and their gradient is 0. So rows of any H can begin at
    multiples of 16 bytes, which fused kernels read fastest, and the weight and its gradient remain
    contiguous.

    Args:
        hidden: [..., H] floating point, outputs of a backbone.
        weight: [R, W], W ≥ H, one row for each node but the root and for each word, numbered by
            `tree`.
        target: [...] int64, words 0 … N - 1 or `ignore_index`.
        tree: the softmaxes; on the device of `hidden`.
        bias: [R] or None.
        reduction: "mean" over the positions that are not ignored (0 if all are), "sum", or "none".
        ignore_index: positions with this target cost nothing and get no gradient.
        backend: "reference" runs node by node, on any device; "triton" in fused kernels, on CUDA;
            "auto" takes "triton" on CUDA, except for fp64 and for trees with paths so wide that
            the kernels would save more than `backends.triton.backend.MAX_SAVED_BYTES`, such as a
            full softmax of many words.
        row_wise: whether the gradients of `weight` and `bias` are `RowGradient`s, of the rows of
            visited nodes alone, for the optimizers of `lm.output.rowwise`. Not within
            `torch.compile`; on CUDA the host waits for the number of these rows.

    Returns:
        A scalar, or [...] for "none", where ignored positions are 0; nats.

    Raises:
        ValueError: if shapes, dtypes, devices or options do not match.
        IndexError: if a target is neither a word nor `ignore_index`; with "triton" on CUDA this is
            a device-side assertion.
        RuntimeError: if it is differentiated twice, or in forward mode.

    Example:
        >>> tree = ClassTree.two_level([0, 0, 1, 1])
        >>> hidden, weight = torch.zeros(3, 5), torch.zeros(tree.num_rows, 5)
        >>> loss = hierarchical_cross_entropy(hidden, weight, torch.tensor([0, 3, 2]), tree)
        >>> print(f"{loss:.4f}")  # log 2 for the class and log 2 for the word
        1.3863
    """
    _check(hidden, weight, target, tree, bias)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be mean, sum or none, got {reduction!r}")
    problem = Problem.of(hidden, weight, bias, target, tree, ignore_index)
    name = choose_backend(backend, problem, hidden.device)
    enabled = torch.is_grad_enabled()
    needs = Needs(
        hidden=enabled and hidden.requires_grad,
        weight=enabled and weight.requires_grad,
        bias=enabled and bias is not None and bias.requires_grad,
        row_wise=enabled and row_wise,
    )
    nll = differentiable_nll(BACKENDS[name], OPS[name], problem, needs)
    if reduction == "none":
        return nll.view(target.shape)
    if reduction == "sum":
        return nll.sum()
    return nll.sum() / (target != ignore_index).sum().clamp(min=1)


@not_compiled
@torch.no_grad()
def hierarchical_nll_by_level(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    tree: ClassTree,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    backend: BackendName = "auto",
) -> Tensor:
    """Negative log-likelihood [D, ...] of each softmax on the words' paths, without gradient.

    nll[d] = - log softmax(W_n h + b_n)[child on the path], n the node on level d of the path

    It is 0 for ignored positions and below the end of a path; the sum over levels is
    `hierarchical_cross_entropy` with reduction "none", whose arguments and errors these are.
    """
    _check(hidden, weight, target, tree, bias)
    problem = Problem.of(hidden, weight, bias, target, tree, ignore_index)
    name = choose_backend(backend, problem, hidden.device)
    return BACKENDS[name].nll_by_level(problem).view(tree.depth, *target.shape)


def _check(
    hidden: Tensor, weight: Tensor, target: Tensor, tree: ClassTree, bias: Tensor | None
) -> None:
    if hidden.dim() < 1 or hidden.shape[:-1] != target.shape:
        raise ValueError(
            "hidden must be [..., H] and target [...],"
            f" got {list(hidden.shape)} and {list(target.shape)}"
        )
    if target.dtype != torch.int64:
        raise ValueError(f"target must be int64, got {target.dtype}")
    check_parameters(hidden, weight, bias, tree)
    others = [weight] if bias is None else [weight, bias]
    higher = [t for t in others if torch.promote_types(t.dtype, hidden.dtype) != hidden.dtype]
    if higher and not torch.is_autocast_enabled(hidden.device.type):
        dtypes = ", ".join(str(tensor.dtype) for tensor in (hidden, *others))
        raise ValueError(
            "weight and bias must have the dtype of hidden or a lower precision outside of"
            f" autocast, got hidden, weight, bias: {dtypes}"
        )
    if target.device != hidden.device:
        raise ValueError(f"target must be on the device of hidden, {hidden.device}")


def check_parameters(hidden: Tensor, weight: Tensor, bias: Tensor | None, tree: ClassTree) -> None:
    """Raise a ValueError unless hidden [..., H], the parameters and the tree fit together."""
    if hidden.dim() < 1 or hidden.shape[-1] < 1 or not hidden.is_floating_point():
        raise ValueError(
            "hidden must be [..., H], H ≥ 1, floating point,"
            f" got {hidden.dtype} {list(hidden.shape)}"
        )
    num_rows, size = tree.num_rows, hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[0] != num_rows or weight.shape[1] < size:
        raise ValueError(
            f"weight must be [R, W] with R = {num_rows} and W ≥ H = {size},"
            f" got {list(weight.shape)}"
        )
    if bias is not None and list(bias.shape) != [num_rows]:
        raise ValueError(f"bias must be [R] = {[num_rows]}, got {list(bias.shape)}")
    parameters = [weight] if bias is None else [weight, bias]
    if not all(tensor.is_floating_point() for tensor in parameters):
        dtypes = ", ".join(str(tensor.dtype) for tensor in parameters)
        raise ValueError(f"weight and bias must be floating point, got {dtypes}")
    if any(tensor.device != hidden.device for tensor in (*parameters, tree.row_of_word)):
        raise ValueError(f"weight, bias and tree must be on the device of hidden, {hidden.device}")
