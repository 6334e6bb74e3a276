"""The kernels compile for every architecture; a kernel that spills or has a hazard is reported.

One width per architecture, and where compiled kernels multiply asynchronously (sm_90) both kinds of
products. All widths, dtypes and versions of Triton: `python -m scripts.kernels.compilation_matrix`.
What the kernels of sm_80 and sm_90 compute in every dtype: `tests/output/backends/triton`.
"""

import json
from pathlib import Path

import pytest

from .processes import run_python

MATRIX_KERNELS = {"_forward", "_heavy", "_rows", "_update"}
RULES = ("norm", "SGD", "Adagrad", "Adagrad, norms given", "Adam")
UPDATES = {f"_update, {rule}" for rule in RULES}
pytest.importorskip("triton.backends.nvidia")


def compile_kernels(
    before: str, sm: int, size: int, dtypes: list[str], *options: str
) -> tuple[int, str]:
    """Exit code and output of the report, after some preparation in the same process."""
    code = f"from scripts.kernels import compilation_matrix\n{before}\ncompilation_matrix.main()"
    arguments = ["--sm", str(sm), "--sizes", str(size), "--dtypes", *dtypes, *options]
    done = run_python("-W", "error", "-c", code, *arguments)
    return done.returncode, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("capability", "size", "dtypes"),
    [
        (80, 64, ["tf32"]),
        (90, 64, ["bf16"]),
        pytest.param(80, 64, ["bf16"], marks=pytest.mark.long),
        pytest.param(90, 64, ["tf32"], marks=pytest.mark.long),
        pytest.param(90, 650, ["bf16"], marks=pytest.mark.long),
        pytest.param(100, 64, ["bf16", "tf32"], marks=pytest.mark.long),
    ],
)
def test_every_kernel_compiles_without_spills_and_with_tensor_cores(
    capability: int, size: int, dtypes: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "report.jsonl"
    code, printed = compile_kernels("", capability, size, dtypes, "--json", str(out))
    assert code == 0, printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for dtype in dtypes:
        names = {row["kernel"] for row in rows if row["dtype"] == dtype}
        others = {"_sort", "_merge", "_plan", "_errors", "_rows, row-wise"}
        assert names >= (MATRIX_KERNELS - {"_update"}) | UPDATES | others
    for row in rows:
        assert row["spilled_bytes"] == row["hazards"] == 0
        assert row["programs"] >= 1
        multiplies = row["kernel"].split(",")[0] in MATRIX_KERNELS and "bias" not in row["kernel"]
        assert (row["tensor_cores"] != "none") == multiplies


def test_a_kernel_that_spills_is_reported() -> None:
    """With tiles that exceed the register file."""
    huge = """
from lm.output.backends.triton.launch import instrumented
from lm.output.backends.triton.tile_shapes import Tile, Tiles
instruments = instrumented(tiles=Tiles(*[Tile(128, 64, 32, 2, 2, 32)] * 4))
instruments.__enter__()
"""
    code, printed = compile_kernels(huge, 80, 64, ["bf16"], "--kernels", "_forward")
    assert code == 1, printed
    assert "1 kernels compiled, 1 of them not as they should be" in printed
