"""A table is trained once, its logs are what it prints, and no README prints other figures."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.config import load_config
from lm.evaluation import Evaluation
from lm.training.metrics import read_metrics

TOP = Path(__file__).resolve().parents[2]
RESULTS = TOP / "scripts" / "results"
SCRIPT = TOP / "scripts" / "reproduce"
README = (TOP / "README.md").read_text(encoding="utf-8")
DETAILS = (RESULTS / "README.md").read_text(encoding="utf-8")
TABLES = yaml.safe_load((TOP / "scripts" / "tables.yaml").read_text())


def reproduce(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def small(tiny: Path, tmp_path: Path) -> list[object]:
    """Arguments for a table of two rows on the tiny corpus."""
    table = {
        "title": "toy",
        "config": str(tiny),
        "shared": ["train.max_steps=2", "train.val_every_steps=1", "classes.dimensions=4"],
        "seeds": [1, 2],
        "figures": ["perplexity", "oov", "minutes"],
        "published": "1 to 2",
        "summary": {"full softmax": "full", "classes": "two_level,a=b"},
        "rows": {
            "full softmax": ["output.tree=full"],
            "classes": {"config": str(tiny), "overrides": ["classes.method=random"]},
        },
    }
    tables = tmp_path / "tables.yaml"
    tables.write_text(yaml.safe_dump({"toy": table}, sort_keys=False))
    return [
        "toy",
        f"--tables={tables}",
        f"--results={tmp_path / 'logs'}",
        f"--runs={tmp_path / 'r'}",
    ]


def test_a_table_is_trained_once_and_printed_from_its_logs(
    small: list[object], corpus: Path, tmp_path: Path
) -> None:
    first = reproduce(
        *small, f"--data-dir={corpus}", "--no-progress", f"--plot={tmp_path / 'p.png'}"
    )
    assert first.returncode == 0, first.stderr
    assert (tmp_path / "p.png").stat().st_size > 1000
    log = json.loads((tmp_path / "logs/toy/full_softmax-2.json").read_text())
    assert log["command"].endswith("--output.tree=full --seed=2")
    assert str(tmp_path) not in log["command"].replace(str(small[1]), "").split("--data.dir=DIR")[1]
    perplexities = [
        json.loads((tmp_path / f"logs/toy/full_softmax-{seed}.json").read_text())["test"][
            "perplexity"
        ]
        for seed in (1, 2)
    ]
    assert perplexities[0] != perplexities[1]
    line = next(line for line in first.stdout.splitlines() if line.startswith("| full softmax |"))
    assert f"| {sum(perplexities) / 2:.2f} |" in line
    assert f"1: {perplexities[0]:.2f}, 2: {perplexities[1]:.2f}" in line
    assert read_metrics(tmp_path / "logs/toy/classes-1.csv")[-1].step == 2
    again = reproduce(*small)  # needs no corpus: nothing is missing
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert line.split("|")[4].strip() == f"{sum(log_minutes(tmp_path)) / 2:.4g}"
    speeds = [
        {
            "config": "tiny.yaml",
            "tree": tree,
            "ratio": ratio,
            "overrides": [f"--train.precision={p}"],
        }
        for tree, ratio, p in [
            ("two_level,a=b", 3, "bf16-mixed"),
            ("two_level,a=b", 2.5, "bf16-mixed"),
            ("full", 7, "32-true"),
        ]
    ]
    (tmp_path / "logs/bench_train.jsonl").write_text("\n".join(map(json.dumps, speeds)))
    total = reproduce("summary", *small[1:]).stdout.splitlines()
    assert total[2].startswith("| toy | 1 to 2 |")
    assert total[2].endswith(f"| full softmax | {sum(perplexities) / 2:.2f} | – |")
    assert total[3].startswith("|  |  |")
    assert total[3].endswith("| 2.50 |")
    assert len(total) == 4


def test_a_check_begins_the_trainings_of_the_logs_anew(
    small: list[object], corpus: Path, tmp_path: Path
) -> None:
    where = [*small, f"--data-dir={corpus}", "--no-progress", "--seeds=1"]
    assert reproduce(*where).returncode == 0
    curves = {row: tmp_path / f"logs/toy/{row}-1.csv" for row in ("full_softmax", "classes")}
    before = {row: path.read_text() for row, path in curves.items()}
    first = {row: read_metrics(path)[0].valid_perplexity or 0 for row, path in curves.items()}
    curves["classes"].write_text(before["classes"].replace(str(first["classes"]), "40.0"))
    done = reproduce(*where, "--check")
    assert done.returncode == 0, done.stderr
    same, other = done.stdout.splitlines()
    now = f"{first['full_softmax']:.2f}"
    assert same == f"full softmax, seed 1: {now} after 1 steps, every digit as in the log"
    off = first["classes"] / 40 - 1
    assert other.endswith(f"{first['classes']:.2f} after 1 steps, 40.00 in the log ({off:+.1%})")
    curves["classes"].write_text(before["classes"].replace("\n1,", "\n7,"))
    curves["full_softmax"].unlink()
    missing, elsewhere = reproduce(*where, "--check").stdout.splitlines()
    assert missing == "full softmax, seed 1: no log"
    assert elsewhere.endswith("after 1 steps, the log's first is after 7")
    assert {path.name for path in (tmp_path / "r").iterdir()} == {"toy"}  # nothing is left


def row_of(table: dict[str, Any], row: str) -> tuple[str, list[str]]:
    """The recipe and the options of a row of tables.yaml."""
    own = table["rows"][row]
    recipe, options = (
        (own["config"], own["overrides"]) if isinstance(own, dict) else (table["config"], own)
    )
    return recipe, [f"--{option}" for option in (*table.get("shared", ()), *options)]


def log_minutes(tmp_path: Path) -> list[float]:
    logs = (tmp_path / f"logs/toy/full_softmax-{seed}.json" for seed in (1, 2))
    return [json.loads(log.read_text())["seconds"] / 60 for log in logs]


def test_mistakes_are_one_line(small: list[object]) -> None:
    for arguments, expected in [
        (["oak"], "no table 'oak'"),
        (["toy", "--rows", "oak"], "toy has no row 'oak'; its rows: full softmax, classes"),
        (["toy"], "--data-dir: where is the corpus?"),
        (["toy", "--plot", "nowhere/x.png"], "--plot nowhere/x.png: expected a .png, .svg, .pdf"),
        (["toy", "--plot", "x.foo"], "--plot x.foo: expected a .png, .svg, .pdf in a folder"),
    ]:
        done = reproduce(*arguments, *small[1:])
        assert done.returncode == 1
        assert done.stderr.startswith(f"reproduce: {expected}")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_the_tables_is_a_valid_configuration(name: str) -> None:
    table = TABLES[name]
    for row in table["rows"]:
        recipe, overrides = row_of(table, row)
        assert load_config(TOP / recipe, overrides).name == Path(recipe).stem
    assert set(table["figures"]) <= {field.name for field in fields(Evaluation)} | {"minutes"}
    assert set(table.get("summary", ())) <= set(table["rows"])


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_shown_as_the_logs_have_them(name: str) -> None:
    done = reproduce(name, "--show")
    assert done.returncode == 0, done.stderr
    shown = done.stdout.strip()
    logged = {json.loads(log.read_text())["row"] for log in (RESULTS / name).glob("*.json")}
    assert shown.count("\n") == 1 + len(logged)
    if logged:
        assert shown in README + DETAILS


def test_the_readme_shows_the_summary_as_the_logs_have_it() -> None:
    done = reproduce("summary")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") > 8
    assert done.stdout.strip() in README


@pytest.mark.parametrize("name", TABLES)
def test_the_commands_of_the_logs_are_those_of_their_rows_today(name: str) -> None:
    for path in (RESULTS / name).glob("*.json"):
        log = json.loads(path.read_text())
        recipe, options = row_of(TABLES[name], log["row"])
        command = ["lm", "train", recipe, "--data.dir=DIR", *options, f"--seed={log['seed']}"]
        assert log["command"] == " ".join(command)


def test_logs_of_other_settings_are_none(small: list[object], corpus: Path, tmp_path: Path) -> None:
    one = [*small, f"--data-dir={corpus}", "--no-progress", "--rows", "classes", "--seeds", "1"]
    assert reproduce(*one).returncode == 0
    log = tmp_path / "logs/toy/classes-1.json"
    stale = json.loads(log.read_text())
    assert "--classes.method=random" in stale["command"]
    stale["command"] = stale["command"].replace("random", "uniform")
    log.write_text(json.dumps(stale))
    assert "| classes |" not in reproduce(*small, "--show").stdout
    again = reproduce(*one)
    assert again.returncode == 0, again.stderr
    assert "| classes |" in again.stdout
    assert "--classes.method=random" in json.loads(log.read_text())["command"]
