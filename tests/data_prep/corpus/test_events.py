"""Tables of events: formats, order, splits, items as they are, and what is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from data_prep.corpus import events
from data_prep.corpus.events import item_word, word_item
from data_prep.corpus.lines import read_lines
from data_prep.errors import UserError
from data_prep.settings import DataConfig, SplitFiles
from tests.data_prep.conftest import write_table

Row = tuple[Any, Any, Any]
EVENTS: list[Row] = [
    ("ann", 7, 30),
    ("bob", 1, 5),
    ("ann", 3, 10),
    ("cy", 9, 40),
    ("ann", 5, 10),
    ("ann", 7, 20),
    ("bob", 2, 50),
    ("bob", 3, 50),
]
"""In order: ann 3 5 7 7, bob 1 2 3, cy 9; equal times keep the order of rows."""


def write(folder: Path, format: str, rows: list[Row]) -> DataConfig:
    path = folder / f"events.{format}"
    write_table(path, [dict(zip(("who", "what", "when"), row, strict=True)) for row in rows])
    return DataConfig(
        dir=str(folder),
        files=SplitFiles(train=path.name),
        format=format,  # type: ignore[arg-type]
        sequences="independent",
        user_field="who",
        item_field="what",
        time_field="when",
    )


def lines(data: DataConfig, **settings: Any) -> dict[str, list[str]]:
    data = DataConfig(**{**vars(data), **settings})
    return {split: list(read_lines(data, split)) for split in ("train", "valid", "test")}


LEAVE_ONE_OUT = {
    "train": ["3 5", "1", "9"],
    "valid": ["3 5\t7", "1\t2"],
    "test": ["3 5 7\t7", "1 2\t3"],
}
BY_TIME = {
    "train": ["3 5", "1"],
    "valid": ["3 5\t7 7"],
    "test": ["1\t2 3", "\t9"],
}


@pytest.mark.parametrize("format", ["csv", "json", "parquet"])
def test_splits_by_the_last_items_and_by_time(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "ROWS", 3)  # that are read at once
    data = write(tmp_path, format, EVENTS)
    assert lines(data, split="leave_one_out") == LEAVE_ONE_OUT
    assert lines(data, split="time", valid_from="15", test_from="40") == BY_TIME
    every = ["3 5 7 7", "1 2 3", "9"]
    assert list(read_lines(data, "train")) == every
    unsorted = DataConfig(**{**vars(data), "time_field": None})
    assert list(read_lines(unsorted, "train")) == ["7 3 5 7", "1 2 3", "9"]


def test_columns_have_any_type_of_text_and_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path, "parquet", EVENTS)
    table = parquet.read_table(tmp_path / "events.parquet")
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        who, what = (table[name].cast(pa.string()).cast(kind) for name in ("who", "what"))
        typed = pa.table({"who": who, "what": what, "when": table["when"]})
        parquet.write_table(typed, tmp_path / "events.parquet")
        assert lines(data, split="leave_one_out") == LEAVE_ONE_OUT
    with pytest.raises(UserError, match="the table has no row"):
        list(read_lines(write(tmp_path, "csv", []), "train"))
    parquet.write_table(table, tmp_path / "events.parquet")
    parquet.write_table(table.slice(0, 0), tmp_path / "none.parquet")
    both = SplitFiles(train=["none.parquet", "events.parquet"])
    assert lines(data, files=both, split="leave_one_out") == LEAVE_ONE_OUT
    with pytest.raises(UserError, match=r"none\.parquet: the table has no row"):
        lines(data, files=SplitFiles(train="none.parquet"), split="time")


@pytest.mark.parametrize("unit", ["s", "us", "ns"])
@pytest.mark.parametrize("kind", [np.datetime64, str])
def test_times_may_be_dates(kind: type[Any], unit: Any, tmp_path: Path) -> None:
    start = np.datetime64("2024-01-01", unit) + np.timedelta64(unit == "ns", unit)
    dates = [start + np.timedelta64(time, "h") for _, _, time in EVENTS]
    rows = [(*row[:2], kind(date)) for row, date in zip(EVENTS, dates, strict=True)]
    data = write(tmp_path, "parquet", rows)
    limits = {"valid_from": "2024-01-01T15:00", "test_from": "2024-01-02 16:00:00"}
    assert lines(data, split="time", **limits) == BY_TIME
    with pytest.raises(UserError, match=r"data\.valid_from: expected a date, .* got a number"):
        lines(data, split="time", valid_from="15")


def test_by_default_80_and_90_percent_of_the_events_are_before_the_limits(tmp_path: Path) -> None:
    data = write(tmp_path, "csv", [(user, time, time) for time in range(10) for user in "ab"])
    found = lines(data, split="time")
    assert found["train"] == ["0 1 2 3 4 5 6 7"] * 2
    assert found["valid"] == ["0 1 2 3 4 5 6 7\t8"] * 2
    assert found["test"] == ["0 1 2 3 4 5 6 7 8\t9"] * 2
    for given in ("8", None):
        with pytest.raises(UserError, match=r"^data\.test_from is earlier than data\.valid_from"):
            lines(data, split="time", valid_from=given, test_from="4")


def test_items_are_kept_as_they_are(tmp_path: Path) -> None:
    items = ["a b", "5 % off", "%20", "é\u2003x", "<unk>", "<eos>", "<b>", "tab\there", "\x00"]
    data = write(tmp_path, "json", [("u", item, time) for time, item in enumerate(items)])
    (line,) = read_lines(data, "train")
    words = line.split(" ")
    assert len(set(words)) == len(items)
    assert not {"<unk>", "<eos>"} & set(words)
    assert list(map(word_item, words)) == items
    assert list(map(item_word, items)) == words
    assert line.split() == words


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([("u", 1.5, 1)], "data.item_field what: expected text or integers, got double"),
        (
            [("u", 1, 1), (None, None, 2), ("u", None, 3)],
            "rows without a value (data.user_field who: 1, the first in row 2,"
            " data.item_field what: 2, the first in row 2; row 1 is the first): remove them",
        ),
        ([("", 1, 1)], "data.user_field who: row 1 is empty"),
        ([("u", 1, "")], "data.time_field when: row 1 is empty"),
        ([("u", 1, "soon")], "data.time_field when: expected numbers or dates (ISO 8601)"),
        ([("u", 1, float("inf"))], "data.time_field when: expected numbers or dates (ISO 8601)"),
        ([("u", 10**25, 1)], "events.json cannot be read: OverflowError: "),
    ],
)
def test_values_of_other_types_are_refused(rows: list[Row], problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        list(read_lines(write(tmp_path, "json", rows), "train"))


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_missing_column_is_named_with_those_that_there_are(format: str, tmp_path: Path) -> None:
    data = write(tmp_path, format, EVENTS)
    with pytest.raises(UserError, match="has no column 'item', only 'who', 'what', 'when'"):
        list(read_lines(DataConfig(**{**vars(data), "item_field": "item"}), "train"))
