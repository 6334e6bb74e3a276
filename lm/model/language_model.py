"""LanguageModel: input vectors → backbone → output layer."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.model.input_pieces import InputPieces
from lm.model.lstm import Dropout
from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.decoding.search import TopK
from lm.output.functional import Reduction
from lm.output.rowwise import lookup
from lm.output.sharded import DealtRows, ShardedSoftmax

State = tuple[Tensor, ...]
_log = logging.getLogger(__name__)


class OutputLayer(Protocol):
    """An `nn.Module` that computes P(word | hidden) over N words, as `HierarchicalSoftmax`.

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
        """The terms of each loss by level of the tree, [D, ...], without a gradient."""

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words, [..., N]."""

    def candidate_log_prob(self, hidden: Tensor, word: Tensor) -> Tensor:
        """Log-probabilities of candidate words [..., K] int64 of each position, [..., K]."""

    def sample(self, *arguments: Any, **options: Any) -> Tensor:
        """Draw a word for each position, [...] int64; arguments of `HierarchicalSoftmax.sample`."""

    def topk(self, hidden: Tensor, k: int, *, excluded: Sequence[int] | Tensor = ()) -> TopK:
        """The k most probable words of each position that are not excluded, [..., k]."""


class Backbone(Protocol):
    """An `nn.Module` that computes hidden vectors from the input vectors up to each position."""

    hidden_size: int
    carries_state: bool
    """Whether, while training, the state after one batch is the initial state of the next."""

    @property
    def receptive_field(self) -> int | None:
        """Number of tokens that a hidden vector depends on, at most; None if it is not limited."""

    def init_state(self, batch_size: int) -> State:
        """The state before the first token."""

    def __call__(self, embedded: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        """Compute hidden vectors [T, B, H] from input vectors [T, B, E], T ≥ 1.

        `state` is that after the positions before them, None if there are none. The new state is
        returned as well; a Transformer has none if `state` is None.
        """

    @staticmethod
    def select_state(state: State, index: Tensor) -> State:
        """The state of some sequences of the batch."""

    @staticmethod
    def join_states(states: Sequence[State]) -> State:
        """The state of a batch of all sequences, which have read equally many tokens."""


class LanguageModel(nn.Module):
    """P(word | previous words) for B sequences in parallel.

    Args:
        backbone: maps input vectors of size E to hidden vectors of size H.
        output: the softmax over words.
        embedding_size: E; None uses the first H numbers of the words' rows of the output layer as
            input vectors (then E = H), and with `path_sum` those of the classes' rows, unless
            `input_tree` has other classes: then each of them has a vector of its own.
        embedding_dtype: type of the input vectors if they are not the output layer's rows; None is
            torch's default.
        path_sum: whether the input vector of a word is the sum of the vectors on its path in a
            tree, instead of one vector per word.
        input_tree: that tree, if it is not the output layer's.
        input_pieces: adds to the input vectors those of the words' pieces, of the same size; None:
            nothing.
        row_wise: whether the gradient of the input vectors holds visited rows only (`RowGradient`).
        word_dropout: [N] probability with which, while training, a word loses its vector: the other
            vectors of its path remain, or with `path_sum=False` zero; None is 0.
        dropout: probability of zeroing an element of input vectors and of hidden vectors.
        dropout_variational: whether all time steps share one dropout mask.
        residual: whether the input vectors are added to the hidden vectors, E = H.

    Raises:
        ValueError: if `output`, whose rows or tree are used, is no `HierarchicalSoftmax`.
    """

    def __init__(
        self,
        backbone: Backbone,
        output: OutputLayer,
        *,
        embedding_size: int | None,
        embedding_dtype: torch.dtype | None = None,
        path_sum: bool = False,
        input_tree: ClassTree | None = None,
        input_pieces: InputPieces | None = None,
        row_wise: bool = False,
        word_dropout: Tensor | None = None,
        dropout: float = 0.0,
        dropout_variational: bool = False,
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.tied = embedding_size is None
        uses_tree = self.tied or (path_sum and input_tree is None)
        if uses_tree and not isinstance(output, HierarchicalSoftmax):
            raise ValueError(
                "shared rows and path sums require a HierarchicalSoftmax,"
                f" got {type(output).__name__}"
            )
        self.backbone, self.output = backbone, output
        self.dropout = Dropout(dropout, dropout_variational)
        self.path_sum, self.row_wise, self.residual = path_sum, row_wise, residual
        self.input_tree, self.input_pieces = input_tree, input_pieces
        self.embedding_size = backbone.hidden_size if embedding_size is None else embedding_size
        self.word_dropout: Tensor | None
        self.register_buffer("word_dropout", word_dropout, persistent=False)
        self.embedding = None
        # Which input vectors this process has; None: all.
        self.dealt = output.dealt if isinstance(output, ShardedSoftmax) else None
        if embedding_size is not None or input_tree is not None:
            embedding_size = self.embedding_size
            num_vectors = self.path_tree.num_rows if path_sum else output.vocab_size
            if self._ties_words_alone:
                num_vectors = self.path_tree.num_nodes  # the root's is not used
            if self.dealt is None:
                self.embedding = nn.Embedding(num_vectors, embedding_size, dtype=embedding_dtype)
            else:
                self.dealt = self.dealt._replace(num_rows=num_vectors, slot=None)
                held = torch.empty(self.dealt.num_held, embedding_size, dtype=embedding_dtype)
                self.embedding = nn.Embedding(len(held), embedding_size, _weight=held)
                self._draw(self.embedding.weight, std=1)  # as the constructor draws all vectors
            self._draw(self.embedding.weight, std=1 / math.sqrt(embedding_size))

    @property
    def dealt_tables(self) -> dict[str, DealtRows]:
        """The parameters of which this process has some rows, by name."""
        if self.dealt is None:
            return {}
        assert isinstance(self.output, ShardedSoftmax)
        tables = {f"output.{name}": self.output.dealt for name, _ in self.output.named_parameters()}
        vectors = {} if self.embedding is None else {"embedding.weight": self.dealt}
        return tables | vectors

    def _draw(self, vectors: Tensor, std: float) -> None:
        fill = partial(nn.init.normal_, std=std)
        if self.dealt is None:
            fill(vectors)
        else:
            self.dealt.draw(vectors, fill)

    @property
    def vocab_size(self) -> int:
        """N, number of words."""
        return self.output.vocab_size

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the backbone's parameters; the table of words may be less precise."""
        return next(cast(nn.Module, self.backbone).parameters()).dtype

    @property
    def table(self) -> list[nn.Parameter]:
        """The table of words: the parameters of the output layer and the input vectors."""
        vectors = () if self.embedding is None else self.embedding.parameters()
        return [*self.output.parameters(), *vectors]

    def init_state(self, batch_size: int) -> State:
        """The state before the first token of `batch_size` sequences."""
        return self.backbone.init_state(batch_size)

    def num_parameters(self) -> dict[str, int]:
        """Trained numbers of each part; the zeros after the rows of the output layer are not."""
        found = {name: sum(p.numel() for p in x.parameters()) for name, x in self.named_children()}
        if isinstance(self.output, HierarchicalSoftmax):
            found["output"] -= self.output.weight[:, self.output.hidden_size :].numel()
        return found

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        """Compute hidden vectors [T, B, H] from the input words [T, B] int64.

        Each predicts the next word. `state` is that after the words before them, None at the
        beginning; the one after `tokens` is returned as well.
        """
        embedded = self.dropout(self.embed(tokens))
        with backbone_autocast(embedded.device):
            hidden, state = self.backbone(embedded, state)
        hidden = self.dropout(hidden)
        return (hidden + embedded.type_as(hidden) if self.residual else hidden), state

    def loss(
        self, tokens: Tensor, targets: Tensor, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """Mean nll of the next words `targets` [T, B] int64; the others are as in `forward`."""
        hidden, state = self(tokens, state)
        return self.output.loss(hidden, targets), state

    def embed(self, tokens: Tensor) -> Tensor:
        """The input vectors [..., E] of words [...] int64."""
        vectors = self._embed(tokens)[..., : self.embedding_size]
        return vectors if self.input_pieces is None else vectors + self.input_pieces(tokens)

    def _embed(self, tokens: Tensor) -> Tensor:
        """One row of the input vectors per word, or the sum of those on its path, [T, B, W]."""
        present = self._draw_present(tokens)
        if not self.path_sum:
            index = self.tree_softmax.tree.row_of_word[tokens] if self.tied else tokens
            return self._lookup(self._vectors, index, present)
        rows = self.path_tree.rows_on_path(tokens)
        used = rows >= 0
        if present is not None:
            used[..., 0] &= present
        rows = rows.clamp(min=0)
        if self._ties_words_alone:
            own = self.tree_softmax.tree.row_of_word[tokens]
            vectors = self._lookup(self.tree_softmax.weight, own, used[..., 0])
            node = ~self.path_tree.item_of_row[rows[..., 1:]].clamp(max=-1)
            classes = self._lookup(self._vectors, node, used[..., 1:]).sum(-2)
            return vectors[..., : self.embedding_size] + classes
        row_wise = self.training and self.row_wise
        if row_wise or self.dealt is not None or self._vectors.dtype != self.dtype:
            return self._lookup(self._vectors, rows, used).sum(-2)
        summed = F.embedding_bag(
            rows.flatten(0, -2),
            self._vectors,
            per_sample_weights=used.flatten(0, -2).to(self.dtype),
            mode="sum",
        )
        return summed.view(*tokens.shape, -1)

    def _draw_present(self, tokens: Tensor) -> Tensor | None:
        """Which words keep their vector under word dropout, [T, B] bool; None: all."""
        if not self.training or self.word_dropout is None:
            return None
        # In fp32: half precision has no numbers between 0 and the probability of a frequent word.
        drawn = torch.rand(tokens.shape, dtype=torch.float32, device=tokens.device)
        return drawn >= self.word_dropout[tokens]

    def _lookup(self, vectors: Tensor, index: Tensor, used: Tensor | None) -> Tensor:
        """Rows of a table, [..., W], in the backbone's type; zeros where not `used`."""
        row_wise = self.training and self.row_wise
        if row_wise or self.dealt is not None:
            read = index if used is None else index.masked_fill(~used, -1)
            if isinstance(self.output, ShardedSoftmax) and self.dealt is not None:
                if self.embedding is None:
                    return self.output.lookup(read, row_wise=row_wise).to(self.dtype)
                return self.dealt.lookup(vectors, read, row_wise=row_wise).to(self.dtype)
            return lookup(vectors, read).to(self.dtype)
        rows = F.embedding(index, vectors).to(self.dtype)
        return rows if used is None else rows * used.unsqueeze(-1)

    @property
    def _vectors(self) -> Tensor:
        """The table of input vectors, [N or R, W], W ≥ E; [I, E] of classes if words are tied."""
        return self.tree_softmax.weight if self.embedding is None else self.embedding.weight

    @property
    def _ties_words_alone(self) -> bool:
        """Whether words have the output layer's rows, and their classes vectors of their own."""
        return self.tied and self.input_tree is not None

    @property
    def path_tree(self) -> ClassTree:
        """The tree with the classes of words: that of the input vectors, if they have their own."""
        return self.tree_softmax.tree if self.input_tree is None else self.input_tree

    @property
    def tree_softmax(self) -> HierarchicalSoftmax:
        """The output layer, which must be a tree of softmaxes."""
        assert isinstance(self.output, HierarchicalSoftmax)
        return self.output


def cpu_has_fast_bf16() -> bool:
    """Whether oneDNN computes bf16 matrix products and LSTMs on this CPU.

    It needs AVX-512 on x86. Without it, torch's native bf16 products take more than ten times as
    long as fp32 products, and oneDNN refuses to train an LSTM in bf16.
    """
    return hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def backbone_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Compute in fp32 under bf16 autocast on a CPU without fast bf16; a warning says so once."""
    is_bf16 = (
        device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
    )
    if not is_bf16 or cpu_has_fast_bf16():
        return nullcontext()
    _report_fp32()
    return torch.autocast("cpu", enabled=False)


@cache
def _report_fp32() -> None:
    _log.warning("this CPU has no fast bf16 arithmetic: bf16 mixed precision computes in fp32")
