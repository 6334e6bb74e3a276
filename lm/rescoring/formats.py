"""Formats of a recogniser's files: which one lines have, and labels that are no words."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from data_prep.errors import DataError

NON_WORDS = r"<[^>]*>|\[.*\]|\{.*\}|\+\+.*\+\+|![A-Z_]+|SENT[-_](?:START|END)"
NON_WORDS += r"|\*DELETE\*|#\d+|sil|SIL"
"""Labels that are no words: in brackets but ( ), in `++`, HTK's `!NULL`, Kaldi's `#0`, `sil`."""
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SLF = re.compile(r"\s*(?:VERSION|UTTERANCE|NODES|LINKS|base|[VUNLIJ])\s*=\s*\S")
_ROW = re.compile(r"[^\t]*\t|\S+-\d+(?:\s|$)")
"""The id of a list's line."""
_log = logging.getLogger(__name__)

Known = Callable[[Sequence[str]], bool]
Format = Literal["slf", "kaldi", "list"]


class NonWords:
    """Labels that are no words: what matches a regular expression. It counts them."""

    def __init__(self, pattern: str = NON_WORDS, are_known: Known = lambda _: False) -> None:
        self.are_known = are_known  # whether numbers are words
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise DataError(f"--non-words {pattern!r}: no regular expression: {error}") from error
        self._counts: Counter[str] = Counter()

    def __contains__(self, label: str) -> bool:
        if not self._pattern.fullmatch(label):
            return False
        self._counts[label] += 1
        return True

    def word(self, label: str | None) -> str | None:
        """The word of an arc; None if there is none."""
        if label in (None, "", "!NULL", "*DELETE*", "<eps>") or label in self:
            return None
        return label

    def without(self, text: str) -> str:
        """A text without such labels."""
        words = text.split()
        kept = [word for word in words if word not in self]
        return text if len(kept) == len(words) else " ".join(kept)

    def log(self, name: str) -> None:
        """Report the labels that were left out of a file, and forget their counts."""
        if self._counts:
            most = ", ".join(f"{label} ({n:,})" for label, n in self._counts.most_common(8))
            more = " and others" if len(self._counts) > 8 else ""
            _log.info("%s: labels that are no words are left out: %s%s", name, most, more)
        self._counts.clear()


def format_of(lines: Iterable[str]) -> Format:
    """The format of a file: HTK's SLF, Kaldi's lattices, or else an n-best list."""
    filled = [line for line in lines if line.strip()]
    if all(map(_ROW.match, filled)) and any("=" not in _ROW.sub("", each, 1) for each in filled):
        return "list"
    if any(map(_SLF.match, filled)) and re.match(r"\s*(?:#|\w+\s*=)", filled[0]):
        return "slf"
    if len(filled) < 2 or "\t" in filled[0] or len(filled[0].split()) > 1:
        return "list"
    return "kaldi" if filled[1].split()[0].isdecimal() else "list"
