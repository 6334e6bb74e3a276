"""The kernels compile for every architecture; a kernel that spills or has a hazard is reported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MATRIX_KERNELS = {"_forward", "_heavy", "_rows"}
TOP = Path(__file__).resolve().parents[3]
pytest.importorskip("triton.backends.nvidia")


def compile_kernels(cache: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, where kernels are compiled instead of interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        capture_output=True,
        text=True,
        cwd=TOP,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
    )


@pytest.mark.parametrize(("capability", "size"), [(80, 300), (90, 650), (100, 300)])
def test_every_kernel_compiles_without_spills_and_with_tensor_cores(
    capability: int, size: int, tmp_path: Path
) -> None:
    out = tmp_path / "report.jsonl"
    options = ["--sm", str(capability), "--sizes", str(size), "--dtypes", "bf16", "tf32"]
    command = ["-m", "scripts.benchmarks.kernel_report", "--json", str(out), *options]
    done = compile_kernels(tmp_path / "cache", *command)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for dtype in ("bf16", "tf32"):
        names = {row["kernel"] for row in rows if row["dtype"] == dtype}
        assert names >= MATRIX_KERNELS | {"_sort", "_merge", "_plan", "_errors", "_rows, row-wise"}
    for row in rows:
        assert row["spilled_bytes"] == row["hazards"] == 0
        assert 0 <= row["shared_bytes"] <= {80: 166_912, 90: 232_448, 100: 232_448}[capability]
        assert (row["tensor_cores"] != "none") == (row["kernel"].split(",")[0] in MATRIX_KERNELS)
        assert row["programs"] >= 1


def test_a_kernel_that_spills_is_reported(tmp_path: Path) -> None:
    """With tiles that exceed the register file."""
    code = """
from lm.output.backends.triton.launch import instrumented
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from scripts.benchmarks import kernel_report
huge = Tile(128, 128, 128, 4, 3, 64)
with instrumented(tiles=Tiles(huge, huge, huge, huge)):
    kernel_report.main()
"""
    options = ["--sm", "80", "--sizes", "300", "--dtypes", "bf16", "--kernels", "_forward"]
    done = compile_kernels(tmp_path, "-c", code, *options)
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
        ("3.8.0", "Triton 3.8.0: 2 kernels compiled, 0 of them not as they should be, 0 hazards"),
    ],
)
def test_versions_that_are_not_known_to_be_right_are_refused_or_guarded(
    version: str, expected: str, tmp_path: Path
) -> None:
    options = ["--sm", "90", "--sizes", "64", "--dtypes", "bf16", "--kernels", "_heavy"]
    done = compile_kernels(tmp_path, "-c", OTHER_VERSION, version, *options)
    assert expected in done.stdout, done.stderr[-2000:]
