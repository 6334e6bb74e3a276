"""The files of a trained model: `model.safetensors` has the weights, `model.json` the rest.

Each is complete or absent, and refused if damaged. Loading executes no code and copies nothing: the
tensors are views of the file, mapped privately.
"""

import json
import os
import stat
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.errors import UserError
from data_prep.settings import STRICT, NonNegative
from data_prep.storage import sha256_file, write_atomically, write_json_atomically
from lm.config import ModelConfig, OutputConfig, WordTable
from lm.model.build import restore_model
from lm.model.language_model import LanguageModel

FORMAT_VERSION = 3
WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"


@dataclass(frozen=True, kw_only=True)
class Description:
    """The content of `model.json`: with the weights, enough to build the model anywhere.

    Attributes:
        format_version: version of the file's format.
        model: the section `model` of the configuration.
        output: the section `output`.
        word_table: the section `word_table`, resolved.
        context: T that the model was trained with.
        eos_id: word id of `<eos>`.
        unk_id: word id of `<unk>`; None if the tokenizer has none.
        tokenizer_sha256: checksum of the tokenizer that the word ids belong to.
        weights_sha256: checksum of `model.safetensors`; `save_model` fills it in.
        step: optimizer steps that led to the weights.
        valid_perplexity: validation perplexity, by which the weights were chosen; None without a
            validation split.
    """

    __pydantic_config__ = STRICT

    format_version: int = FORMAT_VERSION
    model: ModelConfig
    output: OutputConfig
    word_table: WordTable
    context: int
    eos_id: NonNegative
    unk_id: NonNegative | None
    tokenizer_sha256: str
    weights_sha256: str = ""
    step: int
    valid_perplexity: float | None


_ADAPTER = TypeAdapter(Description)


def save_model(folder: Path, model: LanguageModel, description: Description) -> None:
    """Write `model.safetensors` and `model.json`.

    Raises:
        UserError: if the disk is full; files that were there before are unchanged.
    """
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()
    }
    try:
        sha256 = write_atomically(folder / WEIGHTS, lambda file: _write_tensors(tensors, file))
    except SafetensorError as error:
        if "os error 28" not in str(error):
            raise
        raise UserError(f"{folder / WEIGHTS}: the disk is full") from error
    write_json_atomically(folder / DESCRIPTION, asdict(description) | {"weights_sha256": sha256})


def load_model(folder: Path) -> tuple[LanguageModel, Description]:
    """Load the model of a run.

    Args:
        folder: folder of the two files.

    Returns:
        The model, in evaluation mode, on the CPU, its parameters of the dtype that they were
        trained in, with dense gradients; and its description.

    Raises:
        UserError: if a file is absent or damaged, or the two do not belong together.
    """
    description, weights = read_description(folder), folder / WEIGHTS
    if sha256_file(weights) != description.weights_sha256:
        raise UserError(f"{weights} is damaged, or not described by {DESCRIPTION}")
    output = replace(description.output, backend="auto")  # of this device, not of the training
    table = replace(description.word_table, row_wise=False)
    try:
        state = load_file(weights)
        model = restore_model(description.model, output, table, description.context, state)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise UserError(f"{weights} does not fit {DESCRIPTION}: {error}") from error
    for name, id in (("eos_id", description.eos_id), ("unk_id", description.unk_id)):
        if id is not None and id >= model.output.vocab_size:
            raise UserError(
                f"{folder / DESCRIPTION} is damaged: {name} is {id}, and the model has"
                f" {model.output.vocab_size} words"
            )
    return model.eval(), description


def read_description(folder: Path) -> Description:
    """Read `model.json` of a run.

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
    except NotADirectoryError as error:
        raise UserError(f"{folder} is a file, not the folder of a run") from error
    except FileNotFoundError as error:
        problem = f"{folder}: no trained model here ({DESCRIPTION} is missing)"
        if (folder / "config.yaml").exists():
            problem += f"; `lm train {folder} --resume auto` continues the training"
        raise UserError(problem) from error
    except UserError:
        raise
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {str(error).splitlines()[0]}") from error


def _write_tensors(tensors: dict[str, Tensor], file: BinaryIO) -> str:
    """Write an open file, by its name; returns the checksum.

    Safetensors replaces the file by a new one that only its owner may read. The checksum is taken
    here so that little time passes between the two files of a model.
    """
    save_file(tensors, file.name)
    os.chmod(file.name, stat.S_IMODE(os.fstat(file.fileno()).st_mode))
    with open(file.name, "rb+") as written:
        os.fsync(written.fileno())
    return sha256_file(Path(file.name))
