"""Implementations of the output layer."""

import torch

from lm.output.backends.reference import backend as reference
from lm.output.backends.triton import backend as fused
from lm.output.tree.class_tree import ClassTree


def saved_bytes(
    backend_name: str,
    *,
    num_positions: int,
    hidden_size: int,
    tree: ClassTree,
    dtype: torch.dtype,
    row_wise: bool,
) -> int:
    """Memory that a backend's forward saves for its backward, in bytes; from sizes alone.

    Args:
        backend_name: "reference" or "triton".
        num_positions: P, positions of a batch.
        hidden_size: H.
        tree: the softmaxes.
        dtype: of hidden.
        row_wise: whether the gradients of weight and bias are row-wise.
    """
    element = reference.compute_dtype(dtype).itemsize
    if backend_name == "reference":
        size = reference.saved_size(
            num_positions, tree.max_path_columns, tree.depth, sparse=row_wise
        )
        return element * (size + row_wise * num_positions * hidden_size)
    block_c = fused.tiles(dtype, 90, 16).block_c
    blocks = fused.kept_blocks(tree.max_path_columns, tree.depth, block_c)
    per_position = blocks * block_c * dtype.itemsize + (blocks + 2 * tree.depth) * element
    return num_positions * per_position


def expected_backend(
    device: torch.device,
    *,
    num_positions: int,
    hidden_size: int,
    tree: ClassTree,
    dtype: torch.dtype,
) -> str:
    """The backend that "auto" chooses for hidden vectors [P, H] of a dtype on a device."""
    if device.type != "cuda" or dtype == torch.float64:
        return "reference"
    sizes = {"num_positions": num_positions, "hidden_size": hidden_size}
    saved = saved_bytes("triton", **sizes, tree=tree, dtype=dtype, row_wise=False)
    return "triton" if saved <= fused.KEPT_BYTES else "reference"
