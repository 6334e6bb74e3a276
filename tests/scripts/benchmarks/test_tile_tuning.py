"""Tile shapes are tried in the interpreter as on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[3]


def test_tile_shapes_are_timed_one_kernel_after_another(tmp_path: Path) -> None:
    out = tmp_path / "tiles.jsonl"
    command = [sys.executable, "-m", "scripts.benchmarks.tile_tuning", "--dry-run"]
    done = subprocess.run(
        [*command, f"--json={out}"], capture_output=True, text=True, check=True, cwd=TOP
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["kernel"] for row in rows} == {"forward", "d_hidden", "d_weight", "d_light"}
    assert all(row["score"] > 0 for row in rows)
    assert len(rows) == 8
    assert "time ÷ the table's" in done.stdout
