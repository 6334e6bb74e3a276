"""The files of a tokenizer: `tokenizer.json`, and `vocab.txt` or `tokenizer.model`.

No file name is ever taken from the content of a file.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError
from data_prep.settings import NonNegative, Positive, Strict
from data_prep.storage import (
    open_to_read,
    read_json,
    sha256_file,
    write_hashed,
    write_json_atomically,
)
from data_prep.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer, WordTokenizer
from data_prep.tokenizer.word_index import WORDS_PER_CHUNK, WordIndex

TOKENIZER = "tokenizer.json"
FORMAT_VERSION = 1
"""The format of `tokenizer.json`."""
MODEL_FILE = {"words": "vocab.txt", "sentencepiece": "tokenizer.model"}
"""The other file of each kind of tokenizer. A line of `vocab.txt` is `word TAB count`."""


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo(Strict):
    """What is recorded about the tokenizer that the token files were written with."""

    kind: Literal["words", "sentencepiece"]
    sha256: str  # checksum of `tokenizer.json`, which contains that of the vocabulary or model
    vocab_size: Positive
    eos_id: NonNegative
    unk_id: NonNegative


@dataclass(frozen=True, kw_only=True)
class TokenizerFile(Strict):
    """The content of `tokenizer.json`."""

    format_version: int = FORMAT_VERSION
    kind: Literal["words", "sentencepiece"]
    sha256: str  # checksum of `vocab.txt` or `tokenizer.model`
    lowercase: bool = False
    split_punctuation: bool = False


def save_tokenizer(
    folder: Path, tokenizer: Tokenizer, counts: NDArray[np.int64] | None = None
) -> TokenizerInfo:
    """Write `tokenizer.json` and `vocab.txt`, which needs the counts [N], or `tokenizer.model`."""
    path = folder / MODEL_FILE[tokenizer.kind]
    content: Iterable[bytes]
    if isinstance(tokenizer, WordTokenizer):
        assert counts is not None
        content = _format_vocabulary(tokenizer.words, counts)
    else:
        assert isinstance(tokenizer, SentencePieceTokenizer)
        content = [tokenizer.model]
    description = TokenizerFile(
        kind=tokenizer.kind,
        sha256=write_hashed(path, content),
        lowercase=tokenizer.lowercase,
        split_punctuation=tokenizer.split_punctuation,
    )
    return TokenizerInfo(
        kind=tokenizer.kind,
        sha256=write_json_atomically(folder / TOKENIZER, asdict(description)),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        unk_id=tokenizer.unk_id,
    )


def load_tokenizer(folder: Path | str, *, verify: bool = True) -> Tokenizer:
    """Load the tokenizer of a prepared folder, a run or an exported model.

    With `verify`, its vocabulary or model is compared with its SHA-256. UserError if a file is
    absent, damaged or does not match the other.
    """
    description, content = _read(Path(folder), verify)
    try:
        if description.kind == "sentencepiece":
            return SentencePieceTokenizer(content)
        return WordTokenizer(
            WordIndex.parse(content),
            lowercase=description.lowercase,
            split_punctuation=description.split_punctuation,
        )
    except ValueError as error:
        raise DataError(f"{Path(folder, MODEL_FILE[description.kind])}: {error}") from error


def load_counts(folder: Path) -> NDArray[np.int64]:
    """The counts [N] of the words of a folder in its training split."""
    with (folder / MODEL_FILE["words"]).open("rb") as lines:
        return np.fromiter((int(line.rpartition(b"\t")[2]) for line in lines), np.int64)


def verify_tokenizer(folder: Path, sha256: str) -> None:
    """Compare the files of a tokenizer with its checksum in `TokenizerInfo`, without loading it."""
    _read(folder, verify=True, sha256=sha256)


def _read(folder: Path, verify: bool, sha256: str | None = None) -> tuple[TokenizerFile, bytes]:
    """The description of a tokenizer, and the content of its other file."""
    path = folder / TOKENIZER
    if sha256 is not None and sha256_file(path) != sha256:
        raise DataError(f"{path} is not the tokenizer that the token files were written with")
    description: TokenizerFile = read_json(path, TokenizerFile, FORMAT_VERSION)
    path = folder / MODEL_FILE[description.kind]
    with open_to_read(path) as file:
        content = file.read()
    if verify and hashlib.sha256(content).hexdigest() != description.sha256:
        raise DataError(f"{path} is damaged: its SHA-256 differs from the one in {TOKENIZER}")
    return description, content


def _format_vocabulary(words: Iterable[str], counts: NDArray[np.int64]) -> Iterator[bytes]:
    """Yield the content of a `vocab.txt` in chunks."""
    lines = map("{}\t{}\n".format, words, map(int, counts))
    while chunk := "".join(islice(lines, WORDS_PER_CHUNK)):
        yield chunk.encode()
