"""The benchmark of OpenMP settings measures the command as a user starts it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.benchmarks.openmp_spin import SETTINGS, environment, loaded

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_training_is_measured_under_a_setting(tmp_path: Path, run_benchmark: Run) -> None:
    log = tmp_path / "rows"
    options = ["--loads", "none", "--settings", "default", "--rounds", "1", "--steps", "2"]
    done = run_benchmark("openmp_spin", *options, "--json", log, "--model.hidden=8")
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, log.read_text().splitlines())
    assert (row["load"], row["setting"], row["ratio_to_default"]) == ("none", "default", 1)
    assert row["tokens_per_second"] > 0


def test_the_default_is_a_process_without_any_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert not {"GOMP_SPINCOUNT", "OMP_NUM_THREADS"} & environment(SETTINGS["default"]).keys()
    assert environment(SETTINGS["spin count 1,000"])["GOMP_SPINCOUNT"] == "1000"


def test_the_programs_of_a_load_end_with_it() -> None:
    with loaded("busy loops") as programs:
        assert programs
        assert {program.poll() for program in programs} == {None}
    assert None not in {program.poll() for program in programs}
