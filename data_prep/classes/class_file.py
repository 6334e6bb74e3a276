"""Files of word classes (of mkcls, Brown clustering, SRILM, and taxonomies) and of vectors."""

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.corpus.lines import read_text
from data_prep.errors import DataError

_log = logging.getLogger(__name__)

FileFormat = Literal["mkcls", "brown", "srilm", "taxonomy"]
ClassPath = tuple[str, ...]
"""The names of classes that contain each other, from the root down."""

_WORD2VEC = re.compile(r"\d+ \d+ *")
"""First line of a file of word2vec: the numbers of words and of dimensions."""
SENTENCE_WORDS = ("<unk>", "<eos>")
"""Words that class files may lack; they then share an additional class."""


def read_class_levels(
    path: Path, file_format: FileFormat, words: Sequence[str], depth: int | None = None
) -> NDArray[np.int32]:
    r"""Read the classes of a vocabulary from a file with one line per word.

    Classes of each level are numbered in order of first appearance. Words outside the vocabulary
    are ignored. `<unk>` and `<eos>` share an additional class if the file lacks them. UserError if
    the file is absent or not UTF-8, a line has another format, a word is in two classes or missing.

    Without a `depth`, a class is all that the file says, on one level. Otherwise it is within those
    that a part of it names, the first bits or the first categories; of these, up to depth - 1.

    Returns:
        int32 [levels, N], the class of each word on each level; -1 below its last one.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "classes"
    >>> _ = path.write_text("cat\tanimal/pet\nthe\tarticle\ndog\tanimal/pet\ncow\tanimal\n")
    >>> words = ["<eos>", "the", "cat", "dog", "cow"]
    >>> read_class_levels(path, "taxonomy", words, depth=3).tolist()
    [[2, 1, 0, 0, 0], [-1, -1, 0, 0, -1]]
    >>> read_class_levels(path, "taxonomy", words).tolist()
    [[3, 1, 0, 0, 2]]
    """
    id_of_word = {word: index for index, word in enumerate(words)}
    path_of_id: dict[int, ClassPath] = {}
    for place, class_path, word in _read_pairs(path, file_format):
        index = id_of_word.get(word)
        if index is not None and path_of_id.setdefault(index, class_path) != class_path:
            raise DataError(f"{place}: {word!r} already has another class")
    unknown = [w for i, w in enumerate(words) if i not in path_of_id and w not in SENTENCE_WORDS]
    if unknown:
        raise DataError(
            f"{path}: {len(unknown)} of the vocabulary's {len(words)} words have no class, "
            f"the first is {unknown[0]!r}"
        )
    deepest = max(map(len, path_of_id.values()), default=0)
    if depth is not None and deepest >= depth:
        _log.warning(
            "%s: %d of %d levels of classes are used (classes.depth)", path, depth - 1, deepest
        )
    num_levels = min(deepest, depth - 1) if depth else 1
    number: list[dict[ClassPath, int]] = [{} for _ in range(max(1, num_levels))]
    levels = np.full((len(number), len(words)), -1, dtype=np.int32)
    for index, class_path in path_of_id.items():
        for level, known in enumerate(number[: len(class_path)]):
            name = class_path[: level + 1] if depth else class_path
            levels[level, index] = known.setdefault(name, len(known))
    has_none = [index for index in range(len(words)) if index not in path_of_id]
    levels[0, has_none] = len(number[0])
    return levels


def lowest_classes(levels: NDArray[np.int32]) -> NDArray[np.int32]:
    """The class that contains each word, [N], by its classes on all levels, [levels, N].

    >>> lowest_classes(np.array([[0, 1, 0], [1, -1, 0]], np.int32)).tolist()
    [1, 2, 0]
    """
    lowest: NDArray[np.int32] = levels[0]
    for level in levels[1:]:
        keys = lowest.astype(np.int64) * (int(level.max()) + 2) + level + 1
        lowest = np.unique(keys, return_inverse=True)[1].astype(np.int32)
    return lowest


def read_vectors(path: Path, words: Sequence[str]) -> NDArray[np.float32]:
    """Read the vectors of a vocabulary [N, D] from a file with a line per word, after `_WORD2VEC`.

    In each, a tab separates the word from its numbers; without one, spaces do. Words outside the
    vocabulary are ignored; those that the file lacks have zeros, and are counted in a warning.
    UserError if the file is absent or not UTF-8, a line has another format or another number of
    numbers, a word is in two lines, or no word of the vocabulary is in the file.
    """
    id_of_word = {word: index for index, word in enumerate(words)}
    rows: dict[int, NDArray[np.float32]] = {}
    size: int | None = None
    for number, line in enumerate(read_text(str(path)), start=1):
        if not line.strip() or (number == 1 and _WORD2VEC.fullmatch(line)):
            continue
        place = f"{path}, line {number}"
        word, _, rest = line.partition("\t" if "\t" in line else " ")
        try:
            with np.errstate(over="ignore"):  # to infinity, which is refused
                row = np.array(rest.split(), np.float32)
        except ValueError:
            row = np.zeros(0, np.float32)
        if not len(row) or not np.isfinite(row).all() or len(row) != (size or len(row)):
            expected = f"{size} numbers" if size else "numbers"
            raise DataError(f"{place}: expected a word and {expected}, got {line[:80]!r}")
        size = len(row)
        index = id_of_word.get(word)
        if index is not None and rows.setdefault(index, row) is not row:
            raise DataError(f"{place}: {word!r} already has another vector")
    if not rows:
        raise DataError(f"{path}: no word of the vocabulary has a vector")
    missing = [w for i, w in enumerate(words) if i not in rows and w not in SENTENCE_WORDS]
    if missing:
        text = "%s: %d of %d words have no vector, the first is %r: they fill the smallest classes"
        _log.warning(text, path, len(missing), len(words), missing[0])
    vectors = np.zeros((len(words), size or 0), np.float32)
    vectors[list(rows)] = np.stack(list(rows.values()))
    return vectors


def _read_pairs(path: Path, file_format: FileFormat) -> Iterator[tuple[str, ClassPath, str]]:
    """Yield place in the file, classes and word of every line that is not blank."""
    expected = {
        "mkcls": "word TAB class",
        "brown": "bit string TAB word TAB count",
        "srilm": "class [probability] word",
        "taxonomy": "word TAB class/subclass/…",
    }[file_format]
    for number, line in enumerate(read_text(str(path)), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        match file_format, line.split() if file_format == "srilm" else line.split("\t"):
            case "mkcls", [word, name]:
                yield place, (name.strip(),), word
            case "brown", [name, word, num] if re.fullmatch(r"[01]+ \s*\d+\s*", f"{name} {num}"):
                yield place, tuple(name), word
            case "taxonomy", [word, name] if all(names := name.strip().split("/")):
                yield place, tuple(names), word
            case "srilm", [name, word]:
                yield place, (name,), word
            case "srilm", [name, probability, word] if _is_probability(probability):
                yield place, (name,), word
            case _:
                problem = f"expected {expected} ({file_format}), got {line[:80]!r}"
                raise DataError(f"{place}: {problem}")


def _is_probability(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False
