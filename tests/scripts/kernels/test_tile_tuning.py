"""Tile shapes are tried in the interpreter as on a GPU."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lm.output.backends.triton.tile_shapes import tiles

from .processes import run_python

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


@pytest.mark.long
def test_the_model_leaves_out_shapes_that_do_not_fit(tmp_path: Path) -> None:
    """In a process that compiles; the log names the launches of the candidates only."""
    pytest.importorskip("triton.backends.nvidia")
    start = tiles(
        (torch.bfloat16, torch.bfloat16), 90, (16, 16), tensor_cores=False
    ).forward._asdict()
    shapes = [start | {"kernel": "forward", "stages": stages, "score": 1} for stages in (2, 3, 9)]
    file, out = tmp_path / "candidates.jsonl", tmp_path / "tiles.jsonl"
    file.write_text("\n".join(map(json.dumps, shapes)))
    options = ["--sizes=97:16", "--positions=64", f"--candidates={file}", f"--json={out}"]
    done = run_python("-m", "scripts.kernels.tile_tuning", "--model", *options)
    assert done.returncode == 0, done.stderr[-2000:]
    two, three = (json.loads(line) for line in out.read_text().splitlines())
    assert (two["stages"], three["stages"]) == (2, 3)
    assert three["score"] == 1  # the shape that the search starts from
    assert 0.2 < two["score"] < 5
