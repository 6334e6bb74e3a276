"""The language model: input vectors → backbone → output layer. Decides how the parts are joined and
initialised.
"""

import math
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.config import ModelConfig, OutputConfig
from lm.model.adaptive import AdaptiveSoftmax
from lm.model.lstm import LSTM, Dropout
from lm.model.transformer import Transformer
from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.rowwise import lookup

State = tuple[Tensor, ...]


class Backbone(Protocol):
    """What turns input vectors into hidden vectors, forwards in time."""

    hidden_size: int
    carries_state: bool
    """Whether the state after one batch is the start of the next while training."""

    def init_state(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """The state before the first token."""

    def __call__(self, embedded: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        """hidden [T, B, H] of embedded [T, B, E], and the state after them."""

    @staticmethod
    def detach_state(state: State) -> State:
        """The state, cut from the graph that made it."""

    @staticmethod
    def select_state(state: State, index: Tensor) -> State:
        """The state of some sequences of the batch."""


class LanguageModel(nn.Module):
    """P(word | words before it) for streams of words.

    Args:
        backbone: E → H.
        output: the softmax over words.
        embedding_size: E; None shares the output layer's rows of words as input vectors (then E =
            H).
        input_path: a word's input vector is the sum of the vectors on its path in the output
            layer's tree, its nodes' and its own, instead of its own. They are the output layer's
            rows, or as many of size E.
        input_backoff: [N] probability with which, while training, a word is read without its own
            vector: as the rest of that sum, or as zero; None is 0.
        dropout: probability of zeroing, on input vectors and on hidden vectors.
        dropout_variational: one mask for all time steps.
        table_dtype: of the input vectors, if they are not the output layer's rows; None is torch's.
    """

    def __init__(
        self,
        backbone: Backbone,
        output: HierarchicalSoftmax | AdaptiveSoftmax,
        *,
        embedding_size: int | None,
        table_dtype: torch.dtype | None = None,
        input_path: bool = False,
        input_backoff: Tensor | None = None,
        dropout: float = 0.0,
        dropout_variational: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.output = output
        self.dropout = Dropout(dropout, dropout_variational)
        self.input_path = input_path
        self.input_backoff: Tensor | None
        self.register_buffer("input_backoff", input_backoff, persistent=False)
        self.embedding = None
        if embedding_size is not None:
            num_vectors = output.tree.num_rows if input_path else output.tree.vocab_size
            self.embedding = nn.Embedding(num_vectors, embedding_size, dtype=table_dtype)
            nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(embedding_size))

    @property
    def vocab_size(self) -> int:
        """N."""
        return self.output.tree.vocab_size

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.output.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the backbone; the table of words may be kept in less precision."""
        return next(p.dtype for p in cast(nn.Module, self.backbone).parameters())

    @property
    def table(self) -> list[nn.Parameter]:
        """What has a row for each word: the output layer's parameters and the input vectors."""
        vectors = () if self.embedding is None else self.embedding.parameters()
        return [*self.output.parameters(), *vectors]

    def init_state(self, batch_size: int) -> State:
        """The state before the first token."""
        return self.backbone.init_state(batch_size, device=self.device, dtype=self.dtype)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        """Hidden vectors.

        Args:
            tokens: [T, B] int64, the words read.
            state: after the words before them; None is the beginning.

        Returns:
            hidden [T, B, H], each of which predicts the next word, and the state after `tokens`.
        """
        embedded = self._embed_path(tokens) if self.input_path else self._embed_word(tokens)
        hidden, state = self.backbone(self.dropout(embedded), state)
        return self.dropout(hidden), state

    def _embed_word(self, tokens: Tensor) -> Tensor:
        """The words' own vectors, [T, B, E]."""
        rows = tokens if self.embedding is not None else self.output.tree.row_of_word[tokens]
        embedded = self._lookup(rows)
        known = self._draw_known(tokens)
        return embedded if known is None else embedded * known.unsqueeze(-1)

    def _embed_path(self, tokens: Tensor) -> Tensor:
        """Sums of the vectors on the words' paths, [T, B, E]."""
        tree = self.output.tree
        rows = torch.cat([tree.row_of_word[tokens].unsqueeze(-1), tree.rows_above(tokens)], -1)
        used = rows >= 0
        known = self._draw_known(tokens)
        if known is not None:
            used[..., 0] &= known
        rows = rows.clamp(min=0)
        if self._sparse or self._vectors.dtype != self.dtype:
            return (self._lookup(rows) * used.unsqueeze(-1)).sum(-2)
        summed = F.embedding_bag(
            rows.flatten(0, -2),
            self._vectors,
            per_sample_weights=used.flatten(0, -2).to(self.dtype),
            mode="sum",
        )
        return summed.view(*tokens.shape, -1)

    def _draw_known(self, tokens: Tensor) -> Tensor | None:
        """Which words are read with their own vector, [T, B] bool; None is all."""
        if not self.training or self.input_backoff is None:
            return None
        # Not in half precision, which has no numbers between 0 and what a frequent word's would be.
        drawn = torch.rand(tokens.shape, dtype=torch.float32, device=tokens.device)
        return drawn >= self.input_backoff[tokens]

    def _lookup(self, index: Tensor) -> Tensor:
        """Rows of the input vectors' table, [..., E], in the backbone's type."""
        if self._sparse:
            return lookup(self._vectors, index).to(self.dtype)
        return F.embedding(index, self._vectors).to(self.dtype)

    @property
    def _vectors(self) -> Tensor:
        """The table of input vectors."""
        return self.output.weight if self.embedding is None else self.embedding.weight

    @property
    def _sparse(self) -> bool:
        """Whether the table is to get a `RowGradient`."""
        return self.training and self.output.sparse

    def loss(
        self, tokens: Tensor, targets: Tensor, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """Mean negative log-likelihood in nats of `targets` [T, B] after `tokens` [T, B], and the
        state after them.
        """
        hidden, state = self(tokens, state)
        return self.output.loss(hidden, targets), state


def build_model(
    config: ModelConfig,
    output: OutputConfig,
    tree: ClassTree,
    context: int,
    *,
    counts: Tensor | None = None,
    sparse: bool = False,
) -> LanguageModel:
    """The model that a configuration describes, freshly initialised from torch's random numbers.

    Args:
        config: the section `model`.
        output: the section `output`.
        tree: what `output.tree` stands for.
        context: T, positions that a Transformer attends to.
        counts: [N] occurrences of each word while training, which `input_backoff` asks for; without
            them a word's own vector is always there.
        sparse: whether the table of words gets a `RowGradient`.
    """
    embedding_size = config.embedding or config.hidden
    backbone: nn.Module
    if config.backbone == "lstm":
        backbone = LSTM(
            embedding_size,
            config.hidden,
            config.layers,
            dropout=config.dropout,
            dropout_weight=config.dropout_weight,
            dropout_variational=config.dropout_variational,
        )
    else:
        backbone = Transformer(
            embedding_size,
            config.hidden,
            config.layers,
            heads=config.heads,
            feedforward=config.feedforward,
            dropout=config.dropout,
            context=context,
        )
    dtype = torch.bfloat16 if output.dtype == "bf16" else None
    softmax: HierarchicalSoftmax | AdaptiveSoftmax
    if output.tree == "adaptive":
        softmax = AdaptiveSoftmax(config.hidden, tree, bias=output.bias)
    else:
        softmax = HierarchicalSoftmax(
            config.hidden,
            tree,
            bias=output.bias,
            backend=output.backend,
            sparse=sparse,
            dtype=dtype,
        )
    model = LanguageModel(
        cast(Backbone, backbone),
        softmax,
        table_dtype=dtype,
        input_path=config.input == "path",
        input_backoff=_backoff(config, tree, counts),
        embedding_size=None if config.tied else embedding_size,
        dropout=config.dropout,
        dropout_variational=config.dropout_variational,
    )
    if config.init_range is not None:
        for module in (
            model.embedding,
            model.output,
            backbone if config.backbone == "lstm" else None,
        ):
            for parameter in () if module is None else module.parameters():
                nn.init.uniform_(parameter, -config.init_range, config.init_range)
    return model


def _backoff(config: ModelConfig, tree: ClassTree, counts: Tensor | None) -> Tensor | None:
    """Probability [N] of a word being read without its own vector; with input: path 0 for the words
    on the root, of which nothing would be left.
    """
    amount = config.input_backoff
    if not amount or counts is None:
        return None
    probability = amount / (amount + counts)
    if config.input == "path":
        probability = probability * (tree.node_of_row[tree.row_of_word] > 0)
    return probability
