"""Spellings of unknown words: P(spelling | `<unk>`), which gives every string a probability.

p is an n-gram model of characters with interpolated Kneser-Ney smoothing, over all strings w
without whitespace, each with an end mark:

    p(w) = Π p(c | h)    over the characters c of w and its end; h: the n - 1 characters before c
    p(c | h) = (max(n(hc) - D, 0) + D t(h) p(c | h')) / n(h)                                     (1)

n(hc) is how often hc occurs in the word types of the training text, for shorter h the number of
distinct characters before hc; n(h) = Σ_c n(hc); t(h) is the number of distinct c, h' is h without
its first character; p(c | h) = p(c | h') if h is new, and the last p is uniform. Each type counts
once, as it is new once. Characters that only one type has are one symbol, `OTHER`, which is
divided equally among all characters of Unicode that have no symbol.

Strings of the vocabulary V, and the empty one, are no unknown words. A text may contain `<unk>`
literally: this word has the share q of P(`<unk>`) that it has in the training text.

    P(w | <unk>) = (1 - q) p(w) / (1 - p("") - Σ_{v in V} p(v));    P("<unk>" | <unk>) = q       (2)

The probabilities of all strings that are not in V, and of "<unk>", add up to 1.

Source: Kneser & Ney 1995; Chen & Goodman 1999, section 3.
"""

import io
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.errors import DataError, UserError
from data_prep.storage import open_to_read, write_hashed
from data_prep.tokenizer.punctuation import EOS, UNK
from data_prep.tokenizer.word_index import WORDS_PER_CHUNK, WordIndex

SPELLER = "speller.npz"
ORDER = 7
"""n; less if the keys of n-grams would not fit into 64 bits."""
MAX_TYPES = 500_000
"""Most types counted; of more, every k-th in order of frequency."""
_DAMAGED = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
"""What reading a damaged file raises, `NotImplementedError` included."""
MAX_CHARACTERS = (1 << 16) - 3
BEFORE, END, OTHER, FIRST = 0, 1, 2, 3
"""Symbols: before a word, its end, any other character, the first character of the alphabet."""
NUM_SCALARS = 0x110000 - 0x800 - 29
"""Characters of Unicode without surrogates and the 29 that `str.split` separates at."""

Floats = NDArray[np.float64]
Keys = NDArray[np.uint64]


class NGrams(NamedTuple):
    """The n-grams of one length, and by their first n - 1 symbols h what equation (1) requires."""

    key: Keys  # [K], increasing
    number: NDArray[np.uint32]  # [K], n(hc)
    context: Keys  # [M], keys of h, increasing
    total: Floats  # [M], n(h)
    num_next: Floats  # [M], t(h)
    discount: float  # D

    @classmethod
    def of(cls, key: Keys, count: NDArray[np.uint32], bits: int) -> "NGrams":
        """Sum counts by context; D = n1 / (n1 + 2 n2), of n-grams that occur once and twice."""
        context, first = np.unique(key >> np.uint64(bits), return_index=True)
        total = np.add.reduceat(count, first, dtype=np.float64) if len(key) else np.zeros(0)
        num_next = np.diff(first, append=len(key)).astype(np.float64)
        once, twice = (int((count == number).sum()) for number in (1, 2))
        discount = once / (once + 2 * twice) if once and twice else 0.5
        return cls(key, count, context, total, num_next, discount)


class Speller:
    """P(spelling | `<unk>`), equation (2).

    Args:
        alphabet: code points of the characters that have a symbol, increasing.
        counts: for n = 1, 2, …: the keys and the counts of n-grams, as in `NGrams`.
        log_unknown: log of (1 - q) / (1 - p("") - Σ p(v)).
        log_literal: log q.

    Example:
        >>> known, others = WordIndex.of(["cat", "car", "cow"]), WordIndex.of(["dog", "cog"])
        >>> speller = Speller.train(known, others, literal_share=0.01)
        >>> words = ["cot", "xyz"]
        >>> dict(zip(words, speller.log_prob(words).round(1).tolist()))
        {'cot': -15.6, 'xyz': -51.0}
    """

    def __init__(
        self,
        alphabet: NDArray[np.uint32],
        counts: Iterable[tuple[Keys, NDArray[np.uint32]]],
        log_unknown: float = 0.0,
        log_literal: float = -np.inf,
    ) -> None:
        self.alphabet, self.log_unknown, self.log_literal = alphabet, log_unknown, log_literal
        self._bits, self.order = _sizes(len(alphabet))
        self._ngrams = [NGrams.of(*each, self._bits) for each in counts]

    @classmethod
    def train(cls, vocabulary: WordIndex, others: WordIndex, *, literal_share: float) -> "Speller":
        """Count the types of a training text, known words and others, each ordered by frequency.

        `<unk>` and `<eos>` are among the known ones; `literal_share` is q, within (0, 1).
        """
        every = max(1, -(-(len(vocabulary) + len(others)) // MAX_TYPES))
        types = list(islice(chain(vocabulary, others), 0, None, every))
        types = [word for word in types if word not in (UNK, EOS)]
        code_points, word_of = _flat(types)
        pairs = np.unique(word_of.astype(np.uint64) << np.uint64(21) | code_points)
        found, num_types = np.unique(pairs & np.uint64((1 << 21) - 1), return_counts=True)
        by_frequency = np.argsort(-num_types, kind="stable")
        chosen = by_frequency[num_types[by_frequency] > 1][:MAX_CHARACTERS]
        alphabet = np.sort(found[chosen]).astype(np.uint32)
        empty = cls(alphabet, ())
        key, counts = empty._keys(types)[0], []
        for length in range(empty.order, 0, -1):
            unique, count = np.unique(key, return_counts=True)
            counts.append((unique, count.astype(np.uint32)))
            key = empty._suffix(unique, length - 1)  # of each distinct n-gram
        counts.reverse()
        speller = cls(alphabet, counts)
        speller.log_literal = float(np.log(literal_share))
        return speller.outside(vocabulary)

    def outside(self, vocabulary: Iterable[str]) -> "Speller":
        """Equation (2) with another vocabulary, `<unk>` included, of as many texts."""
        words, known = iter(vocabulary), float(np.exp(self._log_p([""])[0]))
        while chunk := list(islice(words, WORDS_PER_CHUNK)):
            known += float(np.exp(self._log_p(chunk)).sum())
        speller = copy(self)
        literal_share = np.exp(self.log_literal)
        speller.log_unknown = float(np.log1p(-literal_share) - np.log1p(-known))
        return speller

    def log_prob(self, words: Sequence[str]) -> Floats:
        """Equation (2) in nats, [n], of words that the vocabulary lacks, or `<unk>`."""
        log_prob = self._log_p(words) + self.log_unknown
        log_prob[[word == UNK for word in words]] = self.log_literal
        return log_prob

    def draw(self, generator: np.random.Generator, is_known: Callable[[str], bool]) -> str:
        """Draw a spelling in the alphabet, of a string that is not known, by equation (2).

        UserError if the alphabet is empty.
        """
        if not len(self.alphabet):
            problem = "no unknown word can be spelled: no character is in two words"
            raise DataError(f"{problem} of the training split")
        following = np.arange(END, FIRST + len(self.alphabet), dtype=np.uint64)
        while True:
            word, key = "", np.zeros(1, np.uint64)
            while True:
                before = self._suffix(key, self.order - 1) << np.uint64(self._bits)
                cumulative = np.cumsum(self._prob(before | following))
                drawn = np.searchsorted(cumulative, generator.random() * cumulative[-1], "right")
                symbol = END + int(drawn)
                if symbol in (END, OTHER):
                    break
                word += chr(self.alphabet[symbol - FIRST])
                key = before | np.uint64(symbol)
            if symbol == END and word and not is_known(word):
                return word

    def save(self, path: Path, tokenizer_sha256: str) -> str:
        """Write the file, for the tokenizer that has the vocabulary; returns its SHA-256."""
        arrays: dict[str, NDArray[Any]] = {
            "alphabet": self.alphabet,
            "log_shares": np.array([self.log_unknown, self.log_literal]),
            "tokenizer": np.frombuffer(tokenizer_sha256.encode(), np.uint8),
        }
        for length, each in enumerate(self._ngrams, 1):
            arrays[f"step{length}"] = np.diff(each.key, prepend=np.uint64(0))
            arrays[f"count{length}"] = each.number
        content = io.BytesIO()
        np.savez_compressed(content, allow_pickle=False, **arrays)
        return write_hashed(path, [content.getvalue()])

    @classmethod
    def load(cls, path: Path, tokenizer_sha256: str) -> "Speller":
        """Read the file; UserError if it is absent, damaged or made for another tokenizer."""
        try:
            with open_to_read(path) as file, np.load(file, allow_pickle=False) as arrays:
                _, order = _sizes(len(arrays["alphabet"]))
                counts = [
                    (np.cumsum(arrays[f"step{n}"], dtype=np.uint64), arrays[f"count{n}"])
                    for n in range(1, order + 1)
                ]
                speller = cls(arrays["alphabet"], counts, *arrays["log_shares"].tolist())
                made_for = arrays["tokenizer"].tobytes().decode()
        except _DAMAGED as error:
            if isinstance(error, UserError):
                raise
            raise DataError(f"{path} is damaged") from error
        if made_for != tokenizer_sha256:
            raise DataError(f"{path} was made for another vocabulary: run `lm prepare` again")
        return speller

    def _log_p(self, words: Sequence[str]) -> Floats:
        """Logarithm of p(w), [n]."""
        key, word_of, num_others = self._keys(words)
        log_p = np.bincount(word_of, np.log(self._prob(key)), len(words)).astype(np.float64)
        log_p -= num_others * np.log(NUM_SCALARS - len(self.alphabet))
        return log_p

    def _prob(self, key: Keys) -> Floats:
        """Equation (1) of the last symbol of n-grams [K]."""
        key, place = np.unique(key, return_inverse=True)
        prob = np.full(len(key), 1 / (len(self.alphabet) + 2))
        for length, each in enumerate(self._ngrams, 1):
            ngram = self._suffix(key, length)
            found, index = _find(each.key, ngram)
            count = np.where(found, each.number[index] - each.discount, 0) if len(index) else 0
            found, index = _find(each.context, ngram >> np.uint64(self._bits))
            if found.any():
                prob[found] *= each.discount * each.num_next[index][found]
                prob[found] = (prob + count)[found] / each.total[index][found]
        return prob[place]

    def _keys(self, words: Sequence[str]) -> tuple[Keys, NDArray[np.int64], NDArray[np.int64]]:
        """The n-grams [S] that end in each symbol of words, the word of each, and its `OTHER`s."""
        code_points, word_of = _flat(words)
        index = np.searchsorted(self.alphabet, code_points).clip(max=max(0, len(self.alphabet) - 1))
        symbols = np.full(len(code_points), OTHER, np.uint64)
        if len(self.alphabet):
            has_symbol = self.alphabet[index] == code_points
            symbols[has_symbol] = index[has_symbol] + FIRST
        num_others = np.bincount(word_of[symbols == OTHER], minlength=len(words))
        ends = np.cumsum(np.bincount(word_of, minlength=len(words)))
        symbols = np.insert(symbols, ends, END)
        word_of = np.insert(word_of, ends, np.arange(len(words)))
        begins = np.append(0, ends + np.arange(1, len(words) + 1))[word_of]
        key = np.zeros(len(symbols), np.uint64)
        for back in range(self.order - 1, -1, -1):
            before = np.arange(len(symbols)) - back
            symbol = np.where(before >= begins, symbols[before.clip(min=0)], np.uint64(BEFORE))
            key = key << np.uint64(self._bits) | symbol
        return key, word_of, num_others

    def _suffix(self, key: Keys, length: int) -> Keys:
        """The last `length` symbols of n-grams."""
        return key & np.uint64((1 << (self._bits * length)) - 1)


def _sizes(num_characters: int) -> tuple[int, int]:
    """Bits of a symbol, and the length of the longest n-grams."""
    bits = (FIRST + num_characters - 1).bit_length()
    return bits, min(ORDER, 64 // bits)


def _flat(words: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The code points of words, one word after another, and the word of each."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    code_points = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)
    return code_points, np.repeat(np.arange(len(words)), lengths)


def _find(key: Keys, wanted: Keys) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Whether increasing keys have each wanted one, and where (anywhere if not)."""
    if not len(key):
        return np.zeros(len(wanted), np.bool_), np.zeros(0, np.int64)
    index = np.searchsorted(key, wanted).clip(max=len(key) - 1)
    return key[index] == wanted, index
