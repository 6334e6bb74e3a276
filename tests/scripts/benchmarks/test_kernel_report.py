"""The kernels compile for every architecture; a kernel that spills or has a hazard is reported.

One width per architecture, and where compiled kernels multiply asynchronously (sm_90) both kinds of
products. All widths, dtypes and versions of Triton: `python -m scripts.benchmarks.kernel_report`.
What the kernels of sm_80 and sm_90 compute in every dtype: `tests/output/backends/triton`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MATRIX_KERNELS = {"_forward", "_heavy", "_rows"}
TOP = Path(__file__).resolve().parents[3]
pytest.importorskip("triton.backends.nvidia")


def compile_kernels(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, where kernels are compiled instead of interpreted; those that
    Triton's cache has are not compiled again.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        capture_output=True,
        text=True,
        cwd=TOP,
        env=environment,
    )


@pytest.mark.parametrize(
    ("capability", "size", "dtype"),
    [
        (80, 64, "bf16"),
        (80, 64, "tf32"),
        (90, 650, "bf16"),
        (90, 64, "tf32"),
        (100, 64, "bf16"),
        (100, 64, "tf32"),
    ],
)
def test_every_kernel_compiles_without_spills_and_with_tensor_cores(
    capability: int, size: int, dtype: str, tmp_path: Path
) -> None:
    out = tmp_path / "report.jsonl"
    options = ["--sm", str(capability), "--sizes", str(size), "--dtypes", dtype]
    command = ["-m", "scripts.benchmarks.kernel_report", "--json", str(out), *options]
    done = compile_kernels(*command)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = {row["kernel"] for row in rows}
    assert names >= MATRIX_KERNELS | {"_sort", "_merge", "_plan", "_errors", "_rows, row-wise"}
    for row in rows:
        assert row["spilled_bytes"] == row["hazards"] == 0
        assert 0 <= row["shared_bytes"] <= {80: 166_912, 90: 232_448, 100: 232_448}[capability]
        assert (row["tensor_cores"] != "none") == (row["kernel"].split(",")[0] in MATRIX_KERNELS)
        assert row["programs"] >= 1


def test_a_kernel_that_spills_is_reported() -> None:
    """With tiles that exceed the register file."""
    code = """
from lm.output.backends.triton.launch import instrumented
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from scripts.benchmarks import kernel_report
huge = Tile(128, 64, 32, 2, 2, 32)
with instrumented(tiles=Tiles(huge, huge, huge, huge)):
    kernel_report.main()
"""
    options = ["--sm", "80", "--sizes", "64", "--dtypes", "bf16", "--kernels", "_forward"]
    done = compile_kernels("-c", code, *options)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "1 kernels compiled, 1 of them not as they should be" in done.stdout


OTHER_VERSION = """
import sys
import triton
from scripts.benchmarks import kernel_report

triton.__version__ = sys.argv.pop(1)
kernel_report.main()
"""


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.6.0", "sm_90: left out, the backend requires Triton 3.7 on devices of compute cap"),
        ("3.8.0", "Triton 3.8.0: 1 kernels compiled, 0 of them not as they should be, 0 hazards"),
    ],
)
def test_versions_that_are_not_known_to_be_right_are_refused_or_guarded(
    version: str, expected: str
) -> None:
    options = ["--sm", "90", "--sizes", "64", "--dtypes", "bf16", "--kernels", "_heavy"]
    done = compile_kernels("-c", OTHER_VERSION, version, *options)
    assert expected in done.stdout, done.stderr[-2000:]
