"""The OpenMP spin count: chosen by the load, unless the user has chosen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm import openmp


@pytest.mark.parametrize(
    ("num_running", "expected"), [(0, openmp.QUIET_SPIN_COUNT), (3, openmp.BUSY_SPIN_COUNT)]
)
def test_the_spin_count_follows_the_load(
    num_running: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(openmp, "num_running", lambda: num_running)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    openmp.limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == str(expected)


@pytest.mark.parametrize("setting", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_users_setting_stays(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv(setting, "7")
    openmp.limit_spinning()
    assert os.environ[setting] == "7"
    assert setting == "GOMP_SPINCOUNT" or "GOMP_SPINCOUNT" not in os.environ


def test_the_kernels_count_of_running_threads_is_read_without_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "loadavg"
    file.write_text("0.10 0.20 0.30 4/93 1234\n")
    monkeypatch.setattr(openmp, "_LOADAVG", file)
    assert openmp.num_running() == 3


def test_the_command_sets_it_before_torch_is_imported() -> None:
    code = (
        "import os, sys; from lm import cli, openmp\n"
        "openmp.num_running = lambda: 0\n"
        "assert 'torch' not in sys.modules\n"
        "cli.main(['train', 'missing.yaml'])\n"
        "print(os.environ['GOMP_SPINCOUNT'])\n"
    )
    user = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in user}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == str(openmp.QUIET_SPIN_COUNT), done.stderr
