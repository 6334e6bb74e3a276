"""Lines of a corpus: line ends, formats, errors, and how files are found."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data_prep.corpus.lines import input_files, splits
from data_prep.corpus.reader import read_lines
from data_prep.errors import UserError
from data_prep.settings import DataConfig, Files, SplitFiles
from tests.data_prep.conftest import write_table


def read(folder: Path, files: Files, **options: object) -> list[str]:
    data = DataConfig(dir=str(folder), files=SplitFiles(train=files), **options)  # type: ignore[arg-type]
    return list(read_lines(data, "train"))


def write(folder: Path, content: bytes, name: str = "corpus.txt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"a b\n\n c \n", ["a b", "", " c "]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\n\r\nb\rc", ["a", "", "b", "c"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "b"]),
        ("a\u2028b\x0cc\u0085d\n".encode(), ["a\u2028b\x0cc\u0085d"]),
        (b"\n", [""]),
    ],
)
def test_lines_end_at_newlines_only(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    write(tmp_path, content)
    assert read(tmp_path, "corpus.txt") == lines


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r\ufeff")))
)
def test_text_comes_back_line_by_line(tmp_path: Path, lines: list[str]) -> None:
    write(tmp_path, "".join(f"{line}\n" for line in [*lines, "end"]).encode())
    assert read(tmp_path, "corpus.txt") == [*lines, "end"]


def test_a_hub_that_cannot_be_reached_is_named_without_its_retries(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    message = "^data.hub a/b cannot be read: ConnectionError: no network$"
    with pytest.raises(UserError, match=message):
        splits(DataConfig(hub="a/b"))
    assert caplog.messages == []


def test_files_are_found_by_glob_folder_and_list_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "we[ir]d * folder"
    folder.mkdir()
    for name in ("b.txt", "a.txt", ".hidden"):
        write(folder, name.encode(), name)
    write(tmp_path, b"c", "c.txt")
    assert read(tmp_path, "we[ir]d * folder") == read(folder, "*.txt") == ["a.txt", "b.txt"]
    assert read(tmp_path, ["c.txt", "we[[]ir]d */*.txt"]) == ["c", "a.txt", "b.txt"]
    assert read(tmp_path, str(folder / "b.txt")) == ["b.txt"]


def test_columns_of_other_formats_are_split_into_lines(tmp_path: Path) -> None:
    rows = ["a\nb\n", "", "c\r\nd", "\ufeffe"]
    expected = ["a", "b", "", "c", "d", "e"]
    records = "".join(json.dumps({"body": row, "n": 1}) + "\n" for row in rows)
    write(tmp_path, records.encode(), "x.jsonl")
    parquet.write_table(pa.table({"body": rows}), tmp_path / "x.parquet")
    assert read(tmp_path, "x.jsonl", format="json", text_field="body") == expected
    assert read(tmp_path, "x.parquet", format="parquet", text_field="body") == expected
    write(tmp_path, json.dumps([{"body": row} for row in rows], indent=1).encode(), "x.json")
    assert read(tmp_path, "x.json", format="json", text_field="body") == expected
    for separator in (b",", b"\t", b";", b"|"):
        content = b'\xef\xbb\xbfn,body\r\n1,"a\nb"\n\n2,c\n'.replace(b",", separator)
        write(tmp_path, gzip.compress(content), "x.csv.gz")
        assert read(tmp_path, "x.csv.gz", format="csv", text_field="body") == ["a", "b", "c"]


def test_text_that_looks_like_numbers_or_dates_is_text(tmp_path: Path) -> None:
    rows = ["2024-05-17", "12", "1e5", "true", "2024-05-17T12:03:00Z", "x" * 200_000]
    write(tmp_path, "\n".join(json.dumps({"text": row}) for row in rows).encode(), "x.json")
    write(tmp_path, "\n".join(["text", *rows]).encode(), "x.csv")
    for format in ("json", "csv"):
        assert read(tmp_path, f"x.{format}", format=format) == rows


ROWS: list[Any] = [{"n": 1, "text": text} for text in ("NA", None, "null", "None", *[None] * 300)]


@pytest.mark.parametrize(
    ("name", "rows", "lines"),
    [
        *((name, ROWS, ["NA", "null", "None"]) for name in ("x.csv", "x.json", "x.parquet")),
        *((name, ROWS[::-1], ["None", "null", "NA"]) for name in ("x.csv", "x.parquet")),
        ("x.json", [{"n": 1}, {"text": ""}, *ROWS], ["", "NA", "null", "None"]),
        ("x.csv", [{"n": 0, "text": ""}, *ROWS], ["NA", "null", "None"]),  # CSV has no null
        ("x.parquet", [{"text": ""}, {"text": "a"}], ["", "a"]),
    ],
)
def test_rows_without_text_are_left_out_and_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, rows: list[Any], lines: list[str]
) -> None:
    write_table(tmp_path / name, rows)
    for _ in range(2):
        assert read(tmp_path, name, format=name[2:]) == lines
    num_nulls = len(rows) - len(lines)
    expected = f"{name}: {num_nulls} of {len(rows)} rows have no 'text' and are left out"
    assert [each.rpartition("/")[2] for each in caplog.messages] == [expected] * (num_nulls > 0)


def test_a_folder_in_the_layout_of_the_hub_has_its_visible_files_as_splits(tmp_path: Path) -> None:
    visible = ["sub/train.txt", "train.txt", "validation.txt"]
    for name in (*visible, ".DS_Store", ".git/HEAD", "sub/.x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, f"{name} text\n".encode(), name)
    data = DataConfig(dir=str(tmp_path.parent), hub=tmp_path.name)
    assert splits(data) == ["train", "valid"]
    assert list(read_lines(data, "valid")) == ["validation.txt text"]
    assert input_files(data, "train") == [tmp_path / name for name in visible]
    with pytest.raises(UserError, match=r"has no split test \(it has train, validation\)"):
        list(read_lines(data, "test"))
    (tmp_path / f"{tmp_path.name}.py").touch()
    with pytest.raises(
        UserError, match=r"^data\.hub .* cannot be read: .*scripts are no longer su"
    ):
        splits(data)


def test_a_split_without_files_is_named() -> None:
    with pytest.raises(UserError, match=r"^data\.files\.valid is not set: expected a file"):
        input_files(DataConfig(), "valid")


def test_text_of_every_arrow_type_of_strings_is_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        parquet.write_table(pa.table({"text": pa.array(["a", "é"], kind)}), tmp_path / "a.parquet")
        assert read(tmp_path, "a.parquet", format="parquet") == ["a", "é"]
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"the corpus has no line \(.*a\.parquet\)$"):
        read(tmp_path, "a.parquet", format="parquet")
    unknown = Mock(side_effect=pa.ArrowNotImplementedError("128 bits"))
    monkeypatch.setattr(parquet, "ParquetFile", unknown)
    with pytest.raises(UserError, match=r"a\.parquet cannot be read: .*Error: 128 bits$"):
        read(tmp_path, "a.parquet", format="parquet")
