"""The files of a tokenizer: `tokenizer.json`, and `vocab.txt` or `tokenizer.model`.

No file name is ever taken from the content of a file.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import UserError
from data_prep.settings import STRICT, NonNegative, Positive
from data_prep.storage import (
    open_to_read,
    read_json,
    sha256_file,
    write_atomically,
    write_json_atomically,
)
from data_prep.tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer, WordTokenizer
from data_prep.tokenizer.word_dict import WordDict

FORMAT_VERSION = 1
"""Of `tokenizer.json`."""
TOKENIZER = "tokenizer.json"
MODEL_FILE = {"words": "vocab.txt", "sentencepiece": "tokenizer.model"}


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """What is recorded about the tokenizer that the token files were written with."""

    __pydantic_config__ = STRICT

    kind: Literal["words", "sentencepiece"]
    sha256: str
    """Checksum of `tokenizer.json`, which contains that of the vocabulary or model."""
    vocab_size: Positive
    eos_id: NonNegative
    unk_id: NonNegative


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """The content of `tokenizer.json`."""

    __pydantic_config__ = STRICT

    format_version: int = FORMAT_VERSION
    kind: Literal["words", "sentencepiece"]
    sha256: str
    """Checksum of `vocab.txt` or `tokenizer.model`."""
    lowercase: bool = False
    split_punctuation: bool = False


def save_tokenizer(
    folder: Path, tokenizer: Tokenizer, counts: NDArray[np.int64] | None = None
) -> TokenizerInfo:
    """Write `tokenizer.json` and `vocab.txt`, which needs the counts [N], or `tokenizer.model`."""
    path = folder / MODEL_FILE[tokenizer.kind]
    content: Iterable[bytes]
    settings = {}
    if isinstance(tokenizer, WordTokenizer):
        from data_prep.tokenizer.vocabulary_file import format_vocabulary  # imports numba

        if counts is None or len(counts) != tokenizer.vocab_size:
            raise ValueError(f"expected counts of {tokenizer.vocab_size} words for {path}")
        content = format_vocabulary(tokenizer.words, counts)
        settings = {
            "lowercase": tokenizer.lowercase,
            "split_punctuation": tokenizer.split_punctuation,
        }
    else:
        assert isinstance(tokenizer, SentencePieceTokenizer)
        content = [tokenizer.model]
    write_atomically(path, lambda file: file.writelines(content))
    description = TokenizerFile(kind=tokenizer.kind, sha256=sha256_file(path), **settings)
    write_json_atomically(folder / TOKENIZER, asdict(description))
    return TokenizerInfo(
        kind=tokenizer.kind,
        sha256=sha256_file(folder / TOKENIZER),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        unk_id=tokenizer.unk_id,
    )


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Load the tokenizer of a prepared folder, a run or an exported model.

    Raises:
        UserError: a file is absent, damaged or does not match the other.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = save_tokenizer(folder, WordTokenizer(["<eos>", "<unk>", "cat"]), np.arange(3))
        >>> load_tokenizer(folder).encode("cat dog")
        [2, 1]
    """
    description = _read_description(Path(folder))
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
    settings = {
        "lowercase": description.lowercase,
        "split_punctuation": description.split_punctuation,
    }
    words = WordDict.parse(content)
    if words is None:
        from data_prep.tokenizer.vocabulary_file import parse_vocabulary  # imports numba

        return WordTokenizer(parse_vocabulary(content, path)[0], **settings)
    return WordTokenizer(words, **settings)


def verify_tokenizer(folder: Path, sha256: str) -> None:
    """Compare the files of a tokenizer with its checksum in `TokenizerInfo`, without loading it."""
    path = folder / TOKENIZER
    if sha256_file(path) != sha256:
        raise UserError(f"{path} is not the tokenizer that the token files were written with")
    description = _read_description(folder)
    model = folder / MODEL_FILE[description.kind]
    if sha256_file(model) != description.sha256:
        raise UserError(_damaged(model))


def _read_description(folder: Path) -> TokenizerFile:
    description: TokenizerFile = read_json(folder / TOKENIZER, TokenizerFile, FORMAT_VERSION)
    return description


def _damaged(path: Path) -> str:
    return f"{path} is damaged: its SHA-256 differs from the one in {TOKENIZER}"
