"""Words by id, ids by word and counts of words, for vocabularies of any size.

Ten million words are stored in about 25 bytes each: their text in one flat array and a compiled
hash table. Words are separated by whitespace, as in `str.split`. No word is special.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.tokenizer import hash_table
from data_prep.tokenizer.hash_table import EMPTY, Bytes, Ids, IntArray, Table, as_bytes, empty_slots

WORDS_PER_CHUNK = 1 << 16


class RepeatedWord(ValueError):
    """A word that occurs twice in a list of distinct words: at `first_id` and at `id`."""

    def __init__(self, word: str, id: int, first_id: int) -> None:
        super().__init__(f"the word {word!r} has the ids {first_id} and {id}")
        self.word, self.id, self.first_id = word, id, first_id


class WordIndex:
    """Distinct words with ids 0 to N - 1; RepeatedWord if one occurs twice.

    `text` and `starts` are those of `hash_table.Table`; they are not copied.

    >>> index = WordIndex.of(["the", "cat"])
    >>> len(index), index[1], index.id("cat"), index.id("dog")
    (2, 'cat', 1, -1)
    >>> index.ids("the black cat", unknown=9).tolist()
    [0, 9, 1]
    """

    def __init__(self, text: Bytes, starts: IntArray) -> None:
        self._table = Table(text, starts, empty_slots(len(starts) - 1))
        repeated = hash_table.fill(self._table, len(self))
        if repeated != EMPTY:
            raise RepeatedWord(self[repeated], repeated, self.id(self[repeated]))

    @classmethod
    def of(cls, words: Iterable[str]) -> "WordIndex":
        """Index words by their position."""
        encoded = [word.encode("utf-8", "surrogatepass") for word in words]
        starts = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(word) for word in encoded], out=starts[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), starts)

    def __len__(self) -> int:
        return len(self._table.starts) - 1

    def __getitem__(self, id: int) -> str:
        first, end = self._table.starts[id : id + 2]
        return self._table.text[first:end].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), WORDS_PER_CHUNK):
            starts = self._table.starts[first : first + WORDS_PER_CHUNK + 1]
            raw = self._table.text[starts[0] : starts[-1]].tobytes()
            ends = (starts - starts[0]).tolist()
            yield from (raw[a:b].decode() for a, b in pairwise(ends))

    def id(self, word: str) -> int:
        """Return the id of a word, -1 if it is not in the index."""
        return int(hash_table.find_word(as_bytes(word), self._table))

    def ids(self, text: str, unknown: int, line_end: int = EMPTY) -> Ids:
        """Look up all words of a text, and its newlines unless `line_end` (their id) is -1."""
        raw = as_bytes(text)
        ids = np.empty(len(raw), np.int32)
        return ids[: hash_table.find(raw, self._table, unknown, line_end, ids)]


class WordCounter:
    """Distinct words in order of first occurrence, with their counts."""

    def __init__(self) -> None:
        self.num_words = 0
        slots = empty_slots(0)
        starts = np.zeros(len(slots) // 2 + 1, np.int64)
        self._table = Table(np.empty(0, np.uint8), starts, slots)
        self._counts: IntArray = np.zeros(len(slots) // 2, np.int64)

    def add(self, text: str) -> None:
        """Count the words of a text."""
        raw, place = as_bytes(text), 0
        enlarged = _enlarged(self._table.text, self._num_bytes, self._num_bytes + len(raw))
        self._table = self._table._replace(text=enlarged)
        while place < len(raw):
            place, self.num_words = hash_table.count(
                raw, place, self._table, self._counts, self.num_words
            )
            if place < len(raw):
                self._double()

    def result(self) -> tuple[Bytes, IntArray, IntArray]:
        """Return `text` and `starts` [n + 1], as in `hash_table.Table`, and the counts [n]."""
        n = self.num_words
        return self._table.text[: self._num_bytes], self._table.starts[: n + 1], self._counts[:n]

    @property
    def _num_bytes(self) -> int:
        return int(self._table.starts[self.num_words])

    def _double(self) -> None:
        """Double the capacity."""
        capacity, n = len(self._table.slots), self.num_words
        text, starts = self._table.text, _enlarged(self._table.starts, n + 1, capacity + 1)
        self._counts = _enlarged(self._counts, n, capacity)
        del self._table  # its slots are freed before the new ones are allocated
        self._table = Table(text, starts, empty_slots(capacity))
        hash_table.fill(self._table, n)


def count_words_in(text: str) -> int:
    """Return `len(text.split())` without making the list."""
    return int(hash_table.count_words_in(as_bytes(text)))


def _enlarged(array: NDArray[Any], num_used: int, num_needed: int) -> NDArray[Any]:
    """The array, or a longer copy of the part in use if it is too short."""
    if num_needed <= len(array):
        return array
    longer = np.empty(max(num_needed, len(array) + len(array) // 2), array.dtype)
    longer[:num_used] = array[:num_used]
    return longer
