"""The OpenMP spin count: a constant, unless the user has chosen."""

import os
import subprocess
import sys

import pytest

import lm


@pytest.mark.parametrize("setting", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_users_setting_stays(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv(setting, "7")
    lm.limit_spinning()
    assert os.environ[setting] == "7"
    assert setting == "GOMP_SPINCOUNT" or "GOMP_SPINCOUNT" not in os.environ


def test_the_command_sets_the_same_count_whatever_runs_before_torch_is_imported() -> None:
    """A count that depends on the load was wrong: numpy's own thread was taken for a load."""
    code = (
        "import os, sys, threading\n"
        "busy = lambda: threading.Thread(target=lambda: sum(range(10**9)), daemon=True).start()\n"
        "busy()\n"
        "sys.argv[1:] = ['train', 'missing.yaml']\n"
        "from lm.__main__ import command\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        "try: command()\n"
        "except SystemExit: print(os.environ['GOMP_SPINCOUNT'], flush=True); os._exit(0)\n"
    )
    user = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in user}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == str(lm.SPIN_COUNT), done.stderr
