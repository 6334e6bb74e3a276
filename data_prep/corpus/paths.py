"""The local files of a corpus: paths, globs, folders and lists from the configuration."""

import glob
from collections.abc import Iterable
from pathlib import Path

from data_prep.errors import UserError
from data_prep.settings import DataConfig

SPLITS = ("train", "valid", "test")


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
        raise UserError(f"{key}: there is no file {path}")
    return found


def _visible_files(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """The files among `paths`, sorted, without hidden files and files in hidden subfolders."""
    return sorted(
        path
        for path in paths
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
