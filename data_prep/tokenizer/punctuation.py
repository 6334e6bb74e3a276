"""Words of a text whose punctuation marks are words of their own, and how they are joined again."""

import re
from collections.abc import Sequence
from functools import cache

UNK = "<unk>"
EOS = "<eos>"
STOPS = (
    ",;:!?\u2026\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a"  # of Latin, Chinese and Japanese text
    "\u0964\u0965\u060c\u061b\u061f\u06d4\u0589\u1362\u1363"  # Indic, Arabic, Armenian, Ethiopic
)
"""Marks that end a word or a part of a sentence, besides the full stop."""


def lowercased(text: str) -> str:
    """The text in lower case; a Turkish I with a dot is one letter."""
    return text.replace("\u0130", "i").lower()


def separate_words(lines: Sequence[str], lowercase: bool, split_punctuation: bool) -> str:
    """Return the lines as a text whose words are separated by whitespace, a newline after each."""
    text = "\n".join(lines) + "\n"
    text = lowercased(text) if lowercase else text
    if not split_punctuation:
        return text
    find, marks = _punctuation_pattern().findall, set(_AFTER)
    each = (find(line) for line in text[:-1].split("\n"))
    words = ([" ".join(word) if word[-1] in marks else word for word in line] for line in each)
    return "".join(f"{' '.join(line)}\n" for line in words)


_BOTH = f"{STOPS}\"'\u201c\u201d\u201e\u2018\u2019\u201a\u00ab\u00bb\u2039\u203a\u2013\u2014*`"
_AFTER = f"{_BOTH}.)]}}%"
"""Marks that are separated from both sides of a word, and from the word before them."""


def marks_and_pattern() -> tuple[str, str]:
    """The marks that are single words, and the pattern of `separate_words`, for other programs."""
    return _AFTER, _punctuation_pattern().pattern


@cache
def _punctuation_pattern() -> re.Pattern[str]:
    """Match a word, a mark before one, or at once all marks after one, in time ∝ the text."""
    before = rf"[{_BOTH}(\[{{\u00bf\u00a1$\u00a3\u20ac)\]}}]|\.(?=\.)|(?<=\.)\."
    special, marks = f"{UNK}|{EOS}", re.escape(_AFTER)  # not possessive: wrong before 3.11.5
    others = rf"(?:[^\s{marks}<]+|(?!{special})<)"
    return re.compile(rf"{special}|(?!{before})(?:(?:[{marks}]*{others})+|[{marks}]+)|\S")


_QUOTES = {
    '"': '"',
    "'": "'",
    "`": "`",
    **dict.fromkeys("\u201c\u201d\u201e", "\u201d"),
    **dict.fromkeys("\u00ab\u00bb", "\u00bb"),
    **dict.fromkeys("\u2039\u203a", "\u203a"),
}
"""Quotation mark → kind; any of a kind opens, and the next one closes, as languages differ."""


class Spacing:
    """The text before each word of a line: a space, or nothing next to attached punctuation."""

    def __init__(self, attach_punctuation: bool) -> None:
        self._attach_punctuation = attach_punctuation
        self._open_quotes: set[str] = set()
        self._glued = True

    def before(self, word: str) -> str:
        """The text before the next word."""
        glued, self._glued = self._glued, False
        if self._attach_punctuation:
            if kind := _QUOTES.get(word):
                closing = kind in self._open_quotes
                self._open_quotes ^= {kind}
                self._glued = not closing
                glued |= closing
            else:
                glued |= word in set(f"{STOPS}.)]}}%\u2019")
                self._glued = word in set("([{\u2018\u201a\u00bf\u00a1$\u00a3\u20ac")
        return "" if glued else " "
