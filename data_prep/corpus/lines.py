"""The lines of a corpus: text between LF, CR or CRLF, without byte order mark and NUL, in UTF-8."""

import sys
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from data_prep.corpus.files import input_files, split_files, split_key
from data_prep.corpus.loader import READING_ERRORS, columns, is_text, one_line
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
    batches = _batches(data, split)
    if not data.keep_empty_lines:
        batches = (list(filter(str.strip, batch)) for batch in batches)
    batches = filter(None, batches)
    first = next(batches, None)
    if first is None:
        raise UserError(
            f"{split_key(data, split)}: the corpus has no line{split_files(data, split)}"
        )
    yield from chain(first, chain.from_iterable(batches))


def read_text(name: str) -> Iterator[str]:
    r"""Yield the lines of one text file, which may be compressed, of a pipe, or of stdin (`-`).

    Raises:
        UserError: the file cannot be read, or a line is not UTF-8 or contains a NUL character.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.txt")
        >>> _ = path.write_text("the cat\nsat\n")
        >>> list(read_text(str(path)))
        ['the cat', 'sat']
    """
    file = sys.stdin.buffer if name == "-" else open_to_read(Path(name))
    if name != "-" and file.seekable():
        file.close()
        source = raw_lines(Path(name))
    else:
        source = _raw_text(file)
    for number, raw in enumerate(source, start=1):
        if mistake := bad_utf8(raw) or _nul(raw):
            raise UserError(f"{name}, line {number}: {mistake}")
        yield raw.decode().removeprefix(BYTE_ORDER_MARK)


def _batches(data: DataConfig, split: str) -> Iterator[list[str]]:
    num_rows = 0
    try:
        for column in columns(data, split):
            yield _clean(column, data, split, num_rows)
            num_rows += len(column)
    except UserError:
        raise
    except READING_ERRORS as error:
        if is_text(data):
            _raise_first(bad_utf8, data, split)
        raise UserError(
            f"{split_key(data, split)}{split_files(data, split)}: cannot be read after"
            f" {num_rows} rows: {one_line(error)}"
        ) from error


def _clean(column: "ChunkedArray", data: DataConfig, split: str, first_row: int) -> list[str]:
    """Check the rows and return them as lines; rows with several lines are split."""
    from pyarrow import compute, types

    if types.is_string_view(column.type):
        column = column.cast("large_string")
    if not (types.is_string(column.type) or types.is_large_string(column.type)):
        raise UserError(
            f"data.text_field is {data.text_field!r}: that column of {split_key(data, split)} holds"
            f" {column.type}, not text"
        )
    if column.null_count:
        row = first_row + column.is_null().index(True).as_py() + 1
        raise UserError(f"{split_key(data, split)}: row {row} has no text in {data.text_field!r}")
    if compute.any(compute.match_substring(column, "\0")).as_py():
        _raise_nul(column, data, split, first_row)
    rows = column.to_pylist()
    lines = rows if is_text(data) else chain.from_iterable(map(_lines_of, rows))
    return [line.removeprefix(BYTE_ORDER_MARK) for line in lines]


def _lines_of(row: str) -> list[str]:
    """Split at LF, CR and CRLF; one at the end of the row starts no further line."""
    return row.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")


def _raise_nul(column: "ChunkedArray", data: DataConfig, split: str, first_row: int) -> NoReturn:
    from pyarrow import compute

    if is_text(data):
        _raise_first(_nul, data, split)
    row = first_row + compute.match_substring(column, "\0").index(True).as_py() + 1
    raise UserError(f"{split_key(data, split)}: row {row} has a NUL character")


def bad_utf8(raw: bytes) -> str | None:
    """Where a line is not UTF-8; None if it is."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start + 1} of the line (0x{raw[error.start]:02x})"
    return None


def _nul(raw: bytes) -> str | None:
    return "a NUL character" if b"\0" in raw else None


def _raise_first(find: Callable[[bytes], str | None], data: DataConfig, split: str) -> None:
    """Read the files again as bytes; raise a UserError that names the first bad file and line."""
    for path in input_files(data, split):
        for number, line in enumerate(raw_lines(path), start=1):
            if mistake := find(line):
                raise UserError(f"{path}, line {number}: {mistake}")


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, compressed or not, without their ends LF, CR or CRLF.

    Raises:
        UserError: the file cannot be read.
    """
    import fsspec

    try:
        with fsspec.open(str(path), "rb", compression="infer") as file:
            yield from _raw_text(file)
    except READING_ERRORS as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error


def _raw_text(file: BinaryIO) -> Iterator[bytes]:
    """The lines of an open file, which end as they do for `datasets`; Latin-1 has every byte."""
    with TextIOWrapper(file, "latin-1") as text:
        for line in text:
            yield line.removesuffix("\n").encode("latin-1")
