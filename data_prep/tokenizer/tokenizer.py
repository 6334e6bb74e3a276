"""Text to token ids and back: whitespace words, or sentencepiece pieces.

Decides what a token is. A tokenizer is a value: it knows no files (`artifacts` stores it) and not
how its vocabulary came about (`vocabulary` builds it). Lines go in without their newline and come
out without `<eos>`, but from `encode_stream`, which lays them in a row.
"""

import codecs
import re
import sys
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, islice
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from data_prep.tokenizer.word_index import WordTable

UNK = "<unk>"
EOS = "<eos>"
SENTENCEPIECE_SPACE = "\u2581"
LINES_PER_BATCH = 16_384
CHARACTERS_PER_BATCH = 1 << 25


def line_batches(lines: Iterable[str]) -> Iterator[list[str]]:
    """The lines some at a time: as many as are fast to work on, fewer where they are long."""
    batch, num_characters = [], 0
    for line in lines:
        batch.append(line)
        num_characters += len(line)
        if len(batch) == LINES_PER_BATCH or num_characters >= CHARACTERS_PER_BATCH:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


class Tokenizer(ABC):
    """Turns a line into ids in [0, vocab_size) and ids into text."""

    kind: ClassVar[Literal["words", "sentencepiece"]]
    vocab_size: int
    eos_id: int
    unk_id: int
    """Stands for what the vocabulary lacks, and for the literal text `<unk>` of published
    corpora.
    """

    @abstractmethod
    def encode(self, line: str) -> list[int]:
        """Ids of one line, without `<eos>`."""

    @abstractmethod
    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """`encode` of every line, faster than one by one."""

    def encode_stream(self, lines: Sequence[str]) -> NDArray[np.integer]:
        """Ids of the lines in a row, `<eos>` after each, faster than `encode_lines`."""
        encoded = self.encode_lines(lines)
        for ids in encoded:
            ids.append(self.eos_id)
        flat = chain.from_iterable(encoded)
        return np.fromiter(flat, np.int64, sum(map(len, encoded)))

    @abstractmethod
    def token(self, id: int) -> str:
        """The word or piece with this id, as the vocabulary spells it; ValueError if there is
        none.
        """

    @abstractmethod
    def stream_decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Pieces of text as soon as they are certain, at a constant cost per id."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; `<eos>` is a newline."""
        return "".join(self.stream_decode(ids))

    def num_words(self, line: str) -> int:
        """Whitespace-separated words of the line as it was written, whatever the tokens are."""
        return len(line.split())

    def _check(self, id: int) -> int:
        if not 0 <= id < self.vocab_size:
            raise ValueError(f"token id {id} is outside the vocabulary of {self.vocab_size}")
        return id


class WordTokenizer(Tokenizer):
    """Words of a fixed list; anything else is `<unk>`, a literal `<eos>` is the `<eos>` word."""

    kind = "words"

    def __init__(
        self,
        words: "WordTable | Iterable[str]",
        *,
        lowercase: bool = False,
        split_punctuation: bool = False,
    ) -> None:
        """The id of a word is its place in `words`.

        Args:
            words: the vocabulary, without repeats, `<unk>` and `<eos>` among them.
            lowercase: see `TokenizerConfig`.
            split_punctuation: see `TokenizerConfig`.

        Raises:
            ValueError: `<unk>` or `<eos>` is missing, or a word is there twice.
        """
        from data_prep.tokenizer.word_index import WordTable  # loads a compiler

        self.words = words if isinstance(words, WordTable) else WordTable.of(words)
        self.lowercase = lowercase
        self.split_punctuation = split_punctuation
        self.vocab_size = len(self.words)
        self.eos_id, self.unk_id = map(self.words.id, (EOS, UNK))
        for special, id in ((UNK, self.unk_id), (EOS, self.eos_id)):
            if id < 0:
                raise ValueError(f"the vocabulary of {self.vocab_size} words lacks {special}")
        self._separate = word_separator(lowercase, split_punctuation)

    def encode(self, line: str) -> list[int]:
        ids: list[int] = self.words.ids(self._separate([line]), self.unk_id).tolist()
        return ids

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        return [self.encode(line) for line in lines]

    def encode_stream(self, lines: Sequence[str]) -> NDArray[np.integer]:
        return self.words.ids(self._separate(lines), self.unk_id, line_end=self.eos_id)

    def num_words(self, line: str) -> int:
        from data_prep.tokenizer.word_index import num_words

        return num_words(line)

    def token(self, id: int) -> str:
        return self.words[self._check(id)]

    def stream_decode(self, ids: Iterable[int]) -> Iterator[str]:
        spacing = _Spacing(self.split_punctuation)
        for id in ids:
            word = self.token(id)
            if id == self.eos_id:
                spacing = _Spacing(self.split_punctuation)
                yield "\n"
            else:
                yield spacing.before(word) + word


class SentencePieceTokenizer(Tokenizer):
    """Pieces of a sentencepiece model that `vocabulary.train_sentencepiece` built.

    The text is not normalised, so that ids give back every character that has a piece. Words start
    with the space before them, the first word of a line too. Where the text says `<unk>`, that and
    one space before it are the unknown id; sentencepiece itself would spell it. Neighbouring
    unknown
    characters are one unknown id, and so are neighbouring unknown words of `model_type: word`.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        """Read the bytes of a sentencepiece model file.

        Raises:
            ValueError: they are no sentencepiece model, or one without `<eos>`.
        """
        from sentencepiece import SentencePieceProcessor

        self.model = model
        self._processor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(f"{len(model)} bytes that are no sentencepiece model") from error
        self.vocab_size = self._processor.vocab_size()
        self.eos_id = self._processor.eos_id()
        self.unk_id = self._processor.unk_id()
        if self.eos_id < 0:
            raise ValueError("the sentencepiece model has no piece for the end of a line")

    def encode(self, line: str) -> list[int]:
        return self.encode_lines([line])[0]

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        if not any(UNK in line for line in lines):
            return self._encode_stretches([f" {line}" if line else "" for line in lines])
        stretches = [known_stretches(line) for line in lines]
        encoded = iter(self._encode_stretches(list(chain.from_iterable(stretches))))
        return [self._joined(islice(encoded, len(parts))) for parts in stretches]

    def _encode_stretches(self, stretches: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._processor.encode(stretches, out_type=int)
        return ids

    def _joined(self, parts: Iterator[list[int]]) -> list[int]:
        ids = next(parts)
        for part in parts:
            ids.append(self.unk_id)
            ids += part
        return ids

    def token(self, id: int) -> str:
        piece: str = self._processor.id_to_piece(self._check(id))
        return piece

    def stream_decode(self, ids: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        at_start, after_space = True, False
        for id in ids:
            piece = self.token(id)
            if self._processor.is_byte(id):
                text = decoder.decode(bytes.fromhex(piece[3:5]))
            else:
                text = decoder.decode(b"", final=True) + self._written(id, piece, after_space)
            after_space = text.endswith(" ") if text else after_space
            shown = text.removeprefix(" ") if at_start else text
            at_start = id == self.eos_id or (at_start and not text)
            if shown:
                yield shown
        rest = decoder.decode(b"", final=True)
        if rest:
            yield rest

    def _written(self, id: int, piece: str, after_space: bool) -> str:
        if id == self.eos_id:
            return "\n"
        if id == self.unk_id:
            return UNK if after_space else f" {UNK}"
        return piece.replace(SENTENCEPIECE_SPACE, " ")


@cache
def _combining_marks() -> str:
    """Regular-expression ranges of combining marks, which `\\w` leaves out, and of two joiners."""
    ranges: list[list[int]] = [[0x200C, 0x200D]]
    for point in range(sys.maxunicode + 1):
        if unicodedata.category(chr(point)).startswith("M"):
            if ranges[-1][1] == point - 1:
                ranges[-1][1] = point
            else:
                ranges.append([point, point])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


def word_separator(lowercase: bool, split_punctuation: bool) -> Callable[[Sequence[str]], str]:
    """From lines, a text with whitespace between their words and one newline after each line."""
    find = _punctuation_splitter() if split_punctuation else None

    def separate(lines: Sequence[str]) -> str:
        text = "\n".join(lines) + "\n"
        text = text.lower() if lowercase else text
        if find is None:
            return text
        return "".join(f"{' '.join(find(line))}\n" for line in text[:-1].split("\n"))

    return separate


@cache
def _punctuation_splitter() -> Callable[[str], list[str]]:
    letter = f"[\\w{_combining_marks()}]"
    return re.compile(
        rf"{UNK}|{EOS}|\d+(?:[.,]\d+)+|{letter}+(?:['\u2019]{letter}+)*|[^\s]"
    ).findall


class _Spacing:
    """What stands before each word of a line: a space, or nothing where punctuation leans on it."""

    def __init__(self, attach_punctuation: bool) -> None:
        self._attach_punctuation = attach_punctuation
        self._open_quotes: set[str] = set()
        self._glued = True

    def before(self, word: str) -> str:
        glued, self._glued = self._glued, False
        if self._attach_punctuation:
            if word in {'"', "'"}:
                closing = word in self._open_quotes
                self._open_quotes ^= {word}
                self._glued = not closing
                glued |= closing
            else:
                glued |= word in set(".,;:!?)]}%\u2026\u2019\u201d\u00bb-/\u3001\u3002")
                self._glued = word in set("([{\u201c\u2018\u00ab\u00bf\u00a1-/$\u00a3\u20ac#@")
        return "" if glued else " "


def known_stretches(line: str) -> list[str]:
    """The line between its `<unk>`s, which take one space before them along; a space leads the
    line.
    """
    return re.split(f" ?{UNK}", f" {line}" if line else "")
