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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_prep.errors import UserError
from data_prep.storage import make_folder, sync, temporary_name, write_atomically

FORMAT_VERSION = 2
LAST, BEST = "last.ckpt", "best.ckpt"
_DAMAGE = (pickle.UnpicklingError, LookupError, TypeError, ValueError, EOFError, AttributeError)
"""Errors of torch's unpickler that mean that the bytes are not its own."""


def save_checkpoint(checkpoint: dict[str, Any], path: Path, *copies: Path) -> None:
    """Write tensors and plain data; copies are other names of one file where possible.

    Raises:
        UserError: if the disk is full; a previous file is then unchanged.
    """
    make_folder(path.parent)
    try:
        write_atomically(path, lambda file: torch.save(checkpoint, file))
    except RuntimeError as error:
        if "unexpected pos" not in str(error):
            raise
        raise UserError(f"{path}: the disk is full; {what_remains(path)}") from error
    for copy in copies:
        link = temporary_name(copy)
        link.unlink(missing_ok=True)
        try:
            os.link(path, link)
            os.replace(link, copy)
            sync(copy.parent)
        except OSError:  # for instance a file system without hard links
            with open(path, "rb") as file:
                write_atomically(copy, partial(shutil.copyfileobj, file, length=1 << 20))


def what_remains(path: Path) -> str:
    """A few words on the checkpoint that a failure leaves at `path`."""
    return "the last checkpoint is untouched" if path.exists() else "there is no checkpoint yet"


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint as plain data, its tensors on the CPU and mapped privately.

    Raises:
        UserError: if the file is absent, damaged, contains more than plain data, or was written by
            another version.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:  # reads all files in small pieces
                raise zipfile.BadZipFile
    except OSError as error:
        raise UserError(f"{path}: cannot read the checkpoint: {error.strerror}") from error
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        raise _damaged(path) from error
    try:
        checkpoint: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (*_DAMAGE, RuntimeError) as error:
        if "allocate memory" in str(error):
            raise
        raise _damaged(path) from error
    if not isinstance(checkpoint, dict) or "format_version" not in checkpoint:
        raise _damaged(path)
    if checkpoint["format_version"] != FORMAT_VERSION:
        raise UserError(f"{path} was written by another version of sqrtlm and cannot be continued")
    return checkpoint


def _damaged(path: Path) -> UserError:
    best = path.with_name(BEST)
    other = best.exists() and not best.samefile(path)
    hint = f": continue from the best one with --resume {best}" if other else ""
    return UserError(f"{path} is damaged, or not a checkpoint of sqrtlm{hint}")
