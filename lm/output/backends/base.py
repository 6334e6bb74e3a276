"""What every backend takes and returns: the problem, the gradients asked for, and the protocol.

A backend computes the negative log-likelihood of every position and, backwards, the gradients. It
does not check its inputs, reduce over positions or know about autograd: `lm.output.functional` and
`lm.output.backends.autograd` do.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.rowwise.row_gradient import RowGradient
from lm.output.tree.class_tree import ClassTree, TreeArrays

Saved = TypeVar("Saved", bound=tuple[Any, ...])
"""What a backend saves for its backward: a `NamedTuple` of tensors and of such `NamedTuple`s."""


class Problem(NamedTuple):
    """The negative log-likelihoods to compute, in the order in which the custom ops take it."""

    hidden: Tensor  # [P, H] floating point
    weight: Tensor  # [R, W] floating point; W ≥ H, and `hidden` counts as followed by zeros
    bias: Tensor | None  # [R] floating point
    target: Tensor  # [P] int64, words or `ignore_index`
    tree: TreeArrays
    depth: int  # D
    max_path_columns: int
    ignore_index: int  # value of the targets that are ignored

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        tree: ClassTree,
        ignore_index: int = -100,
    ) -> "Problem":
        """The problem of all positions of `hidden` [..., H] and `target` [...]."""
        flat, sizes = hidden.reshape(-1, hidden.shape[-1]), (tree.depth, tree.max_path_columns)
        return cls(flat, weight, bias, target.reshape(-1), tree.arrays, *sizes, ignore_index)

    @classmethod
    def without_values(
        cls, num_positions: int, hidden_size: int, tree: ClassTree, dtype: torch.dtype
    ) -> "Problem":
        """A `HierarchicalSoftmax`'s problem without memory for tensors, to ask what it takes."""
        hidden = torch.empty(num_positions, hidden_size, dtype=dtype, device="meta")
        weight = torch.empty(tree.num_rows, row_size(hidden_size), dtype=dtype, device="meta")
        target = torch.empty(num_positions, dtype=torch.int64, device="meta")
        problem = cls.of(hidden, weight, weight[:, 0], target, tree)
        return problem._replace(tree=TreeArrays(*(array.to("meta") for array in tree.arrays)))

    @property
    def num_positions(self) -> int:
        """P."""
        return self.hidden.shape[0]

    @property
    def vocab_size(self) -> int:
        """N."""
        return self.tree.row_of_word.numel()


class Needs(NamedTuple):
    """Which gradients are asked for, and in which form."""

    hidden: bool
    weight: bool
    bias: bool
    row_wise: bool = False  # gradients of weight and bias are `RowGradient`s instead of dense

    @property
    def any(self) -> bool:
        """Whether a backward follows."""
        return self.hidden or self.weight or self.bias


class Gradients(NamedTuple):
    """Gradients in the dtypes of what they belong to; None where not needed."""

    d_hidden: Tensor | None  # [P, H]
    d_weight: Tensor | RowGradient | None  # [R, W], 0 in columns from H on
    d_bias: Tensor | RowGradient | None  # [R]


class Backend(Protocol[Saved]):
    """One way to compute the loss and its gradients."""

    name: str  # as in the argument `backend` of the public functions
    automatic_on: frozenset[str] | None  # types of devices where "auto" may choose it; None: all

    def obstacle(self, problem: Problem, device: torch.device) -> str | None:
        """Why the backend cannot solve the problem on a device, as a predicate; None if it can."""

    def verified(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether "auto" may rely on the results for a dtype of hidden on a device."""

    def forward(self, problem: Problem, needs: Needs) -> tuple[Tensor, Saved]:
        """The nll [P] in `compute_dtype`, and what the backward needs if `needs.any`.

        Raises:
            IndexError: if a target is neither a word nor `ignore_index`; a device-side assertion
                where the backend does not wait for the device.
        """

    def backward(self, d_nll: Tensor, problem: Problem, saved: Saved, needs: Needs) -> Gradients:
        """The gradients that are needed, given the gradient d_nll [P] of the nll.

        `problem` and `saved` are those of the forward; `needs` has the same `row_wise` and asks for
        no more gradients.
        """

    def nll_by_level(self, problem: Problem) -> Tensor:
        """The nll of every position at each level of the tree, [D, P], without gradient."""

    def saved_type(self, problem: Problem, needs: Needs) -> type[Saved]:
        """The type of what the forward saves."""

    def new_saved(self, problem: Problem, needs: Needs) -> Saved:
        """What the forward saves, in uninitialised memory; from sizes alone."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are formed in: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def row_size(hidden_size: int) -> int:
    """The numbers in a row of a `HierarchicalSoftmax`: H up to a multiple of 8.

    Rows of 2-byte or wider numbers then begin at multiples of 16 bytes, as fast copies require.
    """
    return -(-hidden_size // 8) * 8


def followed_by_zeros(vectors: Tensor, size: int) -> Tensor:
    """Vectors [..., H] as [..., size], with zeros from H on; themselves if that is their size."""
    missing = size - vectors.shape[-1]
    return F.pad(vectors, (0, missing)) if missing else vectors


def flatten(saved: tuple[Any, ...]) -> list[Tensor]:
    """The tensors of what a backend saved, in the order of its fields."""
    tensors: list[Tensor] = []
    for value in saved:
        tensors += flatten(value) if isinstance(value, tuple) else [value]
    return tensors


def unflatten(kind: type[Saved], tensors: Iterator[Tensor]) -> Saved:
    """The inverse of `flatten`."""
    fields = kind.__annotations__.values()
    return kind(*(next(tensors) if of is Tensor else unflatten(of, tensors) for of in fields))
