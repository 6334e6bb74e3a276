"""Words by id and ids by word, for vocabularies of any size: flat arrays and a compiled hash table.

Decides how ten million words lie in memory, some 25 bytes each: one after the other in UTF-8, and a
table of ids at the places that the words' hashes say. A word of a text is what whitespace
separates, as `str.split` sees it. Knows no files and no special words.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.compiled import compiled

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int32]
IntArray = NDArray[np.int64]

WORDS_PER_CHUNK = 1 << 16
SMALLEST_TABLE = 1 << 10
BLOCK = 256
"""Words that are looked up together."""
NOTHING = -1
"""An empty slot; as an id, what is left out."""


class RepeatedWord(ValueError):
    """A word that is there twice, with the ids of both."""

    def __init__(self, word: str, id: int, first_id: int) -> None:
        super().__init__(f"the word {word!r} has the ids {first_id} and {id}")
        self.word, self.id, self.first_id = word, id, first_id


class WordTable:
    """Distinct words; the id of each is its place."""

    def __init__(self, text: Bytes, starts: IntArray) -> None:
        """Take the words over, not a copy of them.

        Args:
            text: the words in UTF-8, one after the other.
            starts: [N + 1] where each begins, and the end.

        Raises:
            RepeatedWord: a word is there twice.
        """
        self.text, self.starts = text, starts
        self._slots = _empty_slots(len(self))
        repeated = _fill(text, starts, len(self), self._slots)
        if repeated != NOTHING:
            raise RepeatedWord(self[repeated], repeated, self.id(self[repeated]))

    @classmethod
    def of(cls, words: Iterable[str]) -> "WordTable":
        """A table of these words, in this order."""
        encoded = [word.encode("utf-8", "surrogatepass") for word in words]
        starts = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(word) for word in encoded], out=starts[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, id: int) -> str:
        return self.text[self.starts[id] : self.starts[id + 1]].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), WORDS_PER_CHUNK):
            starts = self.starts[first : first + WORDS_PER_CHUNK + 1]
            raw = self.text[starts[0] : starts[-1]].tobytes()
            ends = (starts - starts[0]).tolist()
            yield from (raw[a:b].decode() for a, b in pairwise(ends))

    def id(self, word: str) -> int:
        """Id of a word; -1 if the table lacks it."""
        raw = as_bytes(word)
        hash = int(_hash(raw, 0, len(raw)))
        return int(self._slots[_slot(raw, 0, len(raw), hash, self.text, self.starts, self._slots)])

    def ids(self, text: str, unknown: int, line_end: int = NOTHING) -> Ids:
        """Ids of the words of a text.

        Args:
            text: any text.
            unknown: the id of words that the table lacks.
            line_end: an id for each newline; -1 for none.
        """
        raw = as_bytes(text)
        ids = np.empty(len(raw), np.int32)
        found = _find(raw, self.text, self.starts, self._slots, unknown, line_end, ids)
        return ids[:found]


class WordCounter:
    """Words in the order in which they come up, and how often each does.

    Attributes:
        num_words: distinct words so far.
    """

    def __init__(self) -> None:
        self.num_words = 0
        self._text: Bytes = np.empty(0, np.uint8)
        self._slots: Ids = _empty_slots(0)
        self._starts: IntArray = np.zeros(len(self._slots) // 2 + 1, np.int64)
        self._counts: IntArray = np.zeros(len(self._slots) // 2, np.int64)

    def add(self, text: str) -> None:
        """Count the words of a text."""
        raw, done = as_bytes(text), 0
        self._text = _enlarged(self._text, self._num_bytes, self._num_bytes + len(raw))
        while done < len(raw):
            done, self.num_words = _count(
                raw, done, self._text, self._starts, self._counts, self.num_words, self._slots
            )
            if done < len(raw):
                self._double()

    def result(self) -> tuple[Bytes, IntArray, IntArray]:
        """The words in UTF-8, one after the other; where each begins, and the end, [n + 1]; how
        often each came up, [n].
        """
        n = self.num_words
        return self._text[: self._num_bytes], self._starts[: n + 1], self._counts[:n]

    @property
    def _num_bytes(self) -> int:
        return int(self._starts[self.num_words])

    def _double(self) -> None:
        room, n = len(self._slots), self.num_words
        self._starts = _enlarged(self._starts, n + 1, room + 1)
        self._counts = _enlarged(self._counts, n, room)
        self._slots = np.empty(0, np.int32)  # not two tables at once
        self._slots = _empty_slots(room)
        _fill(self._text, self._starts, n, self._slots)


def as_bytes(text: str) -> Bytes:
    """The text in UTF-8; what is no character, as it is."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def num_words(text: str) -> int:
    """Words of a text: `len(text.split())` without the list."""
    return int(_num_words(as_bytes(text)))


def parse_counts(content: bytes) -> tuple[Bytes, IntArray, IntArray, int]:
    """Read lines of `word TAB count`.

    Args:
        content: the lines; the last may lack its newline.

    Returns:
        The words in UTF-8, one after the other; where each begins, and the end, [n + 1]; the
        counts [n]; and the number of lines up to the first that reads otherwise, n if all are
        right.
    """
    raw = np.frombuffer(content, np.uint8)
    num_lines = content.count(b"\n") + (not content.endswith(b"\n"))
    text, starts = np.empty(len(raw), np.uint8), np.zeros(num_lines + 1, np.int64)
    counts = np.zeros(num_lines, np.int64)
    right = _parse(raw, text, starts, counts)
    return text[: starts[right]], starts, counts, right


def _empty_slots(num_words: int) -> Ids:
    """At most half of them will be taken; a power of two."""
    return np.full(max(SMALLEST_TABLE, 1 << (2 * num_words - 1).bit_length()), NOTHING, np.int32)


def _enlarged(array: NDArray[Any], used: int, needed: int) -> NDArray[Any]:
    """The array, or a longer copy of the part in use if it has no room."""
    if needed <= len(array):
        return array
    longer = np.empty(max(needed, len(array) + len(array) // 2), array.dtype)
    longer[:used] = array[:used]
    return longer


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
    """Where the word that begins at a place ends; the place itself if whitespace is there."""
    end = begin
    while end < len(text) and (32 < text[end] < 0xC2 or _space(text, end) == 0):
        end += 1
    return end


@compiled
def _num_words(text: Bytes) -> int:
    found = place = 0
    while place < len(text):
        end = _word_end(text, place)
        found += end > place
        place = end if end > place else place + _space(text, place)
    return found


@compiled
def _hash(text: Bytes, begin: int, end: int) -> np.int64:
    """Hash of text[begin:end], not negative.

    Source:
        Fowler, Noll & Vo 1991 (FNV-1a).
    """
    bits = np.uint64(0xCBF29CE484222325)
    for place in range(begin, end):
        bits = (bits ^ np.uint64(text[place])) * np.uint64(0x100000001B3)
    return np.int64((bits ^ (bits >> np.uint64(32))) & np.uint64(0xFFFFFFFF))


@compiled
def _next_words(
    text: Bytes, place: int, newlines: bool, begins: IntArray, ends: IntArray
) -> tuple[int, int]:
    """Where the next words of a text begin and end, as many as fit into the arrays, and if asked
    for the newlines, as empty words; returns how many, and the place after them.
    """
    found = 0
    while place < len(text) and found < len(begins):
        end = _word_end(text, place)
        if end > place or (newlines and text[place] == 10):
            begins[found], ends[found] = place, end
            found += 1
        place = end if end > place else place + _space(text, place)
    return found, place


@compiled
def _fetch(
    text: Bytes, begins: IntArray, ends: IntArray, num: int, starts: IntArray, slots: Ids,
    hashes: IntArray, fetched: IntArray,
) -> None:  # fmt: skip
    """Hash some words, and read what their slots point to into the processor's caches: all at once,
    as it then waits for many places in memory together instead of for one after the other.
    """
    for i in range(num):
        hashes[i] = _hash(text, begins[i], ends[i])
    for i in range(num):
        fetched[i] = slots[hashes[i] & (len(slots) - 1)]
    for i in range(num):
        fetched[i] = starts[max(fetched[i], 0)]


@compiled
def _slot(
    text: Bytes, begin: int, end: int, hash: int, words: Bytes, starts: IntArray, slots: Ids
) -> int:
    """The slot that holds the id of the word text[begin:end], or the empty one where it belongs."""
    slot = hash & (len(slots) - 1)
    while slots[slot] != NOTHING:
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
def _fill(words: Bytes, starts: IntArray, num_words: int, slots: Ids) -> int:
    """Enter all words into empty slots, up to the first that is there already: returns its id, or
    -1.
    """
    hashes, fetched = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for first in range(0, num_words, BLOCK):
        num = min(BLOCK, num_words - first)
        begins, ends = starts[first : first + num], starts[first + 1 : first + num + 1]
        _fetch(words, begins, ends, num, starts, slots, hashes, fetched)
        for i in range(num):
            slot = _slot(words, begins[i], ends[i], hashes[i], words, starts, slots)
            if slots[slot] != NOTHING:
                return first + i
            slots[slot] = first + i
    return NOTHING


@compiled
def _find(
    text: Bytes, words: Bytes, starts: IntArray, slots: Ids, unknown: int, line_end: int, ids: Ids
) -> int:
    """Write the ids of a text's words, and of its newlines unless `line_end` is -1; returns how
    many.
    """
    begins, ends = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    hashes, fetched = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    total = place = 0
    while place < len(text):
        num, place = _next_words(text, place, line_end != NOTHING, begins, ends)
        _fetch(text, begins, ends, num, starts, slots, hashes, fetched)
        for i in range(num):
            id = line_end
            if ends[i] > begins[i]:
                id = slots[_slot(text, begins[i], ends[i], hashes[i], words, starts, slots)]
            ids[total + i] = unknown if id == NOTHING else id
        total += num
    return total


@compiled
def _count(
    text: Bytes, place: int, words: Bytes, starts: IntArray, counts: IntArray, num_words: int,
    slots: Ids,
) -> tuple[int, int]:  # fmt: skip
    """Count words from a place on, until half of the slots are taken; returns where it stopped and
    the number of distinct words.
    """
    begins, ends = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    hashes, fetched = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    while place < len(text):
        num, place = _next_words(text, place, False, begins, ends)
        _fetch(text, begins, ends, num, starts, slots, hashes, fetched)
        for i in range(num):
            slot = _slot(text, begins[i], ends[i], hashes[i], words, starts, slots)
            if slots[slot] == NOTHING:
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


@compiled
def _parse(content: Bytes, words: Bytes, starts: IntArray, counts: IntArray) -> int:
    """Read lines of `word TAB count`; returns how many, up to the first that reads otherwise."""
    place = 0
    for line in range(len(counts)):
        first, length = starts[line], 0
        while place < len(content) and content[place] != 9 and content[place] != 10:
            words[first + length] = content[place]
            length += 1
            place += 1
        if length == 0 or place == len(content) or content[place] != 9:
            return line
        place += 1
        digits = place
        while place < len(content) and 48 <= content[place] <= 57:
            counts[line] = 10 * counts[line] + content[place] - 48
            place += 1
        if not 0 < place - digits < 19 or (place < len(content) and content[place] != 10):
            return line
        starts[line + 1] = first + length
        place += 1
    return len(counts)
