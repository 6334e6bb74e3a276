"""The files of a corpus and their lines, between LF, CR or CRLF, in UTF-8 without NUL.

They are those of plain text, or of a column of JSON, CSV, parquet or a dataset on the hub, which is
a stream of `datasets`: only one batch of rows is in memory. Rows without text (null; in CSV, which
has no null, an empty cell) are left out and counted.
"""

import csv
import glob
import json
import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import BufferedReader, TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from data_prep.corpus.formats import COLUMN_ALONE, decompressed, likely_encoding, reading
from data_prep.errors import DataError
from data_prep.settings import BYTE_ORDER_MARK, DataConfig
from data_prep.storage import open_to_read

if TYPE_CHECKING:
    from datasets import IterableDataset

SPLITS = ("train", "valid", "test")
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
ROWS_PER_BATCH = 256
"""Small, because a row may be a whole book and a batch is in memory several times."""
SURROGATE = re.compile("[\ud800-\udfff]")
CSV_SEPARATORS = ",\t;|"
NO_VALUE = {"NA", "N/A", "NaN", "nan", "NULL", "null", "None", "<NA>", r"\N"}
"""What programs write for a value that is missing."""

_log = logging.getLogger(__name__)


def splits(data: DataConfig) -> list[str]:
    """List the splits that the configuration gives, train first; UserError without train."""
    if data.hub is not None:
        offered = open_hub(data, "train")
        return [split for split in SPLITS if HUB_SPLITS[split] in offered]
    if not data.files.train:
        raise DataError(
            "data.files.train is not set: expected the files of the training split, or data.hub"
        )
    if data.split != "files":
        return [*SPLITS]
    return [split for split in SPLITS if getattr(data.files, split)]


def input_files(data: DataConfig, split: str) -> list[Path]:
    """List the local files of a split in reading order.

    Files of a glob or a folder are sorted by name; lists keep their order. A local folder given as
    `data.hub` has all of its files for every split.
    """
    if data.hub is not None:
        folder = hub_folder(data)
        return [] if folder is None else _visible_files(folder, folder.rglob("*"))
    given = getattr(data.files, split if data.split == "files" else "train")
    if not given:
        raise DataError(
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


def _expanded(folder: Path, name: str, key: str) -> list[Path]:
    path = folder / name
    if path.is_file():
        return [path]
    if path.is_dir():
        found = _visible_files(path, path.iterdir())
        if not found:
            raise DataError(f"{key}: the folder {path} has no files")
        return found
    matches = glob.glob(name, root_dir=folder, recursive=True)
    found = sorted(folder / match for match in matches if (folder / match).is_file())
    if not found:
        hint = ""
        if not Path(name).is_absolute() and folder == Path("."):
            hint = ": names are relative to the current folder, or to data.dir if it is given"
        raise DataError(f"{key}: there is no file {path.absolute()}{hint}")
    return found


_HIDDEN = (".", "_SUCCESS", "_committed_", "_started_")


def _visible_files(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """The files among `paths`, sorted, without Spark's markers and hidden files and subfolders."""
    return sorted(
        path
        for path in paths
        if path.is_file()
        and not any(part.startswith(_HIDDEN) for part in path.relative_to(folder).parts)
    )


def hub_rows(data: DataConfig, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split of `data.hub`; UserError if it is missing."""
    dataset = open_hub(data, split)[HUB_SPLITS[split]]
    tables = iter(dataset.with_format("arrow").iter(batch_size=ROWS_PER_BATCH))
    while True:
        with _silent_datasets():
            table = next(tables, None)
        if table is None:
            return
        chosen = {data.text_field} & {*table.column_names}
        yield from (table.select(chosen) if chosen else table).to_pylist()


def open_hub(data: DataConfig, split: str) -> dict[str, "IterableDataset"]:
    """Return the splits of `data.hub` by the hub's names; UserError if `split` is missing."""
    from datasets import load_dataset

    local = hub_folder(data)
    name = str(local.absolute()) if local else data.hub
    with reading(f"data.hub {data.hub}"), _silent_datasets():
        offered = dict(load_dataset(name, data.hub_config, streaming=True))
    if HUB_SPLITS[split] not in offered:
        raise DataError(
            f"data.hub {data.hub} has no split {HUB_SPLITS[split]} (it has {', '.join(offered)})"
        )
    return offered


@contextmanager
def _silent_datasets() -> Iterator[None]:
    """Suppress log lines of the hub's libraries about an error that they raise as well."""
    levels = {name: logging.getLogger(name).level for name in ("datasets", "huggingface_hub")}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def hub_revision(data: DataConfig) -> str:
    """Return the revision of `data.hub`, a commit; UserError if it cannot be found."""
    from datasets import load_dataset_builder

    with reading(f"data.hub {data.hub}"), _silent_datasets():
        return str(load_dataset_builder(data.hub, data.hub_config).hash)


def read_text(name: str, table: str = COLUMN_ALONE) -> Iterator[str]:
    """Yield the lines of one text file, which may be compressed, of a pipe, or of stdin (`-`).

    `table` is what the message says if the file is a table, such as parquet. UserError if the file
    cannot be read or is no text, or a line is not UTF-8 or contains a NUL character.
    """
    file = sys.stdin.buffer if name == "-" else open_to_read(Path(name))
    if file.closed:
        raise DataError("stdin (-) can be only one of the files")
    with file, reading(name):
        yield from _decoded(decompressed(cast(BufferedReader, file), name, table), name)


class TextFile(NamedTuple):
    """A file with text: plain, or in a column."""

    path: Path
    format: str = "text"  # see `data.format`
    field: str = "text"  # the column

    @property
    def source(self) -> str:
        """The path, and which column if there are some."""
        return f"{self.path}" + f", column {self.field}" * (self.format != "text")

    def lines(self) -> Iterator[str]:
        """Yield the lines; raises as `read_text`."""
        return chain.from_iterable(self.rows())

    def rows(self) -> Iterator[list[str]]:
        """Yield the lines of each row; a line of plain text is a row."""
        path, format, field = self
        if format == "text":
            table = "data.format: parquet and data.text_field read its text"
            yield from ([line] for line in read_text(str(path), table))
        else:
            nulls = (None, "") if format == "csv" else (None,)
            with reading(str(path)):
                yield from column_rows(records(path, format, field), field, str(path), nulls)


def records(
    path: Path, format: str, field: str | None = None, fields: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file: column → value; of parquet, `field` alone if it is given.

    The format is `json` (lines, or one array), `parquet` or `csv` (separated as its first line is),
    which may have neither `field` nor one of the `fields` twice.
    """
    if format == "parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            columns = [field] if field in file.schema_arrow.names else None
            for batch in file.iter_batches(ROWS_PER_BATCH, columns=columns):
                yield from batch.to_pylist()
        return
    lines = read_text(str(path))
    if format == "csv":
        header = next(lines, "")
        if field not in (None, header.strip('"')) and not {*CSV_SEPARATORS} & {*header}:
            expected = "expected a first line of names, separated by a comma, tab, semicolon or |"
            raise DataError(f"{path}: {expected}, got {header!r:.60}")
        yield from csv_rows(chain([header], lines), fields=[*fields, *filter(None, [field])])
        return
    for number, line in enumerate(lines, 1):
        is_array = line.lstrip().startswith("[")
        text = "\n".join([line, *lines]) if is_array else line
        has_escapes = "\\ud" in text.lower()
        values = [_json_value(text, number)] if text.strip() and not is_array else []
        for row, record in enumerate(json.loads(text) if is_array else values, number):
            if not isinstance(record, dict):
                raise DataError(f"{path}, line {number}: expected JSON objects, got {record!r:.40}")
            if has_escapes and (half := SURROGATE.search(json.dumps(record, ensure_ascii=False))):
                raise DataError(f"{path}, row {row}: {half[0]!a} is half of a pair")
            yield record


def looks_like_data(names: Iterable[str]) -> bool:
    """Whether one of the names of columns is a number or a date, as in a table without names."""
    return any(re.fullmatch(r"[-+]?\d[-+\d.,:eETZ ]*", name) for name in names if name)


def csv_rows(
    lines: Iterator[str], *, strict: bool = True, fields: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV file.

    With `strict`, quotes that are not closed and cells without a name are a `csv.Error`, and two of
    the `fields` with one name.
    """
    csv.field_size_limit(sys.maxsize)
    header = next(lines, "")
    text = (f"{line}\n" for line in chain([header], lines))
    separator = max(CSV_SEPARATORS, key=header.count)
    reader = csv.DictReader(text, delimiter=separator, strict=strict)
    if twice := [name for name in fields if [*(reader.fieldnames or [])].count(name) > 1]:
        raise csv.Error(f"there are two columns {twice[0]!r}")
    for number, row in enumerate(reader, 1):
        if strict and None in row and any(row.pop(None)):
            problem = "more cells than the first line has names: quote those with separators"
            raise csv.Error(f"row {number} has {problem}")
        yield row


def _json_value(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error


def column_rows(
    rows: Iterator[dict[str, Any]], field: str, name: str, nulls: Collection[str | None]
) -> Iterator[list[str]]:
    """Yield the lines of each row of a column of text, without rows that have one of `nulls`."""
    first = list(islice(rows, ROWS_PER_BATCH))  # a row of JSON may lack a column
    if first and not any(field in row for row in first):
        columns = ", ".join(map(repr, dict.fromkeys(chain.from_iterable(first))))
        raise DataError(f"data.text_field is {field!r}: {name} has only the columns {columns}")
    num_rows, num_nulls, num_named = 0, 0, 0
    for num_rows, row in enumerate(chain(first, rows), 1):
        if (text := row.get(field)) in nulls:
            num_nulls += 1
            continue
        if not isinstance(text, str) or "\0" in text:
            others = ", ".join(repr(each) for each, value in row.items() if isinstance(value, str))
            mistake = f"{text!r:.40}, not text," if not isinstance(text, str) else "a NUL character"
            hint = f"; columns of text: {others}" if others and not isinstance(text, str) else ""
            raise DataError(f"{name}, row {num_rows}: {mistake} in {field!r}{hint}")
        num_named += text in NO_VALUE
        text = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")
        yield [line.removeprefix(BYTE_ORDER_MARK) for line in text.split("\n")]
    if num_named:
        log_once(
            f"{name}: {num_named:,} rows have a {field!r} such as NA, a word: or leave it empty"
        )
    if num_nulls:
        log_once(f"{name}: {num_nulls:,} of {num_rows:,} rows have no {field!r} and are left out")


@cache
def log_once(message: str) -> None:
    """Log what every reading of a file finds."""
    _log.warning("%s", message)


def _decoded(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of an open file; UserError names the file and the first wrong line."""
    # In Latin-1 every byte is a character: a wrong byte is found in its line.
    with TextIOWrapper(file, "latin-1") as text:
        for number, line in enumerate(text, start=1):
            raw = line.removesuffix("\n").encode("latin-1")
            try:
                decoded = raw.decode()
            except UnicodeDecodeError as error:
                place = f"at byte {error.start + 1} of the line (0x{raw[error.start]:02x})"
                further = f"\n{text.read(4096)}".rpartition("\n")[0].encode("latin-1")
                mistake = f"invalid UTF-8 {place}: {likely_encoding(raw, further)}"
                raise DataError(f"{name}, line {number}: {mistake}") from error
            if "\0" in decoded:
                raise DataError(f"{name}, line {number}: a NUL character")
            yield decoded.removeprefix(BYTE_ORDER_MARK)
