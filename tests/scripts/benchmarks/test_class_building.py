"""The benchmark of class building: its figures, and what it leaves unchanged."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data_prep.classes.report import class_report
from data_prep.classes.word_classes import build_word_classes
from data_prep.prepared import open_prepared
from lm.cli import main
from lm.config import load_config

TOP = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> str:
    """What the benchmark prints, run in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks.class_building", *arguments],
        capture_output=True,
        text=True,
        cwd=TOP,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_building_classes_is_measured_as_lm_classes_reports_it(tiny: Path, tmp_path: Path) -> None:
    rows, data = tmp_path / "rows", tmp_path / "data"
    options = ["--methods", "frequency", "exchange", "--json", str(rows)]
    shown = run(str(tiny), *options, f"--data.prepared_dir={data}")
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [line.split()[0] for line in shown.splitlines()] == ["method", "frequency", "exchange"]
    prepared = open_prepared(data)
    tokens = prepared.tokens("train")
    classes = load_config(tiny).classes
    methods = replace(classes, method="frequency"), replace(classes, method="exchange")
    for row, settings in zip(measured, methods, strict=True):
        word_class = build_word_classes(
            prepared.counts(), settings, tokens=tokens, words=list, folder=tmp_path
        )
        report = class_report(prepared.counts(), word_class, tokens, shortlist=settings.shortlist)
        assert row["method"] == settings.method
        assert row["num_word_classes"] == report.num_word_classes
        assert row["columns_per_token"] == round(report.columns_per_token, 1)
        assert row["bigram_log_likelihood"] == round(report.log_likelihood, 4)
        assert 1 < row["peak_mib"] < 4000


def test_measuring_classes_leaves_those_of_a_run_unchanged(
    tiny: Path, tmp_path: Path, contents: Callable[[Path], dict[str, str]]
) -> None:
    data = f"--data.prepared_dir={tmp_path / 'data'}"
    assert main(["prepare", str(tiny), data]) == 0
    before = contents(tmp_path)
    run(str(tiny), "--methods", "random", data)
    assert contents(tmp_path) == before
