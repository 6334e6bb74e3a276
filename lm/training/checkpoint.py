"""Checkpoints: one file with everything that a run continues from.

A checkpoint is complete or absent: it is written to a temporary file, synchronized to the disk and
renamed. Reading one never executes code and copies nothing: the checksums of the zip archive are
verified in one pass, then the tensors are mapped privately, so that a page takes memory once it is
used and a change never reaches the file. A mapping of a file that is replaced later remains valid.
"""

import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from data_prep.errors import UserError
from data_prep.storage import make_folder, write_atomically

FORMAT_VERSION = 2
LAST, BEST = "last.ckpt", "best.ckpt"


def save_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write tensors and plain data; if the disk is full, a previous file is unchanged.

    Raises:
        UserError: if the disk is full.
    """
    make_folder(path.parent)
    try:
        write_atomically(path, lambda file: torch.save(checkpoint, file))
    except RuntimeError as error:
        if "unexpected pos" not in str(error):
            raise
        raise UserError(f"{path}: the disk is full; {what_remains(path)}") from error


def copy_checkpoint(source: Path, target: Path) -> None:
    """Make `target` the same checkpoint as `source`: another name of one file where possible."""
    link = target.with_name(f".{target.name}.tmp")
    link.unlink(missing_ok=True)
    try:
        os.link(source, link)
        os.replace(link, target)
    except OSError:  # for instance a file system without hard links
        with open(source, "rb") as file:
            write_atomically(target, lambda copy: shutil.copyfileobj(file, copy, 1 << 20))


def what_remains(path: Path) -> str:
    """A few words on the checkpoint that a failure leaves at `path`."""
    return "the last checkpoint is untouched" if path.exists() else "there is no checkpoint yet"


def load_checkpoint(path: Path, *, verify_tensors: bool = True) -> dict[str, Any]:
    """Read a checkpoint as plain data, its tensors on the CPU and mapped privately.

    Raises:
        UserError: if the file is absent, damaged, contains more than plain data, or was written by
            another version.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if verify_tensors or "/data/" not in name:
                    _verify(archive, name)
    except OSError as error:
        raise UserError(f"{path}: cannot read the checkpoint: {error.strerror}") from error
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        raise _damaged(path) from error
    try:
        checkpoint: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        if "allocate memory" in str(error):
            raise
        raise _damaged(path) from error
    if not isinstance(checkpoint, dict) or not {"format_version", "sqrtlm"} & checkpoint.keys():
        raise _damaged(path)
    if checkpoint.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path} was written by another version of sqrtlm and cannot be continued")
    return checkpoint


def batches_done(path: Path) -> int:
    """The number of batches that a checkpoint was trained on; reads a small part of the file.

    Raises:
        UserError: as `load_checkpoint`.
    """
    try:
        return int(load_checkpoint(path, verify_tensors=False)["progress"]["batches_done"])
    except (KeyError, TypeError) as error:
        raise _damaged(path) from error


def _verify(archive: zipfile.ZipFile, name: str) -> None:
    """Read a file of an archive in small pieces, at the end of which its checksum is compared."""
    with archive.open(name) as file:
        while file.read(1 << 20):
            pass


def _damaged(path: Path) -> UserError:
    best = path.with_name(BEST)
    other = best.exists() and not best.samefile(path)
    hint = f": continue from the best one with --resume {best}" if other else ""
    return UserError(f"{path} is damaged, or not a checkpoint of sqrtlm{hint}")
