"""Reading configurations: valid ones round-trip; mistakes are one line that names the key."""

import gzip
import json
import re
from pathlib import Path

import pytest

from data_prep.errors import UserError
from lm.config import (
    differences,
    load_config,
    load_run_config,
    to_dict,
    to_yaml,
    validate,
)

MINIMAL = "name: run\ntrain: {max_steps: 5}\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problem(folder: Path, text: str, *overrides: str) -> str:
    """The single-line error about a configuration, without the file's name."""
    path = written(folder, text)
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_keys_that_the_file_omits_have_their_defaults(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, MINIMAL))
    assert config.train.max_steps == 5
    assert (config.seed, config.model.hidden, config.output.tree) == (1, 200, "two_level")
    assert config.run_path == Path("runs/run")
    assert config.prepared_path == Path("runs/run/data")
    config = load_config(written(tmp_path, MINIMAL + "run_dir: a\ndata: {prepared_dir: b}\n"))
    assert (config.run_path, config.prepared_path) == (Path("a"), Path("b"))


def test_overrides_are_yaml_the_last_one_wins_and_the_result_round_trips(tmp_path: Path) -> None:
    config = load_config(
        written(tmp_path, MINIMAL),
        [
            *("--model.hidden=64", "--model.hidden=32", "--optim.lr=1e-7"),
            *("--optim.betas=[0.8, 0.9]", "--data.files.train=[é.txt, b.txt]"),
            *("--train.max_steps=null", "--train.max_epochs=2", "--word_table.tied=true"),
        ],
    )
    assert (config.model.hidden, config.optim.lr, config.optim.betas) == (32, 1e-7, (0.8, 0.9))
    assert config.data.files.train == ["é.txt", "b.txt"]
    assert (config.train.max_steps, config.train.max_epochs) == (None, 2)
    assert config.word_table.tied
    assert load_config(written(tmp_path, to_yaml(config))) == config
    assert validate(to_dict(config), "c") == config


LOOKS_ELSE = ["2024-05-01", "2024-05-01 12:00:00", "007", "1_000", "0x1F", "12:30", "1e5", ".5"]
LOOKS_ELSE += ["no", "yes", "true", ".inf", "a$_$b", "é"]
"""Text that YAML takes for a date, a number or a truth value, or that a picture takes for math."""
NOT_YAML = ["a: b", "a #b", "{a}", "*a", "&a b", "!b", "%a", "@a", "- a", "it's", "=", "null", "~"]


@pytest.mark.parametrize("text", LOOKS_ELSE + NOT_YAML)
def test_an_override_of_text_is_taken_as_it_is_written(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, MINIMAL)
    config = load_config(path, [f"--data.dir={text}", f"--data.hub={text}"])
    assert config.data.dir == text
    assert config.data.hub == (None if text in ("null", "~") else text)
    quoted = load_config(path, [f"--data.dir={json.dumps(text)}"])
    assert quoted.data.dir == text
    assert load_config(written(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize("text", LOOKS_ELSE)
def test_text_in_a_file_needs_no_quotes(tmp_path: Path, text: str) -> None:
    files = f"data: {{dir: {text}, files: {{train: {text}, valid: [{text}, b]}}}}\n"
    for overrides in ([], [f"--data.files={{train: {text}, valid: [{text}, b]}}"]):
        data = load_config(written(tmp_path, MINIMAL + files), overrides).data
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
    (run / "text.txt").touch()
    given_keys = f"run_dir: runs/old\ndata: {{files: {{train: {given}}}}}\n"
    (run / "config.yaml").write_text(MINIMAL + given_keys)
    (tmp_path / "b").mkdir()
    for folder, override, expected in (
        ("b", "--run_dir=runs/x", str(tmp_path / "a")),
        ("b", "--data.dir=x", "x"),
        ("b", f"--data.files.train={given}", "."),
        ("a", "--seed=2", "."),
    ):
        monkeypatch.chdir(tmp_path / folder)
        assert load_run_config(Path("../a/runs/old"), [override]).data.dir == expected


def test_numbers_off_aliases_and_merge_keys_are_read_as_yaml_has_them(tmp_path: Path) -> None:
    for value in ("off", "'off'", "auto"):
        text = f"name: run\ntrain: {{max_steps: 5, cuda_graph: {value}}}\n"
        assert load_config(written(tmp_path, text)).train.cuda_graph == value.strip("'")
    for number in ("1e-3", "1E-3", ".001", "0.001", "1.e-3", "+1e-3"):
        text = MINIMAL + f"optim: {{lr: {number}}}\n"
        assert load_config(written(tmp_path, text)).optim.lr == 0.001
    text = "name: run\ntrain: &limits {max_steps: 5, threads: 2}\n"
    base = load_config(written(tmp_path, text))
    text = "name: run\ntrain: {<<: {max_steps: 7, threads: 2}, max_steps: 5}\n"
    assert load_config(written(tmp_path, text)) == base
    text = MINIMAL + "model: {dropout: &d 0.3, dropout_weight: *d}\n"
    assert load_config(written(tmp_path, text)).model.dropout_weight == 0.3


def test_differences_name_the_keys_and_both_values() -> None:
    old = validate({"name": "a", "train": {"max_steps": 1}}, "old")
    changes = {"name": "a", "train": {"max_steps": 1}, "model": {"hidden": 8, "dropout": 0.5}}
    assert differences(old, validate(changes, "new")) == {
        "model.dropout": (0.0, 0.5),
        "model.hidden": (200, 8),
    }
    assert differences(old, old) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "modle: {hidden: 3}", r"unknown key modle; did you mean model\?"),
        (
            MINIMAL + "optim: {max_steps: 3}",
            r"unknown key optim.max_steps; did you mean train.max_steps\?",
        ),
        (MINIMAL + "model: {hidden: 0}", "model.hidden: Input should be greater than 0, got 0"),
        (MINIMAL + "model: {dropout: 1.0}", "model.dropout: Input should be less than 1, got 1.0"),
        ("seed: !!timestamp 2021-01-01", "a value is neither a number nor text: .*"),
        ("train: {max_steps: 5}", "name is missing"),
        ("- a\n- b\n", "expected sections with keys, got list"),
        (MINIMAL + "name: other\n", "not valid YAML: .*key 'name' given twice.*"),
        (MINIMAL + "model: {hidden: 3\n", "not valid YAML: .*line 4.*"),
        (
            MINIMAL + "model: {layers: 1}\nseed: 2\nmodel: {}\n",
            r"not valid YAML: key 'model' given twice \(line 5, column 1\)",
        ),
        ("name: " + 3000 * "[" + 3000 * "]", "not valid YAML: values are nested too deeply"),
        ("name: &a [*a]\n", "not valid YAML: values are nested too deeply"),
        (MINIMAL + "model: !!python/name:os.getcwd\n", "not valid YAML: .*python/name.*"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    assert re.fullmatch(message, problem(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hidden=3", "expected an override --section.key=value, got 'model.hidden=3'"),
        ("--=3", "expected an override --section.key=value, got '--=3'"),
        ("--name.first=3", "--name.first: name is not a section"),
        (
            "--seed=a\1",
            "--seed: not valid YAML: unacceptable character #x0001: special characters are not"
            " allowed at position 1",
        ),
        ("--name=a\1", r"name must be a plain file name, got 'a\x01'"),
        ("--name=caf\udce9", r"--name='caf\udce9': not UTF-8"),
        (
            "--optim.schedule=no",
            "optim.schedule: Input should be 'constant', 'cosine', 'step' or 'plateau', got 'no'",
        ),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    assert problem(tmp_path, MINIMAL, override).startswith(message)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    reasons = {tmp_path / "absent.yaml": "No such file", tmp_path: "directory"}
    for encoding, reason in (
        ("latin-1", "invalid UTF-8: .* iconv -f WINDOWS-1252"),
        ("UTF-16", "iconv -f UTF-16 -t UTF-8 .*UTF-16.yaml > NEW$"),
        ("UTF-16LE", "iconv -f UTF-16LE"),
        ("UTF-32BE", "iconv -f UTF-32BE"),
    ):
        path = tmp_path / f"{encoding}.yaml"
        path.write_bytes("name: café\n".encode(encoding))
        reasons[path] = reason
    reasons[tmp_path / "a.yaml.gz"] = "it is compressed, .*: decompress it$"
    (tmp_path / "a.yaml.gz").write_bytes(gzip.compress(b"name: a\n"))
    reasons[tmp_path / "a.yaml"] = "it is a parquet file: expected YAML$"
    (tmp_path / "a.yaml").write_bytes(b"PAR1\x15")
    for path, reason in reasons.items():
        start = re.escape(f"{path}: cannot read the configuration: ")
        with pytest.raises(UserError, match=f"^{start}.*{reason}"):
            load_config(path)


def test_deleted_keys_are_unknown_unless_they_have_their_former_defaults(tmp_path: Path) -> None:
    """The folders of runs contain all keys, those of earlier versions too."""
    old = MINIMAL + "classes: {column_cost: 0.0}\noutput: {bias: true}\n"
    assert load_config(written(tmp_path, old)) == load_config(written(tmp_path, MINIMAL))
    for changed in ("output.bias=false", "classes.column_cost=0.1"):
        message = problem(tmp_path, MINIMAL, f"--{changed}")
        assert message.startswith(f"unknown key {changed.split('=')[0]}")
