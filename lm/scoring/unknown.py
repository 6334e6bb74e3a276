"""Unknown words: what share of P(`<unk>`) each has, and which ones texts have.

The share of a spelling is that of `data_prep.tokenizer.speller`, a model of characters.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from data_prep.corpus.formats import COLUMN_ALONE
from data_prep.corpus.hints import UNSPACED, noted, warn_of
from data_prep.errors import UserError
from data_prep.tokenizer.punctuation import UNK
from data_prep.tokenizer.speller import Speller
from data_prep.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
MANY = 0.2
"""Share of unknown words above which they are reported."""
NUM_SHOWN = 5
MAX_VOCABULARY_SIZE = 1 << 60
"""Ranks are 64-bit integers."""


class UnknownRule:
    """P(word | `<unk>`) of each word outside a model's vocabulary of N words.

    It is 1 by default, with `<unk>` as one word; 1 / U if the U = V - N other words of a vocabulary
    of V share P(`<unk>`); the speller's; or 0 if unknown words are left out.

    Args:
        num_known: N, `<eos>` counted and `<unk>` not.
        vocabulary_size: V.
        speller: in place of V.
        leave_out: whether unknown words are left out of what is read, unless V or a speller is
            given.
        owner: what has the N words, for messages.

    Attributes:
        num_unseen: U; 1 without V.
        is_shared: whether V is given.
        is_spelled: whether a speller is given.
        tells_apart: whether an unknown word has a probability of its own.
        leaves_out: whether unknown words are left out.

    Raises:
        UserError: if V is out of range.
    """

    def __init__(
        self,
        num_known: int,
        vocabulary_size: int | None = None,
        speller: Speller | None = None,
        *,
        leave_out: bool = False,
        owner: str = "the model",
    ) -> None:
        self.num_unseen, self._speller, self._vocabulary_size = 1, speller, vocabulary_size
        self.is_shared, self.is_spelled = vocabulary_size is not None, speller is not None
        self.tells_apart = self.is_spelled or self.is_shared
        self.leaves_out = leave_out and not self.tells_apart
        if vocabulary_size is None:
            return
        if speller is not None:
            raise UserError("a vocabulary size and an open vocabulary exclude each other")
        is_whole = isinstance(vocabulary_size, SupportsIndex)
        if not is_whole or not num_known < vocabulary_size <= MAX_VOCABULARY_SIZE:
            raise UserError(
                f"vocabulary size {vocabulary_size}: expected at least {num_known + 1}, one word"
                f" more than {owner} has, and at most {MAX_VOCABULARY_SIZE}"
            )
        self.num_unseen = vocabulary_size - num_known

    def sentence(self, name: Path, num_types: int) -> str:
        """The rule of the model `name` for `num_types` distinct unknown words of n-best lists."""
        if self.is_spelled:
            return f"{name}: each unknown word has its spelling's share of P(<unk>)"
        if not self.is_shared:
            return f"{name}: each unknown piece has P(<unk>)"
        if not num_types:
            return f"{name}: no word of the lists is unknown"
        return (
            f"{name}: each of the {num_types:,} unknown words of the lists has"
            f" 1/{self.num_unseen:,} of P(<unk>), as by --vocabulary-size={self._vocabulary_size}"
        )

    @property
    def log_share(self) -> float:
        """Log-probability in nats, given `<unk>`, of an unknown word that is not spelled."""
        return -math.inf if self.leaves_out else -math.log(self.num_unseen)

    def log_prob(self, number: int, words: Callable[[], Sequence[str]]) -> NDArray[np.float64]:
        """Log-probabilities [number] in nats of words given `<unk>`; only a speller reads them."""
        if self._speller is None or not number:
            return np.full(number, self.log_share)
        return self._speller.log_prob(words())


class UnknownWords:
    """The words of texts, separated by whitespace, that a tokenizer reads as `<unk>` or in part."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
        counts = Counter(word for text in texts for word in text.split())
        self.num_words, self._tokenizer = counts.total(), tokenizer
        encoded = tokenizer.encode_lines(list(counts))
        pairs = zip(counts.items(), encoded, strict=True)
        self._counts = Counter({word: n for (word, n), ids in pairs if tokenizer.unk_id in ids})
        self.num_unknown = self._counts.total()

    @property
    def types(self) -> list[str]:
        """The distinct words, in their order, but a literal `<unk>`."""
        tokenizer, words = self._tokenizer, list(self._counts)
        is_cut = tokenizer.kind == "sentencepiece" or tokenizer.split_punctuation
        literals = (word.count(UNK) if is_cut else word == UNK for word in words)
        encoded = zip(words, tokenizer.encode_lines(words), literals, strict=True)
        return [word for word, ids, num in encoded if ids.count(tokenizer.unk_id) > num]

    def warning(self, what: str) -> str | None:
        """A sentence if more than `MANY` of the words of `what` are unknown, with the first ones.

        They show the cause: the case of letters, punctuation, apostrophes, or a form of Unicode.
        """
        if self.num_unknown <= MANY * self.num_words:
            return None
        share = 100 * self.num_unknown / self.num_words
        unspaced = Counter({word: n for word, n in self._counts.items() if UNSPACED.search(word)})
        is_unspaced = 2 * unspaced.total() > self.num_unknown
        counts = unspaced if is_unspaced else self._counts
        words = ", ".join(f"{word[:40]!r}" for word, _ in counts.most_common(NUM_SHOWN))
        if is_unspaced:
            cause = "separate the words of the text as those of the training text were separated"
            return f"{share:.0f} % of the words of the {what} are unknown, as {words}: {cause}"
        keys = [
            key for key in ("lowercase", "split_punctuation") if not getattr(self._tokenizer, key)
        ]
        train = " or ".join(f"--tokenizer.{key}=true" for key in keys)
        return (
            f"{share:.0f} % of the words of the {what} are unknown, most often {words}: write them"
            " as in the training text (case, punctuation, apostrophes, form of Unicode)"
            + (f", or train with {train}" if keys else "")
            + ", or add them, lm extend --text" * (self._tokenizer.kind == "words")
        )


def noted_words(tokenizer: Tokenizer, lines: Iterable[str], name: str) -> Iterator[str]:
    """Pass lines on; warn of what the first ones look like, and if many words are unknown."""

    def warn(first: list[str], name: str) -> None:
        warn_of(first, name, COLUMN_ALONE)
        if warning := UnknownWords(tokenizer, first).warning("text"):
            _log.warning("%s, first lines: %s", name, warning)

    return noted(lines, name, warn)
