"""SampledSoftmax: a full softmax that trains on a sample of the words, for comparison."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.functional import Reduction, reduced
from lm.output.inputs import check_positions, check_words, compute_dtype
from lm.output.rowwise import lookup


class SampledSoftmax(HierarchicalSoftmax):
    """The full softmax, whose loss compares a target with S words only while it trains.

    The words s_1 … s_S are drawn with replacement for each call of `loss`, one sample for all
    positions, from Q(w) ∝ 1 + count of w. With the logits z, the loss of a target t is

        -z_t + log(exp z_t + Σ_{i: s_i ≠ t} exp z_{s_i} / (S · Q(s_i)))

    The expectation of the sum is that of the full softmax, Σ_{w ≠ t} exp z_w.

    In evaluation mode it is a full softmax, of which every probability is computed.

    Args:
        hidden_size: H.
        tree: `ClassTree.full(N)`.
        counts: [N] occurrences of each word.
        num_samples: S.
        options: further arguments of `HierarchicalSoftmax`.

    Source: Bengio & Senécal 2003; one sample for a batch: Jean et al. 2015, section 3.
    """

    def __init__(
        self, hidden_size: int, tree: ClassTree, *, counts: Tensor, num_samples: int, **options: Any
    ) -> None:
        super().__init__(hidden_size, tree, **options)
        if tree.num_nodes > 1 or len(counts) != tree.vocab_size:
            raise ValueError(f"expected a full tree and counts [N], got {tree} and [{len(counts)}]")
        self.num_samples = num_samples
        with torch.device("cpu"):
            share = (1 + counts.double()) / (1 + counts.double()).sum()
        # As integers, which no conversion of the module rounds: bf16 has 129 numbers in [1/2, 1].
        log_expected = (num_samples * share).log().float()
        self.log_expected: Tensor
        self.register_buffer("log_expected", log_expected.view(torch.int32), persistent=False)
        self.cumulated: Tensor
        self.register_buffer("cumulated", share.cumsum(0).view(torch.int64), persistent=False)

    def loss(self, hidden: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Negative log-likelihood as `HierarchicalSoftmax.loss`, of a sample while training."""
        if not self.training:
            return super().loss(hidden, target, reduction)
        check_positions(self._checked(hidden), target)
        if target.is_cpu:  # a GPU would be waited for
            check_words("target", target, self.vocab_size, self.ignore_index)
        flat, words = hidden.reshape(-1, self.hidden_size), target.flatten()
        valid = words != self.ignore_index
        words = words.where(valid, 0)
        place = torch.rand(self.num_samples, dtype=torch.float64, device=words.device)
        cumulated = self.cumulated.view(torch.float64)
        sample = torch.searchsorted(cumulated, place).clamp_(max=self.vocab_size - 1)
        read = lookup if self.row_wise else torch.Tensor.__getitem__
        dtype = compute_dtype(flat.dtype)
        rows, drawn = (read(self.weight, each)[:, : self.hidden_size] for each in (words, sample))
        own = (flat * rows.to(flat.dtype)).sum(-1, dtype=dtype)
        others = F.linear(flat, drawn.to(flat.dtype)).to(dtype)
        if self.bias is not None:
            own, others = own + read(self.bias, words), others + read(self.bias, sample)
        log_expected = self.log_expected.view(torch.float32)[sample]
        corrected = others - log_expected.to(torch.promote_types(self.weight.dtype, torch.float32))
        corrected = corrected.masked_fill(sample == words[:, None], -torch.inf)
        nll = torch.cat([own[:, None], corrected], 1).logsumexp(1) - own
        nll = nll.where(valid, 0.0)
        return reduced(nll.view(target.shape), target, reduction, self.ignore_index)
