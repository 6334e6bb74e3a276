"""Which tree and which model a configuration describes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from data_prep.corpus.formats import HEAD_BYTES, likely_encoding, no_text
from data_prep.errors import UserError
from data_prep.prepared import Prepared
from data_prep.storage import open_to_read
from lm.config import Config, ModelConfig, OutputConfig, WordTable
from lm.config.schema import TREES
from lm.model.adaptive import AdaptiveSoftmax
from lm.model.input_pieces import InputPieces
from lm.model.language_model import Backbone, LanguageModel, OutputLayer
from lm.model.lstm import LSTM
from lm.model.sampled import SampledSoftmax
from lm.model.transformer import Transformer
from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.sharded import PlacementName, ShardedSoftmax


def build_tree(config: Config, prepared: Prepared) -> ClassTree | None:
    """Build the tree of softmaxes that `output.tree` names, over the words of the prepared data.

    It is None for `adaptive`, which has cutoffs. A UserError says what is wrong with a tree's file.
    """
    output, vocab_size = config.output, prepared.vocab_size
    if output.tree == "adaptive":
        return None
    if output.tree == "full":
        return ClassTree.full(vocab_size)
    if output.tree == "balanced":
        branching = output.branching or max(2, math.isqrt(vocab_size - 1) + 1)
        return ClassTree.balanced(vocab_size, branching)
    if output.tree == "huffman":
        return ClassTree.huffman(torch.tensor(prepared.counts()), output.arity)
    if output.tree == "two_level":
        return build_input_tree(prepared)
    if output.tree == "multi_level":
        levels = torch.from_numpy(prepared.class_levels().astype("int64"))
        return ClassTree.from_levels(levels, prepared.shortlist, torch.tensor(prepared.counts()))
    check_tree(output)
    tokenizer = prepared.tokenizer
    words = [tokenizer.token(word) for word in range(vocab_size)]
    try:
        return ClassTree.from_file(output.tree, words)
    except UnicodeDecodeError as error:
        problem = f"{output.tree}: invalid UTF-8: {likely_encoding(error.object)}"
        raise UserError(f"output.tree: {problem}") from error
    except ValueError as error:
        raise UserError(f"output.tree: {error}") from error


def check_tree(output: OutputConfig) -> None:
    """Raises UserError if `output.tree` is neither the name of a tree nor a file of text."""
    if output.tree in TREES:
        return
    if not Path(output.tree).exists():
        trees = ", ".join(TREES)
        raise UserError(f"output.tree: {output.tree} is neither a tree ({trees}) nor a file")
    with open_to_read(Path(output.tree)) as file:
        if problem := no_text(file.read(HEAD_BYTES), output.tree):
            raise UserError(f"output.tree: {output.tree} is {problem}")


def build_input_tree(prepared: Prepared) -> ClassTree:
    """Build the tree of the word classes, as for `output.tree: two_level`."""
    word_class = torch.from_numpy(prepared.word_class().astype("int64"))
    counts = torch.tensor(prepared.counts())
    return ClassTree.from_levels(word_class[None], prepared.shortlist, counts)


def build_model(
    config: ModelConfig,
    output: OutputConfig,
    word_table: WordTable,
    tree: ClassTree | None,
    context: int,
    *,
    input_tree: ClassTree | None = None,
    pieces: Tensor | None = None,
    counts: Tensor | None = None,
    placement: PlacementName | None = None,
) -> LanguageModel:
    """Build the model that a configuration describes, initialized from torch's random generator.

    Args:
        config: the section `model`, next to the sections `output` and, resolved, `word_table`.
        tree: the result of `build_tree`, as `input_tree` is of `build_input_tree` and `pieces`, for
            `model.input_pieces`, of `pieces_of_words`.
        context: T, number of positions that a Transformer attends to.
        counts: [N] occurrences of each word in the training split, for `output.tree: adaptive`, a
            placement by class, and to train with `count_word_dropout` or `output.num_samples`.
        placement: how the rows of the table of words are dealt to the processes of
            `torch.distributed`, see `ShardedSoftmax`; None: every process has all.

    Returns:
        The model, in training mode, on the default device. UserError if `output.cutoffs` do not fit
        the vocabulary.
    """
    dtype = torch.bfloat16 if word_table.dtype == "bf16" else None
    word_dropout = None
    if config.count_word_dropout and counts is not None:
        word_dropout = config.count_word_dropout / (config.count_word_dropout + counts)
        paths = tree if input_tree is None else input_tree
        if config.input_embedding == "path_sum" and paths is not None:  # none loses all vectors
            word_dropout = word_dropout * (paths.node_of_row[paths.row_of_word] > 0)
    backbone = _build_backbone(config, context)
    fill = partial(nn.init.uniform_, a=-(config.init_range or 0), b=config.init_range or 0)
    if config.init_range is not None and config.backbone == "lstm":
        # Drawn before the output layer is built, so that they do not depend on it.
        for parameter in cast(nn.Module, backbone).parameters():
            fill(parameter)
    softmax = _build_softmax(config, output, word_table, tree, counts, placement)
    input_pieces = None
    if config.input_pieces is not None:
        assert pieces is not None
        input_pieces = InputPieces(pieces, config.input_pieces, config.embedding or config.hidden)
    model = LanguageModel(
        backbone,
        softmax,
        embedding_size=None if word_table.tied else config.embedding or config.hidden,
        embedding_dtype=dtype,
        path_sum=config.input_embedding == "path_sum",
        input_tree=input_tree,
        input_pieces=input_pieces,
        row_wise=word_table.row_wise,
        word_dropout=word_dropout,
        dropout=config.dropout,
        dropout_variational=config.dropout_variational,
        residual=config.residual,
    )
    if config.init_range is not None:
        dealt = model.dealt_tables
        for prefix in ("embedding.", "output.", "input_pieces."):
            for name, parameter in model.named_parameters():
                if name.startswith(prefix):
                    dealt[name].draw(parameter, fill) if name in dealt else fill(parameter)
        if isinstance(softmax, HierarchicalSoftmax):
            softmax.zero_padding()
    return model


def _build_softmax(
    config: ModelConfig,
    output: OutputConfig,
    word_table: WordTable,
    tree: ClassTree | None,
    counts: Tensor | None,
    placement: PlacementName | None,
) -> OutputLayer:
    if tree is None:  # output.tree: adaptive, whose clusters are by count
        assert counts is not None
        dropout = output.tail_dropout
        try:
            return AdaptiveSoftmax(config.hidden, counts, output.cutoffs, tail_dropout=dropout)
        except ValueError as error:
            raise UserError(f"output.cutoffs: {error}") from error
    kind: Any = HierarchicalSoftmax
    if placement is not None:
        kind = partial(ShardedSoftmax, placement=placement, counts=counts)
    elif output.num_samples is not None and counts is not None:
        kind = partial(SampledSoftmax, counts=counts, num_samples=output.num_samples)
    softmax: OutputLayer = kind(
        config.hidden,
        tree,
        backend=output.backend,
        row_wise=word_table.row_wise,
        dtype=torch.bfloat16 if word_table.dtype == "bf16" else None,
    )
    return softmax


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules that are built inside the `with` block have meta tensors as parameters.

    `torch.nn.init` is skipped: with a meta tensor it imports `torch._dynamo`, which takes seconds.
    """
    with torch.device("meta"), _WithoutInitialization():
        yield


class _WithoutInitialization(TorchFunctionMode):
    """Skips the functions of `torch.nn.init`."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **kwargs)


def _build_backbone(config: ModelConfig, context: int) -> Backbone:
    embedding_size = config.embedding or config.hidden
    if config.backbone == "lstm":
        return LSTM(
            embedding_size,
            config.hidden,
            config.layers,
            dropout=config.dropout,
            dropout_weight=config.dropout_weight,
            dropout_variational=config.dropout_variational,
        )
    return Transformer(
        embedding_size,
        config.hidden,
        config.layers,
        heads=config.heads,
        feedforward=config.feedforward,
        dropout=config.dropout,
        context=context,
    )
