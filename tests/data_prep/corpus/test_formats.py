"""What a file is, is known by its content: compressed text is read, what is no text is refused."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from data_prep.corpus.lines import TextFile, read_text
from data_prep.corpus.split import read_sample
from data_prep.errors import UserError

TEXT = "the cat\nsat é\n".encode()


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


def tarred(mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        archive.addfile(info := tarfile.TarInfo("a.txt"), io.BytesIO())
        info.size = 0
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
def test_the_content_of_a_file_and_not_its_name_decides(
    tmp_path: Path, name: str, compress: Callable[[bytes], bytes]
) -> None:
    (tmp_path / name).write_bytes(compress(TEXT))
    sample = read_sample(TextFile(tmp_path / name))
    assert (sample.lines, sample.num_bytes) == (["the cat", "sat é"], len(TEXT))


@pytest.mark.parametrize(
    "compress", [gzip.compress, bz2.compress, lzma.compress, zstandard.compress]
)
def test_streams_after_one_another_and_zeros_between_them_are_read(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
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
    "chinese.txt": ("天地\n人\n".encode("UTF-16LE"), "is in UTF-16LE: .*iconv -f UTF-16LE "),
    "chinese-be.txt": ("天地\n人\n".encode("UTF-16BE"), "is in UTF-16BE: .*iconv -f UTF-16BE "),
    "japanese.txt": (
        "ある日の暮方\n".encode("shift_jis"),
        "line 1: invalid .* GB18030, SHIFT_JIS, WI",
    ),
    "latin.txt": ("é\n".encode("latin-1"), "line 1: invalid .* iconv -f WINDOWS-1252 -t UTF-8 "),
    "gbk.txt": ("天地人\n".encode("gbk"), "line 1: invalid .* GB18030, SHIFT_JIS, WINDOWS-1251 or"),
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
