"""A step that differs from the first in one bit is reported."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
TOP = Path(__file__).resolve().parents[3]
TINY = ["--rows", "97:8", "--positions", "32", "--steps", "2", "--device", "cpu"]
FAULTY = """
from lm.output.backends.triton.launch import execute, instrumented
from scripts.benchmarks import repeatability

steps = 0


def run(launch):
    global steps
    execute(launch)
    if launch.kernel.__name__ == "_forward":
        steps += 1
        if steps == 3:  # the second that is compared
            launch.arguments["nll"][5] += 1e-6


with instrumented(run=run):
    repeatability.main()
"""


def test_steps_of_correct_kernels_are_equal(run_benchmark: Run) -> None:
    pytest.importorskip("triton")
    done = run_benchmark("repeatability", *TINY, "--dtype", "fp32")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[1].split()[:4] == ["97", "8", "2", "0"]


def test_a_step_that_differs_is_reported() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-c", FAULTY, *TINY, "--dtype", "fp32"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TOP, env=os.environ)
    assert done.returncode == 1, done.stderr[-2000:]
    assert done.stdout.splitlines()[1].split()[:4] == ["97", "8", "2", "1"]
