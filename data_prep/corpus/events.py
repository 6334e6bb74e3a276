"""Tables of events, each of a user, an item and a time, as lines: the items of each user in order.

An item is one word of its line. `item_word` writes white space and `%` in it as URLs do, `%20`;
`word_item` restores it.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import compute, parquet

from data_prep.corpus.formats import one_line, reading
from data_prep.corpus.lines import input_files, records
from data_prep.errors import DataError, UserError
from data_prep.settings import DataConfig, SplitFiles

ROWS = 1 << 16
"""Rows of a file without columns that are in memory as Python objects."""
SHARES = {"valid_from": 0.8, "test_from": 0.9}
"""Default shares of the events before each limit of a split by time."""
_ESCAPED = re.compile(r"^<(?:unk|eos)>$|[%\s\x00-\x1f\x7f-\xa0\ufeff]")
"""What is written as in URLs: special words too, which no item is."""
Ints = NDArray[np.int64]
_log = logging.getLogger("data_prep")


def item_word(item: str | int) -> str:
    """The word that stands for an item.

    >>> item_word("Heat (1995)"), item_word(12), word_item(item_word("5 % off"))
    ('Heat%20(1995)', '12', '5 % off')
    """
    return _ESCAPED.sub(lambda found: quote(found[0], safe=""), str(item))


def word_item(word: str) -> str:
    """The item that a word stands for, as text."""
    return unquote(word)


class _Events(NamedTuple):
    """All events, user by user in the order of their first rows, each user's in that of time."""

    names: list[str]  # [U]
    words: NDArray[Any]  # [I] str
    item: Ints  # [n]
    begin: Ints  # [U], the first event of each user
    end: Ints  # [U]
    user: Ints  # [n]
    time: NDArray[Any]  # [n]
    is_date: bool  # whether times are microseconds since 1970


class EventCounts(NamedTuple):
    """Numbers of a table of events."""

    events: int
    users: int
    items: int
    short: int  # users with fewer than three events


def count_events(data: DataConfig) -> EventCounts:
    """Count the events of the training files; raises UserError as `event_lines`."""
    events = _read(data, "train")
    num_short = int((events.end - events.begin < 3).sum())
    return EventCounts(len(events.item), len(events.begin), len(events.words), num_short)


def histories(data: DataConfig, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the users of a table with the columns of `data`, and their items; as `event_lines`."""
    given = replace(data, dir=".", files=SplitFiles(train=path))
    events = _read(given, "train")
    for name, begin, end in zip(events.names, events.begin, events.end, strict=True):
        yield name, list(map(word_item, events.words[events.item[begin:end]]))


def event_lines(data: DataConfig, split: str) -> Iterator[str]:
    """Yield a line for each user with items to predict; before a tab are those that are known.

    Raises as `user_lines`.
    """
    return (line for _, line in user_lines(data, split))


def user_lines(data: DataConfig, split: str) -> Iterator[tuple[str, str]]:
    """Yield each user of `event_lines`, and the line.

    UserError if a file cannot be read or lacks a column, or a value is missing or of another type
    than text, integer or, of the time, number or date.
    """
    events = _read(data, split)
    begin, end, words = events.begin, events.end, events.words
    valid = test = end
    if data.split == "leave_one_out":
        is_long = end - begin >= 3
        valid, test = end - 2 * is_long, end - is_long
        if split == "valid" and not is_long.all():
            text = "%d of %d users have fewer than three events and are in training alone"
            _log.info(text, (~is_long).sum(), len(is_long))
    elif data.split == "time":
        valid, test = (_first_from(events, name, data) for name in ("valid_from", "test_from"))
        if (valid > test).any():
            default = "by default, 80 % of the events are before it"
            raise UserError(f"data.test_from is earlier than data.valid_from ({default})")
    cuts = {
        "train": (begin, begin, valid),
        "valid": (begin, valid, test),
        "test": (begin, test, end),
    }
    if data.split == "files":
        cuts = dict.fromkeys(cuts, (begin, begin, end))
    places = (each.tolist() for each in cuts[split])
    for name, first, cut, last in zip(events.names, *places, strict=True):
        if cut < last:
            parts = [" ".join(words[events.item[a:b]]) for a, b in ((first, cut), (cut, last))]
            has_known = split != "train" and data.split != "files"
            yield name, "\t".join(parts) if has_known else parts[1]


def _first_from(events: _Events, name: str, data: DataConfig) -> Ints:
    """The first event [U] of each user at a time or later."""
    given, key = getattr(data, name), f"data.{name}"
    if given is None:
        limit = np.quantile(events.time, SHARES[name], method="higher")
    else:
        limit, is_date = _times(pyarrow.chunked_array([[given]]), key)
        if is_date != events.is_date:
            kinds = ["number", "date"]
            expected, found = kinds[events.is_date], kinds[is_date]
            raise UserError(f"{key}: expected a {expected}, as data.time_field has, got a {found}")
    return events.begin + np.bincount(events.user[events.time < limit], minlength=len(events.begin))


def _read(data: DataConfig, split: str) -> _Events:
    """Read and sort the events of the files of a split."""
    paths = input_files(data, split)
    tables = [_table(path, data) for path in paths]
    with reading(f"data.files.{split}"):
        table = pyarrow.concat_tables(tables, promote_options="permissive")
    if not len(table):  # of parquet; other files may have some
        raise UserError(f"{paths[0]}: the table has no row")
    user, item = (table[name].combine_chunks().dictionary_encode() for name in ("user", "item"))
    users = user.indices.to_numpy().astype(np.int64)
    times, is_date = np.zeros(len(users)), False
    if data.time_field is not None:
        times, is_date = _times(table["time"], f"data.time_field {data.time_field}")
    order = np.lexsort((times, users))  # stable
    num_events = np.bincount(users)
    end = np.cumsum(num_events)
    words = np.array([item_word(each) for each in item.dictionary.to_pylist()], object)
    items = item.indices.to_numpy().astype(np.int64)[order]
    names = user.dictionary.to_pylist()
    return _Events(names, words, items, end - num_events, end, users[order], times[order], is_date)


def _table(path: Path, data: DataConfig) -> Any:
    """The columns user, item and, if there is one, time of a file, without a value missing."""
    fields = {"user": data.user_field, "item": data.item_field, "time": data.time_field}
    given = {name: field for name, field in fields.items() if field is not None}
    with reading(str(path)):
        table = _columns(path, data.format, list(dict.fromkeys(given.values())))
    empty = {name: table[field] for name, field in given.items() if table[field].null_count}
    if empty:
        counts = ", ".join(
            f"data.{name}_field {given[name]}: {column.null_count}, the first in row"
            f" {column.is_null().index(True).as_py() + 1}"
            for name, column in empty.items()
        )
        raise DataError(f"{path}: rows without a value ({counts}; row 1 is the first): remove them")
    found = {}
    for name, field in given.items():
        key, column = f"{path}: data.{name}_field {field}", table[field]
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        is_text = _is_text(column.type)
        if name != "time" and not (is_text or pyarrow.types.is_integer(column.type)):
            raise UserError(f"{key}: expected text or integers, got {column.type}")
        if name != "time" or is_text:
            column = column.cast(pyarrow.large_string())
        if is_text and compute.any(compute.equal(column, "")).as_py():
            row = compute.index(column, "").as_py() + 1
            raise UserError(f"{key}: row {row} is empty")
        found[name] = column
    return pyarrow.table(found)


def _is_text(kind: Any) -> bool:
    return kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())


def _columns(path: Path, format: str, fields: list[str]) -> Any:
    """The named columns of a file."""
    if format == "parquet":
        with parquet.ParquetFile(path) as file:
            _check_columns(path, fields, file.schema_arrow.names)
            return file.read(columns=fields)
    rows, tables = records(path, format), list[Any]()
    while chunk := list(islice(rows, ROWS)):
        if not tables:
            _check_columns(path, fields, chunk[0])
        columns = [[row.get(field) for row in chunk] for field in fields]
        tables.append(pyarrow.table(dict(zip(fields, columns, strict=True))))
    if not tables:
        raise UserError(f"{path}: the table has no row")
    return pyarrow.concat_tables(tables, promote_options="permissive")


def _check_columns(path: Path, fields: list[str], found: Any) -> None:
    for field in fields:
        if field not in found:
            columns = ", ".join(map(repr, found))
            keys = "data.user_field, data.item_field and data.time_field name the columns"
            raise UserError(f"{path} has no column {field!r}, only {columns}: {keys}")


def _times(column: Any, key: str) -> tuple[NDArray[Any], bool]:
    """Times [n] as numbers, and whether they are dates, then microseconds."""
    kind, microseconds = column.type, pyarrow.timestamp("us")
    rounded = compute.CastOptions(microseconds, allow_time_truncate=True)
    targets = [kind]
    if _is_text(kind):
        dates = [pyarrow.timestamp(unit, zone) for zone in (None, "UTC") for unit in ("us", "ns")]
        targets = [pyarrow.int64(), pyarrow.float64(), *dates]
    for target in targets:
        is_date = not (pyarrow.types.is_integer(target) or pyarrow.types.is_floating(target))
        try:
            found = column.cast(target)
            if is_date:
                found = found.cast(options=rounded).cast(pyarrow.int64())
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            problem = one_line(error)
            continue
        values = found.to_numpy()
        if not np.isfinite(values).all():
            problem = "a value is not finite"
            continue
        return values, is_date
    raise UserError(f"{key}: expected numbers or dates (ISO 8601): {problem}")
