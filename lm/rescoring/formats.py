"""Formats of a recogniser's files: which one lines have, and labels that are no words.

Formats that cannot be rescored are named, with what to do instead.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from data_prep.errors import UserError

NON_WORDS = r"<[^>]*>|\[.*\]|\{.*\}|\+\+.*\+\+|![A-Z_]+|#\d+|sil|SIL"
"""Labels that are no words: in brackets of any kind or `++`, HTK's `!NULL`, Kaldi's `#0`, `sil`."""
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SLF = re.compile(r"\s*(?:VERSION|UTTERANCE|NODES|LINKS|base|[VUNLIJ])\s*=\s*\S")
_log = logging.getLogger(__name__)

Format = Literal["slf", "kaldi", "list"]


class NonWords:
    """Labels that are no words: what matches a regular expression. It counts them."""

    def __init__(self, pattern: str = NON_WORDS) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise UserError(f"--non-words {pattern!r}: no regular expression: {error}") from error
        self._counts: Counter[str] = Counter()

    def __contains__(self, label: str) -> bool:
        if not self._pattern.fullmatch(label):
            return False
        self._counts[label] += 1
        return True

    def word(self, label: str | None) -> str | None:
        """The word of an arc; None if there is none."""
        if label in (None, "", "!NULL", "<eps>") or label in self:
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


def _every(pattern: str) -> Callable[[Sequence[str]], bool]:
    """Whether every line has a pattern."""
    return lambda lines: all(re.fullmatch(pattern, line) for line in lines)


def _early(pattern: str, number: int = 20) -> Callable[[Sequence[str]], bool]:
    """Whether one of the first lines begins with a pattern."""
    return lambda lines: any(re.match(pattern, line) for line in lines[:number])


def _first(pattern: str) -> Callable[[Sequence[str]], bool]:
    return _early(pattern, 1)


def _is_srilm_list(lines: Sequence[str]) -> bool:
    """Whether lines have two scores, the number of words, perhaps with `<s>` and `</s>`, words."""
    matches = (re.match(rf"{NUMBER} +{NUMBER} +(\d+)(?: |$)", line) for line in lines)
    pairs = zip(matches, lines, strict=True)
    return all(match and abs(int(match[1]) + 3 - len(line.split())) <= 2 for match, line in pairs)


def _is_fst(lines: Sequence[str]) -> bool:
    """Whether lines are arcs of a transducer: final states have fewer columns than arcs."""
    if not re.match(r"\d+\s+\d+\s+\S", lines[0]):
        return False
    rows = [line.split() for line in lines]
    columns = {len(row) for row in rows}
    return all(row[0].isdecimal() for row in rows) and min(columns) <= 2 and max(columns) <= 5


_ONE_WAY = "give the n-best list or the lattice that it was made from"
_TIMES = r"(?:\d*\.\d+\s+\d*\.?\d+|\d+\s+\d*\.\d+)"
"""Beginning and length in seconds, one of them with a decimal point."""
_Foreign = dict[str, tuple[Callable[[Sequence[str]], bool], str]]
"""Formats that are not read: what tells them by the lines, none of them empty, and the remedy."""
_TABS = "write lines id TAB scores TAB words"
_TRANSCRIPTS: _Foreign = {
    "an HTK master label file": (_first("#!MLF!#"), "give one SLF lattice per utterance"),
    "a CTM file, the words of one hypothesis with times": (
        _every(rf";;.*|\S+\s+\w\s+{_TIMES}\s+\S+(?:\s+{NUMBER})?(?:\s+\S+){{0,2}}\s*"),
        "give n-best lists or lattices",
    ),
    "JSON": (
        _first(r"[\[{]\s*(?:\"|\{|$)"),
        f"{_TABS}, for instance by jq -r '[.id, .score, .text] | @tsv'",
    ),
}
"""Formats that references may have too."""
_FOREIGN: _Foreign = _TRANSCRIPTS | {
    "a lattice of Sphinx": (
        _early(r"# getcwd:|Frames \d+$"),
        "write it in HTK's format (-outlatfmt htk, or write_htk of pocketsphinx's lattice)",
    ),
    "a confusion network of SRILM (mesh)": (_early(r"numaligns \d|align \d+ "), _ONE_WAY),
    "a word graph of SRILM (PFSG)": (
        _first(r"name \S+$|nodes \d+ "),
        "write it in HTK's format (lattice-tool -write-htk)",
    ),
    "a confusion network of Kaldi (sausage)": (_every(r"\S+\s+\[ .*\]\s*"), _ONE_WAY),
    "an n-best list of Decipher": (_first(r"NBestList\d"), _TABS),
    "an n-best list of SRILM (acoustic score, language model, number of words, words)": (
        _is_srilm_list,
        'write tabs: awk -v OFS=\'\\t\' \'{a=$1; l=$2; $1=$2=$3=""; gsub(/[ \\t]+/, " ");'
        ' print "ID", a*2.302585, l*2.302585, $0}\'',
    ),
    "a transducer without the id of its utterance": (
        _is_fst,
        "put the id on a line before it, as Kaldi's archives of lattices do",
    ),
    "a file of references or hypotheses in SCTK's format (trn)": (
        _every(r"[^\t]*\(\S+\)\s*"),
        _TABS,
    ),
}


def refuse_transcripts(name: str, lines: Sequence[str]) -> None:
    """Raise a UserError if a file of references, of which no line is empty, has a known format."""
    for format, (applies, _) in _TRANSCRIPTS.items():
        if lines and applies(lines):
            raise UserError(f"{name} is {format}: write lines id words")


def format_of(name: str, lines: Iterable[str]) -> Format:
    """The format of a file: HTK's SLF, Kaldi's lattices, or an n-best list.

    UserError if it has another format that is known.
    """
    filled = [line for line in lines if line.strip()]
    for format, (applies, remedy) in _FOREIGN.items():
        if filled and applies(filled):
            raise UserError(f"{name} is {format}: {remedy}")
    if any(map(_SLF.match, filled)) and re.match(r"\s*(?:#|\w+\s*=)", filled[0]):
        return "slf"
    if len(filled) < 2 or "\t" in filled[0] or len(filled[0].split()) > 1:
        return "list"
    return "kaldi" if filled[1].split()[0].isdecimal() else "list"
