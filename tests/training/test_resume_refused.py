"""Continuations that do not fit the run are refused, and change nothing."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.cli import main

Train = Callable[..., Path]
Contents = Callable[[Path], dict[str, str]]
Failed = Callable[..., str]


def test_a_checkpoint_without_its_run_is_refused_if_it_does_not_fit(
    lstm_run: Path, tmp_path: Path, failed: Failed
) -> None:
    alone = tmp_path / "alone.ckpt"
    shutil.copyfile(lstm_run / "checkpoints" / "last.ckpt", alone)
    for option, problem in (
        ("--model.hidden=16", "size mismatch"),
        ("--output.tree=full", "the weights belong to another tree"),
    ):
        message = failed(tmp_path / "run", "--train.max_steps=30", option, "--resume", alone)
        assert message.startswith("the checkpoint does not fit the configuration: ")
        assert problem in message
    message = failed(tmp_path / "run", "--resume", alone)
    assert message == f"{alone}: training is already complete"
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_checkpoint_of_parameters_of_another_type_is_refused(
    train: Train, tmp_path: Path, failed: Failed
) -> None:
    early = train(tmp_path / "early", "--train.max_steps=1", "--train.precision=64-true")
    (early / "config.yaml").unlink()  # which would be refused first
    message = failed(tmp_path / "run", "--resume", early / "checkpoints" / "last.ckpt")
    assert message == (
        "backbone.layers.0.weight_ih_l0 is torch.float64 in the checkpoint, and torch.float32"
        " under train.precision: 32-true"
    )


def test_a_line_of_metrics_that_has_no_figures_is_named(
    train: Train, tmp_path: Path, failed: Failed
) -> None:
    run = train(tmp_path / "run", "--train.max_steps=1")
    with open(run / "metrics.csv", "ab") as file:
        file.write(b"1,2,\xff,4,5,6,7,8\n")
    assert re.fullmatch(
        rf"{run}/metrics.csv, line 3, is damaged \(.*\): delete it to continue",
        failed(run, "--train.max_steps=2", "--resume", "auto"),
    )


def test_wandb_online_without_a_key_is_refused_before_anything_is_written(
    tmp_path: Path, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    message = failed(tmp_path / "run", "--log.wandb=online")
    assert message.startswith("log.wandb: online: ")
    assert message.endswith("run `wandb login`, set WANDB_API_KEY, or use --log.wandb=offline")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--model.hidden=16", "--optim.lr=1"], "model.hidden: 12 → 16, optim.lr: 0.01 → 1.0"),
        (["--output.tree=full"], "output.tree: two_level → full"),
        (["--train.batch_size=8"], "train.batch_size: 4 → 8"),
        (["--train.seq_len=9"], "train.seq_len: 8 → 9"),
        (["--train.accumulate=2"], "train.accumulate: 1 → 2"),
        (["--train.precision=64-true"], "train.precision: 32-true → 64-true"),
        (["--seed=2"], "seed: 1 → 2"),
    ],
)
def test_a_changed_configuration_is_refused_naming_the_keys(
    options: list[str],
    keys: str,
    lstm_run: Path,
    tmp_path: Path,
    failed: Failed,
    contents: Contents,
) -> None:
    before = contents(lstm_run)
    expected = (
        f"{lstm_run} was started with another configuration ({keys}): set these back to continue"
        " it, or start a new run in another folder"
    )
    allowed = ["--train.max_steps=99", "--log.every_steps=2"]
    assert failed(lstm_run, "--resume", "auto", *allowed, *options) == expected
    checkpoint = lstm_run / "checkpoints" / "last.ckpt"
    assert failed(tmp_path / "run", "--resume", checkpoint, *allowed, *options) == expected
    assert contents(lstm_run) == before


def test_another_corpus_is_refused_when_a_run_continues(
    tiny: Path, corpus: Path, tmp_path: Path, complaint: Callable[..., str], contents: Contents
) -> None:
    run, text = tmp_path / "run", tmp_path / "text.txt"
    lines = (corpus / "train.txt").read_text().splitlines(keepends=True)
    text.write_text("".join(lines))
    command = ["train", str(tiny), f"--data.dir={tmp_path}", "--data.files={train: text.txt}"]
    command += [f"--run_dir={run}", "--no-progress", "--resume", "auto"]
    assert main([*command, "--train.max_steps=2"]) == 0
    text.write_text("".join(lines[::-1]))  # the same words as often: the same vocabulary
    before = contents(run)
    assert complaint(*command, "--train.max_steps=4") == (
        f"{run}/data was prepared from something else (train: text.txt changed), and a run"
        " continues with the data it started with: undo that, or start another run"
    )
    assert contents(run) == before
    assert main(["evaluate", str(run), "--split=train"]) == 0
