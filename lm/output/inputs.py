"""What a tree's softmax accepts, and the dtypes and lengths of its vectors."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.tree.arrays import TreeArrays
from lm.output.tree.class_tree import ClassTree


def check_tensors(**values: object) -> None:
    """Raise a ValueError that names a value which is no tensor, if there is one."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")


def check_positions(hidden: Tensor, target: Tensor) -> None:
    """Raise a ValueError unless hidden [..., H] and target [...] int64 belong together."""
    check_tensors(hidden=hidden, target=target)
    if hidden.dim() < 1 or hidden.shape[:-1] != target.shape:
        raise ValueError(
            "hidden must be [..., H] and target [...],"
            f" got {list(hidden.shape)} and {list(target.shape)}"
        )
    if target.dtype != torch.int64:
        raise ValueError(f"target must be int64, got {target.dtype}")
    if target.device != hidden.device:
        raise ValueError(f"target must be on the device of hidden, {hidden.device}")


def check_words(name: str, word: Tensor, vocab_size: int, ignore_index: int = 0) -> None:
    """Wait for the device; raise an IndexError if one is neither a word nor `ignore_index`."""
    wrong = ((word < 0) | (word >= vocab_size)) & (word != ignore_index)
    if bool(wrong.any()):
        raise IndexError(f"{name} {int(word[wrong][0])} is out of bounds for {vocab_size} words")


def check_whole(weight: Tensor) -> None:
    """Raise a ValueError for a part of a table, as in methods of a layer after `fully_shard`."""
    if hasattr(weight, "full_tensor"):
        raise ValueError(
            "weight is a DTensor: after fully_shard(layer), call the layer itself, or first"
            " torch.distributed.fsdp.register_fsdp_forward_method(layer, NAME) for a method"
        )


def check_parameters(
    hidden: Tensor, weight: Tensor, tree: ClassTree, bias: Tensor | None
) -> TreeArrays:
    """The arrays of the tree.

    Raises:
        ValueError: unless hidden [..., H], the parameters and the tree fit together.
    """
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
    check_whole(weight)
    parameters = [weight] if bias is None else [weight, bias]
    if not all(tensor.is_floating_point() for tensor in parameters):
        dtypes = ", ".join(str(tensor.dtype) for tensor in parameters)
        raise ValueError(f"weight and bias must be floating point, got {dtypes}")
    arrays = tree.arrays
    others = parameters if hidden.is_meta else [*parameters, arrays.row_of_word]
    if any(tensor.device != hidden.device for tensor in others):
        raise ValueError(f"weight, bias and tree must be on the device of hidden, {hidden.device}")
    return arrays


def autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Hidden vectors in the dtype of autocast if it is enabled, as `F.linear` casts them.

    Raises:
        ValueError: if it is not, and a parameter has a higher precision than `hidden`.
    """
    others = [weight] if bias is None else [weight, bias]
    if not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type):
        if hidden.dtype != torch.float64:
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    elif any(torch.promote_types(t.dtype, hidden.dtype) != hidden.dtype for t in others):
        dtypes = ", ".join(str(tensor.dtype) for tensor in (hidden, *others))
        raise ValueError(
            "weight and bias must have the dtype of hidden or a lower precision outside of"
            f" autocast, got hidden, weight, bias: {dtypes}: convert hidden, as by hidden.float()"
        )
    return hidden


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are formed in: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def followed_by_zeros(vectors: Tensor, size: int) -> Tensor:
    """Vectors [..., H] as [..., size], with zeros from H on; themselves if that is their size."""
    missing = size - vectors.shape[-1]
    return F.pad(vectors, (0, missing)) if missing else vectors
