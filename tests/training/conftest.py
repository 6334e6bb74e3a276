"""Fixtures of the tests of training: commands that train `tiny`, and the comparison of two runs."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lm.training.checkpoint import load_checkpoint
from lm.training.metrics import read_metrics


@pytest.fixture
def command(tiny: Path, prepared_dir: Path) -> Callable[[Path], list[str]]:
    """`command(folder)`: arguments of the command that train `tiny` in `folder`."""
    options = ["--no-progress", f"--data.prepared_dir={prepared_dir}"]
    return lambda folder: ["train", str(tiny), *options, f"--run_dir={folder}"]


@pytest.fixture
def failed(
    command: Callable[[Path], list[str]], complaint: Callable[..., str]
) -> Callable[..., str]:
    """`failed(folder, *options)`: the error of training `tiny` in `folder`, which must fail."""
    return lambda folder, *options: complaint(*command(folder), *options)


@pytest.fixture
def arguments(command: Callable[[Path], list[str]], tmp_path: Path) -> list[str]:
    """Arguments of the command that train `tiny` in `tmp_path / "run"`."""
    return command(tmp_path / "run")


@pytest.fixture
def before_call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`before_call(owner, name, action)`: from now on `owner.name` calls `action` first, with the
    same arguments.
    """

    def patch(owner: Any, name: str, action: Callable[..., object]) -> None:
        original = getattr(owner, name)

        def patched(*arguments: Any, **options: Any) -> Any:
            action(*arguments, **options)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, patched)

    return patch


@pytest.fixture(scope="session")
def outcome_of() -> Callable[[Path], dict[str, Any]]:
    """`outcome_of(run)`: everything in a run that must not depend on interruptions."""

    def read(run: Path) -> dict[str, Any]:
        checkpoint = load_checkpoint(run / "checkpoints" / "last.ckpt")
        for name in [name for name in checkpoint["progress"] if name.endswith("seconds")]:
            checkpoint["progress"].pop(name)
        # `assert_close` compares no text.
        assert re.fullmatch(r"[0-9a-f]{64}", checkpoint.pop("text_sha256"))
        lines = read_metrics(run / "metrics.csv")
        return {
            "model": load_file(run / "model.safetensors"),
            "state": checkpoint,
            "metrics": [replace(line, seconds=0.0, tokens_per_second=0.0) for line in lines],
            "description": (run / "model.json").read_text(),
        }

    return read


@pytest.fixture(scope="session")
def assert_same(outcome_of: Callable[[Path], dict[str, Any]]) -> Callable[[Path, Path], None]:
    """`assert_same(run, expected)`, bit for bit: weights, optimizer, random numbers, progress and
    metrics.
    """

    def compare(run: Path, expected: Path) -> None:
        ours, truth = outcome_of(run), outcome_of(expected)
        for name in ("metrics", "description"):
            assert ours[name] == truth[name]
        for name in ("model", "state"):
            torch.testing.assert_close(ours[name], truth[name], rtol=0, atol=0)

    return compare
