"""The check for a GPU runs all of its steps without one, and requires one otherwise."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.kernels import gpu_check

TOP = Path(__file__).resolve().parents[3]
SANITIZER_SECONDS = 60  # where it is installed
STEPS = ["compile", "tests", "benchmark 97:8"]


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process, with this Python."""
    command = [str(TOP / "scripts" / "gpu_check"), *arguments]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_check_for_a_gpu_runs_all_steps_without_one(tmp_path: Path) -> None:
    done = check("--dry-run", "--seconds", "3600", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [step["step"] for step in report["steps"]] == STEPS
    assert all(step["exit_code"] == 0 for step in report["steps"])
    passed = [re.match(r"(\d+) passed", line) for line in report["steps"][1]["last_lines"]]
    assert sum(int(match[1]) for match in passed if match) == 3
    assert "launches for sm_90 compiled" in report["steps"][0]["last_lines"][0]
    lines = (tmp_path / "output_layer.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kernels = {row["method"]: row["launches"] for row in rows if row["backend"] == "triton"}
    assert kernels["random"]["forward"] == ["_sort", "_merge", "_plan", "_forward"]
    assert kernels["random"]["backward"] == ["_errors", "_heavy", "_rows"]
    assert "forward: 1 hierarchical kernel (_forward)" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_for_a_gpu_fails_without_one() -> None:
    done = check()
    assert done.returncode == 1
    assert done.stderr == "gpu_check: no CUDA device; --dry-run runs without one\n"


def test_the_expected_seconds_of_all_steps_are_at_most_nine_minutes(tmp_path: Path) -> None:
    planned = gpu_check.steps(tmp_path, 90)
    assert sum(step.expected for step in planned) + SANITIZER_SECONDS <= 540
    assert all(step.expected < step.limit for step in planned)


def test_a_step_that_takes_too_long_is_ended_and_the_report_is_written(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    done = [sys.executable, "-c", "print('done')"]
    chosen = [
        gpu_check.Step("short", [done, done], 1, 60),
        gpu_check.Step("long", [done, sleep], 1, 2),
        gpu_check.Step("late", [done], 1, 60),
    ]
    results = gpu_check.run_all(chosen[:2], 60, tmp_path, dry=True)
    assert [result["exit_code"] for result in results] == [0, 124]
    assert results[0]["last_lines"] == ["done", "done"]
    assert json.loads((tmp_path / "gpu_check.json").read_text())["steps"] == results
    (late,) = gpu_check.run_all(chosen[2:], 0, tmp_path, dry=True)
    assert late["exit_code"] == 124
