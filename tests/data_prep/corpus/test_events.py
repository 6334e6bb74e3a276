"""Tables of events and independent sequences: formats, order, splits, items, what is predicted."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from data_prep.corpus import event_table, events
from data_prep.corpus.events import user_lines
from data_prep.corpus.lines import log_once
from data_prep.corpus.reader import read_lines
from data_prep.errors import UserError
from data_prep.prepare import prepare
from data_prep.prepared import Prepared
from data_prep.sequences import find_sequences, item_word, word_item
from data_prep.settings import ClassesConfig, DataConfig, SplitFiles, TokenizerConfig
from tests.data_prep.conftest import Corpus, write_table

Row = tuple[Any, Any, Any]
FORMATS = ["csv", "json", "parquet"]
EVENTS: list[Row] = [
    ("ann", 7, 30), ("bob", 1, 5), ("ann", 3, 10), ("cy", 9, 40), ("ann", 5, 10), ("ann", 7, 20),
    ("bob", 2, 50), ("bob", 3, 50),
]  # fmt: skip
"""In order: ann 3 5 7 7, bob 1 2 3, cy 9; equal times keep the order of rows."""
KNOWN = " events of 2 users are known from data.files.train: they are not predicted"
IN_BOTH = "test: 1 of 3 users are in data.files.train too: .*\n.* 2 events of them have the user"
SHORT = "who,what,when\na,1,2\n"
BOTH = SplitFiles(train="old.csv", test="events.csv")
EOS, UNK = 0, 1
ITEMS: dict[str, Any] = {"format": "csv", "sequences": "independent", "user_field": "user"}
ITEMS |= {"time_field": None}


def at(times: Iterable[Any]) -> list[Row]:
    return [(f"u{place}", place, time) for place, time in enumerate(times)]


def untimed(rows: list[Row]) -> list[Row]:
    return [(user, item, None) for user, item, _ in rows]


def named(rows: list[Row]) -> list[dict[str, Any]]:
    return [dict(zip(("who", "what", "when"), row, strict=True)) for row in rows]


def write(folder: Path, format: str, rows: list[Row]) -> DataConfig:
    path = folder / f"events.{format}"
    write_table(path, named(rows))
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
    data = replace(data, **settings)
    return {split: list(read_lines(data, split)) for split in ("train", "valid", "test")}


LEAVE_ONE_OUT = {"train": ["3 5", "1", "9"], "valid": ["3 5\t7", "1\t2"]}
LEAVE_ONE_OUT["test"] = ["3 5 7\t7", "1 2\t3"]
BY_TIME = {"train": ["3 5", "1"], "valid": ["3 5\t7 7"], "test": ["1\t2 3", "\t9"]}


@pytest.mark.parametrize("format", FORMATS)
def test_splits_by_the_last_items_and_by_time(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_table, "ROWS", 3)  # that are read at once
    data = write(tmp_path, format, EVENTS)
    assert lines(data, split="leave_one_out") == LEAVE_ONE_OUT
    assert lines(data, split="time", valid_from="15", test_from="40") == BY_TIME
    assert list(read_lines(data, "train")) == ["3 5 7 7", "1 2 3", "9"]
    assert list(read_lines(replace(data, time_field=None), "train")) == ["7 3 5 7", "1 2 3", "9"]


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
    early = "0 1 2 3 4 5 6 7"
    expected = {"train": [early] * 2, "valid": [f"{early}\t8"] * 2, "test": [f"{early} 8\t9"] * 2}
    assert lines(data, split="time") == expected
    for given in ("8", None):
        with pytest.raises(UserError, match=r"data\.valid_from 8 and data\.test_from 4 leave a"):
            lines(data, split="time", valid_from=given, test_from="4")


START = 1_600_000_000
"""A time in seconds since 1970."""
SPACED: list[Row] = [("u1", "a b", 1), ("u1 ", "a", 2), ("u2", "a\u00a0 b", 3), ("u3", "ab", 4)]


def other(user: str, item: str, first_item: str = "a", first_user: str = "u") -> list[Row]:
    return [(first_user, first_item, 1), (user, item, 2)]


@pytest.mark.parametrize(
    ("rows", "warnings"),
    [
        (at(range(START, START + 2400, 60)), ""),
        (at(range(START - 64_000, 2 * START, 86_400 * 1000)), ""),
        (at(range(20_240_602, 20_240_630, 2)), ""),
        (at(range(0, 280, 7)), ""),
        (at(f"2024-02-{day}" for day in range(10, 30)), ""),
        ([("u", k, f"2024-02-10T00:00:00.1234567{k}") for k in (30, 20, 10)], ""),
        (
            at(np.float32(START + 60.0 * np.arange(40)).astype(float)),
            "40 of 40 events .* have times rounded to multiples of 128, as floats of 32 bits are",
        ),
        (at([0] * 40), r"40 of 40 events \(100 %\) have the time 0"),
        (at([*range(9)] + [9] * 31), "31 of 40 .* have the time 9"),
        (at([0, START, START + 9]), "1 of 3 .* up to 0, the others from 1600000000: in .*"),
        (at([START, START + 1, 1000 * START]), "2 of 3 .* up to 1600000001, the others .*"),
        (at(["1970-01-01", "2024-02-01"]), "1 of 2 .* up to 1970-01-01T00:00:00, the .*"),
        (at(["2024-02-01", "9999-12-31"]), "1 of 2 .*, the others from 9999-12-31T00.*"),
        (EVENTS, r"4 of 8 events \(50 %\) share user and time with another: the order of.*"),
        (untimed(EVENTS), ""),
        (EVENTS * 2, "8 of 16 .* repeat another: the same user, item and time; 16 of 16 .*"),
        (
            untimed([row for row in EVENTS for _ in "ab"]),
            "8 of 16 .* the user and item of the row .*",
        ),
        (SPACED, r"users .*: 1, as 'u1' and 'u1 '; items .*: 1, as 'a b' and 'a\\xa0 b'"),
        (
            other("u\u200b", "a"),
            r"users .* by white space, invisible .* alone: 1, as 'u' and 'u\\u2.*",
        ),
        (other("\ufeffu", "a"), r"users .*: 1, as 'u' and '\\ufeffu'"),
        (other("u", "\u200ea"), r"items .*: 1, as 'a' and '\\u200ea'"),
        (other("u", "e\u0301", "\u00e9"), r"items .*: 1, as '\\xe9' and 'e\\u0301'"),
        (other("u", "3.0", "3"), r"items .* or \.0 alone: 1, as '3' and '3\.0'"),
        (other("007", "a", "a", "7"), r"users .*: 1, as '7' and '007'"),
        (other("u", "3.1", "3"), ""),
        (other("NULL", "NA"), r"users NULL: remove these rows if .*; items NA: remove these .*"),
        (other("u", "0", "00a"), ""),
        (untimed(EVENTS) + untimed(EVENTS), "2 of 16 .*; 7 of 16 .* repeat all earlier .*"),
    ],
)
def test_what_is_probably_wrong_is_counted_once(
    rows: list[Row], warnings: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = replace(write(tmp_path, "json", rows), time_field=None if rows[0][2] is None else "when")
    assert list(read_lines(data, "train")) == list(read_lines(data, "train"))
    source = f"{tmp_path / 'events.json'}: "
    assert re.fullmatch(warnings, "; ".join(each.removeprefix(source) for each in caplog.messages))


def test_random_ties_do_not_depend_on_the_order_of_the_rows(tmp_path: Path) -> None:
    random, found = np.random.default_rng(1), list[list[str]]()
    rows = [(f"u{a}", int(b), int(c)) for a, b, c in random.integers([5, 30, 4], size=(400, 3))]
    for ties, format in zip(["random"] * 3 + ["rows"], [*FORMATS, "csv"], strict=True):
        data = write(tmp_path, format, [rows[i] for i in random.permutation(len(rows))])
        found.append(sorted(lines(data, split="leave_one_out", ties=ties)["test"]))
    assert found[0] == found[1] == found[2] != found[3]
    events = write(tmp_path, "csv", EVENTS)
    assert lines(events, split="leave_one_out", ties="random")["test"][0] == "3 5 7\t7"


@pytest.mark.parametrize(
    "case",
    [  # numbers of rows of EVENTS in the files of train and valid; all are in that of test
        ("when", [2, 4, 1], [2, 4, 1, 5, 6], ["3 5 7\t7", "1 2\t3", "9"], f"test: 3{KNOWN}"),
        (None, [0, 2, 1], [1, 6], ["7 3\t5 7", "1 2\t3", "9"], f"test: 3{KNOWN}"),
        ("when", [6, 0], [], ["1 2\t3", "9"], f"test: 6{KNOWN}"),
        (None, [1, 6, 7, 0], [], ["7\t3 5 7", "9"], f"test: 4{KNOWN}"),
        (None, [6, 1], [], ["7 3 5 7", "1 2 3", "9"], IN_BOTH),
        ("when", [3, 2, 4, 5, 0, 1, 6], [7], [], f"test: 7{KNOWN.replace('2', '3')}"),
    ],
)
def test_events_of_earlier_files_are_known(
    case: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    time_field, train, valid, test, problem = case
    data, files = write(tmp_path, "csv", EVENTS), {"test": "events.csv"}
    for name, rows in {"train": train, "valid": valid}.items():
        if rows:
            files[name] = f"{name}.csv"
            write_table(tmp_path / files[name], named([EVENTS[i] for i in rows]))
    log_once.cache_clear()
    data = replace(data, files=SplitFiles(**files), time_field=time_field)
    assert [line for _, line in user_lines(data, "test")] == test
    assert re.search(problem, caplog.text)


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
    ("format", "rows", "settings", "problem"),
    [
        ("json", [("u", "a", 1), ("u", " \u00a0", 2)], {}, r"\(.*item_field what: 1, .* in row 2;"),
        ("json", [("u", "a", 1), ("u", np.nan, 2)], {}, r"\(.*item_field what: 1, .* in row 2;"),
        ("json", [("u", k, 1) for k in (1, 2, "1")], {}, "'what': row 3 has '1', an earlier one 1"),
        ("json", [("u", 1, 1), (7, 1, 3)], {}, "column 'who': row 2 has 7, an earlier one 'u'"),
        ("csv", SHORT, {"files": BOTH}, r"test and data\.files\.train: the times of one are dates"),
        ("csv", "who,i,i,when\na,1,2,3\n", {"item_field": "i"}, "there are two columns 'i'"),
        ("csv", SHORT, {"item_field": "who"}, r"user_field and .*_field are one column, 'who'"),
        ("csv", "u0,i0,17\nu1,i1,18\n", {}, "the first row looks like data: write one with"),
        ("csv", SHORT, {"item_field": "item"}, "has no column 'item', only 'who', 'what', 'when'"),
        ("parquet", EVENTS, {"item_field": "i"}, "has no column 'i', only 'who', 'what', 'when'"),
    ],
)
def test_tables_that_cannot_be_understood_are_refused(
    format: str, rows: Any, settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    data = replace(write(tmp_path, format, EVENTS if format == "csv" else rows), **settings)
    if format == "csv":
        (tmp_path / "events.csv").write_text(rows)
    write_table(tmp_path / "old.csv", named([("ann", 3, "2024-02-01")]))
    with pytest.raises(UserError, match=problem):
        list(read_lines(data, "test" if "files" in settings else "train"))


@pytest.mark.parametrize("predict_eos", [False, True])
def test_unknown_items_are_left_out_and_counted_where_they_are_predicted(predict_eos: bool) -> None:
    rng = np.random.default_rng(5)
    lines = [rng.integers(1, 5, size=rng.integers(7)) for _ in range(50)]
    num_known = np.array([rng.integers(len(line) + 1) for line in lines])
    tokens = np.concatenate([np.append(line, EOS) for line in lines]).astype(np.uint16)
    options: Any = {"num_known": num_known, "predict_eos": predict_eos}
    found = find_sequences(tokens, eos_id=EOS, unk_id=UNK, **options)
    for i, (line, known, read) in enumerate(zip(lines, num_known, found.lines(), strict=True)):
        assert read.tolist() == [*line[line != UNK].tolist(), *[EOS] * predict_eos]
        assert found.num_known[i] == (line[:known] != UNK).sum()
        assert found.num_left_out[i] == (line[known:] == UNK).sum()
        assert found.num_predicted[i] == (line[known:] != UNK).sum() + predict_eos
    pairs = zip(found.lines(), found.num_known, strict=True)
    repeated = [[x in line[:at] for at, x in enumerate(line) if at >= n] for line, n in pairs]
    shares = [np.mean(each) for each in repeated if each]
    assert found.repeated_share == pytest.approx(np.mean(shares))


def prepared(folder: Path, predict_eos: bool = False, **lines: str) -> Prepared:
    for split, text in lines.items():
        (folder / f"{split}.txt").write_text(text)
    files = SplitFiles(**{split: f"{split}.txt" for split in lines})
    settings: Any = {"sequences": "independent", "predict_eos": predict_eos}
    data = DataConfig(dir=str(folder), files=files, **settings)
    return prepare(data, TokenizerConfig(lowercase=True), None, folder / "data", progress=False)


def test_a_tab_separates_the_items_that_are_known(tmp_path: Path) -> None:
    found = prepared(tmp_path, train="a b c\nb b\n", valid="a new b\tc\nc a\n\tb new\n")
    tokenizer = found.tokenizer
    valid = found.sequences("valid")
    assert [" ".join(map(tokenizer.token, line)) for line in valid.lines()] == ["a b c", "c a", "b"]
    assert valid.num_known.tolist() == [2, 0, 0]
    assert valid.num_left_out.tolist() == [0, 0, 1]
    assert found.sequences("train").num_known.tolist() == [0, 0]


@pytest.mark.parametrize("predict_eos", [False, True])
def test_the_end_of_a_sequence_is_no_item_that_repeats(predict_eos: bool, tmp_path: Path) -> None:
    found = prepared(tmp_path, predict_eos, train="a a\nb c\n")
    assert found.repeated_share == 0.25


@pytest.mark.parametrize(
    ("valid", "num_again"),
    [("a b c\nb b\n", 2), ("a b\tc\nb\tb\nb b c\n", 2), ("a b\tc\nb c\n", 0), ("c a b\n", 0)],
)
def test_sequences_that_predict_those_of_training_again_are_counted(
    valid: str, num_again: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared(tmp_path, train="a b\nb b\nc\n", valid=valid)
    num_lines = len(valid.splitlines())
    problem = f"valid: {num_again} of {num_lines} sequences begin with one of training, whose items"
    assert (problem in caplog.text) == bool(num_again) == ("predicted again" in caplog.text)


def test_a_damaged_record_of_known_items_is_made_again(tmp_path: Path) -> None:
    texts: Any = {"train": "a b c\n", "valid": "a\tb c\n"}
    path = prepared(tmp_path, **texts).folder / "valid-known.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\1")
    assert prepared(tmp_path, **texts).sequences("valid").num_known.tolist() == [1]
    assert path.read_bytes() == content


def test_events_of_new_validation_files_are_known_in_test(corpus: Corpus) -> None:
    files = SplitFiles(train="train.csv", valid="valid.csv", test="test.csv")
    corpus.data, corpus.classes = replace(corpus.data, files=files, **ITEMS), None
    for num_valid in (3, 4):
        for split, items in {"train": "ab", "valid": "abab"[:num_valid], "test": "ababa"}.items():
            rows = [{"user": "u", "item": item} for item in items]
            write_table(corpus.folder / f"{split}.csv", rows)
        assert corpus.prepare().sequences("test").num_known.tolist() == [num_valid]


@pytest.mark.parametrize(
    "classes",
    [
        ClassesConfig(method="file", file="map"),
        ClassesConfig(method="embedding", vectors="map", num_word_classes=2),
    ],
    ids=["file", "vectors"],
)
def test_classes_of_items_come_from_files_of_items_as_their_table_has_them(
    corpus: Corpus, classes: ClassesConfig, caplog: pytest.LogCaptureFixture
) -> None:
    items = ["Heat (1995)", "5 % off", "c", "d"]
    write_table(corpus.folder / "events.csv", [{"user": 1, "item": item} for item in items])
    corpus.data = replace(corpus.data, files=SplitFiles(train="events.csv"), **ITEMS)
    corpus.write("map", "Heat (1995)\t1\nd\t1\nc\t-1\n5 % off\t-1\n")
    corpus.classes = classes

    def class_of(item: str) -> int:
        prepared = corpus.prepare()
        return int(prepared.word_class()[prepared.tokenizer.encode(item)[0]])

    assert class_of("Heat%20(1995)") == class_of("d") != class_of("c")
    assert class_of("c") == class_of("5%20%25%20off")
    assert "speller.npz" not in corpus.written()
    assert corpus.rewritten() == set()
    corpus.write("map", "Heat (1995)\t1\nd\t-1\nc\t-1\n5 % off\t1\n")
    assert corpus.rewritten() == {"classes.npy"}
    assert "classes: map changed" in caplog.messages
    assert class_of("Heat%20(1995)") != class_of("d")


def test_a_table_of_all_splits_is_read_once_unless_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = mock.Mock(side_effect=event_table.read_table)
    monkeypatch.setattr(events, "read_table", reads)
    rows = [("u", item, item) for item in range(5)]
    data = replace(write(tmp_path, "csv", rows[:4]), split="leave_one_out")
    for _ in range(2):
        found = [list(read_lines(data, split)) for split in ("train", "valid", "test")]
        assert found == [["0 1"], ["0 1\t2"], ["0 1 2\t3"]]
    assert reads.call_count == 2
    assert list(read_lines(data, "train")) == ["0 1"]
    write(tmp_path, "csv", rows)
    assert list(read_lines(data, "valid")) == ["0 1 2\t3"]
