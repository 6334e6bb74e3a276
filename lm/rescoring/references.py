"""The words that were said in each utterance, in the layouts of Kaldi and of SCTK.

- Kaldi's text: lines `id words`.
- TRN: lines `words (id)`.

In the latter `;;` begins a comment. SCTK's optional words `(uh)` and alternatives `{ w1 / w2 }` are
counted as the words that they are written with; a warning says so.
"""

import logging
import re
from collections.abc import Collection, Iterator, Sequence

from data_prep.corpus.hints import UNSPACED
from data_prep.corpus.lines import read_text
from data_prep.errors import DataError
from lm.rescoring.formats import NUMBER, NonWords

_TRN = re.compile(r"(.*?)\s*\((\S+)\)\s*")
_SCTK = re.compile(r"(?:^|\s)(?:\(\S+\)|\{ .* / .* \})(?:\s|$)")
_TIMES = rf"(?:(\d*\.\d+)|{NUMBER})\s+{NUMBER}"
_JOINED = """'!/^;;/{} {{ w[$1]; for (i = {}; i <= {}; i++) w[$1] = w[$1] " " $i }} \
END {{ for (u in w) print u w[u] }}'"""
_OTHERS = {
    "an STM file": (
        rf"(?:\S+\s+([AB12])\s+(?!{NUMBER}\s)\S+|(?:\S+\s+){{2}}\S+)\s+{_TIMES}(?:\s.*)?",
        _JOINED.format(" && tolower($0) !~ /ignore_time_segment_in_scoring/", 6, "NF"),
    ),
    "a CTM file": (rf"\S+\s+\S+\s+{_TIMES}\s+\S+(?:\s+{NUMBER}.*)?\s*", _JOINED.format("", 5, 5)),
    "a list with scores": (rf"\S+ (?:(-?\d+\.\d+)|{NUMBER})\t.*", r"-F'\t' '{ print $1, $NF }'"),
}
"""What is no file of references: its lines, with a group in some, and what makes it one in awk."""
_log = logging.getLogger(__name__)


def keyed_lines(
    lines: Iterator[tuple[str, str, str]], what: str
) -> Iterator[tuple[str, str, list[str]]]:
    """Place, key and words of lines, each a place, a key and a text; UserError for a key twice.

    Lines without a key are left out; `what` is what a key has.
    """
    keys = set()
    for place, key, text in lines:
        if key in keys:
            raise DataError(f"{place}: {key} has a {what} already")
        if key:
            keys.add(key)
            yield place, key, text.split()


def first_columns(name: str) -> Iterator[tuple[str, str, str]]:
    """Place, first word and the rest of each line of a file."""
    for number, line in enumerate(read_text(name), 1):
        key, *rest = line.split(maxsplit=1) or [""]
        yield f"{name}, line {number}", key, "".join(rest)


def read_references(
    name: str, ids: Collection[str] = (), non_words: NonWords | None = None
) -> dict[str, list[str]]:
    """Read the words of each utterance from a file in one of the layouts, in any order.

    Lines that begin with one of the `ids`, those of the utterances, are not TRN. `non_words` are
    left out.

    Raises:
        UserError: if an utterance has two references, or the file has another layout.
    """
    non_words = NonWords() if non_words is None else non_words
    rows = [row for row in first_columns(name) if row[1]]
    texts = [(place, f"{key} {text}") for place, key, text in rows if key[:2] != ";;"]
    for what, (pattern, program) in _OTHERS.items():
        found = [re.fullmatch(pattern, text) for _, text in texts]
        if all(found) and any(match and any(match.groups()) for match in found):
            raise DataError(f"{name} is {what}, not lines id words: awk {program} {name}")
    known = set(ids)
    if not all(key in known for _, key, _ in rows):
        matches = [(place, _TRN.fullmatch(text)) for place, text in texts]
        if all(match for _, match in matches):
            rows = [(place, match[2], match[1]) for place, match in matches if match]
    if noted := sum(_SCTK.search(text) is not None for *_, text in rows):
        what = "optional words (uh) or alternatives { w1 / w2 }"
        _log.warning("%s: %s lines have %s, counted as words: expand them", name, noted, what)
    rows = [(place, key, non_words.without(text)) for place, key, text in rows]
    non_words.log(name)
    return {id: words for _, id, words in keyed_lines(iter(rows), "reference")}


def have_no_spaces(texts: Collection[Sequence[str]]) -> bool:
    """Whether the words of utterances are whole lines or clauses, as in Chinese or Japanese.

    Spaces around words of other scripts do not separate these.
    """
    other = rf"(?<!{UNSPACED.pattern}) | (?!{UNSPACED.pattern})"
    words = [word for each in texts for word in re.sub(other, "", " ".join(each)).split()]
    are_long = len(words) < 2 * len(texts) or sum(map(len, words)) > 6 * len(words)
    return are_long and letters_per_word([words]) > 0


def letters_per_word(texts: Collection[Sequence[str]]) -> float:
    """Mean number of letters of `UNSPACED` in words with some; 0 unless they are the most."""
    words = [word for each in texts for word in each]
    numbers = [len(UNSPACED.findall(word)) for word in words if not word.isascii()]
    are_most = 2 * sum(numbers) > sum(map(len, words))
    return sum(numbers) / sum(map(bool, numbers)) if are_most else 0.0
