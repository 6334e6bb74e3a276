"""Benchmarks as they are run: in a new process, from the top folder."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[3]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_benchmark() -> Run:
    """`run_benchmark(name, *arguments)` runs a benchmark and captures its output."""

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", f"scripts.benchmarks.{name}", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=TOP,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    return run
