"""A row of a table is trained once; its log counts as long as it has the row's settings."""

from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.config import load_config
from lm.figures import Evaluation
from scripts.benchmarks.reporting import append_log
from scripts.reproduction.__main__ import main
from scripts.reproduction.runs import LOG, RESULTS, TOP, read_logs, read_tables

TABLES = read_tables()


class Toy:
    """A table of two rows on the tiny corpus; tables.yaml, logs and runs are in `folder`."""

    def __init__(self, config: Path, corpus: Path, folder: Path) -> None:
        self.tables, self.results, self.corpus = folder / "tables.yaml", folder / "logs", corpus
        self.logs = self.results / "toy"
        table = {
            "title": "toy",
            "config": str(config),
            "shared": ["train.max_steps=2", "train.val_every_steps=1", "model.layers=1"],
            "seeds": [1, 2],
            "figures": ["perplexity", "oov", "minutes", "step_milliseconds"],
            "rows": {
                "full softmax": ["output.tree=full"],
                "classes": {"config": str(config), "overrides": ["classes.method=random"]},
            },
        }
        self.tables.write_text(yaml.safe_dump({"toy": table}, sort_keys=False))
        self.options = [f"--tables={self.tables}", f"--results={self.results}"]
        self.options += [f"--runs={folder / 'runs'}", "--no-progress"]

    def show(self, *arguments: str) -> None:
        """Run the command without a corpus."""
        main(["toy", *self.options, *arguments])

    def train(self, *arguments: str) -> None:
        """Run the command with the corpus."""
        self.show(f"--data-dir={self.corpus}", *arguments)

    def log(self, row: str, seed: int) -> dict[str, Any]:
        """A log, to be changed."""
        return deepcopy(read_logs(self.logs)[row, seed])


@pytest.fixture
def toy(tiny: Path, corpus: Path, tmp_path: Path) -> Toy:
    return Toy(tiny, corpus, tmp_path)


def test_a_row_is_trained_once_per_seed_and_the_table_has_the_means(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.train()
    shown = capsys.readouterr().out
    first, second = toy.log("full softmax", 1), toy.log("full softmax", 2)
    assert second["command"].endswith("--output.tree=full --seed=2")
    assert str(toy.corpus) not in second["command"]
    assert "commit" in first
    one, two = first["test"]["perplexity"], second["test"]["perplexity"]
    assert one != two
    line = next(line for line in shown.splitlines() if line.startswith("| full softmax |"))
    assert f"| {(one + two) / 2:.2f} |" in line
    assert f"1: {one:.2f}, 2: {two:.2f}" in line
    assert f"| {(first['seconds'] + second['seconds']) / 120:.4g} |" in line
    steps, tokens, seconds, perplexities = zip(*toy.log("classes", 1)["curve"], strict=True)
    assert steps == (1, 2)
    assert list(tokens) == sorted(tokens)
    assert list(seconds) == sorted(seconds)
    assert min(perplexities) > 1
    toy.show()  # requires no corpus, because nothing is missing
    assert capsys.readouterr().out == shown


def test_a_check_trains_up_to_the_first_validation_and_compares_it_with_the_log(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.train("--seeds=1")
    full, classes = toy.log("full softmax", 1), toy.log("classes", 1)
    expected, other = full["curve"][0][-1], classes["curve"][0][-1]
    classes["curve"][0][-1] = 40.0
    append_log(toy.logs / LOG, classes)
    capsys.readouterr()
    toy.train("--seeds=1", "--check")
    same, changed = capsys.readouterr().out.splitlines()
    assert (
        same
        == f"full softmax, seed 1: {expected:.2f} after 1 steps, equal to the log in every digit"
    )
    assert changed.endswith(f"{other:.2f} after 1 steps, 40.00 in the log ({other / 40 - 1:+.1%})")
    classes["curve"][0][0] = 7
    append_log(toy.logs / LOG, classes)
    append_log(toy.logs / LOG, full | {"command": "another"})
    toy.train("--seeds=1", "--check")
    missing, later = capsys.readouterr().out.splitlines()
    assert missing == "full softmax, seed 1: no log"
    assert later.endswith("after 1 steps; the log's first validation is after 7")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"toy"}


def test_a_log_of_other_settings_counts_as_missing(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ["--rows", "classes", "--seeds", "1"]
    toy.train(*one)
    log = toy.log("classes", 1)
    append_log(toy.logs / LOG, log | {"command": log["command"].replace("random", "uniform")})
    capsys.readouterr()
    toy.show("--show")
    assert "| classes |" not in capsys.readouterr().out
    toy.train(*one)
    assert "| classes |" in capsys.readouterr().out
    assert "--classes.method=random" in toy.log("classes", 1)["command"]


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_the_tables_is_a_valid_configuration(name: str) -> None:
    table = TABLES[name]
    for recipe, overrides in table.rows.values():
        options = [f"--{override}" for override in overrides]
        assert load_config(TOP / recipe, options).name == Path(recipe).stem
    of_runs = {"minutes", "step_milliseconds"}
    assert set(table.figures) <= {field.name for field in fields(Evaluation)} | of_runs
    with_speed = {table.vocabulary[name] for name in ("ours", "full") if name in table.vocabulary}
    assert with_speed <= set(table.summary) <= set(table.rows)


@pytest.mark.parametrize("name", TABLES)
def test_every_log_belongs_to_a_row_and_has_its_command(name: str) -> None:
    runs = {(run.row, run.seed): run for run in TABLES[name].runs(RESULTS)}
    logs = read_logs(RESULTS / name)
    assert logs
    for key, log in logs.items():
        assert log["command"] == runs[key].command
