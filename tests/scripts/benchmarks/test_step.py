"""The breakdown of a training step: its parts, and the plain loop next to it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lm.training import loop
from scripts.benchmarks.step import plain_steps
from scripts.benchmarks.training_speed import start_training
from scripts.reproduction.figures import PARTS, draw_steps

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_the_parts_make_up_the_step_and_are_drawn(
    tiny: Path, tmp_path: Path, run_benchmark: Run
) -> None:
    log = tmp_path / "step.jsonl"
    options = [f"--run_dir={tmp_path / 'run'}", "--rounds", "2", "--steps", "2", "--json", log]
    done = run_benchmark("step", tiny, *options, "--trees", "two_level", "full")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["tree"] for row in rows] == ["two_level", "full"]
    for row in rows:
        assert sum(row[part] for part in PARTS) == pytest.approx(1, abs=0.2)  # each is a median
        assert all(row[part] > 0 for part in PARTS)
        assert row["overhead"] > -1
        assert row["system_share"] >= 0
    draw_steps(tmp_path, tmp_path / "step.png")
    assert (tmp_path / "step.png").stat().st_size > 1000


def test_the_plain_loop_trains_the_same_model(tiny: Path, tmp_path: Path) -> None:
    options = [f"--run_dir={tmp_path}", "--model.dropout=0", "--optim.schedule=constant"]
    ours, plain = (start_training(str(tiny), options, "two_level", num_steps=3) for _ in range(2))
    for _ in plain_steps(plain):
        loop.train_step(ours)
    for own, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(own, other)
