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


def test_only_the_given_candidates_are_tried(tmp_path: Path, run_benchmark: Run) -> None:
    shape = {"kernel": "heavy", "v": 32, "c": 16, "h": 16}
    shape |= {"warps": 4, "stages": 1, "step": 16}
    file, out = tmp_path / "candidates.json", tmp_path / "tiles.jsonl"
    file.write_text(json.dumps([shape]))
    done = run_benchmark("tile_tuning", "--dry-run", f"--json={out}", f"--candidates={file}")
    assert done.returncode == 0, done.stderr
    (row,) = (json.loads(line) for line in out.read_text().splitlines())
    assert shape.items() <= row.items()
    file.write_text(json.dumps([shape | {"kernel": "d_bias"}]))
    done = run_benchmark("tile_tuning", "--dry-run", f"--candidates={file}")
    assert done.returncode == 1
    assert "candidates.json: no kernel d_bias, only" in done.stderr
