"""The folder of a run: what it contains, who may train it, and what a failure leaves unchanged."""

import json
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.storage import locked
from lm.run import Run
from lm.training import environment
from lm.training.checkpoint import load_checkpoint
from lm.training.metrics import read_metrics

Train = Callable[..., Path]
Contents = Callable[[Path], dict[str, str]]
Failed = Callable[..., str]


def test_a_run_leaves_the_files_that_its_use_requires(train: Train, tmp_path: Path) -> None:
    run = train(tmp_path)
    files = {path.name for path in run.rglob("*") if path.is_file()}
    assert files == {
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
    train: Train, tmp_path: Path, failed: Failed, contents: Contents
) -> None:
    with locked(tmp_path / ".lock"):
        before = contents(tmp_path)
        message = failed(tmp_path, "--resume", "auto")
        assert contents(tmp_path) == before
    assert message == f"{tmp_path}: another process trains this run"
    assert train(tmp_path, "--train.max_steps=2") == tmp_path


def test_a_loss_that_is_not_finite_stops_and_leaves_the_last_checkpoint(
    tmp_path: Path, failed: Failed
) -> None:
    options = ["--optim.optimizer=sgd", "--optim.lr=1e38", "--optim.clip=0"]
    message = failed(tmp_path, *options, "--train.checkpoint_every_steps=1")
    found = re.fullmatch(
        r"the loss became (nan|inf|\S+) nats per token before step (\d+); the last checkpoint is"
        r" untouched"
        r" \(a lower optim.lr or optim.clip may help\)",
        message,
    )
    assert found is not None
    progress = load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["progress"]
    assert progress["batches_done"] == int(found[2]) - 1
    assert progress["nll"] < 1e6


@pytest.mark.parametrize(
    ("num_saved", "left"),
    [(0, "there is no checkpoint yet"), (2, "the last checkpoint is untouched")],
)
def test_a_full_disk_ends_a_run_and_leaves_the_last_checkpoint(
    num_saved: int, left: str, tmp_path: Path, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, written = torch.save, list[str]()

    def full(checkpoint: object, file: Any) -> None:
        if len(written) == num_saved:
            file.write(b"half of it")
            raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
        save(checkpoint, file)
        written.append(file.name)

    monkeypatch.setattr(torch, "save", full)
    message = failed(tmp_path, "--train.checkpoint_every_steps=3")
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert message == f"{last}: the disk is full; {left}"
    names = ["last.ckpt"] if num_saved else []
    assert [entry.name for entry in last.parent.iterdir()] == names
    for name in names:
        progress = load_checkpoint(last.with_name(name))["progress"]
        assert progress["batches_done"] == 3 * num_saved


@pytest.mark.parametrize("rate", ["1e9", "1e39"])
def test_weights_whose_validation_perplexity_is_not_finite_are_not_saved(
    rate: str, tmp_path: Path, failed: Failed
) -> None:
    options = ["--optim.optimizer=sgd", f"--optim.lr={rate}", "--optim.clip=0"]
    message = failed(tmp_path, *options, "--train.val_every_steps=1")
    assert re.match(r"the loss became \S+ nats per token before step \d; there is no", message)
    assert not (tmp_path / "checkpoints").exists()
    assert read_metrics(tmp_path / "metrics.csv") == []


def test_a_run_that_does_not_fit_in_memory_is_refused_before_it_has_a_folder(
    tmp_path: Path, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "available_bytes", 1000)
    run = tmp_path / "run"
    need = r"training tiny needs \d\.\d GB of memory .*, 0\.0 GB are available: use"
    assert re.match(need, failed(run))
    assert not run.exists()


def test_the_processor_is_named_with_its_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "CPUINFO", tmp_path / "cpuinfo")
    # Without the file, the architecture is named.
    assert environment.processor_name() in (platform.processor(), platform.machine())
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: A B 7\nflags\t\t: fpu avx2 avx512f avx512_bf16 sse\n\n"
    )
    assert environment.processor_name() == "A B 7, avx2, avx512f, avx512_bf16"


def test_the_most_memory_is_that_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(environment, "STATUS", status)
    assert environment.peak_memory() is None
    status.write_text("Name:\ta: b\nVmPeak:\t 9000000 kB\nVmHWM:\t 1234567 kB\n")
    assert environment.peak_memory() == "1,264 MB"
