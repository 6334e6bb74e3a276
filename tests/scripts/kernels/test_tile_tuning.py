"""Tile shapes are tried in the interpreter as on a GPU."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_tile_shapes_are_timed_one_kernel_after_another(tmp_path: Path, run_benchmark: Run) -> None:
    out = tmp_path / "tiles.jsonl"
    done = run_benchmark("scripts.kernels.tile_tuning", "--dry-run", f"--json={out}")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["kernel"] for row in rows} == {"forward", "errors", "heavy", "light"}
    assert all(row["score"] > 0 for row in rows)
    assert len(rows) == 8
    assert "time ÷ the table's" in done.stdout


SHAPE = {"kernel": "heavy", "v": 32, "c": 16, "h": 16, "warps": 4, "stages": 1, "step": 16}


def test_only_the_best_shapes_of_a_log_are_tried(tmp_path: Path, run_benchmark: Run) -> None:
    shapes = [SHAPE | {"score": 1.1, "v": 16}, SHAPE | {"score": 0.9}, SHAPE | {"score": 1.2}]
    shapes += [SHAPE | {"kernel": "light", "v": 16, "score": 3}]
    file, out = tmp_path / "candidates.jsonl", tmp_path / "tiles.jsonl"
    file.write_text("\n".join(map(json.dumps, shapes)))
    options = ["--dry-run", f"--candidates={file}"]
    done = run_benchmark("scripts.kernels.tile_tuning", *options, "--best=2", f"--json={out}")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["kernel"], row["v"]) for row in rows] == [
        ("heavy", 32),
        ("light", 16),
        ("heavy", 16),
    ]
    file.write_text(json.dumps(SHAPE | {"kernel": "d_bias", "score": 1}))
    done = run_benchmark("scripts.kernels.tile_tuning", *options)
    assert done.returncode == 1
    assert "candidates.jsonl: no kernel d_bias, only" in done.stderr
