"""Compiled loops that split UTF-8 text (as `str.split` does) and look its words up in a hash table.

The table has open addressing with linear probing. For millions of words, a dict or a pandas index
needs over three times the memory, and pyarrow builds its table again for every batch of lines.

Legend: a *word* is a range of bytes, from `begin` to `end`; a *slot* holds the id of a word.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.compiled import compiled

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int32]
IntArray = NDArray[np.int64]

MIN_SLOTS = 1 << 10
BLOCK = 256
"""Number of words that are looked up together."""
EMPTY = -1
"""Content of an empty slot; as an id, an unknown word or an omitted newline."""


class Table(NamedTuple):
    """Distinct words and a hash table of their ids."""

    text: Bytes  # the words in UTF-8, one after the other
    starts: IntArray  # [N + 1] first byte of each word, and the end of the last
    slots: Ids  # [power of two] word ids, or EMPTY; at most half are in use


def empty_slots(num_words: int) -> Ids:
    """Allocate slots of which `num_words` words use at most half."""
    return np.full(max(MIN_SLOTS, 1 << (2 * num_words - 1).bit_length()), EMPTY, np.int32)


def as_bytes(text: str) -> Bytes:
    """Encode a text in UTF-8; surrogates are encoded as if they were characters."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


@compiled
def _space(text: Bytes, place: int) -> int:
    """Bytes of the whitespace character at a place, 0 if there is none."""
    byte = text[place]
    if byte <= 32:
        return 1 if byte == 32 or 9 <= byte <= 13 or 28 <= byte <= 31 else 0
    if byte == 0xC2:  # U+0085, U+00A0
        return 2 if text[place + 1] == 0x85 or text[place + 1] == 0xA0 else 0
    if byte == 0xE1:  # U+1680
        return 3 if text[place + 1] == 0x9A and text[place + 2] == 0x80 else 0
    if byte == 0xE2:
        last = text[place + 2]
        if text[place + 1] == 0x80:  # U+2000 to U+200A, U+2028, U+2029, U+202F
            return 3 if last <= 0x8A or last == 0xA8 or last == 0xA9 or last == 0xAF else 0
        return 3 if text[place + 1] == 0x81 and last == 0x9F else 0  # U+205F
    if byte == 0xE3:  # U+3000
        return 3 if text[place + 1] == 0x80 and text[place + 2] == 0x80 else 0
    return 0


@compiled
def _word_end(text: Bytes, begin: int) -> int:
    """End of the word that begins at a place; the place itself if whitespace is there."""
    end = begin
    while end < len(text) and (32 < text[end] < 0xC2 or _space(text, end) == 0):
        end += 1
    return end


@compiled
def _hash(text: Bytes, begin: int, end: int) -> np.int64:
    """Non-negative hash of text[begin:end] (FNV-1a; Fowler, Noll & Vo 1991)."""
    bits = np.uint64(0xCBF29CE484222325)
    for place in range(begin, end):
        bits = (bits ^ np.uint64(text[place])) * np.uint64(0x100000001B3)
    return np.int64((bits ^ (bits >> np.uint64(32))) & np.uint64(0xFFFFFFFF))


@compiled
def _next_words(
    text: Bytes, place: int, newlines: bool, begins: IntArray, ends: IntArray
) -> tuple[int, int]:
    """Find as many words as fit, newlines as empty ones if asked; return number and next place."""
    found = 0
    while place < len(text) and found < len(begins):
        end = _word_end(text, place)
        if end > place or (newlines and text[place] == 10):
            begins[found], ends[found] = place, end
            found += 1
        place = end if end > place else place + _space(text, place)
    return found, place


@compiled
def _prefetch(
    text: Bytes, begins: IntArray, ends: IntArray, num: int, table: Table, hashes: IntArray,
    fetched: IntArray,
) -> None:  # fmt: skip
    """Hash `num` words and read what their slots refer to into the processor's caches.

    The processor waits for many memory locations together instead of for one after the other.
    """
    for i in range(num):
        hashes[i] = _hash(text, begins[i], ends[i])
    for i in range(num):
        fetched[i] = table.slots[hashes[i] & (len(table.slots) - 1)]
    for i in range(num):
        fetched[i] = table.starts[max(fetched[i], 0)]


@compiled
def _slot(text: Bytes, begin: int, end: int, hash: int, table: Table) -> int:
    """The slot that holds the id of the word text[begin:end], or the empty one where it belongs."""
    words, starts, slots = table
    slot = hash & (len(slots) - 1)
    while slots[slot] != EMPTY:
        first = starts[slots[slot]]
        same = starts[slots[slot] + 1] - first == end - begin
        for offset in range(end - begin if same else 0):
            if words[first + offset] != text[begin + offset]:
                same = False
                break
        if same:
            break
        slot = (slot + 1) & (len(slots) - 1)
    return slot


@compiled
def fill(table: Table, num_words: int) -> None:
    """Enter `num_words` distinct words into empty slots."""
    words, starts, slots = table
    hashes, fetched = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for first in range(0, num_words, BLOCK):
        num = min(BLOCK, num_words - first)
        begins, ends = starts[first : first + num], starts[first + 1 : first + num + 1]
        _prefetch(words, begins, ends, num, table, hashes, fetched)
        for i in range(num):
            slots[_slot(words, begins[i], ends[i], hashes[i], table)] = first + i


def find_words(text: Bytes, table: Table, unknown: int, line_end: int) -> Ids:
    """Look up all words of a text, and its newlines unless `line_end` (their id) is EMPTY."""
    ids = np.empty(len(text), np.int32)
    return ids[: _find(text, table, unknown, line_end, ids)]


@compiled
def _find(text: Bytes, table: Table, unknown: int, line_end: int, ids: Ids) -> int:
    """Write the ids of words, and of newlines unless `line_end` is EMPTY; return their number."""
    begins, ends = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    hashes, fetched = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    total = place = 0
    while place < len(text):
        num, place = _next_words(text, place, line_end != EMPTY, begins, ends)
        _prefetch(text, begins, ends, num, table, hashes, fetched)
        for i in range(num):
            id = line_end
            if ends[i] > begins[i]:
                id = table.slots[_slot(text, begins[i], ends[i], hashes[i], table)]
            ids[total + i] = unknown if id == EMPTY else id
        total += num
    return total


@compiled
def _count(
    text: Bytes, place: int, table: Table, counts: IntArray, num_words: int
) -> tuple[int, int]:
    """Count words from a place on and enter new ones, until half of the slots are in use.

    Returns where counting stopped and the number of distinct words.
    """
    words, starts, slots = table
    begins, ends = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    hashes, fetched = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    while place < len(text):
        num, place = _next_words(text, place, False, begins, ends)
        _prefetch(text, begins, ends, num, table, hashes, fetched)
        for i in range(num):
            slot = _slot(text, begins[i], ends[i], hashes[i], table)
            if slots[slot] == EMPTY:
                if num_words == len(slots) // 2:
                    return begins[i], num_words
                last = starts[num_words]
                for letter in range(begins[i], ends[i]):
                    words[last] = text[letter]
                    last += 1
                starts[num_words + 1] = last
                counts[num_words] = 0
                slots[slot] = num_words
                num_words += 1
            counts[slots[slot]] += 1
    return place, num_words


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
            place, self.num_words = _count(raw, place, self._table, self._counts, self.num_words)
            if place < len(raw):
                self._double()

    def result(self) -> tuple[Bytes, IntArray, IntArray]:
        """Return `text` and `starts` [n + 1], as in `Table`, and the counts [n]."""
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
        fill(self._table, n)


def _enlarged(array: NDArray[Any], num_used: int, num_needed: int) -> NDArray[Any]:
    """The array, or a longer copy of the part in use if it is too short."""
    if num_needed <= len(array):
        return array
    longer = np.empty(max(num_needed, len(array) + len(array) // 2), array.dtype)
    longer[:num_used] = array[:num_used]
    return longer
