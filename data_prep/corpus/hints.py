"""What the lines of a file look like: columns of another format, markup, markers of sentences.

Decides what `lm new` reads of a file, and warns of what is read as words by mistake.
"""

import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

from data_prep.corpus.formats import COMPRESSED_NAME, HEAD_BYTES, PARQUET, reading
from data_prep.corpus.lines import TextFile, csv_rows, looks_like_data, read_text, records
from data_prep.errors import DataError
from data_prep.storage import open_to_read

NUM_LINES = 100
"""Lines and rows that decide."""
SENTENCE_SPACES = 5
"""Least spaces in a cell, on average, of a column that is taken for text and not for names, in a
table of more than a text and a key, which no other row has and which is no user.
"""
MANY_REPEATED = 0.2
"""Share of a split: of its characters, so that short lines of all texts are few; of sequences."""
AS_TABLE = """lines `USER ITEM ITEM …` become a table of events by awk 'BEGIN {print "user,item"} \
{for (i = 2; i <= NF; i++) print $1 "," $i}' FILE > NEW.csv, --items user item"""
UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uff66-\uff9f\U00020000-\U0003ffff]"
)
"""Letters of Thai, Lao, Tibetan, Burmese, Khmer, Japanese and Chinese, written without spaces."""
_FORMAT_OF_SUFFIX = {
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
}
_NAME = re.compile(r"[^\W\d][\w.-]*")
_MARKER = re.compile(r"<\|?/?\w+\|?>|\[/?[A-Z_]+\]")
_CLOSING_TAG = re.compile(r"</(?!s>)[\w:.-]+>|\S</s>|<\?xml |<!doctype ", re.IGNORECASE)

logger = logging.getLogger("data_prep")


def find_text(path: Path, field: str | None) -> TextFile:
    """Find the text of a file: its lines, or a column of text.

    The file is parquet by its content, CSV if the first line has the name `field`, JSON by content,
    or CSV or JSON by its name. Without a `field`, the column is `text`, or else the only one of
    text. UserError if the file cannot be read or the column is not clear, as in a table of events.
    """
    format = _format(path, [] if field is None else [field])
    if format == "text" and field is not None:
        raise DataError(f"{path}: plain text has no column {field}: leave out --text-field")
    if format == "text":
        return TextFile(path)
    rows, names = _first_rows(path, format)
    cells = {name: [row[name] for row in rows if row.get(name)] for name in names}
    texts = [name for name in names if cells[name] and all(map(_is_text, cells[name]))]
    sentences = [
        name
        for name in texts
        if _num_spaces(cells[name]) >= SENTENCE_SPACES
        or (_num_spaces(cells[name]) >= 1 and len(names) == 2 and _is_key({**cells, name: []}))
    ]
    likely = ["text"] if "text" in names else texts if len(names) == 1 else sentences
    found = likely if field is None else [field]
    if len(found) != 1 or not all(isinstance(cell, str) for cell in cells.get(found[0], [0])):
        texts = [each for each in names if all(isinstance(cell, str) for cell in cells[each])]
        of_text, columns = (", ".join(map(repr, each)) for each in (texts, names))
        among = f"--text-field=NAME, of {of_text}" if texts else f"none of {columns} is one"
        wrong = f"{found[0]!r} is no column of text: " if len(found) == 1 else ""
        wrong += "the first row looks like data, not names: " * looks_like_data(names)
        events = f"those of a table of events: --items USER ITEM TIME, of {columns}"
        raise DataError(f"{path}: {wrong}name the column of the text: {among}; {events}")
    return TextFile(path, format, found[0])


def find_columns(path: Path, fields: Sequence[str] = ()) -> tuple[str, list[str]]:
    """The format of a file, as `find_text` finds it by `fields`, and the names of its columns."""
    format = _format(path, fields)
    return format, [] if format == "text" else _first_rows(path, format)[1]


def _first_rows(path: Path, format: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The first rows of a table, and the names of their columns."""
    with reading(str(path)):
        rows = list(islice(records(path, format), NUM_LINES))
    if not rows:
        raise DataError(f"{path}: the file has no row")
    return rows, [*dict.fromkeys(chain.from_iterable(rows))]


def _format(path: Path, fields: Sequence[str]) -> str:
    with open_to_read(path) as file:
        if PARQUET.match(file.read(HEAD_BYTES)):
            return "parquet"
    first = [*islice(filter(str.strip, read_text(str(path))), NUM_LINES)]
    has_fields = fields and {*fields} <= {*next(csv_rows(iter(first), strict=False), ())}
    return "csv" if has_fields else _format_of_lines(first, path.name)


def _format_of_lines(lines: Iterable[str], name: str) -> str:
    """The format of a file that is no parquet, by its first lines, of which none is empty."""
    if _are_json(list(lines)):
        return "json"
    suffix = Path(COMPRESSED_NAME.sub("", name)).suffix.lower()
    return _FORMAT_OF_SUFFIX.get(suffix, "text")


def _num_spaces(cells: list[str]) -> float:
    """Spaces in a cell, on average."""
    return sum(cell.count(" ") for cell in cells) / max(1, len(cells))


def _is_key(columns: Mapping[str, list[Any]]) -> bool:
    """Whether no value of a column comes twice, and none is of users."""
    are_unique = (len({*map(str, cells)}) == len(cells) for cells in columns.values())
    return all(are_unique) and not any("user" in name.lower() for name in columns)


def _is_text(value: Any) -> bool:
    """Whether a value is a string, and no number."""
    return isinstance(value, str) and not re.fullmatch(r"[-+\d.,:eE ]*", value)


def _are_json(lines: Sequence[str]) -> bool:
    """Whether lines begin an array of JSON objects or strings, or each is a JSON object."""
    if re.match(r'\s*\[\s*(?:\{|"[^"]*"\s*,)', "\n".join(lines[:2])):
        return True
    try:
        return bool(lines) and all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


def _are_table(lines: Sequence[str]) -> bool:
    """Whether lines are those of CSV: as many columns as the first line has names."""
    rows = [*csv_rows(iter(lines), strict=False)][:-1]  # without one that may be incomplete
    if len(rows) < 2 or any(None in (*row, *row.values()) for row in rows):
        return False
    return len(rows[0]) > 1 and all(map(_NAME.fullmatch, filter(None, rows[0])))  # 1st of numbers


def warn_of(
    lines: Iterable[str],
    name: str,
    remedy: str = "a configuration reads a column by data.format: {format} and data.text_field",
) -> None:
    """Warn of lines of columns, XML or HTML, a tagger's, indented, not in NFC, or with markers.

    `remedy` is what to do with columns.
    """
    filled = [line for line in lines if line.strip()]
    most = 0.9 * len(filled)
    format = "csv" if _are_table(filled) else _format_of_lines(filled, name)
    if format != "text":
        logger.warning(
            "%s: the lines are %s, of which all columns, names and marks count as words: %s",
            name,
            format.upper(),
            remedy.format(format=format),
        )
    elif sum(bool(_CLOSING_TAG.search(line)) for line in filled) > len(filled) / 2:
        logger.warning("%s: the text is XML or HTML, whose tags count as words: remove them", name)
    elif "EOS" in filled and all("\t" in line for line in filled if line != "EOS"):
        logger.warning("%s: the lines are a tagger's, one word in each: join sentences", name)
    if sum(line.startswith(("  ", "\t")) for line in filled) > len(filled) / 4:
        logger.warning("%s: lines are indented, which pieces (sentencepiece) keep, not words", name)
    if sum(not unicodedata.is_normalized("NFC", line) for line in filled) > len(filled) / 10:
        problem = "has letters and marks apart (not in NFC), other words than with both in one"
        logger.warning("%s: the text %s: uconv -x nfc %s > NEW", name, problem, name)
    for place, where in ((0, "begin"), (-1, "end")):
        words = Counter(line.split()[place] for line in filled)
        marker, count = next(iter(words.most_common(1)), ("", 0))
        if len(filled) > 1 and count >= most and _MARKER.fullmatch(marker):
            logger.warning(
                "%s: the lines %s with %s, which counts as a word that is always right: remove it,"
                " the ends of lines are known",
                name,
                where,
                marker,
            )


def noted(
    lines: Iterable[str], name: str, warn: Callable[[list[str], str], None] = warn_of
) -> Iterator[str]:
    """Pass lines on; warn of what the first ones look like, without waiting for them."""
    first, lines = list[str](), iter(lines)
    for line in islice(lines, NUM_LINES):
        first.append(line)
        if len(first) == NUM_LINES:
            warn(first, name)
        yield line
    yield from lines
    if len(first) < NUM_LINES:
        warn(first, name)


def compared(lines: Iterable[str], held_out: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Pass training lines on; warn of held-out splits of which they contain a large part."""
    unseen = {
        split: Counter((hash(line), len(line)) for line in filter(None, map(str.strip, others)))
        for split, others in held_out.items()
    }
    before = {split: _totals(found) for split, found in unseen.items()}
    for line in lines:
        text = line.strip()
        for found in unseen.values():
            found.pop((hash(text), len(text)), None)
        yield line
    for split, (num_lines, size) in before.items():
        num_unseen, unseen_size = _totals(unseen[split])
        if size - unseen_size > MANY_REPEATED * size:
            logger.warning(
                "%s: %.0f %% of its lines are lines of the training text too, so its perplexity is"
                " lower than that of new text: if that repeats less, remove repeated lines first",
                split,
                100 * (num_lines - num_unseen) / num_lines,
            )


def continued(lines: Iterable[str], training: Iterable[str], split: str) -> Iterator[str]:
    """Pass sequences of items on; warn if many predict those of a training sequence again.

    It begins the sequence, and is longer than one item and than what is before a tab.
    """
    whole = {[*_hashes(line)][-1] for line in training if len(line.split()) > 1}
    num_lines = num_again = 0
    for line in lines:
        num_lines += 1
        known, tab, _ = line.partition("\t")
        num_known = len(known.split()) if tab else 0
        num_again += any(each in whole for each in islice(_hashes(line), num_known, None))
        yield line
    if num_again > MANY_REPEATED * num_lines:
        text = "%s: %d of %d sequences begin with one of training, whose items are predicted again:"
        logger.warning(f"{text} a tab after them makes them known", split, num_again, num_lines)


def _hashes(line: str) -> Iterator[int]:
    """A hash of the first word, of the first two, …."""
    return islice(accumulate(line.split(), lambda *pair: hash(pair), initial=0), 1, None)


def _totals(found: Counter[tuple[int, int]]) -> tuple[int, int]:
    """The number of lines, and the sum of their sizes."""
    return found.total(), sum(size * count for (_, size), count in found.items())
