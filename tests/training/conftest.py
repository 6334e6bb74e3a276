"""Fixtures of the tests of training: commands that train `tiny`, and the comparison of two runs."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lm.training.checkpoint import load_checkpoint
from lm.training.metrics import Metrics, read_metrics


@pytest.fixture
def failed(tiny: Path, prepared_dir: Path, complaint: Callable[..., str]) -> Callable[..., str]:
    """`failed(folder, *options)`: the error of training `tiny` in `folder`, which must fail."""

    def run(folder: Path, *options: str) -> str:
        folders = [f"--run_dir={folder}", f"--data.prepared_dir={prepared_dir}"]
        return complaint("train", tiny, "--no-progress", *folders, *options)

    return run


@pytest.fixture
def arguments(tiny: Path, prepared_dir: Path, tmp_path: Path) -> list[str]:
    """Arguments of the command that train `tiny` in `tmp_path / "run"`."""
    folders = [f"--run_dir={tmp_path / 'run'}", f"--data.prepared_dir={prepared_dir}"]
    return ["train", str(tiny), "--no-progress", *folders]


@dataclass(frozen=True)
class Outcome:
    """Everything in a run that must not depend on interruptions."""

    model: dict[str, Tensor]
    state: dict[str, Any]
    metrics: list[tuple[float | None, ...]]
    description: str

    @classmethod
    def of(cls, run: Path) -> "Outcome":
        checkpoint = load_checkpoint(run / "checkpoints" / "last.ckpt")
        for name in ("seconds", "logged_seconds"):
            checkpoint["progress"].pop(name)
        assert re.fullmatch(
            r"[0-9a-f]{64}", checkpoint.pop("text_sha256")
        )  # assert_close has no text
        return cls(
            model=load_file(run / "model.safetensors"),
            state=checkpoint,
            metrics=[untimed(line) for line in read_metrics(run / "metrics.csv")],
            description=(run / "model.json").read_text(),
        )


def untimed(line: Metrics) -> tuple[float | None, ...]:
    return (
        line.step,
        line.epoch,
        line.tokens,
        line.learning_rate,
        line.train_perplexity,
        line.valid_perplexity,
    )


@pytest.fixture(scope="session")
def outcome_of() -> Callable[[Path], Outcome]:
    """`outcome_of(run)`: everything in a run that must not depend on interruptions."""
    return Outcome.of


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Path, Path], None]:
    """`assert_same(run, expected)`, bit for bit: weights, optimizer, random numbers, progress and
    metrics.
    """

    def compare(run: Path, expected: Path) -> None:
        ours, truth = Outcome.of(run), Outcome.of(expected)
        assert ours.metrics == truth.metrics
        torch.testing.assert_close(ours.model, truth.model, rtol=0, atol=0)
        torch.testing.assert_close(ours.state, truth.state, rtol=0, atol=0)
        assert ours.description == truth.description

    return compare
