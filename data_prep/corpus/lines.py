"""The lines of a corpus: text between LF, CR or CRLF, without byte order mark and NUL, in UTF-8.

Plain text is read here, other formats by `loader`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from data_prep.corpus.loader import (
    READING_ERRORS,
    check_zstandard,
    columns,
    input_files,
    one_line,
    split_files,
    split_key,
)
from data_prep.errors import UserError
from data_prep.settings import BYTE_ORDER_MARK, DataConfig
from data_prep.storage import open_to_read

if TYPE_CHECKING:
    from pyarrow import ChunkedArray


def read_lines(data: DataConfig, split: str) -> Iterator[str]:
    r"""Yield the lines of a split in the order of its files, without their line ends.

    Raises:
        UserError: a file is missing, damaged, not UTF-8 or contains a NUL character (names the file
            and the line); there is no line at all.

    Example:
        >>> import tempfile
        >>> from data_prep.settings import SplitFiles
        >>> folder = tempfile.mkdtemp()
        >>> _ = Path(folder, "a.txt").write_text("the cat\nsat\n")
        >>> data = DataConfig(dir=folder, files=SplitFiles(train="a.txt"))
        >>> list(read_lines(data, "train"))
        ['the cat', 'sat']
    """
    lines: Iterator[str]
    if data.hub is None and data.format == "text":
        lines = chain.from_iterable(map(text_lines, input_files(data, split)))
    else:
        lines = chain.from_iterable(_batches(data, split))
    if not data.keep_empty_lines:
        lines = filter(str.strip, lines)
    first = next(lines, None)
    if first is None:
        raise UserError(
            f"{split_key(data, split)}: the corpus has no line{split_files(data, split)}"
        )
    yield first
    yield from lines


def read_text(name: str) -> Iterator[str]:
    """Yield the lines of one text file, which may be compressed, of a pipe, or of stdin (`-`).

    Raises:
        UserError: the file cannot be read, or a line is not UTF-8 or contains a NUL character.
    """
    file = sys.stdin.buffer if name == "-" else open_to_read(Path(name))
    if name == "-" or not file.seekable():
        return _decoded(file, name)
    file.close()
    return text_lines(Path(name))


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, which may be compressed; raises what `read_text` raises."""
    with open_decompressed(path) as file:
        yield from _decoded(file, str(path))


@contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """Open a file, which may be compressed; UserError if reading it fails in the `with` block."""
    import fsspec

    try:
        if path.suffix == ".zst":
            check_zstandard(path)
        with fsspec.open(str(path), "rb", compression="infer") as file:
            yield file
    except UserError:
        raise
    except READING_ERRORS as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def _decoded(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of an open file; UserError names the file and the first wrong line."""
    # In Latin-1 every byte is a character: a wrong byte is found in its line.
    with TextIOWrapper(file, "latin-1") as text:
        for number, line in enumerate(text, start=1):
            raw = line.removesuffix("\n").encode("latin-1")
            try:
                decoded = raw.decode()
            except UnicodeDecodeError as error:
                place, byte = error.start, raw[error.start]
                mistake = f"invalid UTF-8 at byte {place + 1} of the line (0x{byte:02x})"
                if number == 1 and raw.startswith(b"\x1f\x8b"):
                    mistake = "compressed by gzip: decompress it, or add .gz to its name"
                raise UserError(f"{name}, line {number}: {mistake}") from error
            if "\0" in decoded:
                raise UserError(f"{name}, line {number}: a NUL character")
            yield decoded.removeprefix(BYTE_ORDER_MARK)


def _batches(data: DataConfig, split: str) -> Iterator[list[str]]:
    """Yield the lines of a corpus with columns, some rows at a time."""
    num_rows = 0
    try:
        for column in columns(data, split):
            yield _clean(column, data, split, num_rows)
            num_rows += len(column)
    except UserError:
        raise
    except READING_ERRORS as error:
        raise UserError(
            f"{split_key(data, split)}{split_files(data, split)}: cannot be read after"
            f" {num_rows} rows: {one_line(error)}"
        ) from error


def _clean(column: "ChunkedArray", data: DataConfig, split: str, first_row: int) -> list[str]:
    """Check the rows and return their lines."""
    from pyarrow import compute, types

    if types.is_string_view(column.type):
        column = column.cast("large_string")
    if not (types.is_string(column.type) or types.is_large_string(column.type)):
        raise UserError(
            f"data.text_field is {data.text_field!r}: that column of {split_key(data, split)} holds"
            f" {column.type}, not text"
        )
    for wrong, mistake in (
        (column.is_null(), f"no text in {data.text_field!r}"),
        (compute.match_substring(column, "\0"), "a NUL character"),
    ):
        if (row := wrong.index(True).as_py()) >= 0:
            raise UserError(f"{split_key(data, split)}: row {first_row + row + 1} has {mistake}")
    lines = chain.from_iterable(map(_lines_of, column.to_pylist()))
    return [line.removeprefix(BYTE_ORDER_MARK) for line in lines]


def _lines_of(row: str) -> list[str]:
    """Split at LF, CR and CRLF; one at the end of the row starts no further line."""
    return row.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
