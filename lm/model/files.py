"""The files of a trained model: `model.safetensors` has the weights, `model.json` the rest.

Each is complete or absent, and refused if damaged. Loading executes no code and copies nothing: the
tensors are views of the file, mapped privately.
"""

import hashlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.errors import CheckpointError, DataError, StorageError
from data_prep.settings import NonNegative, Positive, Strict
from data_prep.storage import read_json, sha256_file, write_atomically, write_json_atomically
from lm.config import ModelConfig, OutputConfig, WordTable
from lm.model.build import build_model, without_weights
from lm.model.input_pieces import PIECES
from lm.model.language_model import LanguageModel
from lm.output import ClassTree

FORMAT_VERSION = 3
WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
_TREE, _INPUT_TREE = "output.tree.", "input_tree."
"""Prefixes of the arrays of trees in a model's state."""


@dataclass(frozen=True, kw_only=True)
class Description(Strict):
    """The content of `model.json`: with the weights, enough to build the model anywhere."""

    format_version: int = FORMAT_VERSION
    model: ModelConfig
    output: OutputConfig
    word_table: WordTable  # the section, resolved
    context: Positive  # T that the model was trained with
    eos_id: NonNegative
    unk_id: NonNegative
    tokenizer_sha256: str  # of the tokenizer that the word ids belong to
    weights_sha256: str = ""  # of `model.safetensors`; `save_model` fills it in
    step: NonNegative  # optimizer steps that led to the weights
    valid_perplexity: float | None  # of these weights; None if it was not measured
    valid_ndcg: float | None = None  # likewise, NDCG@10
    sha256: str = ""  # of all other keys; `save_model` fills it in


def save_model(folder: Path, weights: dict[str, Tensor], description: Description) -> None:
    """Write `model.safetensors`, given the `state_dict` of a model, and `model.json`.

    UserError if the file system refuses; files that were there before are unchanged.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}

    def write(file: BinaryIO) -> None:
        """Both files, of which the weights are the last to replace theirs."""
        content = asdict(description) | {"weights_sha256": _write_tensors(tensors, file)}
        write_json_atomically(folder / DESCRIPTION, content | {"sha256": _sha256(content)})

    try:
        write_atomically(folder / WEIGHTS, write)
    except SafetensorError as error:
        reason = re.search(r"I/O error: (.*) \(os error", str(error))
        if reason is None:
            raise
        raise StorageError(f"{folder / WEIGHTS} cannot be written: {reason[1]}") from error


def load_model(
    folder: Path,
    description: Description | None = None,
    state: dict[str, Tensor] | None = None,
    *,
    row_wise: bool = False,
) -> tuple[LanguageModel, Description]:
    """Load the model of a run, and its description unless it is given; `state`: other weights.

    The model is on the CPU, in evaluation mode, its parameters of the dtype that they were trained
    in; with `row_wise`, gradients have the visited rows only. UserError if a file is absent or
    damaged, or they do not fit.
    """
    description, weights = description or read_description(folder), folder / WEIGHTS
    if state is None and sha256_file(weights) != description.weights_sha256:
        raise CheckpointError(f"{weights} is damaged, or not described by {DESCRIPTION}")
    config, context = description.model, description.context
    output = replace(description.output, backend="auto")  # of this device, not of the training
    table = replace(description.word_table, row_wise=row_wise)
    counts, tree, input_tree = None, None, None
    try:
        state = load_file(weights) if state is None else state
        if output.tree == "adaptive":
            counts = state.get("output.index_of_word")  # for their number: ranks are in the state
        else:
            tree = _tree(state, _TREE)
        if any(name.startswith(_INPUT_TREE) for name in state):
            input_tree = _tree(state, _INPUT_TREE)
        sections = config, output, table, tree, context
        with without_weights():
            model = build_model(
                *sections, input_tree=input_tree, pieces=state.get(PIECES), counts=counts
            )
        model.load_state_dict(state, assign=True)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{weights} does not fit {DESCRIPTION}: {error}") from error
    for name, id in (("eos_id", description.eos_id), ("unk_id", description.unk_id)):
        if id >= model.output.vocab_size:
            raise CheckpointError(
                f"{folder / DESCRIPTION} is damaged: {name} is {id}, and the model has"
                f" {model.output.vocab_size} words"
            )
    return model.eval(), description


def read_description(folder: Path) -> Description:
    """Read `model.json` of a run; a UserError says that it is absent, damaged or too old."""
    path = folder / DESCRIPTION
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file, not the folder of a run")
    if not path.exists():
        hint = "`lm train CONFIG` trains one" if folder.exists() else "there is no such folder"
        if any((folder / "checkpoints").glob("*.ckpt")):
            hint = f"`lm train {folder} --resume auto` continues the training"
        raise CheckpointError(f"{folder}: no trained model here ({DESCRIPTION} is missing); {hint}")
    try:
        description: Description = read_json(path, Description, FORMAT_VERSION)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if description.sha256 != _sha256(json.loads(path.read_bytes())):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the recorded one")
    return description


def _sha256(content: dict[str, Any]) -> str:
    """Checksum of `model.json` without its own key."""
    others = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _tree(state: dict[str, Tensor], prefix: str) -> ClassTree:
    arrays = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    return ClassTree.from_state(arrays)


def _write_tensors(tensors: dict[str, Tensor], file: BinaryIO) -> str:
    """Write an open file, by its name; returns the checksum."""
    save_file(tensors, file.name)  # which replaces it by one that only its owner may read
    os.chmod(file.name, stat.S_IMODE(os.fstat(file.fileno()).st_mode))
    with open(file.name, "rb+") as written:
        os.fsync(written.fileno())
    return sha256_file(Path(file.name))
