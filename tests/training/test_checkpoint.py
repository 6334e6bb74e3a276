"""Checkpoints are complete or absent, refused if damaged, and never executed.

`--resume auto` continues the newest one that is not damaged; a path no other.
"""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_prep.errors import UserError
from lm.training.checkpoint import FORMAT_VERSION, load_checkpoint, load_newest, save_checkpoint
from tests.conftest import Printed, Train, contents, flip_bit
from tests.training.tiny_runs import LAST, outcome

CHECKPOINT: dict[str, Any] = {"format_version": FORMAT_VERSION, "progress": {"batches_done": 7}}
CHECKPOINT["state"] = {"weight": torch.arange(1000.0)}


def test_a_checkpoint_is_copied_where_the_file_system_has_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    for has_links in (True, False):
        if not has_links:
            monkeypatch.setattr(os, "link", refuse)
        last.unlink(missing_ok=True)
        last.write_bytes(b"older")
        save_checkpoint(CHECKPOINT, best, last)
        assert whole_checkpoint(last) == 7
        assert last.samefile(best) == has_links
        assert {entry.name for entry in tmp_path.iterdir()} == {"best.ckpt", "last.ckpt"}


def test_a_loaded_checkpoint_and_its_file_do_not_change_each_other(tmp_path: Path) -> None:
    path = tmp_path / "made" / "last.ckpt"
    save_checkpoint(CHECKPOINT, path)
    assert [entry.name for entry in path.parent.iterdir()] == ["last.ckpt"]
    read = load_checkpoint(path)
    read["state"]["weight"][:500] += 1  # copies the pages, not the file
    changed = read["state"]["weight"].clone()
    assert whole_checkpoint(path) == 7
    save_checkpoint(read, path)
    again = load_checkpoint(path)
    path.unlink()
    assert torch.equal(read["state"]["weight"], changed)
    assert torch.equal(again["state"]["weight"], changed)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("[enforce fail at inline_container.cc] . unexpected pos 64 vs 0", "the disk is full"),
        ("out of memory", ""),
        ("no space", "a checkpoint has 0 MB, and the disk has 0 MB free"),
    ],
)
@pytest.mark.parametrize("has_last", [True, False])
def test_a_failure_leaves_the_previous_checkpoint(
    cause: str, message: str, has_last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_last:
        save_checkpoint(CHECKPOINT, tmp_path / "last.ckpt")
    before, path = contents(tmp_path), tmp_path / "step-7.ckpt"

    def save(checkpoint: object, file: Any) -> None:
        file.write(b"half")
        raise RuntimeError(cause)

    monkeypatch.setattr(torch, "save", save)
    if cause == "no space":
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    left = "the last checkpoint is untouched" if has_last else "there is no checkpoint yet"
    kind, expected = (UserError, f"{path}: {message}; {left}") if message else (RuntimeError, cause)
    with pytest.raises(kind) as caught:
        save_checkpoint(CHECKPOINT, path)
    assert str(caught.value) == expected
    assert contents(tmp_path) == before


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save_checkpoint(CHECKPOINT, path)
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 13):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            assert whole_checkpoint(path) == 7
        except UserError as error:
            refused += str(error) == f"{path} is damaged, or not a checkpoint of sqrtlm"
    assert refused > len(whole) / 13 / 2


def whole_checkpoint(path: Path) -> int:
    """The number of batches of a checkpoint whose tensors are those of `CHECKPOINT`."""
    read = load_checkpoint(path)
    assert torch.equal(read["state"]["weight"], CHECKPOINT["state"]["weight"])
    return int(read["progress"]["batches_done"])


def assert_refused(path: Path, message: str = "is damaged, or not a checkpoint of sqrtlm") -> None:
    with pytest.raises(UserError, match=f"^{path} {message}$"):
        load_checkpoint(path)


def test_files_that_are_no_checkpoint_of_this_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for length in (0, 1, 100, 4000):
        save_checkpoint(CHECKPOINT, path)
        os.truncate(path, length)
        assert_refused(path)
    torch.save({"state": torch.zeros(3)}, path)
    assert_refused(path)
    torch.save(CHECKPOINT | {"format_version": FORMAT_VERSION - 1}, path)
    message = f"has format {FORMAT_VERSION - 1} of checkpoints, and this version of sqrtlm reads"
    message += f" {FORMAT_VERSION}: continue with the version that env.json of the run names"
    assert_refused(path, message)


class Trap:
    """Runs `touch` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_code_in_a_checkpoint_is_refused_and_never_runs(tmp_path: Path) -> None:
    path, touched = tmp_path / "last.ckpt", tmp_path / "touched"
    torch.save({"format_version": Trap(touched)}, path)
    assert_refused(path)
    path.write_bytes(pickle.dumps(Trap(touched)))
    assert_refused(path)
    assert not touched.exists()


OPTIONS = ["--train.checkpoint_every_steps=1", "--train.val_every_steps=4", "--log.every_steps=4"]
OPTIONS += ["--train.keep_checkpoints=2"]


def test_the_newest_checkpoints_are_kept_by_their_step_unless_the_run_goes_back(
    train: Train, tmp_path: Path
) -> None:
    folder = train(tmp_path / "run", *OPTIONS, "--train.max_steps=6") / "checkpoints"
    saved = {path.name: load_checkpoint(path)["progress"] for path in folder.iterdir()}
    steps = {name: progress["batches_done"] for name, progress in saved.items()}
    assert steps.pop("best.ckpt") in (4, 6)
    assert steps == {"last.ckpt": 6, "step-5.ckpt": 5, "step-6.ckpt": 6}
    assert (folder / "last.ckpt").samefile(folder / "step-6.ckpt")
    later = (folder / "step-6.ckpt").read_bytes()
    early = train(tmp_path / "early", *OPTIONS, "--train.max_steps=2") / LAST
    train(tmp_path / "run", *OPTIONS, "--train.max_steps=4", f"--resume={early}")
    assert {path.name for path in folder.glob("step-*")} == {"step-3.ckpt", "step-4.ckpt"}
    (folder / "best.ckpt").unlink()
    (folder / "best.ckpt").write_bytes(later)
    (folder / "last.ckpt").write_bytes(b"damaged")  # and step-4.ckpt, another name of the file
    assert load_newest(folder / "last.ckpt")[0].name == "step-3.ckpt"


def test_auto_passes_over_damaged_checkpoints_and_says_so_unless_all_are(
    train: Train, caplog: pytest.LogCaptureFixture, failed: Printed, tmp_path: Path
) -> None:
    truth = outcome(train(tmp_path / "truth", *OPTIONS, "--train.max_steps=8"))
    run = train(tmp_path / "run", *OPTIONS, "--train.max_steps=6")
    options = [*OPTIONS, "--train.max_steps=8"]
    damaged = f"{run / LAST} is damaged, or not a checkpoint of sqrtlm"
    flip_bit(run / LAST)  # and step-6.ckpt, another name of the file
    assert failed(run, *options, f"--resume={run / LAST}") == damaged
    assert outcome(train(run, *options, "--resume=auto")) == truth
    newest = run / "checkpoints" / "step-5.ckpt"
    assert f"{damaged}: it is passed over for {newest}" in caplog.messages
    for path in newest.parent.iterdir():
        path.write_bytes(b"another")
    assert failed(run, *options, "--train.max_steps=9", "--resume=auto") == damaged
