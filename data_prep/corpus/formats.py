"""What a file is, by its first bytes: text, perhaps compressed or in another encoding, or none.

Names do not decide. A file of one compressed text is read as that text; archives, documents and
other encodings than UTF-8 are refused with what to do.
"""

import bz2
import csv
import lzma
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any, cast

from data_prep.errors import DataError, UserError
from data_prep.storage import open_to_read

CHUNK_BYTES = 1 << 16
HEAD_BYTES = 1 << 12
"""The first bytes, which decide."""
COMPRESSIONS: dict[re.Pattern[bytes], Callable[[], Any]] = {
    re.compile(b"\x1f\x8b"): lambda: zlib.decompressobj(31),
    re.compile(b"BZh[1-9](1AY&SY|\x17rE8P\x90)"): bz2.BZ2Decompressor,
    re.compile(b"\xfd7zXZ\0|]\0\0"): lzma.LZMADecompressor,
    re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"): lambda: (
        import_module("zstandard").ZstdDecompressor().decompressobj()  # not needed by other files
    ),
}
ZIP = re.compile(b"PK(\3\4|\5\6|\7\x08)")
COMPRESSED_NAME = re.compile(r"\.(gz|bz2|xz|lzma|zst|zip)$", re.IGNORECASE)
PARQUET = re.compile(rb"PAR1\x15")
_UNPACK = "unpack it and give the file of text"
_EXPORT = "export its text as UTF-8"
COLUMN_ALONE = "give the column of text alone, one line each"
_NO_TEXT = {
    rb".{257}ustar": f"a tar archive: {_UNPACK}",
    rb"7z\xbc\xaf'\x1c|Rar!\x1a\x07|!<arch>\n": f"an archive: {_UNPACK}",
    rb"PK[\x03\x05]": f"a zip archive in a pipe or in another file: {_UNPACK}",
    rb"\x1f[\x8b\x9d\xa0]|BZh[1-9]1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd|\x04\"M\x18": (
        "compressed, in a way that is not read here: decompress it"
    ),
    PARQUET.pattern: "a parquet file: TABLE",
    rb"ARROW1\0|\xff{4}": f"an Arrow file: save it as parquet to train on it, else {COLUMN_ALONE}",
    rb"mmap lm http": "a binary file of KenLM: give the ARPA file",
    rb"%PDF-\d": f"a PDF document: {_EXPORT}, for instance by pdftotext",
    rb"%!PS-Adobe|\{\\rtf\d|\xd0\xcf\x11\xe0": f"a document: {_EXPORT}",
    rb"\x89PNG\r|\xff\xd8\xff|GIF8[79]a|RIFF.{4}W|OggS\0|ID3[\x02-\x04]|fLaC\0": "no text",
    rb"\x7fELF|SQLite format 3\0|\x93NUMPY|\x89HDF\r|\x80[\x02-\x05][\x8c\x95}](?!\n)": "no text",
}
"""First bytes of files that are read as text by mistake, and what is said of them and of TABLEs."""
_ENCODINGS = {"cp932": "CP932", "euc_jp": "EUC-JP", "gb18030": "GB18030", "big5hkscs": "BIG5-HKSCS"}
_ENCODINGS |= {"cp949": "CP949", "cp1251": "WINDOWS-1251", "koi8_r": "KOI8-R", "cp874": "CP874"}
_ENCODINGS |= {f"cp{number}": f"WINDOWS-{number}" for number in (1253, 1254, 1255, 1256)}
"""Encodings of Python that are looked for, and their names for iconv."""


@contextmanager
def reading(name: str) -> Iterator[None]:
    """UserError that names what is read, in place of any of `_reading_errors`."""
    try:
        yield
    except UserError:
        raise
    except _reading_errors() as error:
        raise DataError(f"{name} cannot be read: {one_line(error)}") from error


def _reading_errors() -> tuple[type[Exception], ...]:
    """What reading a damaged file raises; pyarrow, JSON and Unicode raise ValueErrors."""
    found = [OSError, EOFError, ValueError, TypeError, RuntimeError]  # of recursion, scripts too
    zstandard = sys.modules.get("zstandard")  # if a file of it was opened
    found += [OverflowError, csv.Error, lzma.LZMAError, zipfile.BadZipFile, zlib.error]
    return (*found, zstandard.ZstdError) if zstandard else tuple(found)


def one_line(error: Exception) -> str:
    """Return the operating system's reason, or the exception's type and message, on one line."""
    text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return " ".join(text.splitlines())


def decompressed(file: BufferedReader, name: str, table: str) -> BufferedReader:
    """The text of an open file, a pipe or stdin, decompressed.

    UserError if it is no text; `table` is what the message says if the file is a table, such as
    parquet.
    """
    head, member = file.peek(HEAD_BYTES), None
    compression = next((new for start, new in COMPRESSIONS.items() if start.match(head)), None)
    if ZIP.match(head) and file.seekable():
        member = _only_member(file, name)
    elif compression is None and head and COMPRESSED_NAME.search(name):
        raise DataError(
            f"{name}: damaged, or not compressed in spite of its name: restore or rename it"
        )
    if member is not None:
        file = BufferedReader(cast(RawIOBase, member), CHUNK_BYTES)
    elif compression is not None:
        file = BufferedReader(_Stream(_decompress(file, compression, name)), CHUNK_BYTES)
    is_plain = compression is None and member is None
    if problem := no_text(file.peek(HEAD_BYTES), name if is_plain else "FILE", table):
        raise DataError(f"{name}: the file is {problem}")
    return file


def no_text(head: bytes, name: str, table: str = COLUMN_ALONE) -> str | None:
    """What a file with these first bytes is, with what to do, if it is not text in UTF-8."""
    found = (each for start, each in _NO_TEXT.items() if re.match(start, head, re.DOTALL))
    problem = next(found, None)
    if problem is None and (encoding := wide_encoding(head)):
        problem = f"in {encoding}: {convert_from(encoding, name)}"
    return problem and problem.replace("TABLE", table)


def is_compressed(path: Path) -> bool:
    """Whether a file is one of the compressed files that `decompressed` reads."""
    with open_to_read(path) as file:
        head = file.read(HEAD_BYTES)
    return any(start.match(head) for start in (ZIP, *COMPRESSIONS))


def _only_member(file: BufferedReader, name: str) -> IO[bytes]:
    """The file in a zip archive; UserError unless it is one, and without a password."""
    try:
        archive = zipfile.ZipFile(file)
        files = (each for each in archive.infolist() if not each.is_dir())
        members = [each for each in files if not each.filename.startswith("__MACOSX/")]
        is_encrypted = any(each.flag_bits & 1 for each in members)
        if len(members) != 1 or is_encrypted:
            names = [each.filename for each in members[:3]] + ["…"] * (len(members) > 3)
            found = f"{len(members)} files ({', '.join(names)})" if members else "no file"
            found = "a password" if is_encrypted else found
            problem = f"a zip archive with {found}: {_UNPACK}"
            if names[:1] in (["[Content_Types].xml"], ["mimetype"]):
                problem = f"an office document or an e-book: {_EXPORT}"
            raise DataError(f"{name}: the file is {problem}")
        return archive.open(members[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).splitlines())
        raise DataError(f"{name}: the zip archive cannot be read: {reason}") from error


class _Stream(RawIOBase):
    """Chunks of bytes as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if (chunk := next(self._chunks, None)) is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _decompress(file: BufferedReader, new: Callable[[], Any], name: str) -> Iterator[bytes]:
    """The content of streams; unlike Python's modules, refuses what follows and a truncated one."""
    decompressor = None
    while chunk := file.read(CHUNK_BYTES):
        while chunk:
            if decompressor is None and not (chunk := chunk.lstrip(b"\0")):
                break
            decompressor = decompressor or new()
            yield decompressor.decompress(chunk)
            chunk, is_complete = decompressor.unused_data, decompressor.eof
            decompressor = None if is_complete else decompressor
    if decompressor is not None:
        raise DataError(f"{name} cannot be read: it ends before its end-of-stream marker")


def wide_encoding(head: bytes) -> str | None:
    """The encoding of a text that begins as UTF-16 or UTF-32, marked or not, or ISO-2022-JP."""
    for mark, encoding in (
        (b"\xff\xfe\0\0|\0\0\xfe\xff", "UTF-32"),
        (b"\xff\xfe|\xfe\xff", "UTF-16"),
    ):
        if re.match(mark, head):
            return encoding
    # Most letters, and spaces, have zeros in all bytes but one.
    most = 0.6 * (len(head) // 4)
    zeros = "".join("x0"[head[place::4].count(0) > most] for place in range(4))
    found = {"x000": "UTF-32LE", "xx00": "UTF-32LE", "000x": "UTF-32BE", "00xx": "UTF-32BE"}
    found |= {"x0x0": "UTF-16LE", "0x0x": "UTF-16BE"}
    if len(head) >= 8 and (likely := found.get(zeros)):
        return likely
    if b"\0" in head and "\ufffd" in head.decode(errors="replace").rstrip("\ufffd"):
        # As Chinese, where a letter may have the byte of a line end.
        units = [head[place : place + 2] for place in range(0, len(head) - 1, 2)]
        little, big = units.count(b"\n\0"), units.count(b"\0\n")
        if little != big:
            return "UTF-16LE" if little > big else "UTF-16BE"
    return "ISO-2022-JP-3" if re.search(rb"\x1b\$[@B]", head) and head.isascii() else None


def likely_encoding(line: bytes, further: bytes = b"") -> str:
    """What to do with a line that is not UTF-8, for a message; whole lines after it help."""
    characters = line.decode(errors="replace")
    others = [each for each in characters if not each.isascii()]
    with suppress(UnicodeDecodeError):
        line.decode(errors="surrogatepass")
        return "it has halves of characters (surrogates): write each character as UTF-8"
    if len(others) >= 2 * others.count("\N{REPLACEMENT CHARACTER}"):
        return "the other characters of the line are UTF-8, so it is damaged"
    if not re.search(rb"[\x80-\xff]{3}", line):
        other = "of Central Europe -f WINDOWS-1250 or ISO-8859-2"
        return f"if it is Western European text, {convert_from('WINDOWS-1252')} ({other})"
    names = _likely_names(line + further)
    if not names:
        some = ", ".join([*_ENCODINGS.values()][:6])
        return f"if the text is in {some} or another encoding, {convert_from('THAT')}"
    return f"it seems to be in {' or '.join(names)}: {convert_from(names[0])}, and look at NEW"


def _likely_names(text: bytes) -> list[str]:
    """Up to three likely encodings of a text, the best one first; none without the package."""
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return []
    found = (each.encoding for each in from_bytes(text, cp_isolation=[*_ENCODINGS]))
    return [_ENCODINGS[name] for name in found if name in _ENCODINGS][:3]


def convert_from(encoding: str, name: str = "FILE") -> str:
    """The command that converts a text, for a message."""
    return f"convert it, iconv -f {encoding} -t UTF-8 {name} > NEW"
