"""PyTorch's adaptive softmax as an output layer: the peer that the class softmax is compared with.

A shortlist of frequent words and clusters of rarer ones, the clusters' hidden vectors projected to
fewer dimensions. It trains and evaluates like any other output layer; drawing words is not what it
is here for.
"""

from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.output import ClassTree

DIVISOR = 4
"""Each cluster's projection is this much narrower than the one before it (less where H is small:
one dimension is the least).
"""


def _divisor(hidden_size: int, num_clusters: int) -> int:
    """The greatest up to `DIVISOR` that leaves the last projection a dimension."""
    fits = [each for each in range(2, DIVISOR + 1) if each**num_clusters <= hidden_size]
    return max(fits, default=1)


class AdaptiveSoftmax(nn.Module):
    """`nn.AdaptiveLogSoftmaxWithLoss` with the methods of `HierarchicalSoftmax` that training and
    evaluation use. Under autocast it computes in fp32, as `HierarchicalSoftmax` does.

    Args:
        hidden_size: H.
        tree: two levels; the root's words are the shortlist, its other children the clusters.
        bias: whether the head has biases (the clusters never have).

    Raises:
        ValueError: if the tree has another shape.

    Source: Grave et al. 2017.
    """

    sparse = False
    """Its gradients are dense."""

    def __init__(self, hidden_size: int, tree: ClassTree, *, bias: bool = True) -> None:
        super().__init__()
        arrays = tree.arrays
        num_clusters = tree.num_nodes - 1
        if tree.depth > 2 or num_clusters < 1:
            raise ValueError("an adaptive softmax has two levels, one cluster at least")
        self.tree = tree
        head = int(arrays.num_children[0]) - num_clusters
        if head < 1:
            raise ValueError("an adaptive softmax has words in its head, one at least")
        order = arrays.row_of_node[1:].argsort()
        ends = head + arrays.num_children[1:][order].cumsum(0)
        *cutoffs, vocab_size = [head, *ends.tolist()]
        first = ends.new_zeros(num_clusters + 1)
        first[1:][order] = ends - arrays.num_children[1:][order]
        node = arrays.node_of_row[tree.row_of_word]
        self.rank: Tensor
        self.register_buffer(
            "rank", first[node] + tree.row_of_word - arrays.first_row[node], persistent=False
        )
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(
            hidden_size,
            vocab_size,
            cutoffs,
            div_value=_divisor(hidden_size, num_clusters),
            head_bias=bias,
        )

    @property
    def weight(self) -> Tensor:
        """Rows of the head."""
        return self.softmax.head.weight

    @property
    def bias(self) -> Tensor | None:
        """Biases of the head."""
        return self.softmax.head.bias

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words, [..., N], for hidden [..., H]."""
        with torch.autocast(hidden.device.type, enabled=False):
            by_rank = self.softmax.log_prob(self._rows(hidden))
        return by_rank[:, self.rank].view(*hidden.shape[:-1], -1)

    def loss(self, hidden: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """Negative log-likelihood in nats of `target` [...] for hidden [..., H]: the mean, or each
        [...] for reduction "none".
        """
        with torch.autocast(hidden.device.type, enabled=False):
            log_prob = self.softmax(self._rows(hidden), self.rank[target.flatten()]).output
        return _reduced(-log_prob.view(target.shape), reduction)

    def class_loss(self, hidden: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        """The part of `loss` that is paid in the head."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = self.softmax.head(self._rows(hidden))
        child = self.tree.root_child(target.flatten())
        return _reduced(
            F.cross_entropy(logits, child, reduction="none").view(target.shape), reduction
        )

    def _rows(self, hidden: Tensor) -> Tensor:
        return hidden.flatten(0, -2).to(self.weight.dtype)

    def sample(self, *arguments: object, **options: object) -> NoReturn:
        """Refuses."""
        raise ValueError("output.tree: adaptive trains and evaluates only")


def _reduced(nll: Tensor, reduction: str) -> Tensor:
    return nll if reduction == "none" else nll.mean()
