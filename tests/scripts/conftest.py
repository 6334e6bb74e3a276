"""Benchmarks as `python -m` runs them, from the top folder, in the process of the tests."""

import argparse
import io
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest

from scripts import TOP

Run = Callable[..., subprocess.CompletedProcess[str]]
Parse = Callable[..., argparse.Namespace]


@pytest.fixture
def run_benchmark(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run_benchmark(name, *arguments)` runs a benchmark, or a module, and captures its output."""

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [name, *map(str, arguments)]
        module = name if "." in name else f"scripts.benchmarks.{name}"
        code, out, err = 0, io.StringIO(), io.StringIO()
        with monkeypatch.context() as patches, redirect_stdout(out), redirect_stderr(err):
            patches.chdir(TOP)
            patches.setenv("OMP_NUM_THREADS", "1")  # of the processes that it starts
            patches.setattr("sys.argv", command)
            patches.delitem(sys.modules, module, raising=False)  # as in a new process
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
                err.write(f"{end.code}\n" if isinstance(end.code, str) else "")
        return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """`parse(benchmark, *arguments)`: its options, which its `main` has from now on, too."""

    def options_of(benchmark: Any, *arguments: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
        options: argparse.Namespace = benchmark.parse_options()
        return options

    return options_of
