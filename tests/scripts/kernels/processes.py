"""Processes in which kernels are compiled, not interpreted."""

import os
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[3]


def run_python(*arguments: object, cwd: Path = TOP) -> subprocess.CompletedProcess[str]:
    """Run Python with this copy of the project, and with the Triton that PYTHONPATH may lead to.

    What Triton's cache has is not compiled again.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{TOP}{os.pathsep}{environment.get('PYTHONPATH', TOP)}"
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
    )
