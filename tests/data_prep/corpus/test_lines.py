"""Lines of a corpus: line ends, formats, compression; what is no text; how files are found."""

import bz2
import gzip
import io
import json
import logging
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data_prep.corpus.lines import TextFile, input_files, read_text, splits
from data_prep.corpus.reader import read_lines
from data_prep.corpus.split import read_sample
from data_prep.errors import UserError
from data_prep.settings import DataConfig, Files, SplitFiles
from tests.data_prep.conftest import write_table

ROWS: list[Any] = [{"n": 1, "text": text} for text in ("NA", None, "null", "None", *[None] * 300)]
TEXT = "the cat\nsat é\n".encode()


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
    for name in ("b.txt", "a.txt", ".hidden", "_SUCCESS", "_committed_17"):
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
    missing = f"{num_nulls} of {len(rows)} rows have no 'text' and are left out"
    named = "3 rows have a 'text' such as NA, a word: or leave it"
    found = [each.rpartition(f"/{name}: ")[2].partition(" empty")[0] for each in caplog.messages]
    assert found == [named] * ("NA" in lines) + [missing] * (num_nulls > 0)


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
    with pytest.raises(UserError, match=r"^data\.hub .* cannot be read: .*scripts are no longer s"):
        splits(data)


def test_a_split_without_files_is_named() -> None:
    with pytest.raises(UserError, match=r"^data\.files\.valid is not set: expected a file"):
        input_files(DataConfig(), "valid")


def test_arrow_types_of_strings_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def zipped(*members: str, content: bytes = TEXT) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in members:
            archive.writestr(member, b"" if member.endswith("/") else content)
    return file.getvalue()


def encrypted() -> bytes:
    """A zip archive whose member is marked as encrypted, in both of its headers."""
    content = bytearray(zipped("a.txt"))
    for header, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(header) + flags] |= 1
    return bytes(content)


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return file.getvalue()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda content: lzma.compress(content, lzma.FORMAT_ALONE),
    "zst": zstandard.compress,
    "pzst": lambda content: b"P*M\x18\4\0\0\0skip" + zstandard.compress(content),
    "zip": lambda content: zipped("a.txt", content=content),
    "zip of a Mac": lambda content: zipped("a/", "a/b.txt", "__MACOSX/a/._b", content=content),
}


@pytest.mark.parametrize("name", ["A.TXT.GZ", "a.Zip", "a.txt", "a"])
@pytest.mark.parametrize("compress", COMPRESS.values(), ids=COMPRESS)
def test_the_content_and_not_the_name_decides(tmp_path: Path, name: str, compress: Any) -> None:
    (tmp_path / name).write_bytes(compress(TEXT))
    sample = read_sample(TextFile(tmp_path / name))
    assert (sample.lines, sample.num_bytes) == (["the cat", "sat é"], len(TEXT))


@pytest.mark.parametrize("compress", [COMPRESS[name] for name in ("gz", "bz2", "xz", "zst")])
def test_streams_and_zeros_between_them_are_read(tmp_path: Path, compress: Any) -> None:
    large = b"".join(b"line %d\n" % (i * i) for i in range(100_000))
    (tmp_path / "a").write_bytes(compress(large) + bytes(4096) + compress(TEXT) + compress(b""))
    lines = [line.encode() + b"\n" for line in read_text(str(tmp_path / "a"))]
    assert b"".join(lines) == large + TEXT


def test_a_pipe_is_decompressed() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, gzip.compress(TEXT))
    os.close(write_end)
    assert list(read_text(f"/dev/fd/{read_end}")) == ["the cat", "sat é"]
    os.close(read_end)


ENCODINGS = ("UTF-16", "UTF-16LE", "UTF-16BE", "UTF-32", "UTF-32LE", "UTF-32BE")
EMPTY_PARQUET = io.BytesIO()
parquet.write_table(pa.table({"text": pa.array([], pa.string())}), EMPTY_PARQUET)
NOT_READ = {
    **{
        each: (TEXT.decode().encode(each), f"is in {each}: .*iconv -f {each} ")
        for each in ENCODINGS
    },
    "chinese.txt": ("上天\n人上\n".encode("UTF-16LE"), "is in UTF-16LE: .*iconv -f UTF-16LE "),
    "chinese-be.txt": ("人上\n上\n".encode("UTF-16BE"), "is in UTF-16BE: .*iconv -f UTF-16BE "),
    "iso.txt": ("ある日の\n".encode("iso2022_jp"), "is in ISO-2022-JP-3: .*-f ISO-2022-JP-3 "),
    "shift.txt": ("ある日の暮方\n".encode("cp932"), "1: invalid .* be in CP932 .* -f CP932 -t"),
    "euc.txt": (("雨やみを待っていた。\n" * 9).encode("euc_jp"), "be in EUC-JP.*: convert it"),
    "big5.txt": ("宇宙洪荒。日月盈昃，\n".encode("big5"), "be in BIG5-HKSCS.* -f BIG5-HKSCS "),
    "koi.txt": (("Все семьи похожи\n" * 9).encode("koi8_r"), "be in KOI8-R.* -f KOI8-R "),
    "latin.txt": ("é\n".encode("latin-1"), "line 1: invalid .* iconv -f WINDOWS-1252 -t UTF-8 "),
    "gbk.txt": ("天地玄黄，宇宙洪荒。日月盈昃，\n".encode("gbk"), "be in GB18030.* -f GB18030 "),
    "bytes.txt": (b"\xff\xff\x80\xff\x81\n", "if the text is in CP932, EUC-JP, .* -f THAT -t"),
    "cesu.txt": (b"\xed\xa0\xbd\n", "line 1: invalid .* it has halves of characters"),
    "damaged.txt": (b"\xc3\xa9t\xc3\n", "line 1: invalid .* UTF-8, so it is damaged$"),
    "two.zip": (zipped("a.txt", "b.txt"), r"a zip archive with 2 files \(a.txt, b.txt\): unpack"),
    "empty.zip": (zipped(), "a zip archive with no file: unpack it"),
    "secret.zip": (encrypted(), "a zip archive with a password: unpack it"),
    "cut.zip": (zipped("a.txt", "b.txt")[:90], "zip archive cannot be read: File is not a zip"),
    "bad.zip": (zipped("a.txt").replace(zipped("a.txt")[35:40], b"\xff" * 5), "cannot be read: "),
    "plain.zip": (TEXT, "damaged, or not compressed in spite of its name"),
    "report.docx": (zipped("[Content_Types].xml", "word/document.xml"), "an office document"),
    "cut.txt.gz": (gzip.compress(TEXT)[:-9], "ends before its end-of-stream marker"),
    "CUT.XZ": (lzma.compress(TEXT)[:-9], "ends before its end-of-stream marker"),
    "cut.zst": (zstandard.compress(TEXT)[:-3], "ends before its end-of-stream marker"),
    "garbage.zst": (zstandard.compress(TEXT * 99)[:30] + b"\xff" * 9, "cannot be read: ZstdError"),
    "garbage.bz2": (bz2.compress(TEXT) + b"\xf0garbage", "cannot be read: OSError: Invalid data"),
    "sum.gz": (gzip.compress(TEXT)[:-8] + bytes(8), "cannot be read: error: .*incorrect data"),
    "twice.gz": (gzip.compress(gzip.compress(TEXT)), "the file is compressed, in a way"),
    "a.txt.Z": (b"\x1f\x9d\x90aaaa", "the file is compressed, in a way"),
    "a.tar": (tarred(), "the file is a tar archive: unpack it"),
    "a.7z": (b"7z\xbc\xaf'\x1c\0\4", "the file is an archive: unpack it"),
    "a.pdf": (b"%PDF-1.4\n%\xe2\xe3\n", "the file is a PDF document: .*pdftotext$"),
    "a.rtf": (b"{\\rtf1\\ansi text}", "the file is a document: "),
    "data.arrow": (b"\xff\xff\xff\xff\xe0\3\0\0", "the file is an Arrow file: save it as parquet"),
    "a.png": (b"\x89PNG\r\n\x1a\n\0", "the file is no text$"),
    "empty.parquet": (EMPTY_PARQUET.getvalue(), "a parquet file: give the column of text alone,"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    content, message = NOT_READ[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}.*{message}") as caught:
        list(read_text(str(tmp_path / name)))
    assert "\n" not in str(caught.value)
