"""The files of a corpus, and the rows of a dataset on the hub.

Rows are streams of `datasets`: nothing is copied into a cache, and only one batch of rows is in
memory at a time.
"""

import glob
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.corpus.formats import reading
from data_prep.errors import DataError
from data_prep.settings import DataConfig

if TYPE_CHECKING:
    from datasets import IterableDataset

SPLITS = ("train", "valid", "test")
HUB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
ROWS_PER_BATCH = 256
"""Small, because a row may be a whole book and a batch is in memory several times."""


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


def _visible_files(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """The files among `paths`, sorted, without hidden files and files in hidden subfolders."""
    return sorted(
        path
        for path in paths
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
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
