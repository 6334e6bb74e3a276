"""What a run leaves on disk of a model: checkpoints to go on from, and the model itself for use.

Checkpoints and models are written whole or not at all, from the tensors where they lie, and refused
if damaged. Reading them executes nothing and copies nothing: the file is verified in one pass and
then mapped privately, so that a page takes memory once it is used and a change never reaches the
file. A file that is replaced by renaming, as ours are, stays as it was for whoever has mapped it.
"""

import json
import os
import pickle
import stat
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins import CheckpointIO
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.errors import UserError
from data_prep.settings import STRICT
from data_prep.storage import sha256_file, write_atomically, write_json_atomically
from lm.config import ModelConfig, OutputConfig
from lm.model.language_model import LanguageModel, build_model
from lm.output import ClassTree

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's way to the disk: temporary file, fsync, rename; zip checksums verified before
    anything is read.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write `checkpoint` to `path`; a full disk leaves the file that was there.

        Raises:
            UserError: if the disk is full.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(path, lambda file: torch.save(checkpoint, file))
        except RuntimeError as error:
            if "unexpected pos" not in str(error):
                raise
            raise UserError(
                f"{path}: the disk is full; the checkpoint before it is untouched"
            ) from error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint, always as plain data; its tensors are views of the file, mapped
        privately.

        Raises:
            UserError: if the file is absent, damaged, or holds more than plain data.
        """
        return _read(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint."""
        Path(path).unlink(missing_ok=True)


def batches_done(path: Path) -> int:
    """How far the training of a checkpoint had come; reads next to nothing of the file.

    Raises:
        UserError: if it is no checkpoint of ours.
    """
    checkpoint = _read(path, weights=False)
    try:
        return int(checkpoint["sqrtlm"]["progress"]["batches_done"])
    except (KeyError, TypeError) as error:
        raise _damaged(path) from error


def _read(path: Path, *, weights: bool = True) -> dict[str, Any]:
    """A checkpoint as plain data, its tensors mapped; without `weights`, the checksums of these are
    not verified.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if weights or "/data/" not in name:
                    _read_through(archive, name)
    except OSError as error:
        raise UserError(f"{path}: cannot read the checkpoint: {error.strerror}") from error
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        raise _damaged(path) from error
    try:
        checkpoint: dict[str, Any] = torch.load(
            path, map_location="cpu", mmap=True, weights_only=True
        )
        return checkpoint
    except (pickle.UnpicklingError, RuntimeError) as error:
        if "allocate memory" in str(error):
            raise
        raise _damaged(path) from error


def _read_through(archive: zipfile.ZipFile, name: str) -> None:
    """Read a file of an archive in small pieces; its checksum is compared at its end."""
    with archive.open(name) as file:
        while file.read(1 << 20):
            pass


def _damaged(path: Path) -> UserError:
    return UserError(f"{path}: damaged checkpoint or none of ours")


@dataclass(frozen=True, kw_only=True)
class Description:
    """What `model.json` says besides the weights: enough to build the model anywhere."""

    __pydantic_config__ = STRICT

    format_version: int
    model: ModelConfig
    output: OutputConfig
    context: int
    """T that the model was trained with."""
    eos_id: int
    unk_id: int | None
    tokenizer_sha256: str
    weights_sha256: str
    step: int
    """Optimizer steps that led to these weights."""
    valid_perplexity: float | None
    """The reason why these weights were kept; None without a validation split."""


def save_model(folder: Path, model: LanguageModel, description: Description) -> None:
    """Write `model.safetensors` and `model.json`; `description.weights_sha256` is filled in
    here.
    """
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    sha256 = write_atomically(folder / WEIGHTS, lambda file: _write_tensors(tensors, file))
    write_json_atomically(folder / DESCRIPTION, asdict(description) | {"weights_sha256": sha256})


def _write_tensors(tensors: dict[str, Tensor], file: BinaryIO) -> str:
    """Write an open file by its name, since safetensors puts a new file, closed to others, in its
    place; returns its checksum, so that the time between the two files of a model is short.
    """
    save_file(tensors, file.name)
    os.chmod(file.name, stat.S_IMODE(os.fstat(file.fileno()).st_mode))
    with open(file.name, "rb+") as written:
        os.fsync(written.fileno())
    return sha256_file(Path(file.name))


def load_model(folder: Path) -> tuple[LanguageModel, Description]:
    """The model of a run or an export, in evaluation mode, on the CPU, its parameters of the type
    that they were trained in: views of the file, mapped privately.

    Raises:
        UserError: if a file is absent or damaged, or the two do not belong together.
    """
    description = read_description(folder)
    weights = folder / WEIGHTS
    if sha256_file(weights) != description.weights_sha256:
        raise UserError(f"{weights}: damaged, or not the weights that {DESCRIPTION} describes")
    try:
        state = load_file(weights)
        prefix = "output.tree."
        tree = ClassTree.from_state(
            {
                name.removeprefix(prefix): value
                for name, value in state.items()
                if name.startswith(prefix)
            }
        )
        # Where the kernels ran says nothing of the model.
        output = replace(description.output, backend="auto")
        with torch.device("meta"):
            model = build_model(description.model, output, tree, description.context)
        model.load_state_dict(state, assign=True)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise UserError(f"{weights}: does not fit {DESCRIPTION}: {error}") from error
    return model.eval(), description


def read_description(folder: Path) -> Description:
    """`model.json` of a run or an export.

    Raises:
        UserError: if it is absent, damaged or of another version.
    """
    path = folder / DESCRIPTION
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            raise UserError(f"{path}: format version {version}, expected {FORMAT_VERSION}")
        description: Description = _ADAPTER.validate_json(json.dumps(values))
        return description
    except FileNotFoundError as error:
        raise UserError(f"{folder}: no trained model here ({DESCRIPTION} is missing)") from error
    except (ValidationError, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: damaged: {str(error).splitlines()[0]}") from error


_ADAPTER = TypeAdapter(Description)
