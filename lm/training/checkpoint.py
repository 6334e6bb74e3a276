"""Checkpoints: one file with everything that a run continues from.

A checkpoint is complete or absent: it is written to a temporary file, synchronized to the disk and
renamed. Reading one never executes code and copies nothing: the checksums of the zip archive are
verified in one pass, then the tensors are mapped privately, so that a page takes memory once it is
used and a change never reaches the file. A mapping of a file that is replaced later remains valid.
"""

import logging
import pickle
import re
import shutil
import struct
import warnings
import zipfile
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from data_prep.errors import CheckpointError, StorageError
from data_prep.storage import link_or_copy, make_folder, write_atomically
from lm.training.progress import Progress

FORMAT_VERSION = 2
"""The number changes when a version can no longer read what earlier ones have written."""
LAST, BEST = "last.ckpt", "best.ckpt"
_NUMBERED = re.compile(r"step-(\d+)\.ckpt$")
_log = logging.getLogger(__name__)
_DAMAGE = (
    *(pickle.UnpicklingError, LookupError, TypeError, ValueError, EOFError, AttributeError),
    *(AssertionError, struct.error),
)
"""Errors of torch's unpickler that mean that the bytes are not its own."""


def save_checkpoint(checkpoint: dict[str, Any], path: Path, *copies: Path) -> None:
    """Write tensors and plain data; copies are other names of one file where possible.

    Raises:
        StorageError: if the disk is full; a previous file is then unchanged.
    """
    make_folder(path.parent)
    tensors = (each for each in tree_iter(checkpoint) if isinstance(each, torch.Tensor))
    num_bytes, free = sum(each.nbytes for each in tensors), shutil.disk_usage(path.parent).free
    if num_bytes > free:  # its file has a little more
        raise StorageError(
            f"{path}: a checkpoint has {num_bytes / 1e6:,.0f} MB, and the disk has"
            f" {free / 1e6:,.0f} MB free; {what_remains(path)}"
        )
    try:
        write_atomically(path, lambda file: torch.save(checkpoint, file))
    except RuntimeError as error:
        if "unexpected pos" not in str(error):
            raise
        raise StorageError(f"{path}: the disk is full; {what_remains(path)}") from error
    for copy in copies:
        link_or_copy(path, copy)


def save_first_checkpoint(state: dict[str, torch.Tensor], text_sha256: str, path: Path) -> None:
    """Write the checkpoint that a run starts with, of weights alone; `text_sha256` as in others."""
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    content = {"format_version": FORMAT_VERSION, "model": weights, "text_sha256": text_sha256}
    save_checkpoint(content | {"progress": asdict(Progress())}, path)


def numbered_name(step: int) -> str:
    """Name of a checkpoint that `train.keep_checkpoints` keeps."""
    return f"step-{step}.ckpt"


def keep_newest(folder: Path, num_kept: int, step: int) -> None:
    """Delete all but the newest numbered checkpoints of a folder, whose run is at `step`.

    Those of later steps are older: the run has gone back to an earlier checkpoint since.
    """
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := _NUMBERED.match(path.name))]
    for _, _, path in sorted([(n <= step, n, path) for n, path in found], reverse=True)[num_kept:]:
        path.unlink()


def what_remains(path: Path) -> str:
    """A few words on the checkpoint that a failure to write `path` leaves in its folder."""
    has_last = path.with_name(LAST).exists()
    return "the last checkpoint is untouched" if has_last else "there is no checkpoint yet"


def load_newest(last: Path) -> tuple[Path, dict[str, Any]]:
    """Read the last checkpoint or, if that is damaged, the newest in its folder that is not.

    Numbered ones come first: the best may be of steps that the run has gone back before. A warning
    says why the last one is passed over; its error is raised if no other can be read.
    """
    try:
        return last, load_checkpoint(last)
    except CheckpointError as error:
        refused = error
    found: list[tuple[tuple[bool, int], Path, dict[str, Any]]] = []
    for path in sorted(last.parent.glob("*.ckpt")):
        if not path.samefile(last):
            try:
                checkpoint = load_checkpoint(path)
                is_numbered = _NUMBERED.match(path.name) is not None
                age = is_numbered, checkpoint["progress"]["batches_done"]
                found.append((age, path, checkpoint))
            except CheckpointError as error:
                _log.warning("%s", error)
    if not found:
        raise refused
    _, path, checkpoint = max(found, key=itemgetter(0))
    _log.warning("%s: it is passed over for %s", refused, path)
    return path, checkpoint


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint as plain data, its tensors on the CPU and mapped privately.

    Raises:
        CheckpointError: if the file is absent, damaged, contains more than plain data, or has a
            format of another version.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:  # reads all files in small pieces
                raise zipfile.BadZipFile
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the checkpoint: {error.strerror}") from error
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        raise _damaged(path) from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Detected pickle protocol")
            checkpoint: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (*_DAMAGE, RuntimeError, UserWarning) as error:
        if "allocate memory" in str(error):
            raise
        raise _damaged(path) from error
    if not isinstance(checkpoint, dict) or "format_version" not in checkpoint:
        raise _damaged(path)
    if (found := checkpoint["format_version"]) != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {found} of checkpoints, and this version of sqrtlm reads"
            f" {FORMAT_VERSION}: continue with the version that env.json of the run names"
        )
    return checkpoint


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged, or not a checkpoint of sqrtlm")
