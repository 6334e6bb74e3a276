"""Several devices compute what one does."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.metrics import read_metrics


def test_two_processes_train_as_one_and_go_on_where_they_stopped(
    tiny: Path, prepared_dir: Path, train: Callable[..., Path], tmp_path: Path
) -> None:
    options = ["--model.dropout=0", "--train.max_steps=8", "--log.every_steps=2"]
    one = read_metrics(train(tmp_path / "one", *options) / "metrics.csv")
    command = [sys.executable, "-m", "lm.cli", "train", str(tiny), "--no-progress", *options]
    command += [f"--run_dir={tmp_path / 'two'}", f"--data.prepared_dir={prepared_dir}"]
    command += ["--train.devices=2", "--train.accelerator=cpu"]
    for stop in (["--train.max_steps=4"], ["--resume", "auto"]):
        result = subprocess.run(
            [*command, *stop],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert result.returncode == 0, result.stderr
    two = read_metrics(tmp_path / "two" / "metrics.csv")
    assert [line.step for line in two] == [line.step for line in one] == [2, 4, 6, 8]
    for ours, truth in zip(two, one, strict=True):
        assert ours.tokens == truth.tokens
        assert ours.train_perplexity == pytest.approx(truth.train_perplexity, rel=1e-5)
    assert two[-1].valid_perplexity == pytest.approx(one[-1].valid_perplexity, rel=1e-5)
