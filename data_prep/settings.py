"""The three sections of the configuration that data preparation reads: `data`, `tokenizer`,
`classes`.

Plain dataclasses with their constraints in the types; `lm.config` validates them (strictly, no
coercion). Nothing heavy is imported here, so that a command line can read a configuration without
loading a library.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Files = str | list[str] | None

BYTE_ORDER_MARK = "\ufeff"
"""Stands before some texts and is no part of them."""


@dataclass(frozen=True, kw_only=True)
class SplitFiles:
    """The files of each split: a path, a glob, a folder, or a list of these; relative ones start at
    `data.dir`.
    """

    __pydantic_config__ = STRICT

    train: Files = None
    valid: Files = None
    test: Files = None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from: what `datasets.load_dataset` takes, and where the prepared files
    go.
    """

    __pydantic_config__ = STRICT

    dir: str = "."
    """Folder that relative names in `files` start at."""
    files: SplitFiles = field(default_factory=SplitFiles)
    """Local files of each split; compressed ones (.gz .bz2 .xz .zst) are read as they are."""
    format: Literal["text", "json", "parquet", "csv"] = "text"
    """What the local files are: lines of text, JSON lines, parquet or CSV."""
    hub: str | None = None
    """Name of a dataset on the hub (or a folder in its layout), instead of `files`; its splits
    train/validation/test are read.
    """
    hub_config: str | None = None
    """Configuration name of the hub dataset, for instance `wikitext-103-raw-v1`."""
    text_field: str = "text"
    """Column that holds the text, for formats that have columns."""
    keep_empty_lines: bool = True
    """Whether an empty line counts as a sentence of one `<eos>` (the convention behind published
    WikiText figures).
    """
    prepared_dir: str | None = None
    """Folder of the prepared files and of nothing else; default `<run_dir>/data`."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How a line becomes token ids. The vocabulary is built from the training split alone."""

    __pydantic_config__ = STRICT

    kind: Literal["words", "sentencepiece"] = "words"
    """`words`: whitespace-separated words, vocab.txt; `sentencepiece`: pieces, tokenizer.model."""
    vocab_size: Positive | None = None
    """words: keep at most this many types, `<unk>` and `<eos>` included (None: all); sentencepiece:
    number of pieces (required).
    """
    min_count: Positive = 1
    """words: types seen less often become `<unk>`."""
    lowercase: bool = False
    """words: fold case before anything else."""
    split_punctuation: bool = False
    """words: punctuation marks become words of their own (for raw text; corpora with separated
    tokens want False).
    """
    model_type: Literal["unigram", "bpe", "char", "word"] = "unigram"
    """sentencepiece: kind of model."""
    byte_fallback: bool = False
    """sentencepiece: spell unknown characters as UTF-8 bytes, so that nothing is unknown."""
    character_coverage: Annotated[float, Field(gt=0, le=1)] = 0.9995
    """sentencepiece: share of characters that get a piece."""
    max_sentences: Positive = 1_000_000
    """sentencepiece: number of training lines sampled to build the model (memory grows with it)."""


@dataclass(frozen=True, kw_only=True)
class ClassesConfig:
    """How words are put into classes for `output.tree: two_level`."""

    __pydantic_config__ = STRICT

    method: Literal["embedding", "exchange", "frequency", "uniform", "random", "file"] = "exchange"
    """exchange: each word moves to the class that makes the text most likely, from those of
    embedding;
    embedding: balanced k-means on PPMI-SVD vectors, refined by the likelihood of class bigrams;
    frequency: equal sums of √count; uniform: equal blocks of frequency ranks; random: equal sizes,
    shuffled; file: a word → class file.
    """
    num_word_classes: Positive | None = None
    """C, number of classes; default √N, rounded."""
    head: NonNegative = 0
    """This many of the most frequent words are in no class: they hang on the root, beside the
    classes. exchange then makes the classes of the other words for that tree.
    """
    seed: NonNegative = 1
    """Seed of `random`, `embedding` and `exchange`."""
    clustered_words: Positive | None = None
    """embedding, exchange: only this many of the most frequent words are clustered; the others are
    cut by count into classes of their own, as in frequency. The two parts share C in proportion to
    their sums of √count. embedding looks at pairs of clustered words alone; to exchange, the others
    are one neighbour. Default: all.
    """
    dimensions: Positive = 100
    """embedding, exchange: length of the word vectors."""
    max_words: Positive | None = None
    """embedding, exchange: most words in one class; default ⌈N / C⌉, equal sizes, and twice that
    for exchange. With `clustered_words`, N and C are those of the clustered words.
    """
    column_cost: Annotated[float, Field(ge=0)] = 0.0
    """exchange: nats that one logit of one token is worth; above 0, frequent words end in smaller
    classes.
    """
    file: str | None = None
    """file: the word → class file; a relative name starts at `data.dir`."""
    file_format: Literal["mkcls", "brown", "srilm"] = "mkcls"
    """file: `mkcls` (word TAB class), `brown` (bit string TAB word TAB count) or `srilm` (class
    [probability] word).
    """
