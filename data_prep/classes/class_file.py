"""Word classes read from files of other tools: mkcls, Brown clustering, SRILM."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.corpus.lines import text_lines
from data_prep.errors import UserError

FileFormat = Literal["mkcls", "brown", "srilm"]

SENTENCE_WORDS = ("<unk>", "<eos>")
"""Words that class files may lack; they then share an additional class."""


def read_word_classes(
    path: Path, file_format: FileFormat, words: Sequence[str]
) -> NDArray[np.int32]:
    r"""Read the classes of a vocabulary from a file with one line per word.

    Classes, int32 [N], are numbered in order of first appearance. Words outside the vocabulary are
    ignored. `<unk>` and `<eos>` share an additional class if the file lacks them. UserError if the
    file is absent or not UTF-8, a line has another format, a word is in two classes or missing.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "classes"
    >>> _ = path.write_text("cat\t7\nthe\t3\ndog\t7\n")
    >>> read_word_classes(path, "mkcls", ["<eos>", "the", "cat", "dog"]).tolist()
    [2, 1, 0, 0]
    """
    id_of_word = {word: index for index, word in enumerate(words)}
    number: dict[str, int] = {}
    word_class = np.full(len(words), -1, dtype=np.int32)
    for place, name, word in _read_pairs(path, file_format):
        index = id_of_word.get(word)
        if index is None:
            continue
        found = number.setdefault(name, len(number))
        if word_class[index] not in (-1, found):
            raise UserError(f"{place}: {word!r} already has another class")
        word_class[index] = found
    missing = np.flatnonzero(word_class < 0).tolist()
    unknown = [words[index] for index in missing if words[index] not in SENTENCE_WORDS]
    if unknown:
        raise UserError(
            f"{path}: {len(unknown)} of the vocabulary's {len(words)} words have no class, "
            f"the first is {unknown[0]!r}"
        )
    word_class[missing] = len(number)
    return word_class


def _read_pairs(path: Path, file_format: FileFormat) -> Iterator[tuple[str, str, str]]:
    """Yield place in the file, name of the class and word of every line that is not blank."""
    for number, line in enumerate(text_lines(path), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield (place, *_parse_line(line, file_format, place))


def _parse_line(text: str, file_format: FileFormat, place: str) -> tuple[str, str]:
    """Name of the class and word; UserError that names `place` if the line has another format."""
    match file_format, text.split() if file_format == "srilm" else text.split("\t"):
        case "mkcls", [word, name]:
            return name.strip(), word
        case "brown", [name, word, count] if not name.strip("01") and count.strip().isdecimal():
            return name, word
        case "srilm", [name, word]:
            return name, word
        case "srilm", [name, probability, word] if _is_probability(probability):
            return name, word
    expected = {
        "mkcls": "word TAB class",
        "brown": "bit string TAB word TAB count",
        "srilm": "class [probability] word",
    }[file_format]
    raise UserError(f"{place}: expected {expected} ({file_format}), got {text[:80]!r}")


def _is_probability(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False
