"""Fixtures of the tests of training: commands that train `tiny`, and calls before others."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.training.batches import Batches, SequenceBatches
from tests.conftest import Printed

BeforeCall = Callable[..., None]


@pytest.fixture
def command(tiny: Path, prepared_dir: Path) -> Callable[[Path], list[str]]:
    """`command(folder)`: arguments of the command that train `tiny` in `folder`."""
    options = ["--no-progress", f"--data.prepared_dir={prepared_dir}"]
    return lambda folder: ["train", str(tiny), *options, f"--run_dir={folder}"]


@pytest.fixture
def failed(command: Callable[[Path], list[str]], complaint: Printed) -> Printed:
    """`failed(folder, *options)`: the error of training `tiny` in `folder`, which must fail."""
    return lambda folder, *options: complaint(*command(folder), *options)


@pytest.fixture
def signals_at(before_call: BeforeCall) -> dict[int, list[int]]:
    """The signals that this process sends itself before batches, by their number; each once."""
    numbers: dict[int, list[int]] = {}

    def send(_: Batches, batch: int) -> None:
        for number in numbers.pop(batch, ()):
            os.kill(os.getpid(), number)

    for kind in (Batches, SequenceBatches):
        before_call(kind, "__getitem__", send)
    return numbers


@pytest.fixture
def before_call(monkeypatch: pytest.MonkeyPatch) -> BeforeCall:
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
