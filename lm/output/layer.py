"""HierarchicalSoftmax: the output layer as a module, in place of a linear layer and its loss."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.output.backends import BACKENDS, check_backend, choose_backend
from lm.output.backends.base import Needs, Problem, row_size
from lm.output.backends.nodes import lse_by_level
from lm.output.decoding import distribution
from lm.output.decoding.draws import Sampling
from lm.output.decoding.search import TopK
from lm.output.functional import BackendName, Reduction, hierarchical_cross_entropy, reduced
from lm.output.inputs import check_positions, check_tensors, check_whole
from lm.output.rowwise import lookup
from lm.output.tracing import not_compiled, refuse_recording
from lm.output.tree.class_tree import ClassTree
from lm.output.tree.shapes import check_size

_P_ITSELF = Sampling()


class Loss(NamedTuple):
    """Result of `HierarchicalSoftmax.forward`, as of `nn.AdaptiveLogSoftmaxWithLoss`."""

    output: Tensor  # [...], log-probability of each target in nats; 0 where ignored
    loss: Tensor  # scalar, negative mean of `output` over the positions that are not ignored


class HierarchicalSoftmax(nn.Module):
    """A softmax over N words as a tree of softmaxes.

    log P(w | h) = Σ over nodes n on the path of w: log softmax(W_n h + b_n)[child on the path]

    The interface follows `nn.AdaptiveLogSoftmaxWithLoss`. In all methods, hidden is [..., H]
    floating point and target [...] int64, words 0 … N - 1 or `ignore_index`; losses and
    log-probabilities are in nats, in at least fp32. Shapes, dtypes or devices that do not fit
    together raise a ValueError; other words raise an IndexError (on CUDA with Triton, the device
    reports an assertion).

    Example:
        >>> import torch
        >>> from lm.output import ClassTree, HierarchicalSoftmax
        >>> layer = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1, 1, 1]))
        >>> hidden, target = torch.zeros(2, 4), torch.tensor([0, 2])
        >>> loss = layer.loss(hidden, target)
        >>> loss.backward()
        >>> round(loss.item(), 4)  # mean of -log(1/2 · 1/2) and -log(1/2 · 1/3)
        1.589

    Attributes:
        weight: [R, W], one row for each word and for each node but the root; see `ClassTree`. W is
            H up to a multiple of 8; columns from H on are 0 and remain so, as their gradient is 0.
        bias: [R] or None.
        tree: the tree of softmaxes.
        vocab_size: N.

    Args:
        hidden_size: H.
        tree: the tree of softmaxes; the layer has a copy, which shares its `arrays`.
        bias: whether rows have biases.
        ignore_index, backend, row_wise: as in `hierarchical_cross_entropy`.
        device, dtype: of the parameters, as in `nn.Linear`; the tree is on the same device.

    Raises:
        ValueError: if `hidden_size` is not an integer ≥ 1, or there is no such backend.

    Source: Morin & Bengio 2005; of two levels: Goodman 2001.
    """

    def __init__(
        self,
        hidden_size: int,
        tree: ClassTree,
        *,
        bias: bool = True,
        ignore_index: int = -100,
        backend: BackendName = "auto",
        row_wise: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_size = check_size("hidden_size", hidden_size, 1)
        if not isinstance(tree, ClassTree):
            raise ValueError(f"tree must be a ClassTree, such as ClassTree.full(N), got {tree!r}")
        check_backend(backend)
        self.hidden_size, self.vocab_size = hidden_size, tree.vocab_size
        self.ignore_index, self.backend, self.row_wise = ignore_index, backend, row_wise
        num_rows = self._num_held_rows(tree)
        weight = torch.empty(num_rows, row_size(hidden_size), device=device, dtype=dtype)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(weight.new_empty(num_rows)) if bias else None
        self.tree = tree.copy().to(weight.device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws rows uniformly from ±1/√H, as in `nn.Linear`, and sets biases to 0.

        Every node thus starts close to uniform. `lm.model.build` draws again by `model.init_range`.
        """
        bound = 1 / math.sqrt(self.hidden_size)
        self.draw(self.weight, lambda rows: nn.init.uniform_(rows, -bound, bound))
        self.zero_padding()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _num_held_rows(self, tree: ClassTree) -> int:
        return tree.num_rows

    def draw(self, table: Tensor, fill: Callable[[Tensor], Any]) -> None:
        """Fill a table of rows, `weight` or `bias`, with random numbers."""
        fill(table)

    def zero_padding(self) -> None:
        """Sets the columns of the weight from H on to 0, after whole rows were drawn."""
        nn.init.zeros_(self.weight.detach()[:, self.hidden_size :])

    def forward(self, hidden: Tensor, target: Tensor) -> Loss:
        """Log-probability of each target, and the mean loss."""
        nll = self.loss(hidden, target, reduction="none")
        return Loss(-nll, reduced(nll, target, "mean", self.ignore_index))

    def loss(self, hidden: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Negative log-likelihood of the targets, as `hierarchical_cross_entropy` defines it."""
        return hierarchical_cross_entropy(
            self._checked(hidden),
            self.weight,
            target,
            self.tree,
            self.bias,
            reduction=reduction,
            ignore_index=self.ignore_index,
            backend=self.backend,
            row_wise=self.row_wise,
        )

    def embed(self, word: Tensor) -> Tensor:
        """The rows of words [...], [..., H], as input vectors of a model that shares them.

        `nn.Embedding` with the rows of the words as its table. With `row_wise`, the gradient is a
        `RowGradient`, to which that of the loss is added.

        Example:
            >>> layer = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1]))
            >>> layer.loss(layer.embed(torch.tensor([0, 2])), torch.tensor([2, 1])).backward()

        Args:
            word: int64 or int32, words 0 … N - 1.

        Raises:
            IndexError: on a CPU, if one is no word.
        """
        check_tensors(words=word)
        if word.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"words must be int64 or int32, got {word.dtype}")
        check_whole(self.weight)
        try:
            rows = self.tree.arrays.row_of_word.index_select(0, word.flatten())  # none is below 0
        except IndexError:
            size = self.tree.vocab_size
            raise IndexError(f"words must be 0 … {size - 1}, one is not") from None
        return self._rows(rows.view(word.shape))[..., : self.hidden_size]

    def _rows(self, row: Tensor) -> Tensor:
        return lookup(self.weight, row) if self.row_wise else F.embedding(row, self.weight)

    @not_compiled
    @torch.no_grad()
    def nll_by_level(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The terms of the loss at each level of the tree, root first, without gradient.

        Example:
            >>> layer = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1, 1, 1]))
            >>> nll = layer.nll_by_level(torch.zeros(2, 4), torch.tensor([0, 2]))
            >>> nll.exp().round(decimals=3).tolist()  # 1 / P of the class, of the word within it
            [[2.0, 2.0], [2.0, 3.0]]

        Returns:
            [depth, ...], 0 where ignored and below the end of a path; the sum over dimension 0 is
            `loss(hidden, target, "none")`.
        """
        refuse_recording("nll_by_level")
        problem = self._problem(hidden, target)
        backend = BACKENDS[choose_backend(self.backend, problem, hidden.device)]
        softmaxes, _ = backend.softmaxes(target.flatten(), problem, Needs(False, False, False))
        return softmaxes.nll_by_level().view(self.tree.depth, *target.shape)

    def lse_by_level(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The log-sum-exp of each softmax on the targets' paths, log Σ exp(W_n h + b_n).

        Differentiable. It computes the logits again, node by node, and gradients of the parameters
        are dense, also for row-wise layers. The z-loss, z · mean over positions of Σ_d lse[d]²,
        keeps it near 0, which the loss alone does not determine.

        Example:
            >>> layer = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1, 1, 1]))
            >>> hidden, target = torch.zeros(2, 4), torch.tensor([0, 2])
            >>> lse = layer.lse_by_level(hidden, target)
            >>> lse.exp().round(decimals=3).tolist()
            [[2.0, 2.0], [2.0, 3.0]]
            >>> loss = layer.loss(hidden, target) + 1e-4 * lse.square().sum(0).mean()

        Returns:
            [depth, ...], 0 where ignored, below the end of a path and for nodes of one child.

        Source: z-loss: Chowdhery et al. 2022, section 5.
        """
        refuse_recording("lse_by_level")
        lse = lse_by_level(target.flatten(), self._problem(hidden, target))
        return lse.view(self.tree.depth, *target.shape)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words, [..., N]. Differentiable once; evaluates all R rows.

        Example:
            >>> layer = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1]))
            >>> layer.log_prob(torch.zeros(4)).exp().round(decimals=3).tolist()
            [0.25, 0.25, 0.5]
        """
        return distribution.log_prob(*self._decoded(hidden))

    def candidate_log_prob(self, hidden: Tensor, word: Tensor) -> Tensor:
        """Log-probabilities of some words of each position, [..., K].

        Equal to `log_prob` at these words. Differentiable, but on a GPU or compiled only once.
        Evaluates the softmaxes on the candidates' paths, on a CPU each once for a position: in a
        tree of two levels at most C + K N / C columns. Without a gradient it evaluates all of them
        where that is faster. Gradients of parameters are dense, also for row-wise layers.

        Example:
            >>> layer = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1]))
            >>> words = torch.tensor([[2, 0], [1, 1]])
            >>> layer.candidate_log_prob(torch.zeros(2, 4), words).exp().round(decimals=3).tolist()
            [[0.5, 0.25], [0.25, 0.25]]

        Args:
            word: [..., K] int64, words 0 … N - 1; K may be 0 and words may repeat.
        """
        hidden, weight, tree, bias = self._decoded(hidden)
        return distribution.candidate_log_prob(hidden, weight, word, tree, bias)

    def predict(self, hidden: Tensor) -> Tensor:
        """The most probable word of each position, [...] int64; ties go to the lowest word.

        Example:
            >>> layer = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1]))
            >>> layer.predict(torch.zeros(2, 4))
            tensor([2, 2])
        """
        return self.topk(hidden, 1).word.squeeze(-1)

    def topk(self, hidden: Tensor, k: int, *, excluded: Sequence[int] | Tensor = ()) -> TopK:
        """The k (1 … N) most probable words of each position, exact for the full distribution.

        Words in `excluded` are left out; the log-probabilities of the others are as they are. A
        tensor [..., L] int64 of two dimensions or more has those of each position, or -1.

        In compiled loops, a class is evaluated only while it is at least as probable as the k-th
        best word found: few classes for a peaked distribution, nearly all for a flat one such as an
        untrained layer's. Otherwise, and for many positions that need many classes, all are.

        Example:
            >>> layer = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1]))
            >>> log_prob, word = layer.topk(torch.zeros(4), 2)
            >>> word.tolist(), log_prob.exp().round(decimals=3).tolist()
            ([2, 0], [0.5, 0.25])

        Raises:
            ValueError: if k is out of range or a log-probability is not finite.
        """
        refuse_recording("topk or predict")
        return distribution.topk(*self._decoded(hidden), k=k, excluded=excluded)

    def sample(
        self,
        hidden: Tensor,
        sampling: Sampling | None = None,
        *,
        previous: Tensor | None = None,
        seeds: Tensor | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> Tensor:
        """One word per position, [...] int64, drawn exactly from the full distribution.

        Draws evaluate the class that is drawn (with a temperature, a penalty or excluded words also
        those of rejected trials, or all words); `top_p` alone, on a CPU, also those that tell
        whether the word is in the nucleus; `top_k` and `min_p` search as `topk` does. A position's
        word depends on its hidden vector, its previous words and its seed, not on other positions,
        except that logits may be rounded otherwise. With a temperature, a penalty, `top_p` or
        excluded words, and neither `top_k` nor `min_p`, seeds give other words on a GPU or without
        numba.

        Example:
            >>> layer = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1]))
            >>> layer.sample(torch.zeros(3, 4), generator=torch.Generator().manual_seed(2)).tolist()
            [0, 1, 1]
            >>> hidden, previous = torch.zeros(2, 4), torch.tensor([[2, -1], [0, 0]])
            >>> greedy = Sampling(temperature=0, repetition_penalty=3)
            >>> layer.sample(hidden, greedy, previous=previous)  # P of word 2: 1/8 and 1/2
            tensor([0, 2])

        Args:
            sampling: the distribution to draw from; by default P itself.
            previous: [..., L] int64, the words that the repetition penalty applies to, in any
                order; each counts once, -1 is skipped.
            seeds: [...] int64, one for each position; None draws them from `generator`.
            generator: source of the seeds, on any device, if they are not given; None is torch's
                default.
            options: fields of `Sampling`, such as temperature, top_p and excluded, which replace
                those of `sampling`. Words may be excluded from each position, as in `topk`.

        Raises:
            ValueError: if an option is out of range, a log-probability is not finite, or there is a
                repetition penalty without `previous`.
        """
        refuse_recording("sample")
        if not isinstance(sampling, Sampling | None):
            raise ValueError(f"sampling must be a Sampling, got {sampling!r}")
        given, excluded = options.get("excluded"), None
        if isinstance(given, Tensor) and given.dim() > 1:
            excluded, options["excluded"] = given, ()
        sampling = (sampling or _P_ITSELF).changed(options, "sample", "previous, seeds, generator")
        inputs = self._decoded(hidden)
        return distribution.sample(*inputs, sampling, previous, seeds, generator, excluded)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.tree.check_saved(state_dict, f"{prefix}tree.")  # before the weights are replaced
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _decoded(self, hidden: Tensor) -> tuple[Tensor, Tensor, ClassTree, Tensor | None]:
        return self._checked(hidden), self.weight, self.tree, self.bias

    def _problem(self, hidden: Tensor, target: Tensor) -> Problem:
        """The problem of hidden vectors [..., H] at the positions of targets [...]."""
        check_positions(self._checked(hidden), target)
        return Problem.of(hidden, self.weight, self.tree, self.bias, self.ignore_index)

    def _checked(self, hidden: Tensor) -> Tensor:
        """Hidden vectors [..., H]; fewer numbers would fit the rows as well."""
        check_tensors(hidden=hidden)
        if hidden.shape[-1:] != (self.hidden_size,):
            raise ValueError(f"hidden must be [..., {self.hidden_size}], got {list(hidden.shape)}")
        return hidden

    def extra_repr(self) -> str:
        """The settings, for `print(layer)`."""
        return (
            f"hidden_size={self.hidden_size}, bias={self.bias is not None}, backend={self.backend},"
            f" row_wise={self.row_wise}"
        )
