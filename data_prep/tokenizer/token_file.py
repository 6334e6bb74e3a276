"""Lines to a token file: one `<eos>` after every line, and the counts that evaluation needs later.

Decides the layout of a token stream and what is counted; `storage` decides the file format.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data_prep.settings import STRICT, NonNegative, Positive
from data_prep.storage import ArrayInfo, write_array
from data_prep.tokenizer.tokenizer import Tokenizer, line_batches


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """What is recorded about a token file."""

    __pydantic_config__ = STRICT

    dtype: Literal["uint16", "uint32"]
    tokens: Positive
    """`<eos>` after every line included."""
    lines: Positive
    words: NonNegative
    """Whitespace-separated words of the text, without `<eos>`."""
    utf8_bytes: Positive
    """Size of the text with one newline after each line."""
    oov: NonNegative
    """Tokens that are `<unk>`, literal in the text or not in the vocabulary."""
    sha256: str
    """Checksum of the tokens, without the header of the file."""

    @property
    def array(self) -> ArrayInfo:
        """The record of the same file as a plain array."""
        return ArrayInfo(dtype=self.dtype, length=self.tokens, sha256=self.sha256)


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest type of a token file that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def encode_split(
    lines: Iterable[str], tokenizer: Tokenizer, path: Path, *, progress: bool = True
) -> tuple[SplitInfo, NDArray[np.int64]]:
    """Write the token file of a split, atomically.

    Args:
        lines: the lines without their ends, at least one.
        tokenizer: converts them to ids.
        path: the token file.
        progress: whether a bar on stderr counts the lines.

    Returns:
        The record of the file, and the occurrences of every id, int64 [N].

    Raises:
        UserError: the file cannot be written.
    """
    encoder = _CountingEncoder(tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    with tqdm(
        desc=path.stem, unit=" lines", unit_scale=True, disable=None if progress else True
    ) as bar:
        array = write_array(path, encoder.batches(lines, bar), dtype)
    info = SplitInfo(
        dtype=dtype,
        tokens=array.length,
        lines=encoder.num_lines,
        words=encoder.num_words,
        utf8_bytes=encoder.utf8_bytes,
        oov=int(encoder.occurrences[tokenizer.unk_id]),
        sha256=array.sha256,
    )
    return info, encoder.occurrences


class _CountingEncoder:
    """Encodes batches of lines and counts lines, words, bytes and ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_lines = self.num_words = self.utf8_bytes = 0
        self.occurrences = np.zeros(tokenizer.vocab_size, np.int64)

    def batches(self, lines: Iterable[str], bar: "tqdm[Any]") -> Iterator[NDArray[np.integer]]:
        """Yield the token ids of each batch of lines, `<eos>` after each line."""
        for batch in line_batches(lines):
            # A newline separates words, so the joined batch has the words of its lines.
            text = "\n".join(batch)
            self.num_lines += len(batch)
            self.num_words += self.tokenizer.num_words(text)
            self.utf8_bytes += len(text.encode()) + 1
            ids = self.tokenizer.encode_stream(batch)
            np.add.at(self.occurrences, ids, 1)
            bar.update(len(batch))
            yield ids
