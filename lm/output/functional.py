"""The loss of the output layer as a function: its checks and the backend, which computes it."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.backends import BACKENDS, OPS, choose_backend
from lm.output.backends.autograd import (
    eager,
    eager_nll,
    recorded_nll,
    refuse_transforms,
    row_wise_nll,
)
from lm.output.backends.base import Needs, Problem
from lm.output.inputs import check_positions
from lm.output.tracing import is_for_onnx
from lm.output.tree.class_tree import ClassTree

BackendName = Literal["auto", "compiled", "reference", "triton"]
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
    a lower precision than `hidden`. Under autocast, `hidden` is cast to its dtype, as by
    `torch.nn.functional.linear`, and the others may have any precision: rows are cast when read.

    Args:
        hidden: [..., H] floating point, outputs of a backbone.
        weight: [R, W], W ≥ H, one row for each node but the root and for each word, numbered by
            `tree`. Hidden vectors count as followed by zeros; the gradient is 0 from column H on.
        target: [...] int64, words 0 … N - 1 or `ignore_index`.
        tree: the softmaxes; on the device of `hidden`.
        bias: [R] or None.
        reduction: "mean" over the positions that are not ignored (0 if all are), "sum", or "none".
        ignore_index: positions with this target cost nothing and get no gradient.
        backend: "reference" runs node by node, on any device; "compiled" in compiled loops over
            nodes, on a CPU with numba; "triton" in fused kernels, on CUDA. "auto" takes "triton" on
            CUDA and "compiled" on a CPU where it can, and else "reference", with a warning that
            says why: in fp64 on CUDA, for example.
        row_wise: whether the gradients of `weight` and `bias` are `RowGradient`s, of the rows of
            visited nodes alone, for the optimizers of `lm.output.rowwise`. Not within
            `torch.compile`. With "triton" they are factors, and the host waits for the number of
            rows only where these are formed in memory.

    Returns:
        A scalar, or [...] for "none", where ignored positions are 0; nats.

    Raises:
        ValueError: if shapes, dtypes, devices or options do not match.
        IndexError: if a target is neither a word nor `ignore_index`; with "triton" on CUDA this is
            a device-side assertion.
        RuntimeError: if it is differentiated twice, in forward mode, or by transforms of
            `torch.func`.

    Example:
        >>> import torch
        >>> tree = ClassTree.two_level([0, 0, 1, 1])
        >>> hidden, weight = torch.zeros(3, 5), torch.zeros(tree.num_rows, 5)
        >>> loss = hierarchical_cross_entropy(hidden, weight, torch.tensor([0, 3, 2]), tree)
        >>> print(f"{loss:.4f}")  # log 2 for the class and log 2 for the word
        1.3863
    """
    if is_for_onnx():
        ignored = target == ignore_index
        nll = -path_log_prob(hidden, weight, target.masked_fill(ignored, 0), tree, bias)
        nll = nll.masked_fill(ignored, 0)
        return reduced(nll, target, reduction, ignore_index)
    refuse_transforms(hidden, weight, bias)
    check_positions(hidden, target)
    problem = Problem.of(hidden, weight, tree, bias, ignore_index)
    needs = Needs.of(hidden, weight, bias, row_wise=row_wise)
    name = choose_backend(backend, problem, hidden.device)
    num_words = None
    if needs.row_wise:
        nll, num_words = row_wise_nll(BACKENDS[name], target.reshape(-1), needs, problem)
    elif eager(hidden, weight, target, bias):
        nll, num_words = eager_nll(BACKENDS[name], target.reshape(-1), needs, problem)
    else:
        nll = recorded_nll(OPS[name], target.reshape(-1), needs, problem)
    return reduced(nll.view(target.shape), target, reduction, ignore_index, num_words)


def path_log_prob(
    hidden: Tensor, weight: Tensor, word: Tensor, tree: ClassTree, bias: Tensor | None
) -> Tensor:
    """Log-probabilities of words [...] after hidden vectors [..., H], for exports to ONNX.

    By ordinary operations: a log-softmax of each node's rows, from the logits of all rows.
    """
    logits = F.linear(hidden, weight[:, : hidden.shape[-1]].to(hidden.dtype))
    logits = logits if bias is None else logits + bias.to(hidden.dtype)
    node = tree.arrays.node_of_row.expand(logits.shape)
    nodes = logits[..., :1].expand(*logits.shape[:-1], tree.num_nodes)
    largest = torch.full_like(nodes, -math.inf).scatter_reduce(-1, node, logits, "amax")
    shifted = logits - largest.gather(-1, node)
    total = torch.zeros_like(nodes).scatter_add(-1, node, shifted.exp())
    path = tree.rows_on_path(word)
    rows = path.clamp(min=0).flatten(hidden.dim() - 1)
    each = (shifted - total.log().gather(-1, node)).gather(-1, rows).view(path.shape)
    return each.where(path >= 0, 0).sum(-1)


def reduced(
    nll: Tensor,
    target: Tensor,
    reduction: Reduction,
    ignore_index: int,
    num_words: Tensor | None = None,
) -> Tensor:
    """The mean, the sum or all of nll [...], which is 0 where the target is ignored.

    The mean is over the targets that are not ignored, `num_words` if known; 0 if there is none.

    Raises:
        ValueError: if there is no such reduction.
    """
    if reduction == "none":
        return nll
    if reduction == "sum":
        return nll.sum()
    if reduction == "mean":
        count = target.ne(ignore_index).sum() if num_words is None else num_words
        return nll.sum().div(count.clamp_min(1))
    raise ValueError(f"reduction must be mean, sum or none, got {reduction!r}")
