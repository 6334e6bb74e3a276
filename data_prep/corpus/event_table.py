"""The columns of a file with a table of events: the user, the item and the time of each row."""

from bisect import bisect_left
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import compute, parquet

from data_prep.corpus.formats import reading
from data_prep.corpus.lines import looks_like_data, records
from data_prep.errors import DataError, UserError
from data_prep.settings import DataConfig

ROWS = 1 << 16
"""Rows of a file without columns that are in memory as Python objects."""


def read_table(path: Path, data: DataConfig) -> Any:
    """The columns user, item and, if there is one, time of a file, without a value missing."""
    fields = {"user": data.user_field, "item": data.item_field, "time": data.time_field}
    given = {name: field for name, field in fields.items() if field is not None}
    if twice := [field for field, count in Counter(given.values()).items() if count > 1]:
        keys = " and ".join(f"data.{name}_field" for name in given if given[name] == twice[0])
        raise UserError(f"{path}: {keys} are one column, {twice[0]!r}")
    with reading(str(path)):
        table = _columns(path, data.format, list(dict.fromkeys(given.values())))
    table = {field: _filled(table[field]) for field in table.column_names}
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
        is_text = _is_text(column.type)
        if name != "time" and not (is_text or pyarrow.types.is_integer(column.type)):
            raise UserError(f"{key}: expected text or integers, got {column.type!s:.40}")
        if name != "time" or is_text:
            column = column.cast(pyarrow.large_string())
        if name == "time":
            column = as_times(column, key)
        found[name] = column
    return pyarrow.table(found)


def _filled(column: Any) -> Any:
    """A column, null where text is white space, without a dictionary."""
    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not _is_text(column.type):
        return column
    column = column.cast(pyarrow.large_string())
    blank = compute.equal(compute.utf8_trim_whitespace(column), "")
    none = pyarrow.scalar(None, column.type)
    return compute.if_else(blank, none, column) if compute.any(blank).as_py() else column


def _is_text(kind: Any) -> bool:
    return kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())


def _columns(path: Path, format: str, fields: list[str]) -> Any:
    """The named columns of a file."""
    if format == "parquet":
        with parquet.ParquetFile(path) as file:
            _check_columns(path, fields, file.schema_arrow.names)
            return file.read(columns=fields)
    rows, tables = records(path, format, fields=fields), list[Any]()
    first = dict[str, Any]()
    while chunk := list(islice(rows, ROWS)):
        if not tables:
            _check_columns(path, fields, chunk[0])
        columns = [[row.get(field) for row in chunk] for field in fields]
        if format == "json":
            begin = sum(map(len, tables))
            for field, values in zip(fields, columns, strict=True):
                _check_types(f"{path}: column {field!r}", values, begin, first)
        tables.append(pyarrow.table(dict(zip(fields, columns, strict=True))))
    if not tables:
        raise UserError(f"{path}: the table has no row")
    return pyarrow.concat_tables(tables, promote_options="permissive")


def _check_types(name: str, values: list[Any], begin: int, first: dict[str, Any]) -> None:
    """Raise DataError unless all values are text, or none; replaces NaN by None.

    `begin` is the number of earlier rows, `first` has the first value of each column.
    """
    for row, value in enumerate(values):
        if value is None or value != value:
            values[row] = None
            continue
        other = first.setdefault(name, value)
        if isinstance(value, str) != isinstance(other, str):
            problem = f"row {begin + row + 1} has {value!r}, an earlier one {other!r}"
            raise DataError(f"{name}: {problem}: text and numbers, make them one")


def _check_columns(path: Path, fields: list[str], found: Any) -> None:
    for field in fields:
        if list(found).count(field) > 1:
            raise DataError(f"{path}: there are two columns {field!r}")
        if field not in found:
            columns = ", ".join(map(repr, found))
            keys = "rename them, or name them in lm new by --items, in a recipe by data.*_field"
            if looks_like_data(found):
                keys = "the first row looks like data: write one with names before it"
            raise UserError(f"{path} has no column {field!r}, only {columns}: {keys}")


def as_times(column: Any, key: str) -> Any:
    """Times as integers, floats or dates in µs or ns; UserError names one that is none."""
    if (found := _as_times(column)) is not None:
        return found
    row = bisect_left(range(len(column)), 1, key=lambda row: _as_times(column[: row + 1]) is None)
    expected = f"a time like {column[0]} of row 1" if row else "a number, or 2024-10-06 (ISO 8601)"
    place = f" in row {row + 1}" * (len(column) > 1)
    raise UserError(f"{key}: expected {expected}, got {column[row]}{place}")


def _as_times(column: Any) -> Any:
    """Times as by `as_times`; None if a value is none."""
    kind, types = column.type, pyarrow.types
    targets = [pyarrow.float64() if types.is_floating(kind) or types.is_decimal(kind) else kind]
    if _is_text(kind):
        dates = [pyarrow.timestamp(unit, zone) for zone in (None, "UTC") for unit in ("us", "ns")]
        targets = [pyarrow.int64(), pyarrow.float64(), *dates]
    for target in targets:
        try:
            found = column.cast(target)
            if not types.is_integer(target) and target != pyarrow.float64():
                found = _without_zone(found)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):
            continue
        if np.isfinite(found.to_numpy()).all():
            return found
    return None


def _without_zone(dates: Any) -> Any:
    try:
        return dates.cast(pyarrow.timestamp("us"))
    except pyarrow.ArrowInvalid:  # would lose digits
        return dates.cast(pyarrow.timestamp("ns"))
