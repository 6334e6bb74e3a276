"""A step that differs from the first in one bit is reported.

Steps that do not differ: `test_gpu_check.py` runs the same command.
"""

import subprocess
from collections.abc import Callable

import pytest

from lm.output.backends.triton.launch import Launch, execute, instrumented

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_a_step_that_differs_is_reported(run_benchmark: Run) -> None:
    pytest.importorskip("triton")
    num_steps = 0

    def run(launch: Launch) -> None:
        nonlocal num_steps
        execute(launch)
        if launch.kernel.__name__ == "_forward":
            num_steps += 1
            if num_steps == 3:  # the second that is compared
                launch.arguments["nll"][5] += 1e-6

    tiny = ["--rows", "97:8", "--positions", "32", "--steps", "2", "--device", "cpu"]
    with instrumented(run=run):
        done = run_benchmark("repeatability", *tiny, "--dtype", "fp32")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[2].split("|")[4].strip() == "1"
