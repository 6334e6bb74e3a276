"""The folder of a run: what it contains, who may train it, and what is refused without a change."""

import json
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_prep.storage import locked
from lm import device
from lm.cli import main
from lm.run import Run
from lm.training.metrics import read_metrics
from tests.conftest import Printed, Train, contents, corpus_of


def test_a_run_leaves_the_files_that_its_use_requires(train: Train, tmp_path: Path) -> None:
    run = train(tmp_path)
    assert {path.name for path in run.rglob("*") if path.is_file()} == {
        *(".lock", "config.yaml", "classes.npy", "env.json", "tokenizer.json", "vocab.txt"),
        *("best.ckpt", "last.ckpt", "metrics.csv", "curves.png", "speller.npz"),
        *("model.json", "model.safetensors"),
    }
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "env.json").read_text())["torch"] == torch.__version__


def test_a_run_without_a_checkpoint_yet_begins_anew_though_it_has_a_model(
    train: Train, tmp_path: Path
) -> None:
    """A kill between the first validation and the first checkpoint leaves this."""
    train(tmp_path, "--train.max_steps=4")
    expected = (tmp_path / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")
    train(tmp_path, "--train.max_steps=4", "--resume=auto")
    assert (tmp_path / "model.safetensors").read_bytes() == expected


def test_a_run_is_trained_by_one_process_at_a_time(
    train: Train, command: Callable[[Path], list[str]], tmp_path: Path, untouched: Printed
) -> None:
    with locked(tmp_path / ".lock"):
        message = untouched(*command(tmp_path), "--resume", "auto")
    assert message == f"{tmp_path}: another process trains this run"
    assert train(tmp_path, "--train.max_steps=2") == tmp_path


@pytest.mark.parametrize("rate", ["1e39", "1e9"])
def test_a_validation_that_is_not_finite_stops_before_anything_is_saved(
    rate: str, tmp_path: Path, failed: Printed
) -> None:
    options = ["--optim.optimizer=sgd", f"--optim.lr={rate}", "--optim.clip=0"]
    assert re.fullmatch(
        r"the loss became \S+ nats per token before step \d+; there is no checkpoint yet"
        r" \(a lower optim.lr or optim.clip may help\)",
        failed(tmp_path, *options, "--train.val_every_steps=1"),
    )
    assert not (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert read_metrics(tmp_path / "metrics.csv") == []


def test_a_run_that_does_not_fit_in_memory_is_refused_before_it_has_a_folder(
    tmp_path: Path, failed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "available_bytes", 1000)
    run = tmp_path / "run"
    need = r"training tiny needs \d\.\d GB of memory .*, 0\.0 GB are available: use"
    assert re.match(need, failed(run))
    assert not run.exists()


def test_the_processor_and_the_most_memory_are_those_that_linux_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, status = tmp_path / "cpuinfo", tmp_path / "self" / "status"
    status.parent.mkdir()
    monkeypatch.setattr(device, "PROC", tmp_path)
    assert device.processor_name() in (platform.processor(), platform.machine())
    assert device.peak_memory() is None
    info.write_text(
        "processor\t: 0\nmodel name\t: A B 7\nflags\t\t: fpu avx2 avx512f avx512_bf16 sse\n\n"
    )
    status.write_text("Name:\ta: b\nVmPeak:\t 9000000 kB\nVmHWM:\t 1234567 kB\n")
    assert device.processor_name() == "A B 7, avx2, avx512f, avx512_bf16"
    assert device.peak_memory() == "1,264 MB"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5_000_000)
    assert device.peak_memory() == "1,264 MB, 5 MB on the GPU"


def test_a_checkpoint_without_its_run_is_refused_if_it_does_not_fit(
    lstm_run: Path, tmp_path: Path, failed: Printed
) -> None:
    alone, more = tmp_path / "alone.ckpt", "--train.max_steps=30"
    shutil.copyfile(lstm_run / "checkpoints" / "last.ckpt", alone)
    of_tree = "--output.tree=full", "the weights belong to another tree"
    for option, problem in (("--model.hidden=16", "size mismatch"), of_tree):
        message = failed(tmp_path / "run", more, option, "--resume", alone)
        assert message.startswith("the checkpoint does not fit the configuration: ")
        assert problem in message
    message = failed(tmp_path / "run", more, "--train.precision=64-true", "--resume", alone)
    types = "torch.float32 in the checkpoint, and torch.float64 under train.precision: 64-true"
    assert message == f"backbone.layers.0.weight_ih_l0 is {types}"
    message = failed(tmp_path / "run", "--resume", alone)
    assert message == f"{alone}: training is already complete"
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(("key", "reason"), [("", "log.wandb: online: "), ("short", ".*40.* char")])
def test_wandb_online_without_a_valid_key_is_refused_before_anything_is_written(
    tmp_path: Path, failed: Printed, monkeypatch: pytest.MonkeyPatch, key: str, reason: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", key)
    message = failed(tmp_path / "run", "--log.wandb=online")
    assert re.match(reason, message)
    assert message.endswith("run `wandb login`, set WANDB_API_KEY, or use --log.wandb=offline")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (
            ["--model.hidden=16", "--optim.lr=1", "--train.precision=64-true"],
            "model.hidden: 12 → 16, optim.lr: 0.01 → 1.0, train.precision: 32-true → 64-true",
        ),
        (["--output.tree=full", "--seed=2"], "output.tree: two_level → full, seed: 1 → 2"),
        (
            ["--train.batch_size=8", "--train.seq_len=9", "--train.accumulate=2"],
            "train.accumulate: 1 → 2, train.batch_size: 4 → 8, train.seq_len: 8 → 9",
        ),
    ],
)
def test_a_changed_configuration_is_refused_naming_the_keys(
    options: list[str],
    keys: str,
    lstm_run: Path,
    train: Train,
    tmp_path: Path,
    failed: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = contents(lstm_run)
    back = "set these back to continue it, or start a new run in another folder"
    expected = f"{lstm_run} was started with another configuration ({keys}): {back}"
    allowed = ["--train.max_steps=99", "--log.every_steps=2", "--train.val_every_steps=3"]
    assert failed(lstm_run, "--resume", "auto", *allowed, *options) == expected
    checkpoint = lstm_run / "checkpoints" / "last.ckpt"
    assert failed(tmp_path / "run", "--resume", checkpoint, *allowed, *options) == expected
    train(tmp_path / "own", "--train.max_steps=1", *options)
    assert failed(tmp_path / "own", "--resume", checkpoint, *allowed, *options) == expected
    monkeypatch.chdir(checkpoint.parent)
    assert failed(tmp_path / "run", "--resume", checkpoint.name, *allowed, *options) == expected
    assert contents(lstm_run) == before


def test_another_corpus_is_refused_when_a_run_continues(
    tiny: Path, corpus: Path, tmp_path: Path, untouched: Printed
) -> None:
    run, text = tmp_path / "run", (corpus / "train.txt").read_text()
    command = ["train", str(tiny), *corpus_of(tmp_path, text), "--no-progress", "--resume", "auto"]
    assert main([*command, "--train.max_steps=2"]) == 0
    # The same words as often: the same vocabulary.
    (tmp_path / "text.txt").write_text("".join(text.splitlines(keepends=True)[::-1]))
    assert untouched(*command, "--train.max_steps=4") == (
        f"{run}/data was prepared from something else (train: text.txt changed), and a run"
        " continues with the data it started with: undo that, or start another run"
    )
    assert main(["evaluate", str(run), "--split=train"]) == 0
