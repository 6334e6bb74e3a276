"""Unknown words of texts, n-best lists and references: how many they are, and why so many."""

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from data_prep.corpus.formats import COLUMN_ALONE
from data_prep.corpus.hints import noted, warn_of
from data_prep.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
MANY = 0.2
"""Share of unknown words above which a cause is looked for."""


def _bare(word: str) -> str:
    found = re.search(r"\w(?:.*\w)?", word, re.DOTALL)  # in linear time
    return found[0] if found else ""


_TYPEWRITER = str.maketrans("\u2018\u2019\u02bc\u2010\u2011", "'''--")
_LOWER = "convert the {what} to lower case"
_TRAIN = "train with --tokenizer."
_CAUSES: dict[str, tuple[Callable[[str], str], str]] = {
    **{
        f"another form of Unicode than {form}": (
            partial(unicodedata.normalize, form),
            f"convert the {{what}} to {form}, uconv -x {form.lower()}",
        )
        for form in ("NFC", "NFD", "NFKC")
    },
    "typographic apostrophes and hyphens": (
        lambda word: word.translate(_TYPEWRITER),
        "replace \u2019 and \u2018 by ' and \u2010 by - in the {what}",
    ),
    "typewriter apostrophes": (
        lambda word: word.replace("'", "\u2019"),
        "replace ' by \u2019 in the {what}",
    ),
    "characters that are not visible, such as U+200B and U+00AD": (
        lambda word: "".join(each for each in word if unicodedata.category(each) != "Cf"),
        "remove them from the {what}",
    ),
    "upper case": (str.lower, f"{_LOWER}, or {_TRAIN}lowercase=true"),
    "lower case": (str.upper, "convert the {what} to upper case"),
    "marks of pieces of words": (
        lambda word: re.sub("\u2581|^##|@@$", "", word),
        "join the pieces of the {what} into words",
    ),
    "attached punctuation": (
        _bare,
        "separate or remove punctuation as in the training text, or"
        f" {_TRAIN}split_punctuation=true",
    ),
    "upper case and attached punctuation": (
        lambda word: _bare(word).lower(),
        f"{_LOWER} and separate or remove punctuation, or {_TRAIN}lowercase=true"
        " --tokenizer.split_punctuation=true",
    ),
    "another tokenisation of contractions and compounds": (
        lambda word: re.sub(r"(n't$|'\w*|\W)", r" \1 ", word),
        "separate words at apostrophes and hyphens as in the training text",
    ),
}
"""Differences between the words of a list and of the training text: what undoes one in a word, and
what to do with the texts, {what}."""


class UnknownWords:
    """The words of texts, separated by whitespace, that a tokenizer reads as `<unk>` or in part."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        counts = Counter(word for text in texts for word in text.split())
        self.num_words = counts.total()
        is_unknown = self._are_unknown(list(counts))
        pairs = zip(counts.items(), is_unknown, strict=True)
        self._counts = {word: count for (word, count), unknown in pairs if unknown}
        self.num_unknown = sum(self._counts.values())

    def _are_unknown(self, words: list[str]) -> list[bool]:
        return [self._tokenizer.unk_id in ids for ids in self._tokenizer.encode_lines(words)]

    def warning(self, what: str) -> str | None:
        """A sentence with a likely cause if more than `MANY` of the words of `what` are unknown.

        The cause is the change that makes most of the unknown words known, half of them at least.
        """
        if self.num_unknown <= MANY * self.num_words:
            return None
        share = 100 * self.num_unknown / self.num_words
        problem = f"{share:.0f} % of the words of the {what} are unknown"
        mended = {name: self._num_mended(change) for name, (change, _) in _CAUSES.items()}
        cause, num_mended = max(mended.items(), key=lambda item: item[1])
        if 2 * num_mended < self.num_unknown:
            return (
                f"{problem}, and neither lower case nor removed punctuation makes most of them"
                " known: compare them with the training text (tokenisation, subject, language)"
            )
        remedy, mended_share = _CAUSES[cause][1], 100 * num_mended / self.num_unknown
        return (
            f"{problem}; likely cause: {cause}, without which {mended_share:.0f} % of these"
            f" are known: {remedy.format(what=what)}"
        )

    def _num_mended(self, change: Callable[[str], str]) -> int:
        """How many unknown words a change makes known."""
        changed = [change(word) for word in self._counts]
        pairs = zip(changed, self._counts.values(), self._are_unknown(changed), strict=True)
        return sum(count for text, count, unknown in pairs if text.strip() and not unknown)


def noted_words(tokenizer: Tokenizer, lines: Iterable[str], name: str) -> Iterator[str]:
    """Pass lines on; warn of what the first ones look like, and if many words are unknown."""

    def warn(first: list[str], name: str) -> None:
        warn_of(first, name, COLUMN_ALONE)
        if warning := UnknownWords(tokenizer, first).warning("text"):
            _log.warning("%s, first lines: %s", name, warning)

    return noted(lines, name, warn)
