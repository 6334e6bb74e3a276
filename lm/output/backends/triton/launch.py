"""What the launches of the fused kernels have in common: the arguments that follow from a batch, a
tree, and the layout of two matrices.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output.backends.visits import Visits
from lm.output.tree.class_tree import TreeArrays


class Units(NamedTuple):
    """H and the strides in units of `align` elements, so that the compiler knows what divides them:
    rows of 300 halves are not multiples of 16, but of 4.
    """

    align: int
    size: int
    hidden_stride: int
    weight_stride: int

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor) -> "Units":
        sizes = (hidden.shape[1], hidden.stride(0), weight.stride(0))
        align = math.gcd(*sizes, 16)
        return cls(align, *(size // align for size in sizes))


def like(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.device}


def of_batch(visits: Visits) -> dict[str, Tensor]:
    return {"position": visits.position, "node": visits.node, "child": visits.child}


def of_nodes(tree: TreeArrays) -> dict[str, Tensor]:
    return {
        "first_row": tree.first_row,
        "num_children": tree.num_children,
        "column": tree.column,
    }


def arithmetic(hidden: Tensor, units: Units) -> dict[str, Any]:
    """Constants of the kernels that follow from the dtype and the alignment."""
    import triton.language as tl

    fast = torch.get_float32_matmul_precision() != "highest"
    return {
        "ACC": tl.float64 if hidden.dtype == torch.float64 else tl.float32,
        "PRECISION": "tf32" if fast and hidden.dtype == torch.float32 else "ieee",
        "ALIGN": units.align,
    }


def num_processors(hidden: Tensor) -> int:
    if hidden.is_cuda:
        return torch.cuda.get_device_properties(hidden.device).multi_processor_count
    return 1
