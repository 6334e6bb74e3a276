"""The lines of a corpus, read through `datasets` in a stream: local files, folders, globs, hub
names.

Decides what a line is: the text between LF, CR or CRLF, without a byte order mark, valid UTF-8,
free of NUL. Nothing is copied into a cache and nothing is held but the batch at hand. Knows nothing
of words.
"""

import codecs
import csv
import glob
import locale
import logging
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import zstandard

from data_prep.errors import UserError
from data_prep.settings import BYTE_ORDER_MARK, DataConfig
from data_prep.storage import CHUNK_BYTES, open_to_read

if TYPE_CHECKING:
    from datasets import IterableDataset
    from pyarrow import ChunkedArray, Table

SPLITS = ("train", "valid", "test")
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
ROWS_PER_BATCH = 256
"""A row may be a whole book, and a batch is in memory several times."""
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}

READING_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    csv.Error,
    lzma.LZMAError,
    zlib.error,
    zstandard.ZstdError,
)
"""What the loader raises for a bad file; errors of pyarrow and Unicode are ValueErrors or
TypeErrors.
"""


def lines(data: DataConfig, split: str) -> Iterator[str]:
    """The lines of a split in the order of its files, without their ends.

    Args:
        data: the section `data` of the configuration.
        split: train, valid or test.

    Raises:
        UserError: a file is missing, damaged, not UTF-8 or has a NUL character (with its name and
            the line); there is no line at all.
    """
    batches = _batches(data, split)
    if not data.keep_empty_lines:
        batches = (list(filter(str.strip, batch)) for batch in batches)
    batches = filter(None, batches)
    first = next(batches, None)
    if first is None:
        raise UserError(f"{_key(data, split)}: the corpus has no line{_names(data, split)}")
    yield from chain(first, chain.from_iterable(batches))


def splits(data: DataConfig) -> list[str]:
    """The splits that the configuration gives, train first.

    Raises:
        UserError: there is no training split.
    """
    if data.hub is not None:
        offered = _load_hub(data)
        _check_offered(offered, "train", data)
        return [split for split in SPLITS if HUB_SPLITS[split] in offered]
    if not data.files.train:
        raise UserError(
            "data.files.train is not set: expected the files of the training split, or data.hub"
        )
    return [split for split in SPLITS if getattr(data.files, split)]


def hub_folder(data: DataConfig) -> Path | None:
    """The local folder that `data.hub` names; None if it names no folder."""
    folder = Path(data.dir, data.hub or "")
    return folder if data.hub is not None and folder.is_dir() else None


def input_files(data: DataConfig, split: str) -> list[Path]:
    """The local files of a split in reading order: those of a glob or a folder by name, lists as
    given.

    A hub name has none; a local folder given as `data.hub` has all its files.

    Raises:
        UserError: nothing is there; names the file and its configuration key.
    """
    if data.hub is not None:
        folder = hub_folder(data)
        if folder is None:
            return []
        return _visible_files(folder, folder.rglob("*"))
    given = getattr(data.files, split)
    if not given:
        raise UserError(
            f"data.files.{split} is not set: expected a file, a glob, a folder or a list"
        )
    names = [given] if isinstance(given, str) else given
    return [path for name in names for path in _expanded(Path(data.dir), name, _key(data, split))]


def _expanded(folder: Path, name: str, key: str) -> list[Path]:
    path = folder / name
    if path.is_file():
        return [path]
    if path.is_dir():
        found = _visible_files(path, path.iterdir())
        if not found:
            raise UserError(f"{key}: the folder {path} has no files")
        return found
    matches = glob.glob(name, root_dir=folder, recursive=True)
    found = sorted(folder / match for match in matches if (folder / match).is_file())
    if not found:
        raise UserError(f"{key}: there is no file {path}")
    return found


def _visible_files(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """The files among the paths, by name, but for hidden ones and those in hidden folders of it."""
    return sorted(
        path
        for path in paths
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _key(data: DataConfig, split: str) -> str:
    return f"data.files.{split}" if data.hub is None else f"data.hub {data.hub}, {split} split"


def _names(data: DataConfig, split: str) -> str:
    if data.hub is not None:
        return ""
    paths = input_files(data, split)
    return f" ({paths[0]})" if len(paths) == 1 else f" ({paths[0]} and {len(paths) - 1} more)"


def _batches(data: DataConfig, split: str) -> Iterator[list[str]]:
    rows = 0
    try:
        for column in _columns(data, split):
            yield _clean(column, data, split, rows)
            rows += len(column)
    except UserError:
        raise
    except READING_ERRORS as error:
        _explain(error, data, split, rows)


def _columns(data: DataConfig, split: str) -> Iterator["ChunkedArray"]:
    """The text column of the corpus, some rows at a time."""
    if data.hub is not None:
        offered = _load_hub(data)
        _check_offered(offered, split, data)
        dataset = offered[HUB_SPLITS[split]]
    else:
        dataset = _load_files(data, split)
    field = "text" if _is_text(data) else data.text_field
    for table in _tables(dataset):
        _check_field(table.column_names, data, split)
        yield table.column(field)


def _check_field(columns: Iterable[str], data: DataConfig, split: str) -> None:
    if not _is_text(data) and data.text_field not in columns:
        raise UserError(
            f"data.text_field is {data.text_field!r}: {_key(data, split)} has only the columns"
            f" {', '.join(columns)}"
        )


def _tables(dataset: "IterableDataset") -> Iterator["Table"]:
    tables = iter(dataset.with_format("arrow").iter(batch_size=ROWS_PER_BATCH))
    while True:
        with _silent_loader():
            table = next(tables, None)
        if table is None:
            return
        yield table


def _load_files(data: DataConfig, split: str) -> "IterableDataset":
    from datasets import load_dataset

    paths = input_files(data, split)
    _check_locale(data.format, paths)
    for path in paths:
        if path.suffix == ".zst":
            _check_zstandard(path)
    # The loader takes names for globs, and finds nothing, silently, where a name has brackets.
    names = [glob.escape(str(path.absolute())) for path in paths]
    options: dict[str, Any] = {}
    if data.format == "csv":
        # Text is text: the loader takes "NA", "null" and the like for nothing otherwise, digits
        # for numbers, and one type for each column, whether it is read or not.
        for path in paths:
            _check_field(_csv_columns(path), data, split)
        name = data.text_field
        options = {"keep_default_na": False, "usecols": [name], "converters": {name: str}}
    with _silent_loader():
        return load_dataset(
            data.format, data_files={"train": names}, split="train", streaming=True, **options
        )


def _csv_columns(path: Path) -> list[str]:
    import fsspec

    with fsspec.open(
        str(path), "rt", encoding="utf-8-sig", newline="", compression="infer"
    ) as file:
        return next(csv.reader(file), [])


def _check_zstandard(path: Path) -> None:
    """The loader takes a file that was cut off for a whole one."""
    frame = None
    with open_to_read(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            while chunk:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                frame.decompress(chunk)
                chunk = frame.unused_data
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError(f"{path.name} ends before its end-of-stream marker")


def _check_locale(format: str, paths: list[Path]) -> None:
    """The loader decodes compressed text as the locale says, whatever encoding it is asked for."""
    encoding = codecs.lookup(locale.getpreferredencoding(False)).name
    for path in paths if format in {"text", "csv"} and encoding != "utf-8" else ():
        if path.suffix in COMPRESSED:
            raise UserError(
                f"{path}: compressed text is decoded as the locale says, {encoding}: expected UTF-8"
                " (set PYTHONUTF8=1)"
            )


def _load_hub(data: DataConfig) -> dict[str, "IterableDataset"]:
    """The dataset's splits under the names that it has for them."""
    from datasets import load_dataset

    local = hub_folder(data)
    name = str(local.absolute()) if local else data.hub
    try:
        with _silent_loader():
            return dict(load_dataset(name, data.hub_config, streaming=True))
    except READING_ERRORS as error:
        raise UserError(f"data.hub {data.hub} cannot be opened: {_one_line(error)}") from error


def _check_offered(offered: dict[str, "IterableDataset"], split: str, data: DataConfig) -> None:
    if HUB_SPLITS[split] not in offered:
        raise UserError(
            f"data.hub {data.hub} has no split {HUB_SPLITS[split]} (it has {', '.join(offered)})"
        )


@contextmanager
def _silent_loader() -> Iterator[None]:
    """No log lines of the loader's about an error that it raises as well."""
    from datasets.utils import logging as loader_logging

    level = loader_logging.get_verbosity()
    loader_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        loader_logging.set_verbosity(level)


def _clean(column: "ChunkedArray", data: DataConfig, split: str, first_row: int) -> list[str]:
    """The rows as lines: checked, split where a row has several, and without byte order marks."""
    from pyarrow import compute, types

    if types.is_string_view(column.type):
        column = column.cast("large_string")
    if not (types.is_string(column.type) or types.is_large_string(column.type)):
        raise UserError(
            f"data.text_field is {data.text_field!r}: that column of {_key(data, split)} holds"
            f" {column.type}, not text"
        )
    if column.null_count:
        row = first_row + column.is_null().index(True).as_py() + 1
        raise UserError(f"{_key(data, split)}: row {row} has no text in {data.text_field!r}")
    if compute.any(compute.match_substring(column, "\0")).as_py():
        _raise_nul(column, data, split, first_row)
    rows: list[str] = column.to_pylist()
    if _is_text(data):
        if compute.any(compute.starts_with(column, BYTE_ORDER_MARK)).as_py():
            rows = [row.removeprefix(BYTE_ORDER_MARK) for row in rows]
        return rows
    return [line.removeprefix(BYTE_ORDER_MARK) for row in rows for line in _lines_of(row)]


def _is_text(data: DataConfig) -> bool:
    return data.hub is None and data.format == "text"


def _lines_of(row: str) -> list[str]:
    """LF, CR and CRLF end a line, as in a text file; at the end of the row none begins a further
    one.
    """
    if "\r" in row:
        row = row.replace("\r\n", "\n").replace("\r", "\n")
    return row.removesuffix("\n").split("\n")


def _raise_nul(column: "ChunkedArray", data: DataConfig, split: str, first_row: int) -> NoReturn:
    from pyarrow import compute

    if _is_text(data):
        _raise_where(lambda raw: "a NUL character" if b"\0" in raw else None, data, split)
    row = first_row + compute.match_substring(column, "\0").index(True).as_py() + 1
    raise UserError(f"{_key(data, split)}: row {row} has a NUL character")


def _explain(error: Exception, data: DataConfig, split: str, rows: int) -> NoReturn:
    """Turn what the loader raised into a line that names the file."""
    if _is_text(data):
        _raise_where(_bad_utf8, data, split)
    place = f"{_key(data, split)}{_names(data, split)}"
    raise UserError(f"{place}: cannot be read after {rows} rows: {_one_line(error)}") from error


def _bad_utf8(raw: bytes) -> str | None:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"invalid UTF-8 at byte {error.start + 1} of the line (0x{raw[error.start]:02x})"
    return None


def _raise_where(find: Callable[[bytes], str | None], data: DataConfig, split: str) -> None:
    """Read the files again, one by one and as bytes; a UserError names the first bad file and
    line.
    """
    for path in input_files(data, split):
        for number, line in enumerate(_raw_lines(path), start=1):
            if mistake := find(line):
                raise UserError(f"{path}, line {number}: {mistake}")


def _raw_lines(path: Path) -> Iterator[bytes]:
    import fsspec

    try:
        with (
            fsspec.open(str(path), "rb", compression="infer") as file,
            # A character for every byte, and lines end where the loader ends them.
            TextIOWrapper(file, "latin-1") as text,
        ):
            for line in text:
                yield line.removesuffix("\n").encode("latin-1")
    except READING_ERRORS as error:
        raise UserError(f"{path} cannot be read: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
