"""Lines to a token file: one `<eos>` after every line, and the counts that evaluation needs later.

Decides the layout of a token stream and what is counted; `artifacts` decides the file format.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data_prep.prepared import SplitInfo, token_dtype
from data_prep.storage import write_array
from data_prep.tokenizer.tokenizer import Tokenizer, line_batches


def encode_split(
    lines: Iterable[str], tokenizer: Tokenizer, path: Path, *, progress: bool = True
) -> tuple[SplitInfo, NDArray[np.int64]]:
    """Write the token file of a split.

    Args:
        lines: the lines without their ends, at least one.
        tokenizer: makes ids of them.
        path: the token file; complete or absent afterwards.
        progress: whether a bar on stderr counts the lines.

    Returns:
        What was counted, and the occurrences of every id, int64 [N].
    """
    counting = _Counting(tokenizer)
    with tqdm(
        desc=path.stem, unit=" lines", unit_scale=True, disable=None if progress else True
    ) as bar:
        array = write_array(path, counting.batches(lines, bar), token_dtype(tokenizer.vocab_size))
    info = SplitInfo(
        dtype=token_dtype(tokenizer.vocab_size),
        tokens=array.length,
        lines=counting.lines,
        words=counting.words,
        utf8_bytes=counting.utf8_bytes,
        oov=int(counting.occurrences[tokenizer.unk_id]),
        sha256=array.sha256,
    )
    return info, counting.occurrences


class _Counting:
    """Encodes batches of lines and counts on the way."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.lines = 0
        self.words = 0
        self.utf8_bytes = 0
        self.occurrences = np.zeros(tokenizer.vocab_size, np.int64)

    def batches(self, lines: Iterable[str], bar: "tqdm[Any]") -> Iterator[NDArray[np.integer]]:
        """Token ids of a batch of lines after the other, `<eos>` after each line."""
        for batch in line_batches(lines):
            # A newline separates words, so the joined batch has the words of its lines.
            text = "\n".join(batch)
            self.lines += len(batch)
            self.words += self.tokenizer.num_words(text)
            self.utf8_bytes += len(text.encode()) + 1
            ids = self.tokenizer.encode_stream(batch)
            np.add.at(self.occurrences, ids, 1)
            bar.update(len(batch))
            yield ids
