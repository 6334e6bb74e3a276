"""HierarchicalSoftmax: the output layer as a module, a drop-in for a linear layer followed by a
cross-entropy.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lm.output.decoding import functional as decoding
from lm.output.functional import BackendName, Reduction, hierarchical_cross_entropy
from lm.output.tree.class_tree import ClassTree


class Loss(NamedTuple):
    """What `HierarchicalSoftmax` returns, like `nn.AdaptiveLogSoftmaxWithLoss`.

    Attributes:
        output: [...], log-probability of each target, 0 where ignored.
        loss: scalar, its negative mean over the positions that are not ignored.
    """

    output: Tensor
    loss: Tensor


class HierarchicalSoftmax(nn.Module):
    """A softmax over N words as a tree of softmaxes.

    Attributes:
        weight: [R, H], a row for each word and each node but the root (`ClassTree` numbers them).
        bias: [R] or None.
        tree: the shape.

    Args:
        hidden_size: H.
        tree: which softmaxes there are; moves with the layer and is saved with it.
        bias: whether rows have biases.
        ignore_index: targets that cost nothing.
        backend, sparse: as in `hierarchical_cross_entropy`.
    """

    def __init__(
        self,
        hidden_size: int,
        tree: ClassTree,
        *,
        bias: bool = True,
        ignore_index: int = -100,
        backend: BackendName = "auto",
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_size < 1:
            raise ValueError(f"hidden_size must be at least 1, got {hidden_size}")
        self.hidden_size = hidden_size
        self.ignore_index = ignore_index
        self.backend = backend
        self.sparse = sparse
        self.weight = nn.Parameter(
            torch.empty(tree.num_rows, hidden_size, device=device, dtype=dtype)
        )
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(tree.num_rows, device=device, dtype=dtype))
        self.tree = tree if self.weight.is_meta else tree.to(self.weight.device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rows uniform in ±1/√H as in `nn.Linear`; biases 0, so that each node starts close to
        uniform.
        """
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor, target: Tensor) -> Loss:
        """Log-probability of each target and the mean loss.

        Args:
            hidden: [..., H].
            target: [...] int64, words or `ignore_index`.
        """
        nll = self.loss(hidden, target, reduction="none")
        num_kept = (target != self.ignore_index).sum().clamp(min=1)
        return Loss(-nll, nll.sum() / num_kept)

    def loss(self, hidden: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """`hierarchical_cross_entropy` with this layer's parameters."""
        return hierarchical_cross_entropy(
            hidden,
            self.weight,
            target,
            self.tree,
            self.bias,
            reduction=reduction,
            ignore_index=self.ignore_index,
            backend=self.backend,
            sparse=self.sparse,
        )

    def class_loss(self, hidden: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The part of `loss` that is paid at the root: of the class, where the tree has two
        levels. Gradients are dense, of the whole weight, whatever `sparse` is.
        """
        num_children = int(self.tree.num_children[0])
        root = ClassTree.full(num_children).to(hidden.device)
        kept = target != self.ignore_index
        child = self.tree.root_child(torch.where(kept, target, 0))
        return hierarchical_cross_entropy(
            hidden,
            self.weight[:num_children],
            torch.where(kept, child, self.ignore_index),
            root,
            None if self.bias is None else self.bias[:num_children],
            reduction=reduction,
            ignore_index=self.ignore_index,
            backend=self.backend,
        )

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words, [..., N], for hidden [..., H]. Differentiable; N columns
        for each position.
        """
        return decoding.log_prob(hidden, self.weight, self.bias, self.tree)

    def predict(self, hidden: Tensor) -> Tensor:
        """The most probable word, [...] int64, for hidden [..., H]; ties go to the lowest word."""
        return self.topk(hidden, 1).word.squeeze(-1)

    def topk(self, hidden: Tensor, k: int) -> decoding.TopK:
        """The k most probable words, for hidden [..., H], opening only classes that can hold one
        (`decoding.topk`).
        """
        return decoding.topk(hidden, self.weight, self.bias, self.tree, k)

    def sample(
        self,
        hidden: Tensor,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A word for each position, [...] int64, for hidden [..., H]: the class, then the word
        (`decoding.sample`).
        """
        return decoding.sample(
            hidden,
            self.weight,
            self.bias,
            self.tree,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=generator,
        )

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, bias={self.bias is not None}, backend={self.backend},"
            f" sparse={self.sparse}"
        )
