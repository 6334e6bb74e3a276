"""The files of a corpus, and the text column of those that are not plain text.

Columns are streams of `datasets`: nothing is copied into a cache, and only one batch of rows is in
memory at a time.
"""

import codecs
import csv
import glob
import locale
import logging
import lzma
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zstandard

from data_prep.errors import UserError
from data_prep.settings import DataConfig
from data_prep.storage import CHUNK_BYTES, open_to_read

if TYPE_CHECKING:
    from datasets import IterableDataset
    from pyarrow import ChunkedArray

SPLITS = ("train", "valid", "test")
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
ROWS_PER_BATCH = 256
"""Small, because a row may be a whole book and a batch is in memory several times."""
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
"""What `datasets` raises for a bad file; pyarrow and Unicode raise ValueErrors and TypeErrors."""


def splits(data: DataConfig) -> list[str]:
    """List the splits that the configuration gives, train first; UserError without train."""
    if data.hub is not None:
        offered = _hub_with(data, "train")
        return [split for split in SPLITS if HUB_SPLITS[split] in offered]
    if not data.files.train:
        raise UserError(
            "data.files.train is not set: expected the files of the training split, or data.hub"
        )
    return [split for split in SPLITS if getattr(data.files, split)]


def input_files(data: DataConfig, split: str) -> list[Path]:
    """List the local files of a split in reading order.

    Files of a glob or a folder are sorted by name; lists keep their order. A hub name has no local
    files; a local folder given as `data.hub` has the same files for every split: all of its files.
    """
    if data.hub is not None:
        folder = hub_folder(data)
        return [] if folder is None else _visible_files(folder, folder.rglob("*"))
    given = getattr(data.files, split)
    if not given:
        raise UserError(
            f"data.files.{split} is not set: expected a file, a glob, a folder or a list"
        )
    names = [given] if isinstance(given, str) else given
    key = split_key(data, split)
    return [path for name in names for path in _expanded(Path(data.dir), name, key)]


def hub_folder(data: DataConfig) -> Path | None:
    """Return the local folder that `data.hub` names; None if it is not a local folder."""
    folder = Path(data.dir, data.hub or "")
    return folder if data.hub is not None and folder.is_dir() else None


def split_key(data: DataConfig, split: str) -> str:
    """Return the configuration key of a split, for messages."""
    return f"data.files.{split}" if data.hub is None else f"data.hub {data.hub}, {split} split"


def split_files(data: DataConfig, split: str) -> str:
    """Return the local files of a split in brackets, for messages; empty for the hub."""
    if data.hub is not None:
        return ""
    paths = input_files(data, split)
    return f" ({paths[0]})" if len(paths) == 1 else f" ({paths[0]} and {len(paths) - 1} more)"


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
        hint = ""
        if not Path(name).is_absolute() and folder == Path("."):
            hint = ": names are relative to the current folder, or to data.dir if it is given"
        raise UserError(f"{key}: there is no file {path.absolute()}{hint}")
    return found


def _visible_files(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """The files among `paths`, sorted, without hidden files and files in hidden subfolders."""
    return sorted(
        path
        for path in paths
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def columns(data: DataConfig, split: str) -> Iterator["ChunkedArray"]:
    """Yield the text column of a split, up to `ROWS_PER_BATCH` rows at a time.

    UserError if the split or column is missing; a damaged file raises one of `READING_ERRORS`.
    """
    on_hub = data.hub is not None
    dataset = _hub_with(data, split)[HUB_SPLITS[split]] if on_hub else _load_files(data, split)
    tables = iter(dataset.with_format("arrow").iter(batch_size=ROWS_PER_BATCH))
    while True:
        with _silent_datasets():
            table = next(tables, None)
        if table is None:
            return
        _check_field(table.column_names, data, split)
        yield table.column(data.text_field)


def load_hub(data: DataConfig) -> dict[str, "IterableDataset"]:
    """Open `data.hub` and return its splits under the hub's names; UserError if that fails."""
    from datasets import load_dataset

    local = hub_folder(data)
    name = str(local.absolute()) if local else data.hub
    try:
        with _silent_datasets():
            return dict(load_dataset(name, data.hub_config, streaming=True))
    except READING_ERRORS as error:
        raise UserError(f"data.hub {data.hub} cannot be opened: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Return the operating system's reason, or the exception's type and message, on one line."""
    text = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _hub_with(data: DataConfig, split: str) -> dict[str, "IterableDataset"]:
    """The splits of `data.hub`, `split` among them."""
    if HUB_SPLITS[split] not in (offered := load_hub(data)):
        raise UserError(
            f"data.hub {data.hub} has no split {HUB_SPLITS[split]} (it has {', '.join(offered)})"
        )
    return offered


def _check_field(names: Iterable[str], data: DataConfig, split: str) -> None:
    if data.text_field not in names:
        raise UserError(
            f"data.text_field is {data.text_field!r}: {split_key(data, split)} has only the columns"
            f" {', '.join(names)}"
        )


def _load_files(data: DataConfig, split: str) -> "IterableDataset":
    from datasets import load_dataset

    paths = input_files(data, split)
    for path in paths:
        if path.suffix == ".zst":
            check_zstandard(path)
    # `datasets` interprets names as globs and silently finds nothing for a name with brackets.
    names = [glob.escape(str(path.absolute())) for path in paths]
    options: dict[str, Any] = {}
    if data.format == "csv":
        _check_locale(paths)
        # By default "NA", "null" and the like become missing values, digits become numbers, and
        # columns that are not read must have one type.
        for path in paths:
            _check_field(_csv_columns(path), data, split)
        name = data.text_field
        options = {"keep_default_na": False, "usecols": [name], "converters": {name: str}}
    with _silent_datasets():
        return load_dataset(
            data.format, data_files={"train": names}, split="train", streaming=True, **options
        )


def _csv_columns(path: Path) -> list[str]:
    import fsspec

    with fsspec.open(
        str(path), "rt", encoding="utf-8-sig", newline="", compression="infer"
    ) as file:
        return next(csv.reader(file), [])


def check_zstandard(path: Path) -> None:
    """Decompress the whole file: `datasets` reads a truncated one without an error."""
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


def _check_locale(paths: list[Path]) -> None:
    """Require UTF-8: `datasets` always decodes compressed CSV by the encoding of the locale."""
    encoding = codecs.lookup(locale.getpreferredencoding(False)).name
    for path in paths if encoding != "utf-8" else ():
        if path.suffix in COMPRESSED:
            raise UserError(
                f"{path}: compressed CSV is decoded by the locale's encoding, {encoding}: expected"
                " UTF-8 (set PYTHONUTF8=1)"
            )


@contextmanager
def _silent_datasets() -> Iterator[None]:
    """Suppress log lines of the hub's libraries about an error that they raise as well."""
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
