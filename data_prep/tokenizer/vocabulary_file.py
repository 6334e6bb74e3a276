"""The file `vocab.txt`: one line `word TAB count` for each word, in order of the ids."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from data_prep.compiled import compiled
from data_prep.errors import UserError
from data_prep.tokenizer.hash_table import Bytes, IntArray
from data_prep.tokenizer.tokenizer import EOS, UNK
from data_prep.tokenizer.word_index import WORDS_PER_CHUNK, RepeatedWord, WordIndex

TAB, NEWLINE, ZERO, NINE = 9, 10, 48, 57
MAX_DIGITS = 18
"""So that every count fits into 64 bits."""


def format_vocabulary(words: Iterable[str], counts: IntArray) -> Iterator[bytes]:
    """Yield the content of a `vocab.txt` in chunks, from N words and their counts [N]."""
    lines = map("{}\t{}\n".format, words, map(int, counts))
    while chunk := "".join(islice(lines, WORDS_PER_CHUNK)):
        yield chunk.encode()


def parse_vocabulary(content: bytes, path: Path) -> tuple[WordIndex, IntArray]:
    r"""Parse the content of a `vocab.txt`, whose last line may lack its newline, to counts [N].

    UserError names the first wrong line of `path`, or the special word that is missing.

    >>> words, counts = parse_vocabulary(b"<eos>\t5\nthe\t3\n<unk>\t0\n", Path("vocab.txt"))
    >>> list(words), counts.tolist()
    (['<eos>', 'the', '<unk>'], [5, 3, 0])
    """
    try:
        content.decode()
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {number}: invalid UTF-8") from error
    raw = np.frombuffer(content, np.uint8)
    num_lines = content.count(b"\n") + (not content.endswith(b"\n"))
    text, starts = np.empty(len(raw), np.uint8), np.zeros(num_lines + 1, np.int64)
    counts = np.zeros(num_lines, np.int64)
    num_right = _parse(raw, text, starts, counts)
    if num_right < num_lines:
        line = content.split(b"\n", num_right + 1)[num_right].decode()
        raise UserError(f"{path}, line {num_right + 1}: expected word TAB count, got {line[:80]!r}")
    try:
        words = WordIndex(text[: starts[-1]], starts)
    except RepeatedWord as error:
        raise UserError(
            f"{path}, line {error.id + 1}: {error.word!r} is on line {error.first_id + 1} too"
        ) from error
    for special in (UNK, EOS):
        if words.id(special) < 0:
            raise UserError(f"{path}: the word {special} is missing")
    return words, counts


@compiled
def _parse(content: Bytes, words: Bytes, starts: IntArray, counts: IntArray) -> int:
    """Parse lines up to the first wrong one; returns the number of correct lines."""
    place = 0
    for line in range(len(counts)):
        first, length = starts[line], 0
        while place < len(content) and content[place] != TAB and content[place] != NEWLINE:
            words[first + length] = content[place]
            length += 1
            place += 1
        if length == 0 or place == len(content) or content[place] != TAB:
            return line
        place += 1
        digits = place
        while place < len(content) and ZERO <= content[place] <= NINE:
            counts[line] = 10 * counts[line] + content[place] - ZERO
            place += 1
        if not 0 < place - digits <= MAX_DIGITS:
            return line
        if place < len(content) and content[place] != NEWLINE:
            return line
        starts[line + 1] = first + length
        place += 1
    return len(counts)
