"""The sections of the configuration that data preparation reads: `data`, `tokenizer`, `classes`.

Plain dataclasses with their constraints in the types; `lm.config` validates them strictly, without
coercion. Imports nothing heavy, so that a command line can read a configuration quickly.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Files = str | list[str] | None

BYTE_ORDER_MARK = "\ufeff"
"""First character of some text files; not part of the text."""
ALL_LEVELS = 1_000_000
"""`ClassesConfig.depth` that leaves out no level of a file."""


class Strict:
    """Base of dataclasses that pydantic validates without coercion; unknown keys are errors."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class SplitFiles(Strict):
    """The files of each split: a path, a glob, a folder, or a list of these.

    Relative paths start at `data.dir`.
    """

    train: Files = None
    """Files of the training split."""
    valid: Files = None
    """Files of the validation split."""
    test: Files = None
    """Files of the test split."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Strict):
    """Where the text comes from and where the prepared files are written."""

    dir: str = "."
    """Folder at which relative paths in `files` start."""
    files: SplitFiles = field(default_factory=SplitFiles)
    """Local files of each split, which may be compressed (.gz .bz2 .xz .zst, .zip of one)."""
    format: Literal["text", "json", "parquet", "csv"] = "text"
    """Format of the local files: lines of text, JSON (lines or one array), parquet, or CSV with a
    line of names, separated by commas, tabs, semicolons or vertical bars.
    """
    hub: str | None = None
    """Name of a dataset on the hub (or a folder in the hub's layout), read instead of `files`; its
    splits are train, validation and test.
    """
    hub_config: str | None = None
    """Configuration name of the hub dataset, for instance `wikitext-103-raw-v1`."""
    text_field: str = "text"
    """Column that contains the text, for formats with columns."""
    keep_empty_lines: bool = True
    """Whether an empty line counts as a sentence of one `<eos>` (the convention of published
    WikiText figures).
    """
    sequences: Literal["stream", "independent"] = "stream"
    """stream: all lines of a split are one text. independent: each line is a sequence of its own,
    such as the items of one user: nothing is carried from one to the next, the first item is
    predicted from `<eos>`, and the end is not predicted. In a line of validation or test, a tab
    separates items that are known from those to predict. Items that the training split lacks are
    left out; those to predict are counted. In training, sequences longer than `train.seq_len` are
    cut into windows: each item is in one, predicted from the items before it there.
    """
    predict_eos: bool = False
    """independent: whether the end of each sequence is predicted as well."""
    user_field: str | None = None
    """independent: column of the user. The files are then tables of events, one in a row, whose
    items become one sequence for each user. They are kept as they are, text or integers.
    """
    item_field: str = "item"
    """user_field: column of the item."""
    time_field: str | None = "time"
    """user_field: column of the time, a number or a date, by which the events of a user are sorted.
    Without this column (null) they have the order of the files.
    """
    ties: Literal["rows", "random"] = "rows"
    """user_field: order of the events of a user at one time. rows: that of the files. random: that
    of a hash of user, time and item, whatever the order of the rows is.
    """
    split: Literal["files", "leave_one_out", "time"] = "files"
    """user_field: files: each split has files of its own; events that a user has in those of an
    earlier split are known, and not predicted. Otherwise `files.train` has all events.
    leave_one_out: the last item of a user is test and the one before it validation; users with
    fewer than three events are in training alone. time: events from `valid_from` on are validation,
    and from `test_from` on test.
    """
    valid_from: str | None = None
    """split: time: a number or a date (ISO 8601). Default: 80 % of the events are before it."""
    test_from: str | None = None
    """split: time: likewise; default: 90 % of the events are before it."""
    prepared_dir: str | None = None
    """Folder that contains the prepared files and nothing else; default `<run_dir>/data`."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Strict):
    """How a line becomes token ids; the vocabulary is built from the training split alone."""

    kind: Literal["words", "sentencepiece"] = "words"
    """`words`: whitespace-separated words, vocab.txt; `sentencepiece`: pieces, tokenizer.model."""
    vocab_size: Positive | None = None
    """words: maximum number of word types, `<unk>` and `<eos>` included (None: all); sentencepiece:
    number of pieces (required), with `model_type: char` the maximum.
    """
    min_count: Positive = 1
    """words: words that occur less often become `<unk>`."""
    lowercase: bool = False
    """words: convert the text to lower case first, in all languages alike: the Turkish capital I,
    with or without a dot, becomes i.
    """
    split_punctuation: bool = False
    """words: punctuation marks before and after a word become separate words; marks inside one
    belong to it, as in `EU:n` and `--max-size` (for raw text; not for corpora that are already
    tokenized).
    """
    model_type: Literal["unigram", "bpe", "char", "word"] = "unigram"
    """sentencepiece: kind of model."""
    byte_fallback: bool = False
    """sentencepiece: spell unknown characters as UTF-8 bytes, so that nothing is unknown. Not with
    `model_type: word`.
    """
    character_coverage: Annotated[float, Field(ge=0.98, le=1)] = 0.9995
    """sentencepiece: share of the characters that the pieces cover."""
    max_sentences: Positive = 1_000_000
    """sentencepiece: number of training lines sampled to build the model; memory grows with it."""


@dataclass(frozen=True, kw_only=True)
class ClassesConfig(Strict):
    """How words are assigned to classes, for `output.tree` or `model.input_tree` of classes."""

    method: Literal["embedding", "exchange", "frequency", "uniform", "random", "file"] = "exchange"
    """exchange: start from embedding, then move each word to the class that makes the text most
    likely;
    embedding: balanced k-means on PPMI-SVD vectors, refined by the likelihood of class bigrams;
    frequency: equal sums of √count; uniform: equal blocks of frequency ranks; random: equal sizes,
    shuffled; file: a word → class file.
    """
    num_word_classes: Positive | None = None
    """C, number of classes; default √N, rounded, and N^((depth - 1) / depth) for multi_level, where
    C classes contain words.
    """
    depth: Annotated[int, Field(ge=2)] | None = None
    """multi_level: largest number of nodes on a word's path (default 3; file: that of the file).
    Words are assigned to C classes, these by the same method to C^((depth - 2) / (depth - 1))
    classes, and so on up to the root. file: levels of classes beyond depth - 1 are left out.
    """
    shortlist: NonNegative = 0
    """Number of most frequent words that are children of the root, next to the classes, and in no
    class. exchange then optimizes the classes of the other words for that tree.
    """
    seed: NonNegative = 1
    """Seed of `random`, `embedding` and `exchange`."""
    clustered_words: Positive | None = None
    """embedding, exchange: number of most frequent words to cluster (default: all). The other words
    are divided by count into separate classes, as in frequency. The two groups share C in
    proportion to their sums of √count. embedding counts pairs of clustered words only; exchange
    treats all other words as one neighbour.
    """
    dimensions: Positive = 100
    """embedding, exchange: length of the word vectors."""
    max_words: Positive | None = None
    """embedding, exchange: maximum number of words in one class; default ⌈N / C⌉ (equal sizes),
    twice that for exchange. With `clustered_words`, N and C are those of the clustered words.
    """
    vectors: str | None = None
    """embedding: file of given vectors, such as those of descriptions of items, in place of those
    of neighbours: a word and its numbers in each line, separated by a tab, or by spaces as in
    word2vec and GloVe. k-means balances the classes of these; the text does not refine them. A
    relative path starts at `data.dir`. Not with `clustered_words` and multi_level.
    """
    file: str | None = None
    """file: the word → class file; a relative path starts at `data.dir`."""
    file_format: Literal["mkcls", "brown", "srilm", "taxonomy"] = "mkcls"
    """file: `mkcls` (word TAB class), `brown` (bit string TAB word TAB count), `srilm` (class
    [probability] word) or `taxonomy` (word TAB class/subclass/…). multi_level requires brown, whose
    bits it takes as child numbers, or taxonomy.
    """
