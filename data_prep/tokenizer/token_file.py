"""Lines to a token file: one `<eos>` after every line, and the counts that evaluation needs."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data_prep.errors import UserError
from data_prep.settings import NonNegative, Positive, Strict
from data_prep.storage import ArrayInfo, write_array
from data_prep.tokenizer.punctuation import EOS
from data_prep.tokenizer.tokenizer import Tokenizer, WordTokenizer, line_batches

logger = logging.getLogger("data_prep")


@dataclass(frozen=True, kw_only=True)
class SplitInfo(Strict):
    """What is recorded about a token file."""

    dtype: Literal["uint16", "uint32"]
    tokens: Positive  # `<eos>` after every line included
    lines: Positive
    words: NonNegative  # whitespace-separated words of the text, without `<eos>`
    utf8_bytes: Positive  # size of the text with one newline after each line
    oov: NonNegative  # tokens that are `<unk>`, literal in the text or not in the vocabulary
    sha256: str  # checksum of the tokens, without the header of the file
    known: ArrayInfo | None = None  # int64 [lines], items that are not predicted; None: 0

    @property
    def array(self) -> ArrayInfo:
        """The record of the same file as a plain array."""
        return ArrayInfo(dtype=self.dtype, length=self.tokens, sha256=self.sha256)


def log_literals(name: str, counts: Mapping[str, int]) -> None:
    """Log how often a text contains each of `Tokenizer.literals`, if it does."""
    if found := [f"{word} ({count:,})" for word, count in counts.items() if count]:
        words = " and ".join(found)
        logger.info("%s: the text contains %s, counted as special words", name, words)


def counted_literals(lines: Iterable[str], counts: dict[str, int]) -> Iterator[str]:
    """Pass lines on; adds to `counts` how often they contain each of its keys."""
    for line in lines:
        for word in counts:
            counts[word] += line.count(word)
        yield line


def counted_known(
    lines: Iterable[str], split: str, counts: list[int], *, lowercase: bool
) -> Iterator[str]:
    """Pass sequences of items on; appends the number of those before a tab, which are known.

    UserError if a line has several tabs, or one in the training split; or an item is `<eos>`.
    """
    for line in lines:  # without those left out, so that a number would name another
        known, tab, rest = line.partition("\t")
        if tab and (split == "train" or "\t" in rest):
            allowed = "none in the training split" if split == "train" else "at most one"
            problem = f"expected {allowed}: it separates known items from those to predict"
            raise UserError(f"{split}, {line!r:.60}: a tab, {problem}; spaces separate items")
        if EOS in (line.lower() if lowercase else line).split():
            raise UserError(f"{split}, {line!r:.60}: {EOS} is no item: it ends each sequence")
        counts.append(len(known.split()) if tab else 0)
        yield line


def encode_split(
    lines: Iterable[str], tokenizer: Tokenizer, path: Path, *, progress: bool = True
) -> tuple[SplitInfo, NDArray[np.int64]]:
    """Write the token file of a split of at least one line; return also the counts of all ids."""
    literals = dict.fromkeys(tokenizer.literals, 0)
    totals = {"lines": 0, "words": 0, "utf8_bytes": 0}
    occurrences = np.zeros(tokenizer.vocab_size, np.int64)
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    is_one_id = isinstance(tokenizer, WordTokenizer) and not tokenizer.split_punctuation

    def encoded(bar: "tqdm[Any]") -> Iterator[NDArray[np.integer]]:
        for batch in line_batches(lines):
            # A newline separates words, so the joined batch has the words of its lines.
            text = "\n".join(batch)
            for word in literals:
                literals[word] += text.count(word)
            ids = tokenizer.encode_stream(batch)
            totals["lines"] += len(batch)
            totals["words"] += len(ids) - len(batch) if is_one_id else len(text.split())
            totals["utf8_bytes"] += len(text.encode()) + 1
            np.add.at(occurrences, ids, 1)
            bar.update(len(batch))
            yield ids

    disable = None if progress else True
    with tqdm(desc=path.stem, unit=" lines", unit_scale=True, disable=disable) as bar:
        array = write_array(path, encoded(bar), dtype)
    log_literals(path.stem, literals)
    oov, sha256 = int(occurrences[tokenizer.unk_id]), array.sha256
    counted: dict[str, Any] = {"tokens": array.length, "oov": oov, **totals}
    return SplitInfo(dtype=dtype, sha256=sha256, **counted), occurrences
