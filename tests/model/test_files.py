"""The files of a model: complete, refused if damaged, and readable across versions."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from data_prep.errors import UserError
from lm.config import ModelConfig, OutputConfig
from lm.model.build import build_model
from lm.model.files import Description, load_model, read_description, save_model
from lm.model.language_model import LanguageModel
from lm.output import ClassTree

Contents = Callable[[Path], dict[str, str]]


def description(model: ModelConfig, output: OutputConfig) -> Description:
    return Description(
        format_version=1,
        model=model,
        output=output,
        context=6,
        eos_id=1,
        unk_id=0,
        tokenizer_sha256="t",
        weights_sha256="",
        step=3,
        valid_perplexity=4.5,
    )


def saved(
    folder: Path, tree: str = "two_level", dtype: torch.dtype = torch.float32, **settings: Any
) -> LanguageModel:
    config, output = ModelConfig(hidden=8, heads=2, **settings), OutputConfig(tree=tree)
    classes = ClassTree.two_level(torch.tensor([0, 1, 2, 0, 1, 1, 2]), head=1)
    model = build_model(config, output, classes, 6).to(dtype)
    save_model(folder, model, description(config, output))
    return model


@pytest.mark.parametrize("backbone", ["lstm", "transformer"])
@pytest.mark.parametrize(
    ("tree", "tied", "embedding"),
    [("two_level", False, 4), ("two_level", True, None), ("adaptive", False, None)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_saved_model_predicts_the_same_when_it_is_loaded(
    tmp_path: Path,
    backbone: str,
    tree: str,
    tied: bool,
    embedding: int | None,
    dtype: torch.dtype,
) -> None:
    settings = {"tied": tied, "embedding": embedding, "dropout": 0.5}
    model = saved(tmp_path, tree, dtype, backbone=backbone, **settings).eval()
    loaded, read = load_model(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    tokens = torch.tensor([[1, 5], [3, 2], [6, 0]])
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    # Where the numbers lie in memory may decide in which order they are summed.
    near = 8 * torch.finfo(dtype).eps
    for ours, theirs in zip(model(tokens), loaded(tokens), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near)
    nll, same = (each.output.loss(each(tokens)[0], tokens, "none") for each in (model, loaded))
    torch.testing.assert_close(nll, same, rtol=near, atol=near)
    assert not loaded.training
    assert (read.step, read.valid_perplexity, read.context) == (3, 4.5, 6)


def test_a_loaded_model_may_be_changed_and_saved_in_the_place_of_its_own_file(
    tmp_path: Path,
) -> None:
    weight = saved(tmp_path).output.weight.detach()
    first, read = load_model(tmp_path)
    first.output.weight.data.add_(1)
    second, _ = load_model(tmp_path)
    assert torch.equal(second.output.weight, weight)
    save_model(tmp_path, first, read)
    assert torch.equal(load_model(tmp_path)[0].output.weight, weight + 1)
    assert torch.equal(second.output.weight, weight)


def test_a_model_may_be_read_by_whoever_may_read_the_run(tmp_path: Path) -> None:
    saved(tmp_path)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    (tmp_path / "plain").touch()
    assert modes == {(tmp_path / "plain").stat().st_mode & 0o777}


def test_weights_and_description_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        saved(tmp_path / name)
    weights = tmp_path / "a" / "model.safetensors"
    weights.write_bytes((tmp_path / "b" / "model.safetensors").read_bytes())
    message = f"^{weights}: damaged, or not the weights that model.json describes$"
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "a")


def rewritten(folder: Path, **changes: Any) -> Path:
    path = folder / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_a_description_of_another_shape_than_the_weights_is_refused_in_one_line(
    tmp_path: Path,
) -> None:
    saved(tmp_path)
    values = json.loads((tmp_path / "model.json").read_text())
    rewritten(tmp_path, model=values["model"] | {"hidden": 9})
    with pytest.raises(UserError) as caught:
        load_model(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/model.safetensors: does not fit model.json: ")


def test_a_description_that_is_no_description_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    path = rewritten(tmp_path, format_version=2)
    with pytest.raises(UserError, match=f"^{path}: format version 2, expected 1$"):
        read_description(tmp_path)
    rewritten(tmp_path, format_version=1, step="3")
    with pytest.raises(UserError, match=f"^{path}: damaged: "):
        read_description(tmp_path)
    for text in ("[]", "{", ""):
        path.write_text(text)
        with pytest.raises(UserError, match=f"^{path}: damaged: "):
            read_description(tmp_path)


def test_missing_weights_are_named(tmp_path: Path, lstm_run: Path) -> None:
    run = copytree(lstm_run, tmp_path / "run")
    (run / "model.safetensors").unlink()
    with pytest.raises(UserError, match=f"^{run}/model.safetensors"):
        load_model(run)


def test_a_model_trained_by_the_kernels_is_used_without_them(
    tmp_path: Path, lstm_run: Path
) -> None:
    shutil.copytree(lstm_run, tmp_path / "run")
    path = tmp_path / "run" / "model.json"
    description = json.loads(path.read_text())
    description["output"]["backend"] = "triton"
    path.write_text(json.dumps(description))
    model, _ = load_model(tmp_path / "run")
    loss, _ = model.loss(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, dtype=torch.int64))
    assert loss.isfinite()
