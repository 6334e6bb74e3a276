"""hierarchical_cross_entropy: the contract of the output layer, its custom op, and the choice of
backend.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from lm.output.backends.reference import backend as reference
from lm.output.backends.triton import backend as fused
from lm.output.backends.visits import Schedule, Visits, route, schedule, schedule_sizes
from lm.output.rowwise.row_gradient import differentiable_once, not_compiled
from lm.output.tree.class_tree import ClassTree, TreeArrays

Backend = Literal["auto", "reference", "triton"]
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
    backend: Backend = "auto",
    sparse: bool = False,
) -> Tensor:
    """Negative log-likelihood of words under a tree of softmaxes, for all positions at once.

    nll = - Σ over the nodes on the target's path of log softmax(W_node h + b_node)[child on the
    path]

    With `ClassTree.full(N)` it is `torch.nn.functional.cross_entropy(hidden @ weight.T + bias,
    target)`. Differentiable once, in `hidden`, `weight` and `bias`. Sums are formed in fp32 (fp64
    for fp64) whatever the inputs, and so is the result. `weight` and `bias` may be kept in less
    precision than `hidden`, under autocast in more; no weight is cast as a whole.

    Args:
        hidden: [..., H] floating point, outputs of a backbone.
        weight: [R, H], one row for each node but the root and for each word, as `tree` numbers
            them.
        target: [...] int64, words 0 … N - 1 or `ignore_index`.
        tree: the softmaxes; on the same device.
        bias: [R] or None.
        reduction: "mean" over the positions that are not ignored (0 if all are), "sum", or "none".
        ignore_index: positions with this target cost nothing and get no gradient.
        backend: "reference" runs node by node, on any device; "triton" in fused kernels, on CUDA;
            "auto" takes "triton" on CUDA, but for fp64 and for trees whose paths are so wide that
            the kernels' memory would be no matter of √N any more (`fused.KEPT_BYTES`), such as a
            full softmax of many words.
        sparse: `weight` and `bias` get a `RowGradient`, of the rows of visited nodes alone, for the
            optimizers of `lm.output.rowwise`; not within `torch.compile`, and on CUDA the host
            waits for the number of these rows.

    Returns:
        nats: a scalar, or [...] for "none", where ignored positions hold 0.

    Raises:
        ValueError: if shapes, dtypes, devices or options do not fit together.
        IndexError: if a target is neither a word nor `ignore_index`; "triton" does not wait to see
            it on CUDA: there it is a device-side assertion.
    """
    _check(hidden, weight, target, tree, bias, reduction, backend)
    flat, size = hidden.reshape(-1, hidden.shape[-1]), (tree.depth, tree.max_path_columns)
    chosen = _choose(backend, flat, weight, tree)
    nll: Tensor
    if sparse and torch.is_grad_enabled():
        nll = _sparse_nll(flat, weight, bias, target.reshape(-1), tree, ignore_index, chosen)
    elif chosen == "triton":
        keep = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
        )
        nll, *_ = fused_nll(
            flat, weight, bias, target.reshape(-1), list(tree.arrays), *size, ignore_index, keep
        )
    else:
        nll, *_ = hierarchical_nll(
            flat, weight, bias, target.reshape(-1), list(tree.arrays), *size, ignore_index
        )
    if reduction == "none":
        return nll.view(target.shape)
    if reduction == "sum":
        return nll.sum()
    return nll.sum() / (target != ignore_index).sum().clamp(min=1)


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    tree: ClassTree,
    bias: Tensor | None,
    reduction: str,
    backend: str,
) -> None:
    if hidden.dim() < 1 or hidden.shape[:-1] != target.shape:
        raise ValueError(
            "hidden must be [..., H] and target [...],"
            f" got {list(hidden.shape)} and {list(target.shape)}"
        )
    if weight.shape != (tree.num_rows, hidden.shape[-1]):
        expected = [tree.num_rows, hidden.shape[-1]]
        raise ValueError(f"weight must be [R, H] = {expected}, got {list(weight.shape)}")
    if bias is not None and bias.shape != (tree.num_rows,):
        raise ValueError(f"bias must be [R] = [{tree.num_rows}], got {list(bias.shape)}")
    if target.dtype != torch.int64:
        raise ValueError(f"target must be int64, got {target.dtype}")
    if not hidden.is_floating_point():
        raise ValueError(f"hidden must be floating point, got {hidden.dtype}")
    others = [weight] if bias is None else [weight, bias]
    autocast = torch.is_autocast_enabled(hidden.device.type)
    finer = [t for t in others if torch.promote_types(t.dtype, hidden.dtype) != hidden.dtype]
    if not autocast and finer:
        dtypes = ", ".join(str(tensor.dtype) for tensor in (hidden, *others))
        raise ValueError(
            "weight and bias must have the dtype of hidden or less precision outside of autocast,"
            f" got hidden, weight, bias: {dtypes}"
        )
    if any(tensor.device != hidden.device for tensor in (*others, target, tree.row_of_word)):
        raise ValueError(
            f"weight, bias, target and tree must be on the device of hidden, {hidden.device}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be mean, sum or none, got {reduction!r}")
    if backend not in ("auto", "reference", "triton"):
        raise ValueError(f"backend must be auto, reference or triton, got {backend!r}")


def _choose(backend: Backend, hidden: Tensor, weight: Tensor, tree: ClassTree) -> Backend:
    """The backend that "auto" stands for, or the one asked for if it can be had."""
    if backend == "reference" or (backend == "auto" and not hidden.is_cuda):
        return "reference"
    obstacle = fused.obstacle(hidden, weight, tree.max_path_columns, tree.depth)
    if backend == "triton" and obstacle:
        raise ValueError(f"backend triton {obstacle}")
    return "reference" if obstacle else "triton"


def _check_targets(target: Tensor, vocab_size: int, ignore_index: int) -> None:
    wrong = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    if bool(wrong.any()):
        raise IndexError(f"target {int(target[wrong][0])} is out of bounds for {vocab_size} words")


def _assert_targets(target: Tensor, vocab_size: int, ignore_index: int) -> Tensor:
    """The targets, asserted on their device without waiting; wrong ones stay within the tables."""
    good = ((target >= 0) & (target < vocab_size)) | (target == ignore_index)
    torch._assert_async(good.all(), "a target is neither a word nor ignore_index")
    return torch.where(good, target, ignore_index)


@torch.library.custom_op("sqrtlm::hierarchical_nll", mutates_args=())
def hierarchical_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    tree: list[Tensor],
    depth: int,
    max_path_columns: int,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """nll [P]; what the backward needs of the forward (`reference.saved_size`); the four of
    `Visits`.

    `hierarchical_cross_entropy` documents the arguments; `tree` are its arrays.
    """
    arrays = TreeArrays(*tree)
    visits, saved = _laid_out(hidden, target, arrays, depth, max_path_columns, ignore_index)
    nll = reference.forward(hidden, weight, bias, visits, arrays, saved)
    return nll, saved, *visits


def _laid_out(
    hidden: Tensor,
    target: Tensor,
    tree: TreeArrays,
    depth: int,
    max_path_columns: int,
    ignore_index: int,
    *,
    sparse: bool = False,
) -> tuple[Visits, Tensor]:
    """The visits, and memory for what the reference's backward needs of its forward."""
    _check_targets(target, tree.row_of_word.numel(), ignore_index)
    visits = route(target, tree, depth, ignore_index)
    size = reference.saved_size(hidden.shape[0], max_path_columns, depth, sparse=sparse)
    return visits, hidden.new_empty(size, dtype=reference.compute_dtype(hidden.dtype))


@hierarchical_nll.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    tree: list[Tensor],
    depth: int,
    max_path_columns: int,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_positions, dtype = hidden.shape[0], reference.compute_dtype(hidden.dtype)
    size = reference.saved_size(num_positions, max_path_columns, depth)
    return (
        hidden.new_empty(num_positions, dtype=dtype),
        hidden.new_empty(size, dtype=dtype),
        target.new_empty(num_positions),
        target.new_empty(num_positions),
        target.new_empty(depth, num_positions),
        target.new_empty(depth, num_positions),
    )


@torch.library.custom_op("sqrtlm::fused_nll", mutates_args=())
def fused_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    tree: list[Tensor],
    depth: int,
    max_path_columns: int,
    ignore_index: int,
    keep: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """nll [P]; the four each of `fused.State`, for a backward if `keep`, of `Visits` and of
    `Schedule`.
    """
    arrays = TreeArrays(*tree)
    num_words = arrays.row_of_word.numel()
    if target.is_cuda:
        target = _assert_targets(target, num_words, ignore_index)
    else:
        _check_targets(target, num_words, ignore_index)
    visits = route(target, arrays, depth, ignore_index)
    plan = schedule(visits, arrays)
    hidden, bias = hidden.contiguous(), None if bias is None else bias.contiguous()
    nll, state = fused.forward(hidden, weight, bias, visits, plan, arrays, max_path_columns, keep)
    return nll, *state, *visits, *plan


@fused_nll.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    tree: list[Tensor],
    depth: int,
    max_path_columns: int,
    ignore_index: int,
    keep: bool,
) -> tuple[Tensor, ...]:
    num_positions = hidden.shape[0]
    state = fused.new_state(hidden, weight, depth, max_path_columns, keep)
    flat, table = (num_positions,), (depth, num_positions)
    groups, heavy = schedule_sizes(num_positions, tree[0].shape[0], depth)
    shapes = (flat, flat, table, table, table, flat, (groups,), (heavy,))
    nll = hidden.new_empty(num_positions, dtype=state.lse.dtype)
    return nll, *state, *(target.new_empty(shape) for shape in shapes)


@torch.library.custom_op("sqrtlm::hierarchical_nll_backward", mutates_args=())
def hierarchical_nll_backward(
    d_nll: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    left: list[Tensor],
    tree: list[Tensor],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """d_hidden [P, H], d_weight [R, H] and d_bias [R]; an empty tensor for each that `needs` does
    not ask for.

    Args:
        left: what `hierarchical_nll` or `fused_nll` returned besides nll.
    """
    arrays, inputs = TreeArrays(*tree), (d_nll, hidden, weight, bias)
    grads: tuple[Tensor | None, ...]
    if len(left) == 1 + len(Visits._fields):
        grads = reference.backward(*inputs, Visits(*left[1:]), arrays, left[0], needs)
    else:
        state, visits, plan = fused.State(*left[:4]), Visits(*left[4:8]), Schedule(*left[8:])
        grads = fused.backward(
            d_nll, hidden.contiguous(), weight, bias, visits, plan, arrays, state, needs
        )
    d_hidden, d_weight, d_bias = (hidden.new_empty(0) if grad is None else grad for grad in grads)
    return d_hidden, d_weight, d_bias


@hierarchical_nll_backward.register_fake
def _(
    d_nll: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    left: list[Tensor],
    tree: list[Tensor],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    d_hidden, d_weight, d_bias = (
        tensor.new_empty(tensor.shape) if tensor is not None and needed else hidden.new_empty(0)
        for tensor, needed in zip((hidden, weight, bias), needs, strict=True)
    )
    return d_hidden, d_weight, d_bias


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, _, tree, *rest = inputs
    ctx.num_rest = len(rest)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, *tree, *output[1:])


def _backward(ctx: Any, d_nll: Tensor | None, *_: None) -> tuple[Any, ...]:
    num_arrays = len(TreeArrays._fields)
    rest = (None, [None] * num_arrays, *(None,) * ctx.num_rest)
    if d_nll is None:
        return (None, None, None, *rest)
    needs = list(ctx.needs_input_grad[:3])
    hidden, weight, bias, *saved = ctx.saved_tensors
    grads = hierarchical_nll_backward(
        d_nll, hidden, weight, bias, saved[num_arrays:], saved[:num_arrays], needs
    )
    wanted = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return (*wanted, *rest)


hierarchical_nll.register_autograd(_backward, setup_context=_save_for_backward)
fused_nll.register_autograd(_backward, setup_context=_save_for_backward)


class _SparseNll(torch.autograd.Function):
    """nll [P] whose backward leaves a `RowGradient` to weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        tree: ClassTree,
        ignore_index: int,
        backend: Backend,
    ) -> Tensor:
        ctx.tree, ctx.backend = tree, backend
        size = (tree.depth, tree.max_path_columns)
        nll: Tensor
        if backend == "triton":
            arrays = list(tree.arrays)
            nll, *left = fused_nll(hidden, weight, bias, target, arrays, *size, ignore_index, True)
        else:
            arguments = (hidden, target, tree.arrays, *size, ignore_index)
            visits, saved = _laid_out(*arguments, sparse=True)
            pulled = torch.zeros_like(hidden, dtype=saved.dtype)
            nll = reference.forward(hidden, weight, bias, visits, tree.arrays, saved, pulled)
            left = [saved, pulled, *visits]
        ctx.save_for_backward(hidden, weight, bias, *left)
        return nll

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *d_nll: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, *left = ctx.saved_tensors
        inputs, needs = (d_nll[0], hidden, weight, bias), list(ctx.needs_input_grad[:3])
        arrays = ctx.tree.arrays
        grads: tuple[Tensor | None, ...]
        if ctx.backend != "triton":
            saved, pulled, *visits = left
            grads = reference.sparse_backward(
                *inputs, Visits(*visits), arrays, saved, pulled, needs
            )
        else:
            inputs = (d_nll[0], hidden.contiguous(), weight, bias)
            batch = Visits(*left[4:8]), Schedule(*left[8:]), arrays, fused.State(*left[:4])
            grads = fused.sparse_backward(*inputs, *batch, needs)
        return (*grads, None, None, None, None)


@not_compiled
def _sparse_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    tree: ClassTree,
    ignore_index: int,
    backend: Backend,
) -> Tensor:
    args = (hidden, weight, bias, target, tree, ignore_index, backend)
    nll: Tensor = _SparseNll.apply(*args)  # type: ignore[no-untyped-call]
    return nll
