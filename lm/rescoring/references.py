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
from lm.rescoring.formats import NonWords

_TRN = re.compile(r"(.*?)\s*\((\S+)\)\s*")
_SCTK = re.compile(r"(?:^|\s)(?:\(\S+\)|\{ .* / .* \})(?:\s|$)")
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
        UserError: if an utterance has two references.
    """
    non_words = NonWords() if non_words is None else non_words
    rows = [row for row in first_columns(name) if row[1]]
    texts = [(place, f"{key} {text}") for place, key, text in rows]
    commented = [(place, text) for place, text in texts if not text.startswith(";;")]
    known = set(ids)
    if not all(key in known for _, key, _ in rows):
        matches = [(place, _TRN.fullmatch(text)) for place, text in commented]
        if all(match for _, match in matches):
            rows = [(place, match[2], match[1]) for place, match in matches if match]
    if noted := sum(_SCTK.search(text) is not None for *_, text in rows):
        what = "optional words (uh) or alternatives { w1 / w2 }"
        _log.warning("%s: %s lines have %s, counted as words: expand them", name, noted, what)
    rows = [(place, key, non_words.without(text)) for place, key, text in rows]
    non_words.log(name)
    return {id: words for _, id, words in keyed_lines(iter(rows), "reference")}


def have_no_spaces(references: Collection[Sequence[str]]) -> bool:
    """Whether the words of utterances are whole lines or clauses, as in Chinese or Japanese.

    Spaces around words of other scripts do not separate these.
    """
    other = rf"(?<!{UNSPACED.pattern}) | (?!{UNSPACED.pattern})"
    words = [word for each in references for word in re.sub(other, "", " ".join(each)).split()]
    characters = "".join(words)
    are_long = len(words) < 2 * len(references) or len(characters) > 6 * len(words)
    return are_long and 2 * len(UNSPACED.findall(characters)) > len(characters)
