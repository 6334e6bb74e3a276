"""The files of a model: complete, refused if damaged, and readable across versions."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError

from data_prep.errors import StorageError, UserError
from lm.config import ModelConfig, OutputConfig, WordTable
from lm.model import files
from lm.model.build import build_model
from lm.model.files import Description, _sha256, load_model, read_description, save_model
from lm.model.language_model import LanguageModel
from lm.output import ClassTree


def saved(
    folder: Path, tree: str = "two_level", dtype: torch.dtype = torch.float32, **settings: Any
) -> LanguageModel:
    table = WordTable(tied=settings.pop("tied", False))
    config = ModelConfig(**{"hidden": 8, "heads": 2, **settings})
    output = OutputConfig(tree=tree)
    classes, counts = torch.tensor([0, 1, 2, 0, 1, 1, 2]), torch.tensor([9, 2, 8, 3, 7, 4, 6])
    two_level = ClassTree.two_level(classes, 1)
    class_tree = {"adaptive": None, "full": ClassTree.full(7)}.get(tree, two_level)
    input_tree = two_level if tree == "full" else None
    sections: Any = config, output, table, class_tree, 6
    pieces = torch.tensor([[0, 1], [-1, -1], [2, -1], [7, 3], [4, 5], [6, -1], [1, 1]]).int()
    model = build_model(*sections, input_tree=input_tree, pieces=pieces, counts=counts)
    figures: Any = {"context": 6, "eos_id": 1, "unk_id": 0, "step": 3, "valid_perplexity": 4.5}
    named: Any = {"model": config, "output": output, "word_table": table}
    description = Description(**named, tokenizer_sha256="t", **figures)
    save_model(folder, model.to(dtype).state_dict(), description)
    return model


PATH_SUM = {"tree": "full", "input_embedding": "path_sum", "input_tree": "two_level"}


@pytest.mark.parametrize("backbone", ["lstm", "transformer"])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"embedding": 4, "input_pieces": 8}, torch.float32),
        ({"tied": True}, torch.bfloat16),
        ({"tied": True, "hidden": 12, "input_pieces": 8}, torch.float64),
        ({"tree": "adaptive"}, torch.bfloat16),
        (PATH_SUM, torch.float64),
        (PATH_SUM | {"tied": True}, torch.float32),
    ],
    ids=str,
)
def test_a_saved_model_predicts_the_same_when_it_is_loaded(
    backbone: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = saved(tmp_path, dtype=dtype, backbone=backbone, dropout=0.5, **options).eval()
    loaded, read = load_model(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    tokens = torch.tensor([[1, 5], [3, 2], [6, 0]])
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    # The alignment in memory may decide in which order numbers are summed.
    near = 8 * torch.finfo(dtype).eps
    for ours, theirs in zip(model(tokens), loaded(tokens), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near)
    nll, same = (each.output.loss(each(tokens)[0], tokens, "none") for each in (model, loaded))
    torch.testing.assert_close(nll, same, rtol=near, atol=near)
    assert not loaded.training
    assert (read.step, read.valid_perplexity, read.context) == (3, 4.5, 6)


def test_a_loaded_model_can_be_changed_and_saved_over_its_own_file(tmp_path: Path) -> None:
    weight = saved(tmp_path).table[0].detach()
    first, read = load_model(tmp_path)
    first.table[0].data.add_(1)
    second, _ = load_model(tmp_path)
    assert torch.equal(second.table[0], weight)
    save_model(tmp_path, first.state_dict(), read)
    assert torch.equal(load_model(tmp_path)[0].table[0], weight + 1)
    assert torch.equal(second.table[0], weight)


def test_a_saved_model_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    saved(tmp_path)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    (tmp_path / "plain").touch()
    assert modes == {(tmp_path / "plain").stat().st_mode & 0o777}


def rewritten(folder: Path, **changes: Any) -> Path:
    """`model.json` with other values; those of a section are added to it."""
    path = folder / "model.json"
    values = json.loads(path.read_text())
    for name, change in changes.items():
        values[name] = values[name] | change if isinstance(change, dict) else change
    path.write_text(json.dumps(values | {"sha256": _sha256(values)}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"hidden": 9}}, "model.safetensors does not fit model.json: "),
        ({"format_version": 2}, "model.json has format version 2: expected 3$"),
        ({"step": "3"}, "model.json is damaged: "),
        ({"step": -1}, "model.json is damaged: step: Input should be greater"),
        ({"context": 0}, "model.json is damaged: context: Input should be greater"),
        ({"output": {"bias": False}}, "model.json: unknown key output.bias: use the version of"),
        ({"eos_id": -1}, "model.json is damaged: "),
        ({"unk_id": -1}, "model.json is damaged: "),
        ({"eos_id": 99999}, "model.json is damaged: eos_id is 99999, and the model has"),
        ({"unk_id": 99999}, "model.json is damaged: unk_id is 99999, and the model has"),
        ({}, "model.safetensors cannot be read: No such file"),
    ],
    ids=str,
)
def test_missing_weights_and_a_description_that_does_not_fit_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    rewritten(tmp_path, **changes)
    if not changes:
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=f"^{tmp_path}/{message}"):
        load_model(tmp_path)


def test_a_description_without_a_key_that_was_added_is_read(tmp_path: Path) -> None:
    saved(tmp_path)
    path = rewritten(tmp_path)
    values = json.loads(path.read_text())
    assert values["model"].pop("input_pieces", 1) is None
    path.write_text(json.dumps(values | {"sha256": _sha256(values)}))
    assert load_model(tmp_path)[1].output == OutputConfig()
    path.write_text("[]")
    with pytest.raises(UserError, match=f"^{path} is damaged: "):
        read_description(tmp_path)


def test_a_model_trained_by_the_triton_backend_is_used_without_it(tmp_path: Path) -> None:
    saved(tmp_path)
    rewritten(tmp_path, output={"backend": "triton"})
    model, _ = load_model(tmp_path)
    loss, _ = model.loss(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, dtype=torch.int64))
    assert loss.isfinite()


@pytest.mark.parametrize(
    ("number", "reason"), [(28, "No space left on device"), (27, "File too large")]
)
def test_a_disk_that_is_full_is_a_single_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    """Safetensors reports it by an exception that is no `OSError`."""
    saved(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    text = f"Error while serializing: I/O error: {reason} (os error {number})"

    def full(*_: object) -> None:
        raise SafetensorError(text)

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(UserError, match=f"model.safetensors cannot be written: {reason}$"):
        saved(tmp_path)
    text = "Error while serializing: another one"
    with pytest.raises(SafetensorError, match=text):
        saved(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_neither_file_is_changed_if_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved(tmp_path)
    full = StorageError("model.json cannot be written: No space left on device")
    monkeypatch.setattr("lm.model.files.write_json_atomically", Mock(side_effect=full))
    with pytest.raises(StorageError, match="No space left"):
        saved(tmp_path, hidden=16)
    torch.testing.assert_close(load_model(tmp_path)[0].state_dict(), before.state_dict())
