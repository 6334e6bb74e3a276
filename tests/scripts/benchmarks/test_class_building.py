"""The benchmark of class building: its figures, and what it leaves unchanged."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data_prep.classes.report import class_report
from data_prep.classes.word_classes import build_class_levels
from data_prep.prepared import open_prepared
from lm.cli import main
from lm.config import load_config

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_building_classes_is_measured_as_lm_classes_reports_it(
    tiny: Path, tmp_path: Path, run_benchmark: Run
) -> None:
    rows, data = tmp_path / "rows", tmp_path / "data"
    options = ["--methods", "frequency", "exchange", "--json", str(rows)]
    done = run_benchmark("class_building", tiny, *options, f"--data.prepared_dir={data}")
    assert done.returncode == 0, done.stderr
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    printed = [line.split()[1] for line in done.stdout.splitlines()]
    assert [printed[0], *printed[2:]] == ["method", "frequency", "exchange"]
    prepared = open_prepared(data)
    tokens = prepared.tokens("train")
    classes = load_config(tiny).classes
    methods = replace(classes, method="frequency"), replace(classes, method="exchange")
    for row, settings in zip(measured, methods, strict=True):
        (word_class,) = build_class_levels(
            prepared.counts(), settings, tokens=tokens, words=list, folder=tmp_path
        )
        report = class_report(prepared.counts(), word_class, tokens, shortlist=settings.shortlist)
        assert row["method"] == settings.method
        assert row["num_word_classes"] == report.num_word_classes
        assert row["columns_per_token"] == round(report.columns_per_token, 1)
        assert row["bigram_log_likelihood"] == round(report.log_likelihood, 4)
        assert 1 < row["peak_mib"] < 4000


def test_measuring_classes_leaves_those_of_a_run_unchanged(
    tiny: Path, tmp_path: Path, contents: Callable[[Path], dict[str, str]], run_benchmark: Run
) -> None:
    data = f"--data.prepared_dir={tmp_path / 'data'}"
    assert main(["prepare", str(tiny), data]) == 0
    before = contents(tmp_path)
    assert run_benchmark("class_building", tiny, data, "--methods", "random").returncode == 0
    assert contents(tmp_path) == before
