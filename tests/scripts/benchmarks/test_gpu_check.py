"""The check for a GPU runs all of its steps without one, and requires one otherwise."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

TOP = Path(__file__).resolve().parents[3]
STEPS = ["compile", "tests", "repeat", "benchmark 97:8"]


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process."""
    command = [str(TOP / "scripts" / "gpu_check"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_check_for_a_gpu_runs_all_steps_without_one(tmp_path: Path) -> None:
    done = check("--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [step["step"] for step in report["steps"]] == STEPS
    assert all(step["exit_code"] == 0 for step in report["steps"])
    passed = [re.match(r"(\d+) passed", line) for line in report["steps"][1]["last_lines"]]
    assert sum(int(match[1]) for match in passed if match) == 4
    assert "launches for sm_90 compiled" in report["steps"][0]["last_lines"][0]
    lines = (tmp_path / "output_layer.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kernels = {row["method"]: row["launches"] for row in rows if row["backend"] == "triton"}
    assert kernels["random"]["forward"] == ["_forward"]
    assert kernels["random"]["backward"] == ["_d_hidden", "_d_weight", "_d_light"]
    assert "forward: 1 hierarchical kernel (_forward)" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_for_a_gpu_fails_without_one() -> None:
    done = check()
    assert done.returncode == 1
    assert done.stderr == "gpu_check: no CUDA device; --dry-run runs without one\n"
