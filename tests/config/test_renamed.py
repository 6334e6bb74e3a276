"""Old keys: readable in old runs, an error with the present key elsewhere."""

from pathlib import Path

import pytest

from data_prep.errors import UserError
from lm.config import load_config, load_run_config
from lm.config.reference import sections
from lm.config.renamed import RENAMED, translate_description, translate_override

OLD = """\
name: run
classes: {head: 3}
model: {hidden: 8, tied: true, input: path, input_backoff: 5.0}
output: {sparse: null, dtype: fp32}
optim: {table: adagrad, table_lr: 0.05}
train: {max_steps: 5}
"""
NEW = """\
name: run
classes: {shortlist: 3}
model: {hidden: 8, input_embedding: path_sum, count_word_dropout: 5.0}
word_table: {gradients: auto, tied: true, dtype: fp32, optimizer: adagrad, lr: 0.05}
train: {max_steps: 5}
"""


def test_the_configuration_of_an_old_run_is_read_as_its_present_form(tmp_path: Path) -> None:
    configs = []
    for name, text in (("old", OLD), ("new", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(text)
        configs.append(load_run_config(tmp_path / name, ["--run_dir=null"]))
    assert configs[0].word_table == configs[1].word_table
    assert configs[0].model == configs[1].model
    assert configs[0].classes == configs[1].classes
    assert configs[0].run_path == tmp_path / "old"


def test_sections_of_an_old_description_are_translated_and_others_kept() -> None:
    old = {
        "step": 3,
        "model": {"hidden": 8, "tied": False, "input": "word"},
        "output": {"tree": "full", "sparse": False, "dtype": "bf16"},
    }
    assert translate_description(old) == {
        "step": 3,
        "model": {"hidden": 8, "input_embedding": "word"},
        "output": {"tree": "full"},
        "word_table": {"tied": False, "gradients": "dense", "dtype": "bf16"},
    }
    assert old["model"] == {"hidden": 8, "tied": False, "input": "word"}
    present = {"model": {"hidden": 8}, "word_table": {"tied": True}}
    assert translate_description(present) == present


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--output.sparse=true", "--word_table.gradients=row_wise"),
        ("--output.sparse=null", "--word_table.gradients=auto"),
        ("model.input=path", "model.input_embedding=path_sum"),
        ("--model.input=word", "--model.input_embedding=word"),
        ("--optim.table_lr=5e-2", "--word_table.lr=5e-2"),
        ("--train.max_steps=5", "--train.max_steps=5"),
        ("--resume", "--resume"),
    ],
)
def test_overrides_of_old_logs_are_translated(old: str, new: str) -> None:
    assert translate_override(old) == new


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--model.tied=true", "model.tied was renamed: write word_table.tied: true"),
        ("--output.sparse=false", "output.sparse was renamed: write word_table.gradients: dense"),
        ("--model.input=path", "model.input was renamed: write model.input_embedding: path_sum"),
        ("--optim.table=null", "optim.table was renamed: write word_table.optimizer: null"),
    ],
)
def test_an_old_key_of_the_user_is_an_error_that_names_the_present_one(
    tmp_path: Path, override: str, message: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("name: run\ntrain: {max_steps: 5}\n")
    for load, source in ((load_config, path), (load_run_config, tmp_path)):
        with pytest.raises(UserError) as caught:
            load(source, [override])
        assert str(caught.value) == f"{path}: {message}"


def test_every_old_key_has_a_present_key() -> None:
    names = {key.name for _, keys in sections().values() for key in keys}
    assert {new.key for new in RENAMED.values()} <= names
    assert not names & RENAMED.keys()
