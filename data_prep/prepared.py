"""The files on disk that `data_prep` writes and `lm` reads: formats, checksums, validation.

A prepared folder holds `meta.json`, the tokenizer (`tokenizer.json` and `vocab.txt` or
`tokenizer.model`), one token file for each split (`train.npy`, ...), `counts.npy` and
`classes.npy`. Every file is complete or absent. `meta.json` describes finished stages only and is
replaced after each of them. File names are fixed here; none is ever taken from a file's contents.
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from data_prep.errors import UserError
from data_prep.settings import STRICT, NonNegative, Positive
from data_prep.storage import (
    ArrayInfo,
    map_array,
    open_to_read,
    sha256_file,
    verify_array,
    write_atomically,
    write_json_atomically,
)
from data_prep.tokenizer.tokenizer import EOS, UNK, SentencePieceTokenizer, Tokenizer, WordTokenizer

if TYPE_CHECKING:
    from data_prep.tokenizer.word_index import WordTable

FORMAT_VERSION = 1
META = "meta.json"
COUNTS = "counts.npy"
CLASSES = "classes.npy"
TOKENIZER = "tokenizer.json"
MODEL_FILE = {"words": "vocab.txt", "sentencepiece": "tokenizer.model"}
WORDS_PER_CHUNK = 1 << 16

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of the corpus as it was when it was read."""

    __pydantic_config__ = STRICT

    name: str
    """Without its folder: a corpus that moves is still the same."""
    num_bytes: NonNegative
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """A token file and what was counted while it was written."""

    __pydantic_config__ = STRICT

    dtype: Literal["uint16", "uint32"]
    tokens: Positive
    """`<eos>` after every line included."""
    lines: Positive
    words: NonNegative
    """Whitespace-separated words of the text, without `<eos>`."""
    utf8_bytes: Positive
    """Of the text, each line with one newline."""
    oov: NonNegative
    """Tokens that are `<unk>`, whether the text says so or the vocabulary lacks the word."""
    sha256: str
    """Of the tokens, without the header of the file."""

    @property
    def array(self) -> ArrayInfo:
        """The same file as a plain array."""
        return ArrayInfo(dtype=self.dtype, length=self.tokens, sha256=self.sha256)


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The tokenizer that the token files were written with."""

    __pydantic_config__ = STRICT

    kind: Literal["words", "sentencepiece"]
    sha256: str
    """Of `tokenizer.json`, which holds the hash of the vocabulary or model."""
    vocab_size: Positive
    eos_id: NonNegative
    unk_id: NonNegative


@dataclass(frozen=True, kw_only=True)
class ClassesInfo:
    """The word classes: which method made them, how many there are, and how many words are in
    none.
    """

    __pydantic_config__ = STRICT

    method: str
    num_word_classes: Positive
    head: NonNegative = 0
    array: ArrayInfo


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What `meta.json` says: how the folder was made, and the stages that are finished."""

    __pydantic_config__ = STRICT

    format_version: int = FORMAT_VERSION
    settings: dict[str, dict[str, Any]]
    """Sections `data`, `tokenizer`, `classes`: those of their keys that matter to the files."""
    inputs: dict[str, list[InputFile]]
    """The files of the corpus by split, in reading order; under `classes`, the file of word
    classes.
    """
    tokenizer: TokenizerInfo | None = None
    splits: dict[Split, SplitInfo] = field(default_factory=dict)
    counts: ArrayInfo | None = None
    classes: ClassesInfo | None = None
    complete: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """What `tokenizer.json` says."""

    __pydantic_config__ = STRICT

    format_version: int = FORMAT_VERSION
    kind: Literal["words", "sentencepiece"]
    sha256: str
    """Of `vocab.txt` or `tokenizer.model`."""
    lowercase: bool = False
    split_punctuation: bool = False


class Prepared:
    """A complete prepared folder, open for reading; made by `open_prepared`."""

    def __init__(self, folder: Path, meta: Meta, *, verify: bool = True) -> None:
        if meta.tokenizer is None or meta.counts is None or meta.classes is None:
            raise ValueError(f"{folder}: the preparation is not complete")
        self.folder = folder
        self.meta = meta
        self.splits: dict[str, SplitInfo] = {split: meta.splits[split] for split in meta.splits}
        self.vocab_size = meta.tokenizer.vocab_size
        self.eos_id = meta.tokenizer.eos_id
        self.unk_id = meta.tokenizer.unk_id
        self.tokenizer_kind = meta.tokenizer.kind
        self.tokenizer_sha256 = meta.tokenizer.sha256
        self.num_word_classes = meta.classes.num_word_classes
        self.head = meta.classes.head
        self._counts = meta.counts
        self._classes = meta.classes.array
        self._verify = verify
        self._verified: set[str] = set()

    def tokens(self, split: str) -> NDArray[np.unsignedinteger[Any]]:
        """All tokens of a split in reading order, a read-only map of the file [tokens], uint16 or
        uint32.

        Raises:
            UserError: the split was not prepared; the file is absent, truncated or damaged; an id
                is out of range.
        """
        if split not in self.splits:
            raise UserError(
                f"{self.folder} has no {split} split: give its files as data.files.{split}"
                f" (prepared: {', '.join(self.splits)})"
            )
        return self._array(f"{split}.npy", self.splits[split].array, below=self.vocab_size)

    def counts(self) -> NDArray[np.int64]:
        """Occurrences of every id in the training split, int64 [N]."""
        return self._array(COUNTS, self._counts, length=self.vocab_size)

    def word_class(self) -> NDArray[np.int32]:
        """Class of every id, int32 [N], in [0, num_word_classes); that of the `head` most frequent
        words says nothing.
        """
        return self._array(
            CLASSES, self._classes, length=self.vocab_size, below=self.num_word_classes
        )

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the token files were written with."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        verify_tokenizer(self.folder, self.tokenizer_sha256)
        return load_tokenizer(self.folder)

    def _array(
        self, name: str, info: ArrayInfo, *, length: int | None = None, below: int | None = None
    ) -> NDArray[Any]:
        if length is not None and info.length != length:
            raise UserError(
                f"{self.folder / name} holds {info.length} values:"
                f" expected {length}, one for each word"
            )
        array = map_array(self.folder / name, info)
        if self._verify and name not in self._verified:
            verify_array(self.folder / name, array, info, below=below)
            self._verified.add(name)
        return array


def open_prepared(folder: Path | str, *, verify: bool = True) -> Prepared:
    """Open a folder that `prepare` has finished.

    Args:
        folder: the prepared folder.
        verify: whether each array is compared with its SHA-256 the first time it is asked for
            (about 1 GB/s).

    Raises:
        UserError: the folder is absent, unfinished, damaged or of another format version.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    if meta is None:
        raise UserError(
            f"{folder} is no prepared folder: it has no {META} (run `lm prepare` first)"
        )
    if not meta.complete:
        raise UserError(f"{folder} is half prepared: run `lm prepare` again to finish it")
    return Prepared(folder, meta, verify=verify)


def read_meta(folder: Path) -> Meta | None:
    """`meta.json` of a prepared folder, finished or not; None if there is none.

    Raises:
        UserError: it is damaged or of another format version.
    """
    path = folder / META
    if not path.exists():
        return None
    meta: Meta = _read_json(path, Meta)
    needed = (meta.tokenizer, meta.counts, meta.classes, meta.splits.get("train"))
    if meta.complete and None in needed:
        raise UserError(f"{path} is damaged: it calls itself complete, but a stage is missing")
    return meta


def write_meta(folder: Path, meta: Meta) -> None:
    """Replace `meta.json`."""
    write_json_atomically(folder / META, asdict(meta))


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest type of a token file that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def save_tokenizer(
    folder: Path, tokenizer: Tokenizer, counts: NDArray[np.int64] | None = None
) -> TokenizerInfo:
    """Write `tokenizer.json` and `vocab.txt` or `tokenizer.model`.

    Args:
        folder: an existing folder.
        tokenizer: what to write.
        counts: occurrences of each word [N], for `vocab.txt`.
    """
    model = folder / MODEL_FILE[tokenizer.kind]
    content: Iterator[bytes]
    settings = {}
    if isinstance(tokenizer, WordTokenizer):
        if counts is None or len(counts) != tokenizer.vocab_size:
            raise ValueError(f"expected counts of {tokenizer.vocab_size} words for {model}")
        content = _vocabulary(tokenizer.words, counts)
        settings = {
            "lowercase": tokenizer.lowercase,
            "split_punctuation": tokenizer.split_punctuation,
        }
    elif isinstance(tokenizer, SentencePieceTokenizer):
        content = iter([tokenizer.model])
    else:
        raise ValueError(f"no file format for {type(tokenizer).__name__}")
    digest = write_atomically(model, partial(_write_hashed, content))
    description = TokenizerFile(kind=tokenizer.kind, sha256=digest, **settings)
    write_json_atomically(folder / TOKENIZER, asdict(description))
    return TokenizerInfo(
        kind=tokenizer.kind,
        sha256=sha256_file(folder / TOKENIZER),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        unk_id=tokenizer.unk_id,
    )


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a prepared folder, a run or an exported model.

    Args:
        folder: holds `tokenizer.json` and `vocab.txt` or `tokenizer.model`.

    Raises:
        UserError: a file is absent, damaged or does not fit the other.
    """
    description: TokenizerFile = _read_json(Path(folder) / TOKENIZER, TokenizerFile)
    path = Path(folder) / MODEL_FILE[description.kind]
    with open_to_read(path) as file:
        content = file.read()
    if hashlib.sha256(content).hexdigest() != description.sha256:
        raise UserError(_damaged(path))
    if description.kind == "sentencepiece":
        try:
            return SentencePieceTokenizer(content)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error
    words, _ = parse_vocabulary(content, path)
    return WordTokenizer(
        words, lowercase=description.lowercase, split_punctuation=description.split_punctuation
    )


def verify_tokenizer(folder: Path, sha256: str) -> None:
    """Compare the files of a tokenizer with their checksums, without loading it.

    Args:
        folder: holds `tokenizer.json` and `vocab.txt` or `tokenizer.model`.
        sha256: of `tokenizer.json`, as `TokenizerInfo` has it.

    Raises:
        UserError: a file is absent, damaged or of another tokenizer.
    """
    path = folder / TOKENIZER
    if sha256_file(path) != sha256:
        raise UserError(f"{path} is not the tokenizer that the token files were written with")
    description: TokenizerFile = _read_json(path, TokenizerFile)
    model = folder / MODEL_FILE[description.kind]
    if sha256_file(model) != description.sha256:
        raise UserError(_damaged(model))


def copy_tokenizer(prepared: Prepared, folder: Path | str) -> None:
    """Copy the tokenizer's files to a run or an exported model.

    Raises:
        UserError: a file is absent, damaged or of another tokenizer.
    """
    verify_tokenizer(prepared.folder, prepared.tokenizer_sha256)
    for name in (MODEL_FILE[prepared.tokenizer_kind], TOKENIZER):
        with open_to_read(prepared.folder / name) as source:
            write_atomically(Path(folder) / name, partial(shutil.copyfileobj, source))


def parse_vocabulary(content: bytes, path: Path) -> tuple["WordTable", NDArray[np.int64]]:
    """The words and counts of a `vocab.txt`: one `word TAB count` a line.

    Args:
        content: bytes of the file.
        path: its name, for messages.

    Raises:
        UserError: names the first line that is wrong, or the special word that is missing.
    """
    from data_prep.tokenizer.word_index import (  # loads a compiler
        RepeatedWord,
        WordTable,
        parse_counts,
    )

    try:
        content.decode()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {number}: invalid UTF-8") from error
    text, starts, counts, num_right = parse_counts(content)
    if num_right < len(counts):
        line = content.split(b"\n", num_right + 1)[num_right].decode()
        raise UserError(f"{path}, line {num_right + 1}: expected word TAB count, got {line[:80]!r}")
    try:
        words = WordTable(text, starts)
    except RepeatedWord as error:
        raise UserError(
            f"{path}, line {error.id + 1}: {error.word!r} is on line {error.first_id + 1} too"
        ) from error
    for special in (UNK, EOS):
        if words.id(special) < 0:
            raise UserError(f"{path}: the word {special} is missing")
    return words, counts


def _damaged(path: Path) -> str:
    return f"{path} is damaged: its SHA-256 differs from the one in {TOKENIZER}"


def _read_json(path: Path, kind: type[Any]) -> Any:
    with open_to_read(path) as file:
        content = file.read()
    try:
        version = TypeAdapter(dict[str, Any]).validate_json(content).get("format_version")
        if version != FORMAT_VERSION:
            raise UserError(f"{path} has format version {version}: expected {FORMAT_VERSION}")
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{path} is damaged: {where}: {first['msg']}".replace(": : ", ": ")
        ) from error


def _vocabulary(words: "WordTable", counts: NDArray[np.int64]) -> Iterator[bytes]:
    """The content of `vocab.txt`, in portions."""
    lines = map("{}\t{}\n".format, words, map(int, counts))
    while chunk := "".join(islice(lines, WORDS_PER_CHUNK)):
        yield chunk.encode()


def _write_hashed(content: Iterable[bytes], file: BinaryIO) -> str:
    """Write the content; returns its SHA-256."""
    digest = hashlib.sha256()
    for chunk in content:
        digest.update(chunk)
        file.write(chunk)
    return digest.hexdigest()
