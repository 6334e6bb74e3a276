"""Words by id and ids by word, for vocabularies of any size.

The words are one flat array of text, so that ten million that are only read take little memory. The
first lookup makes a dict of them (1.2 GB for ten million). No word is special.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

WORDS_PER_CHUNK = 1 << 16


class WordIndex:
    """Distinct words with ids 0 to N - 1.

    Args:
        text: uint8 [bytes], the words in UTF-8, one after the other.
        starts: int64 [N + 1], first byte of each word, and the end of the last.

    Example:
        >>> index = WordIndex.of(["the", "cat"])
        >>> len(index), index[1], index.id("cat"), index.id("dog")
        (2, 'cat', 1, -1)
        >>> index.ids("the black cat", unknown=9).tolist()
        [0, 9, 1]
    """

    def __init__(self, text: NDArray[np.uint8], starts: NDArray[np.int64]) -> None:
        self.text = text
        self.starts = starts

    @classmethod
    def of(cls, words: Iterable[str]) -> "WordIndex":
        """Index words by their position; ValueError if one occurs twice."""
        encoded = [word.encode("utf-8", "surrogatepass") for word in words]
        if len(set(encoded)) < len(encoded):
            raise ValueError("a word occurs twice in the vocabulary")
        starts = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(word) for word in encoded], out=starts[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), starts)

    @classmethod
    def parse(cls, content: bytes) -> "WordIndex":
        r"""Read the words of a `vocab.txt`, which has one line `word TAB count` for each id.

        >>> list(WordIndex.parse(b"<eos>\t5\nthe\t3\n"))
        ['<eos>', 'the']
        """
        content.decode()  # raises a ValueError if it is not UTF-8
        raw = np.frombuffer(content, np.uint8)
        tabs, ends = (np.flatnonzero(raw == ord(mark)) for mark in "\t\n")
        begins = np.append(0, ends + 1)[:-1]
        is_complete = len(tabs) == len(ends) and content.endswith(b"\n")
        if not is_complete or (tabs <= begins).any() or (tabs > ends).any():
            raise ValueError("expected lines word TAB count")
        lengths = np.stack([tabs - begins, ends + 1 - tabs], axis=1)
        is_word = np.repeat(np.resize([True, False], lengths.size), lengths.ravel())
        return cls(raw[is_word], np.append(0, np.cumsum(lengths[:, 0])))

    def with_new(self, words: Iterable[str]) -> "WordIndex":
        """The words of this index, and after them others, which it must lack."""
        new = WordIndex.of(words)
        starts = np.append(self.starts, self.starts[-1] + new.starts[1:])
        return WordIndex(np.append(self.text, new.text), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, id: int) -> str:
        first, end = self.starts[id : id + 2]
        return self.text[first:end].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), WORDS_PER_CHUNK):
            starts = self.starts[first : first + WORDS_PER_CHUNK + 1]
            raw = self.text[starts[0] : starts[-1]].tobytes()
            ends = (starts - starts[0]).tolist()
            yield from (raw[a:b].decode() for a, b in pairwise(ends))

    def id(self, word: str) -> int:
        """Return the id of a word, -1 if it is not in the index."""
        return self._ids.get(word, -1)

    def ids(self, text: str, unknown: int, line_end: int = -1) -> NDArray[np.int32]:
        """The ids of a text's words, `unknown` for others; of newlines unless `line_end` is -1."""
        find = self._ids.get
        lines = [text] if line_end < 0 else text.split("\n")
        found = [[find(word, unknown) for word in line.split()] for line in lines]
        for ids in found[:-1]:
            ids.append(line_end)
        return np.fromiter(chain.from_iterable(found), np.int32, sum(map(len, found)))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: id for id, word in enumerate(self)}
