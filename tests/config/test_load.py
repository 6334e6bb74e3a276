"""Reading configurations: valid ones round-trip; mistakes are one line that names the key."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from data_prep.errors import UserError
from lm.config import Config, differences, load_config, load_run_config, to_dict, to_yaml, validate

MINIMAL = "name: run\ntrain: {max_steps: 5}\n"
Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`load(text, *overrides)`: the configuration of a file with that text."""

    def read(text: str, *overrides: str) -> Config:
        path = tmp_path / "c.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, overrides)

    return read


def test_keys_that_the_file_omits_have_their_defaults(load: Load) -> None:
    config = load(MINIMAL)
    assert config.train.max_steps == 5
    assert (config.seed, config.model.hidden, config.output.tree) == (1, 200, "two_level")
    assert config.run_path == Path("runs/run")
    assert config.prepared_path == Path("runs/run/data")
    config = load(MINIMAL + "run_dir: a\ndata: {prepared_dir: b}\n")
    assert (config.run_path, config.prepared_path) == (Path("a"), Path("b"))


def test_overrides_are_yaml_the_last_one_wins_and_the_result_round_trips(load: Load) -> None:
    config = load(
        *(MINIMAL, "--model.hidden=64", "--model.hidden=32", "--optim.lr=1e-7"),
        *("--optim.betas=[0.8, 0.9]", "--data.files.train=[é.txt, b.txt]"),
        *("--train.max_steps=null", "--train.max_epochs=2", "--word_table.tied=true"),
    )
    assert (config.model.hidden, config.optim.lr, config.optim.betas) == (32, 1e-7, (0.8, 0.9))
    assert config.data.files.train == ["é.txt", "b.txt"]
    assert (config.train.max_steps, config.train.max_epochs) == (None, 2)
    assert config.word_table.tied
    assert load(to_yaml(config)) == config
    assert validate(to_dict(config), "c") == config


LOOKS_ELSE = ["2024-05-01", "2024-05-01 12:00:00", "007", "1_000", "0x1F", "12:30", "1e5", ".5"]
LOOKS_ELSE += ["no", "yes", "true", ".inf", "a$_$b", "é"]
"""Text that YAML takes for a date, a number or a truth value, or that a picture takes for math."""
NOT_YAML = ["a: b", "a #b", "{a}", "*a", "&a b", "!b", "%a", "@a", "- a", "it's", "=", "null", "~"]


@pytest.mark.parametrize("text", LOOKS_ELSE + NOT_YAML)
def test_an_override_of_text_is_taken_as_it_is_written(load: Load, text: str) -> None:
    config = load(MINIMAL, f"--data.dir={text}", f"--data.hub={text}")
    assert config.data.dir == text
    assert config.data.hub == (None if text in ("null", "~") else text)
    assert load(MINIMAL, f"--data.dir={json.dumps(text)}").data.dir == text
    assert load(to_yaml(config)) == config


@pytest.mark.parametrize("text", LOOKS_ELSE)
def test_text_in_a_file_needs_no_quotes(load: Load, text: str) -> None:
    files = f"data: {{dir: {text}, files: {{train: {text}, valid: [{text}, b]}}}}\n"
    for overrides in ([], [f"--data.files={{train: {text}, valid: [{text}, b]}}"]):
        data = load(MINIMAL + files, *overrides).data
        assert (data.dir, data.files.train, data.files.valid) == (text, text, [text, "b"])


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        ([], "runs/old"),
        (["--seed=2"], "runs/old"),
        (["--name=new"], "runs/new"),
        (["--run_dir=elsewhere"], "elsewhere"),
        (["--run_dir=elsewhere", "--name=new"], "elsewhere"),
    ],
)
def test_a_run_keeps_its_folder_unless_another_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/old").mkdir(parents=True)
    for run_dir in ("", "run_dir: before\n"):
        Path("runs/old/config.yaml").write_text(MINIMAL + run_dir)
        assert load_run_config(Path("runs/old"), overrides).run_path == Path(folder)


def test_the_text_of_a_run_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, given = tmp_path / "a/runs/old", "runs/old/text.txt"
    run.mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "disk/old").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "c/runs").symlink_to(tmp_path / "disk")
    for written, started in product(("runs/old", "runs/old/", "./runs//old"), ("a", "c")):
        keys = f"run_dir: {written}\ndata: {{files: {{train: {given}}}}}\n"
        (tmp_path / started / "runs/old/config.yaml").write_text(MINIMAL + keys)
        (tmp_path / started / given).touch()
        for folder, override, expected in (
            ("b", "--run_dir=runs/x", str(tmp_path / started)),
            ("b", "--data.prepared_dir=x", str(tmp_path / started)),
            ("b", "--data.dir=x", "x"),
            ("b", f"--data.files.train={given}", "."),
            (started, "--seed=2", "."),
        ):
            monkeypatch.chdir(tmp_path / folder)
            found = load_run_config(Path(f"../{started}/runs/old"), [override])
            assert found.data.dir == expected


def test_numbers_off_aliases_and_merge_keys_are_read_as_yaml_has_them(load: Load) -> None:
    for value in ("off", "'off'", "auto"):
        text = f"name: run\ntrain: {{max_steps: 5, cuda_graph: {value}}}\n"
        assert load(text).train.cuda_graph == value.strip("'")
    for number in ("1e-3", "1E-3", ".001", "0.001", "1.e-3", "+1e-3"):
        assert load(MINIMAL + f"optim: {{lr: {number}}}\n").optim.lr == 0.001
    base = load("name: run\ntrain: &limits {max_steps: 5, threads: 2}\n")
    assert load("name: run\ntrain: {<<: {max_steps: 7, threads: 2}, max_steps: 5}\n") == base
    text = MINIMAL + "model: {dropout: &d 0.3, dropout_weight: *d}\n"
    assert load(text).model.dropout_weight == 0.3


def test_differences_name_the_keys_and_both_values() -> None:
    old = validate({"name": "a", "train": {"max_steps": 1}}, "old")
    changes = {"name": "a", "train": {"max_steps": 1}, "model": {"hidden": 8, "dropout": 0.5}}
    expected = {"model.dropout": (0.0, 0.5), "model.hidden": (200, 8)}
    assert differences(old, validate(changes, "new")) == expected
    assert differences(old, old) == {}


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r": cannot read the configuration: .*directory"):
        load_config(tmp_path)
