"""Unknown words of texts, n-best lists and references: how many they are, and which."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator

from data_prep.corpus.formats import COLUMN_ALONE
from data_prep.corpus.hints import noted, warn_of
from data_prep.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
MANY = 0.2
"""Share of unknown words above which they are reported."""
NUM_SHOWN = 5


class UnknownWords:
    """The words of texts, separated by whitespace, that a tokenizer reads as `<unk>` or in part."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
        counts = Counter(word for text in texts for word in text.split())
        self.num_words, self._tokenizer = counts.total(), tokenizer
        encoded = tokenizer.encode_lines(list(counts))
        pairs = zip(counts.items(), encoded, strict=True)
        self._counts = Counter({word: n for (word, n), ids in pairs if tokenizer.unk_id in ids})
        self.num_unknown = self._counts.total()

    def warning(self, what: str) -> str | None:
        """A sentence if more than `MANY` of the words of `what` are unknown, with the first ones.

        They show the cause: the case of letters, punctuation, apostrophes, or a form of Unicode.
        """
        if self.num_unknown <= MANY * self.num_words:
            return None
        share = 100 * self.num_unknown / self.num_words
        words = ", ".join(f"{word[:40]!r}" for word, _ in self._counts.most_common(NUM_SHOWN))
        keys = [
            key for key in ("lowercase", "split_punctuation") if not getattr(self._tokenizer, key)
        ]
        train = " or ".join(f"--tokenizer.{key}=true" for key in keys)
        return (
            f"{share:.0f} % of the words of the {what} are unknown, most often {words}: write them"
            " as in the training text (case, punctuation, apostrophes, form of Unicode)"
            + (f", or train with {train}" if keys else "")
        )


def noted_words(tokenizer: Tokenizer, lines: Iterable[str], name: str) -> Iterator[str]:
    """Pass lines on; warn of what the first ones look like, and if many words are unknown."""

    def warn(first: list[str], name: str) -> None:
        warn_of(first, name, COLUMN_ALONE)
        if warning := UnknownWords(tokenizer, first).warning("text"):
            _log.warning("%s, first lines: %s", name, warning)

    return noted(lines, name, warn)
