"""Text to token ids and back: whitespace-separated words, or sentencepiece pieces.

Lines are passed without their newline and encoded without `<eos>`, except by `encode_stream`,
which joins lines.
"""

import codecs
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, compress, islice
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.tokenizer.punctuation import EOS, UNK, Spacing, separate_words
from data_prep.tokenizer.word_index import WordIndex

SENTENCEPIECE_SPACE = "\u2581"
LINES_PER_BATCH = 16_384
CHARACTERS_PER_BATCH = 1 << 25


def line_batches(lines: Iterable[str], most: int | None = None) -> Iterator[list[str]]:
    """Group lines into batches of up to `LINES_PER_BATCH` lines, fewer if the lines are long."""
    batch, num_characters = [], 0
    most = LINES_PER_BATCH if most is None else most
    for line in lines:
        batch.append(line)
        num_characters += len(line)
        if len(batch) == most or num_characters >= CHARACTERS_PER_BATCH:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


class AlignedLine(NamedTuple):
    """The words of a line, separated by whitespace, and the ids that each consists of."""

    words: list[str]
    ids: NDArray[np.integer]  # [n], as `Tokenizer.encode` returns them
    word_of_id: NDArray[np.int64]  # [n], in `words`; len(words): the whitespace after the last


class Tokenizer(ABC):
    """Converts a line into ids in [0, vocab_size) and ids into text."""

    kind: ClassVar[Literal["words", "sentencepiece"]]  # name in the configuration
    literals: ClassVar[tuple[str, ...]] = (UNK,)  # special words that are recognized in a text
    lowercase: bool = False  # whether letters are converted to lower case
    split_punctuation: bool = False  # whether punctuation marks are tokens of their own
    has_bytes: bool = False  # whether every byte is a token, so that nothing is unknown
    vocab_size: int  # N, number of ids
    eos_id: int  # the end of a line
    unk_id: int  # everything outside the vocabulary, and the literal text `<unk>`

    def encode(self, line: str) -> list[int]:
        """Return the ids of one line, without `<eos>`."""
        return self.encode_lines([line])[0]

    @abstractmethod
    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Encode several lines without `<eos>`, faster than one by one."""

    def encode_stream(self, lines: Sequence[str]) -> NDArray[np.integer]:
        """Return the ids of all lines in one array [tokens], `<eos>` after each line."""
        encoded = self.encode_lines(lines)
        for ids in encoded:
            ids.append(self.eos_id)
        flat = chain.from_iterable(encoded)
        return np.fromiter(flat, np.int64, sum(map(len, encoded)))

    @abstractmethod
    def align(self, line: str) -> AlignedLine:
        """Encode one line, without `<eos>`, and assign each id to a word.

        An id that covers several words, such as one `<unk>` for consecutive unknown words, belongs
        to the last of them.
        """

    @abstractmethod
    def token(self, id: int) -> str:
        """Return the word or piece with an id; ValueError if the id is out of range."""

    @abstractmethod
    def stream_decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text that each id makes final, which may be empty, and at the end the rest."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids; `<eos>` is a newline."""
        return "".join(self.stream_decode(ids))

    def _check(self, id: int) -> int:
        if not 0 <= id < self.vocab_size:
            raise ValueError(f"token id {id} is outside the vocabulary of {self.vocab_size}")
        return id


class WordTokenizer(Tokenizer):
    r"""Words of a fixed list; any other word is `<unk>`, a literal `<eos>` is the `<eos>` word.

    The ids of `words`, `<unk>` and `<eos>` included, are positions. Other arguments are those of
    `TokenizerConfig`.

    Raises:
        ValueError: `<unk>` or `<eos>` is missing, or a word is repeated.

    Example:
        >>> tokenizer = WordTokenizer(["<eos>", "<unk>", "the", "cat"])
        >>> tokenizer.encode("the black cat")
        [2, 1, 3]
        >>> tokenizer.decode([2, 1, 3, 0])
        'the <unk> cat\n'
    """

    kind = "words"
    literals = (EOS, UNK)

    def __init__(
        self,
        words: WordIndex | Iterable[str],
        *,
        lowercase: bool = False,
        split_punctuation: bool = False,
    ) -> None:
        self.words = words if isinstance(words, WordIndex) else WordIndex.of(words)
        self.lowercase = lowercase
        self.split_punctuation = split_punctuation
        self._separate = partial(
            separate_words, split_punctuation=split_punctuation, lowercase=lowercase
        )
        self.vocab_size = len(self.words)
        ids = (id for id, word in enumerate(self.words) if word in (UNK, EOS))  # without a lookup
        special = {self.words[id]: id for id in islice(ids, 2)}
        for word in (UNK, EOS):
            if word not in special:
                raise ValueError(f"the vocabulary of {self.vocab_size} words lacks {word}")
        self.eos_id, self.unk_id = special[EOS], special[UNK]

    def align(self, line: str) -> AlignedLine:
        """Encode one line; a word has several ids if punctuation is split."""
        words, ids = line.split(), self.words.ids(self._separate([line]), self.unk_id)
        num_ids = [len(self._separate([word]).split()) for word in words]
        return AlignedLine(words, ids, np.repeat(np.arange(len(words)), num_ids))

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Encode several lines, without `<eos>`."""
        return [self.words.ids(self._separate([line]), self.unk_id).tolist() for line in lines]

    def encode_stream(self, lines: Sequence[str]) -> NDArray[np.integer]:
        """Return the ids of all lines in one array [tokens], faster than `encode_lines`."""
        return self.words.ids(self._separate(lines), self.unk_id, line_end=self.eos_id)

    def unknown_occurrences(self, lines: Sequence[str]) -> list[str]:
        """The words of lines that are `<unk>`, in their order, in the case of `encode`.

        >>> WordTokenizer(["<eos>", "<unk>", "a"], lowercase=True).unknown_occurrences(["A b", "B"])
        ['b', 'b']
        """
        text = self._separate(lines)
        is_unknown = self.words.ids(text, self.unk_id) == self.unk_id
        return list(compress(text.split(), is_unknown))

    def token(self, id: int) -> str:
        """Return the word with an id; ValueError if the id is out of range."""
        return self.words[self._check(id)]

    def stream_decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield words with the space before them, and newlines."""
        spacing = Spacing(self.split_punctuation)
        for id in ids:
            word = self.token(id)
            if id == self.eos_id:
                spacing = Spacing(self.split_punctuation)
                yield "\n"
            else:
                yield spacing.before(word) + word


class SentencePieceTokenizer(Tokenizer):
    """Pieces of a sentencepiece model built by `vocabulary.train_sentencepiece`.

    The text is not normalised, so decoding restores every character that has a piece. Words start
    with the space before them, including the first word of a line. A literal `<unk>` and one space
    before it are encoded as the unknown id; sentencepiece itself would spell it, and would read a
    literal U+2581 as a space: it is encoded as bytes, or as unknown if there are none. Consecutive
    unknown characters are one unknown id, and so are consecutive unknown words of
    `model_type: word`.

    Raises:
        ValueError: `model` is not the content of a model file, or the model has no `<eos>`.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self.model = model
        self._processor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(f"{len(model)} bytes that are not a sentencepiece model") from error
        self.vocab_size = self._processor.vocab_size()
        self.has_bytes = any(map(self._processor.is_byte, range(self.vocab_size)))
        self.eos_id = self._processor.eos_id()
        self.unk_id = self._processor.unk_id()
        if self.eos_id < 0:
            raise ValueError("the sentencepiece model has no piece for the end of a line")

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Encode several lines without `<eos>`."""
        texts = list(map(split_at_special, lines))
        segments = list(chain.from_iterable(text[::2] for text in texts))
        encoded = iter(self._processor.encode(segments, out_type=int))
        joined = []
        for text in texts:
            joined.append(next(encoded))
            for special, ids in zip(text[1::2], encoded, strict=False):
                joined[-1] += self._special_ids(special) + ids
        return joined

    def _special_ids(self, special: str) -> list[int]:
        """The ids of `<unk>`, or of the character that sentencepiece has for a space: its bytes."""
        if UNK in special or not self.has_bytes:
            return [self.unk_id]
        return [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in special.encode()]

    def align(self, line: str) -> AlignedLine:
        """Encode one line; a piece belongs to the word of its last character, or to the next."""
        text = f" {line}" if line else ""
        ids: list[int] = []
        ends: list[int] = []  # in `text`
        for place, segment in enumerate(split_at_special(line)):
            if place % 2:
                ids += (special := self._special_ids(segment))
                ends += [(ends[-1] if ends else 0) + len(segment)] * len(special)
                continue
            encoded = (self._processor.encode(segment, out_type=kind) for kind in (int, str))
            for id, piece in zip(*encoded, strict=True):
                ids.append(id)
                ends.append((ends[-1] if ends else 0) + self._num_characters(id, piece))
        starts = [word.start() for word in re.finditer(r"\S+", text)]
        word_of_id, next_word = [0] * len(ids), len(starts)
        for place in reversed(range(len(ids))):
            # A further byte of a character covers that character.
            begin = min(ends[place - 1], ends[place] - 1) if place else 0
            if visible := text[begin : ends[place]].rstrip():
                next_word = bisect_right(starts, begin + len(visible) - 1) - 1
            word_of_id[place] = next_word
        return AlignedLine(text.split(), np.array(ids, np.int32), np.array(word_of_id, np.int64))

    def _num_characters(self, id: int, piece: str) -> int:
        """Characters of the text that a piece covers; a byte's are counted by its first one."""
        if self._processor.is_byte(id):
            return int(not 0x80 <= int(piece[3:5], 16) < 0xC0)
        return len(piece)

    def token(self, id: int) -> str:
        """Return the piece with an id; ValueError if the id is out of range."""
        piece: str = self._processor.id_to_piece(self._check(id))
        return piece

    def stream_decode(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of each piece; incomplete UTF-8 is held back until it is complete."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        at_start, after_space = True, False
        for id in ids:
            piece = self.token(id)
            if self._processor.is_byte(id):
                text = decoder.decode(bytes.fromhex(piece[3:5]))
            else:
                text = decoder.decode(b"", final=True) + self._written(id, piece, after_space)
            after_space = text.endswith(" ") if text else after_space
            visible = text.removeprefix(" ") if at_start else text
            at_start = id == self.eos_id or (at_start and not text)
            yield visible
        if incomplete := decoder.decode(b"", final=True):
            yield incomplete

    def _written(self, id: int, piece: str, after_space: bool) -> str:
        if id == self.eos_id:
            return "\n"
        if id == self.unk_id:
            return UNK if after_space else f" {UNK}"
        return piece.replace(SENTENCEPIECE_SPACE, " ")


def split_at_special(line: str) -> list[str]:
    """Split a line, with a space before it, at what sentencepiece reads as something else.

    Returns texts and, between them, `<unk>` with the space before it, or what a space is there.
    """
    text = f" {line}" if line else ""
    is_plain = UNK not in text and SENTENCEPIECE_SPACE not in text
    return [text] if is_plain else re.split(f"( ?{UNK}|{SENTENCEPIECE_SPACE})", text)
