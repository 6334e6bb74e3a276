"""OutputLayer: what a language model requires of its softmax over words."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from lm.output.decoding.search import TopK
from lm.output.functional import Reduction


class OutputLayer(Protocol):
    """An `nn.Module` that computes P(word | hidden) over N words.

    In all methods `hidden` is [..., H] and `target` is [...] int64, a word or `ignore_index` =
    -100.
    """

    @property
    def vocab_size(self) -> int:
        """N, number of words."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters, as `nn.Module.parameters`."""

    def loss(self, hidden: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Negative log-likelihood in nats: a scalar, or [...] with `reduction="none"`."""

    def nll_by_level(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The terms of the loss at each level of the tree, [D, ...], without a gradient.

        Row 0 is the class part; the sum over rows is the loss of each position.
        """

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words, [..., N]."""

    def candidate_log_prob(self, hidden: Tensor, word: Tensor) -> Tensor:
        """Log-probabilities of candidate words [..., K] int64 of each position, [..., K]."""

    def sample(self, *arguments: Any, **options: Any) -> Tensor:
        """Draw a word for each position, [...] int64; see `HierarchicalSoftmax.sample`."""

    def topk(self, hidden: Tensor, k: int, *, excluded: Sequence[int] | Tensor = ()) -> TopK:
        """The k most probable words of each position that are not excluded, [..., k]."""
