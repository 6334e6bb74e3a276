"""A vocabulary of a few hundred thousand words as a dict, without the imports of `word_index`.

numba takes half as long to import as torch, which short texts are not worth.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from data_prep.tokenizer.word_index import WordIndex

MAX_VOCABULARY_BYTES = 1 << 22
MAX_TEXT_CHARACTERS = 1 << 20
"""Longer texts are looked up by a compiled `WordIndex`."""
MAX_DIGITS = 18


class WordDict:
    """Distinct words with ids 0 to N - 1; the methods are those of `WordIndex`.

    >>> words = WordDict(["the", "cat"])
    >>> len(words), words[1], words.id("cat"), words.id("dog")
    (2, 'cat', 1, -1)
    >>> words.ids("the black cat", unknown=9).tolist()
    [0, 9, 1]
    """

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._ids = {word: id for id, word in enumerate(words)}

    @classmethod
    def parse(cls, content: bytes) -> "WordDict | None":
        """The words of a `vocab.txt`; None if it is large or wrong, as `parse_vocabulary` tells."""
        if len(content) > MAX_VOCABULARY_BYTES:
            return None
        try:
            lines = content.decode().removesuffix("\n").split("\n")
        except UnicodeDecodeError:
            return None
        pairs = [line.partition("\t") for line in lines]
        counts = [count for _, _, count in pairs]
        if not all(c.isascii() and c.isdigit() and len(c) <= MAX_DIGITS for c in counts):
            return None
        words = cls([word for word, _, _ in pairs])
        is_right = len(words._ids) == len(lines) and "" not in words._ids
        return words if is_right and {"<unk>", "<eos>"} <= words._ids.keys() else None

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, id: int) -> str:
        return self._words[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._words)

    def id(self, word: str) -> int:
        """Return the id of a word, -1 if it is not in the vocabulary."""
        return self._ids.get(word, -1)

    def ids(self, text: str, unknown: int, line_end: int = -1) -> NDArray[Any]:
        """Look up all words of a text, and its newlines unless `line_end` (their id) is -1."""
        if line_end >= 0 or len(text) > MAX_TEXT_CHARACTERS:
            return self._index.ids(text, unknown, line_end)
        return np.array([self._ids.get(word, unknown) for word in text.split()], np.int32)

    @cached_property
    def _index(self) -> "WordIndex":
        from data_prep.tokenizer.word_index import WordIndex  # imports numba

        return WordIndex.of(self._words)
