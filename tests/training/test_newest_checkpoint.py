"""`--resume auto` continues the newest checkpoint that is not damaged; a path no other."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lm.cli import main
from lm.training.checkpoint import load_checkpoint

OPTIONS = ["--train.checkpoint_every_steps=1", "--train.val_every_steps=4", "--log.every_steps=4"]
OPTIONS += ["--train.keep_checkpoints=2"]
Command = Callable[[Path], list[str]]


@pytest.fixture
def folder(command: Command, tmp_path: Path) -> Path:
    """Checkpoints of a run of 6 steps, the best one of step 4."""
    assert main([*command(tmp_path / "run"), *OPTIONS, "--train.max_steps=6"]) == 0
    return tmp_path / "run" / "checkpoints"


def step_of(path: Path) -> int:
    return int(load_checkpoint(path)["progress"]["batches_done"])


def test_the_newest_checkpoints_are_kept_by_their_step(folder: Path) -> None:
    steps = {path.name: step_of(path) for path in folder.iterdir()}
    best = steps.pop("best.ckpt")
    assert steps == {"last.ckpt": 6, "step-5.ckpt": 5, "step-6.ckpt": 6}
    assert best in (4, 6)
    assert (folder / "last.ckpt").samefile(folder / "step-6.ckpt")


def test_auto_passes_over_damaged_checkpoints_and_says_so(
    folder: Path,
    command: Command,
    flip_bit: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
    complaint: Callable[..., str],
    assert_same: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    options = [*OPTIONS, "--train.max_steps=8"]
    assert main([*command(tmp_path / "truth"), *options]) == 0
    last, run = folder / "last.ckpt", [*command(tmp_path / "run"), *options]
    damaged = f"{last} is damaged, or not a checkpoint of sqrtlm"
    flip_bit(last)  # and step-6.ckpt, another name of the file
    assert complaint(*run, f"--resume={last}") == damaged
    assert main([*run, "--resume=auto"]) == 0
    newest = folder / "step-5.ckpt"
    assert f"{damaged}: it is passed over for {newest}" in caplog.messages
    assert_same(tmp_path / "run", tmp_path / "truth")


def test_auto_is_refused_if_every_checkpoint_is_damaged(
    folder: Path, command: Command, complaint: Callable[..., str], tmp_path: Path
) -> None:
    for path in folder.iterdir():
        path.write_bytes(b"another")
    arguments = [*command(tmp_path / "run"), *OPTIONS, "--train.max_steps=8", "--resume=auto"]
    message = f"{folder}/last.ckpt is damaged, or not a checkpoint of sqrtlm"
    assert complaint(*arguments) == message


def test_a_disk_without_space_for_a_checkpoint_is_refused_before_it_is_written(
    folder: Path,
    command: Command,
    complaint: Callable[..., str],
    contents: Callable[[Path], dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Usage(NamedTuple):
        free: int = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage())
    before = contents(folder)
    options = [*OPTIONS, "--train.max_steps=8", "--resume=auto"]
    message = complaint(*command(tmp_path / "run"), *options)
    assert message == (
        f"{folder}/step-7.ckpt: a checkpoint has 0 MB, and the disk has 0 MB free; the last"
        " checkpoint is untouched"
    )
    assert contents(folder) == before
