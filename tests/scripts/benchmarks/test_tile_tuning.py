"""Tile shapes are tried in the interpreter as on a GPU."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_tile_shapes_are_timed_one_kernel_after_another(tmp_path: Path, run_benchmark: Run) -> None:
    out = tmp_path / "tiles.jsonl"
    done = run_benchmark("tile_tuning", "--dry-run", f"--json={out}")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["kernel"] for row in rows} == {"forward", "errors", "heavy", "light"}
    assert all(row["score"] > 0 for row in rows)
    assert len(rows) == 8
    assert "time ÷ the table's" in done.stdout
