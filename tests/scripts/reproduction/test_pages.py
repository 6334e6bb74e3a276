"""Tables and figures of pages are generated from logs; a row of a table is trained once."""

import json
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure

from data_prep.errors import UserError
from lm.config import load_config
from lm.figures import Evaluation
from scripts import TOP
from scripts.benchmarks.reporting import append_log
from scripts.reproduction.__main__ import main
from scripts.reproduction.pages import PICTURE, all_tables, draw_vocabularies, pages, update
from scripts.reproduction.runs import LOG, RESULTS, read_logs, read_tables
from scripts.reproduction.tables import table_of_log

TABLES = read_tables()


def cells(table: str) -> list[list[str]]:
    """The cells of a table without its header."""
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_the_tables_of_all_pages_are_current() -> None:
    tables = all_tables()
    assert len(pages()) >= 5
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert update(text, tables) == text, f"{page}: run `scripts/reproduce pages`"
    recipes = sorted(path.stem for path in (TOP / "configs").glob("*.yaml"))
    assert [row[0] for row in cells(tables["configs"])] == [f"[{r}]({r}.yaml)" for r in recipes]


def test_a_page_with_an_unknown_or_open_table_is_an_error() -> None:
    with pytest.raises(UserError, match="no table 'oak'; there are elm"):
        update("<!-- table: oak -->\n<!-- end -->", {"elm": ""})
    with pytest.raises(UserError, match="expected `<!-- end -->` after every"):
        update("<!-- table: elm -->\n| 1 |\n", {"elm": ""})


def test_the_last_row_of_a_log_with_the_same_names_counts(tmp_path: Path) -> None:
    rows = [("a", 1, 0.5), ("b", 1, 2.5), ("a", 2, 1.5), ("a", 1, 3.5), ("c", 9, 1), ("b", 2, None)]
    log = [{"method": m, "size": n, "ratio": r, "why": "memory"} for m, n, r in rows]
    (tmp_path / "oak.jsonl").write_text("\n".join(map(json.dumps, log)))
    titles = {"b": "B", "z": "Z", "a": "A"}
    where: Any = {"row": "{method}", "row_titles": titles, "column": "N = {size}"}
    table = table_of_log(tmp_path, log="oak", **where, cell="{ratio:.2f}", otherwise="{why}")
    assert table.splitlines()[0] == "|  | N = 1 | N = 2 | N = 9 |"
    assert cells(table) == [["B", "2.50", "memory", "–"], ["A", "3.50", "1.50", "–"]]
    columns = {"method": "{method}", "ratio": "{ratio:.1f}"}
    table = table_of_log(tmp_path, log="oak", where={"size": 1}, key=["method"], columns=columns)
    assert cells(table) == [["a", "3.5"], ["b", "2.5"]]


def test_speeds_are_relative_to_the_full_softmax_of_the_corpus() -> None:
    tables = all_tables()
    for row in cells(tables["summary"]):
        *_, layer, _, ratio = row
        assert ratio == "1.00" or not layer.startswith("full softmax")
    sizes = cells(tables["vocabularies"])
    assert [row[0] for row in sizes] == ["10,000", "33,278", "203,887", "9,867,684"]
    assert [row[5] for row in sizes] == ["1.5", "2.3", "12", "–"]
    for row in sizes[:3]:
        full, ours, speedup = (float(text.replace(",", "")) for text in row[2:5])
        assert speedup == pytest.approx(ours / full, rel=0.05)
    declared = cells(tables["comparisons"])
    assert [row[3] == "–" for row in declared] == [False, False, False, False, True]
    assert sizes[0][6:] == declared[0][3:5]
    (of_gpu,) = (row for row in cells(tables["gpu_layer"]) if row[0].startswith("267,735"))
    ours, full, published = float(of_gpu[1]), float(of_gpu[2]), float(of_gpu[5])
    times = f"{ours} ms in a CUDA graph; full softmax: PyTorch {full:.0f}, "
    times += f"fastest published {published:.0f}, computed"
    assert times in (TOP / "README.md").read_text(encoding="utf-8")


def test_lines_go_from_left_to_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    draw_vocabularies(RESULTS, tmp_path / PICTURE.name)
    (figure,) = saved
    for line in [line for axes in figure.axes for line in axes.lines]:
        places, heights = (np.asarray(each, float) for each in line.get_data())
        assert len(places) > 1, line.get_label()
        assert np.diff(places).min() > 0, (line.get_label(), places)
        assert np.isfinite(heights).all(), line.get_label()


class Toy:
    """A table of two rows on the tiny corpus; tables.yaml, logs and runs are in `folder`."""

    def __init__(self, config: Path, corpus: Path, folder: Path) -> None:
        self.tables, self.results, self.corpus = folder / "tables.yaml", folder / "logs", corpus
        self.logs = self.results / "toy"
        shared = ["train.max_steps=2", "train.val_every_steps=1", "model.layers=1"]
        figures = ["perplexity", "oov", "minutes", "step_milliseconds"]
        random = {"config": str(config), "overrides": ["classes.method=random"]}
        rows = {"full softmax": ["output.tree=full"], "classes": random}
        table: Any = {"title": "toy", "config": str(config), "shared": shared, "seeds": [1, 2]}
        table |= {"figures": figures, "rows": rows}
        self.tables.write_text(yaml.safe_dump({"toy": table}, sort_keys=False))
        self.options = [f"--tables={self.tables}", f"--results={self.results}"]
        self.options += [f"--runs={folder / 'runs'}", "--no-progress"]

    def show(self, *arguments: str) -> None:
        main(["toy", *self.options, *arguments])

    def train(self, *arguments: str) -> None:
        self.show(f"--data-dir={self.corpus}", *arguments)

    def log(self, row: str, seed: int) -> dict[str, Any]:
        return deepcopy(read_logs(self.logs)[row, seed])


@pytest.fixture
def toy(tiny: Path, corpus: Path, tmp_path: Path) -> Toy:
    return Toy(tiny, corpus, tmp_path)


def test_rows_are_trained_once_and_have_means(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
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
    equal = f"{expected:.2f} after 1 steps, equal to the log in every digit"
    assert same == f"full softmax, seed 1: {equal}"
    assert changed.endswith(f"{other:.2f} after 1 steps, 40.00 in the log ({other / 40 - 1:+.1%})")
    classes["curve"][0][0] = 7
    append_log(toy.logs / LOG, classes)
    append_log(toy.logs / LOG, full | {"command": "another"})
    toy.train("--seeds=1", "--check")
    missing, later = capsys.readouterr().out.splitlines()
    assert missing == "full softmax, seed 1: no log"
    assert later.endswith("after 1 steps; the log's first validation is after 7")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"toy"}


def test_a_log_of_other_settings_is_missing(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
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
