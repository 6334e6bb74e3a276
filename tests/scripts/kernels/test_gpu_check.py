"""The check for a GPU runs its commands without one, says what is wrong, and leaves no process."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import TOP
from scripts.kernels.gpu_check import COMMANDS, GPU_TESTS, preflight
from tests.conftest import python

ALL = {line.split()[1]: 0 for line in COMMANDS.splitlines()} | {"memcheck": 127, "racecheck": 127}
ENDED = "1 a 9 :\n1 b 9 none\n1 c 9 sleep 0.5; kill -TERM $PPID; tail -f $LOGS/c.log"
FAILED = "1 a 0.1 tail -f $LOGS/a.log\n1 b 9 tail -f $LOGS/b.log & exit 3\n1 c 9 :"


@pytest.mark.parametrize(
    ("table", "code", "codes"),
    [
        (ENDED, 143, {"a": 0, "b": 127}),
        (FAILED, 1, {"a": 124, "b": 3, "c": 0}),
        pytest.param(COMMANDS, 0, ALL, marks=pytest.mark.long),
    ],
    ids=["ended", "failed", "all"],
)
def test_commands_are_reported_and_end(
    table: str, code: int, codes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(TOP))
    program = f"from scripts.kernels import gpu_check as g; g.COMMANDS = {table!r}; g.main()"
    assert python("-c", program, "--part=2", "--only", next(iter(codes))).returncode == 2
    done = python("-c", program, "--dry-run", "--out", "a folder")
    assert done.returncode == code, done.stderr
    found = json.loads((tmp_path / "a folder/gpu_check.json").read_text())["commands"]
    assert {name: each["exit_code"] for name, each in found.items()} == codes
    subprocess.run(["pidwait", "-f", tmp_path], timeout=20)  # those that are being killed


@pytest.mark.parametrize(
    ("version", "found", "message"),
    [
        (None, None, "torch finds no CUDA device; --dry-run runs without one"),
        ("3.6.0", None, "the backend requires Triton 3.7.1 .*; see scripts/kernels/README.md"),
        ("3.9.0", "nll is off", "the kernels differ from the reference with rows .*: nll is off"),
    ],
)
def test_wrong_or_unsafe_kernels_are_refused(
    version: str | None, found: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr("torch.cuda.is_available", lambda: version is not None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("lm.output.backends.verify.result_of", lambda *_: found)
    monkeypatch.setattr("scripts.kernels.compilation.launches", lambda *_: [])
    with pytest.raises(SystemExit, match=f"^{message}$"):
        preflight(dry=False)


def test_the_script_runs_the_code_of_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/__init__.py").write_text("raise SystemExit(3)")
    assert subprocess.run([TOP / "scripts/gpu_check", "--list"], cwd=tmp_path).returncode == 0


def test_programs_import_only_what_a_gpu_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    missing = ("datasets", "hypothesis", "sentencepiece", "uv", "wandb", "zstandard")
    program = f"import sys, pytest; sys.modules |= dict.fromkeys({missing})\n"
    for line in COMMANDS.splitlines():
        program += f"import {line.partition(' -m ')[2].split()[0]}\n"
    program += "sys.exit(pytest.main(sys.argv[1:]))"
    done = python("-c", program, *f"-q --collect-only -m gpu {GPU_TESTS}".split())
    assert done.returncode == 0, done.stdout + done.stderr
