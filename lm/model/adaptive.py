"""AdaptiveSoftmax: PyTorch's adaptive softmax as an output layer, for comparison.

A shortlist of frequent words, and clusters of rarer words whose hidden vectors are projected to
fewer dimensions. It trains and evaluates like any other output layer, but does not generate.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.output.functional import Reduction, reduced
from lm.output.inputs import check_positions, check_words

MAX_DIVISOR = 4
"""Each cluster's projection is up to this factor narrower than the one before it."""
IGNORE_INDEX = -100


def _dropped(module: nn.Module, inputs: tuple[Tensor], *, probability: float) -> Tensor:
    """Dropout of the hidden vectors before a module."""
    return F.dropout(inputs[0], probability, module.training)


class AdaptiveSoftmax(nn.Module):
    """`nn.AdaptiveLogSoftmaxWithLoss` as an `OutputLayer`; computes in fp32 under autocast.

    Args:
        hidden_size: H.
        counts: [N] occurrences of each word, which give its frequency rank; ties go by word.
        cutoffs: frequency ranks at which the clusters begin: increasing, at least one, within
            1 … N - 1. The first is the size of the shortlist. None: N / 10 and N / 3.
        tail_dropout: probability of zeroing an element of the hidden vectors within clusters.

    Attributes:
        index_of_word: [N] int64, index of each word in the wrapped module.

    Raises:
        ValueError: if the cutoffs do not increase within 1 … N - 1.

    Source: Grave et al. 2017.

    Example:
        >>> layer = AdaptiveSoftmax(8, torch.tensor([3, 9, 1, 5]), [2])
        >>> layer.index_of_word.tolist()
        [2, 0, 3, 1]
        >>> layer.loss(torch.zeros(5, 8), torch.tensor([0, 1, 2, 3, -100]), "none").shape
        torch.Size([5])
    """

    def __init__(
        self,
        hidden_size: int,
        counts: Tensor,
        cutoffs: Sequence[int] | None = None,
        *,
        tail_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocab_size = len(counts)
        if cutoffs is None:
            cutoffs = [max(1, self.vocab_size // 10), self.vocab_size // 3]
        limits = [0, *cutoffs, self.vocab_size]
        if not cutoffs or not all(low < high for low, high in pairwise(limits)):
            raise ValueError(
                f"cutoffs must increase within 1 … {self.vocab_size - 1}, got {list(cutoffs)}"
            )
        with torch.device("cpu"):  # whatever the default device is
            rank = torch.empty(self.vocab_size, dtype=torch.int64)
            rank[counts.argsort(descending=True, stable=True)] = torch.arange(self.vocab_size)
            cluster = torch.bucketize(rank, torch.tensor(cutoffs), right=True)
            index = torch.empty_like(rank)  # by cluster, in a cluster by word
            index[cluster.argsort(stable=True)] = torch.arange(self.vocab_size)
        self.index_of_word: Tensor
        self.register_buffer("index_of_word", index)
        # The last projection has at least one dimension.
        fits = [each for each in range(2, MAX_DIVISOR + 1) if each ** len(cutoffs) <= hidden_size]
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(
            hidden_size,
            self.vocab_size,
            list(cutoffs),
            div_value=max(fits, default=1),
            head_bias=True,
        )
        for tail in self.softmax.tail:
            tail.register_forward_pre_hook(partial(_dropped, probability=tail_dropout))

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words, [..., N], for hidden [..., H]."""
        with torch.autocast(hidden.device.type, enabled=False):
            by_index: Tensor = self.softmax.log_prob(self._flat(hidden))
        return by_index[:, self.index_of_word].view(*hidden.shape[:-1], self.vocab_size)

    def candidate_log_prob(self, hidden: Tensor, word: Tensor) -> Tensor:
        """Log-probabilities [..., K] of candidate words, each computed as a position of its own."""
        check_words("candidate", word, self.vocab_size)
        expanded = hidden.unsqueeze(-2).expand(*word.shape, hidden.shape[-1])
        return -self.loss(expanded, word, "none")

    def loss(self, hidden: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Negative log-likelihood of words, "mean" over the positions that are not ignored."""
        index, valid = self._index(hidden, target)
        with torch.autocast(hidden.device.type, enabled=False):
            log_prob = self.softmax(self._flat(hidden), index).output
        nll: Tensor = (-log_prob).where(valid, 0.0).view(target.shape)
        return reduced(nll, target, reduction, IGNORE_INDEX)

    @torch.no_grad()
    def nll_by_level(self, hidden: Tensor, target: Tensor) -> Tensor:
        """[2, ...]: the choice of the shortlist's word or the cluster, and of a word within it."""
        (index, valid), flat = self._index(hidden, target), self._flat(hidden)
        cutoffs = self.softmax.cutoffs
        cluster = torch.bucketize(index, index.new_tensor(cutoffs[:-1]), right=True)
        nll = flat.new_zeros(2, len(flat))
        with torch.autocast(hidden.device.type, enabled=False):
            root_child = index.where(cluster == 0, cutoffs[0] + cluster - 1)
            nll[0] = F.cross_entropy(self.softmax.head(flat), root_child, reduction="none")
            for number, tail in enumerate(self.softmax.tail, start=1):
                member = cluster == number
                within = index[member] - cutoffs[number - 1]
                nll[1, member] = F.cross_entropy(tail(flat[member]), within, reduction="none")
        return nll.where(valid, 0.0).view(2, *target.shape)

    def sample(self, *arguments: object, **options: object) -> NoReturn:
        """Not supported: raises a ValueError."""
        raise ValueError("output.tree: adaptive does not support sampling")

    def topk(self, *arguments: object, **options: object) -> NoReturn:
        """Not supported: raises a ValueError."""
        raise ValueError("output.tree: adaptive does not support search for the best words")

    def _index(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Indices [M] of targets in the wrapped module, and which of them are not ignored."""
        check_positions(hidden, target)
        check_words("target", target, self.vocab_size, IGNORE_INDEX)
        flat = target.flatten()
        valid = flat != IGNORE_INDEX
        return self.index_of_word[flat.where(valid, 0)], valid

    def _flat(self, hidden: Tensor) -> Tensor:
        """[M, H] in the type of the weights."""
        return hidden.reshape(-1, hidden.shape[-1]).to(self.softmax.head.weight.dtype)
