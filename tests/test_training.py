"""Training: what a run leaves, and that mistakes leave the last good checkpoint."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lm import footprint
from lm.checkpoint import AtomicCheckpointIO, batches_done
from lm.metrics import Metrics, MetricsFile, read_metrics
from lm.model.language_model import LanguageModel

Train = Callable[..., Path]
Complaint = Callable[..., str]


def test_a_loss_that_is_not_finite_stops_and_leaves_the_last_checkpoint(
    tiny: Path, prepared_dir: Path, tmp_path: Path, complaint: Complaint
) -> None:
    said = complaint(
        *("train", tiny, f"--run_dir={tmp_path}", f"--data.prepared_dir={prepared_dir}"),
        *("--no-progress", "--optim.optimizer=sgd", "--optim.lr=1e38", "--optim.clip=0"),
        "--train.checkpoint_every_steps=1",
    )
    found = re.fullmatch(
        r"the loss became (nan|inf) before step (\d+); the last checkpoint is untouched"
        r" \(a lower optim.lr or optim.clip may help\)",
        said,
    )
    assert found is not None
    last = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = AtomicCheckpointIO().load_checkpoint(last)
    assert checkpoint["global_step"] == batches_done(last) == int(found[2]) - 1
    assert checkpoint["sqrtlm"]["progress"]["nll"] < 1e6


def test_a_full_disk_ends_the_training_and_leaves_the_last_checkpoint(
    tiny: Path,
    prepared_dir: Path,
    tmp_path: Path,
    complaint: Complaint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save, written = torch.save, list[str]()

    def full_after_two(checkpoint: object, file: Any) -> None:
        if len(written) == 2:
            file.write(b"half of it")
            raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
        save(checkpoint, file)
        written.append(file.name)

    monkeypatch.setattr(torch, "save", full_after_two)
    said = complaint(
        *("train", tiny, f"--run_dir={tmp_path}", f"--data.prepared_dir={prepared_dir}"),
        *("--no-progress", "--train.checkpoint_every_steps=3"),
    )
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert said == f"{last}: the disk is full; the checkpoint before it is untouched"
    assert batches_done(last) == 6
    assert [entry.name for entry in last.parent.iterdir()] == ["last.ckpt"]


def test_a_run_leaves_everything_that_its_use_needs(lstm_run: Path) -> None:
    files = {path.name for path in lstm_run.rglob("*") if path.is_file()}
    assert files == {
        *("config.yaml", "classes.npy", "env.json", "tokenizer.json", "vocab.txt"),
        *("best.ckpt", "last.ckpt", "metrics.csv", "curves.png"),
        *("model.json", "model.safetensors"),
    }
    assert (lstm_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((lstm_run / "env.json").read_text())["torch"] == torch.__version__


def test_the_best_model_is_that_of_the_lowest_validation_perplexity(
    train: Train, tmp_path: Path
) -> None:
    options = ["--optim.optimizer=sgd", "--optim.lr=6", "--optim.clip=5"]
    run = train(tmp_path / "run", *options, "--train.val_every_steps=2", "--train.max_steps=20")
    lines = read_metrics(run / "metrics.csv")
    measured = {line.step: line.valid_perplexity for line in lines if line.valid_perplexity}
    assert list(measured) == list(range(2, 21, 2))
    best = min(measured, key=lambda step: measured[step] or 0.0)
    assert best != 20
    description = json.loads((run / "model.json").read_text())
    assert (description["step"], description["valid_perplexity"]) == (best, measured[best])
    checkpoint = AtomicCheckpointIO().load_checkpoint(run / "checkpoints" / "best.ckpt")
    assert checkpoint["global_step"] == best
    weights = {
        name.removeprefix("model."): tensor for name, tensor in checkpoint["state_dict"].items()
    }
    torch.testing.assert_close(load_file(run / "model.safetensors"), weights, rtol=0, atol=0)


def test_metrics_count_tokens_steps_and_epochs(train: Train, tmp_path: Path) -> None:
    run = train(
        *(tmp_path / "run", "--train.max_steps=4", "--train.accumulate=2", "--log.every_steps=2"),
        *("--optim.warmup_steps=4", "--optim.lr=0.004"),
    )
    lines = read_metrics(run / "metrics.csv")
    assert [(line.step, line.tokens) for line in lines] == [(2, 4 * 32), (4, 8 * 32)]
    assert [line.learning_rate for line in lines] == pytest.approx([0.002, 0.004])
    assert lines[1].epoch == pytest.approx(2 * lines[0].epoch, abs=1e-3)


def test_lines_after_a_continuations_first_step_are_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    lines = [
        Metrics(
            step=step,
            epoch=step / 3,
            tokens=10 * step,
            learning_rate=1e-3 / 3,
            train_perplexity=100 / step,
            valid_perplexity=None if step % 2 else 1 / 3,
            seconds=0.5,
            tokens_per_second=3,
        )
        for step in (1, 2, 3)
    ]
    metrics = MetricsFile(path, 0)
    for line in lines:
        metrics.append(line)
    assert read_metrics(path) == lines
    path.write_text(path.read_text() + "4,1.3")
    assert read_metrics(path) == lines
    MetricsFile(path, 2)
    assert read_metrics(path) == lines[:2]


def test_accumulated_batches_make_one_step_by_their_mean_gradient(
    train: Train, tmp_path: Path
) -> None:
    options = ["--model.dropout=0", "--train.max_steps=1", "--train.precision=64-true"]
    options += ["--optim.optimizer=sgd", "--optim.clip=0", "--optim.lr=1"]
    once = train(tmp_path / "once", *options, "--train.seq_len=8")
    twice = train(tmp_path / "twice", *options, "--train.seq_len=4", "--train.accumulate=2")
    one, two = (read_metrics(run / "metrics.csv")[0] for run in (once, twice))
    assert one.tokens == two.tokens == 32
    assert one.train_perplexity == pytest.approx(two.train_perplexity, rel=1e-12)
    first, second = (load_file(run / "model.safetensors")["output.bias"] for run in (once, twice))
    torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("accumulate", [4, 7, 100])
def test_every_epoch_is_validated_where_batches_are_accumulated(
    accumulate: int, train: Train, tmp_path: Path
) -> None:
    options = [f"--train.accumulate={accumulate}", "--train.max_epochs=6", "--train.max_steps=null"]
    lines = read_metrics(train(tmp_path / "run", *options) / "metrics.csv")
    validated = [line for line in lines if line.valid_perplexity is not None]
    (size,) = {round(line.step * accumulate / line.epoch) for line in lines}
    last = max(line.step for line in lines)
    expected = sorted({-(-epoch * size // accumulate) for epoch in range(1, 7)} | {last})
    assert [line.step for line in validated] == [step for step in expected if step <= last]


def test_what_cannot_fit_is_refused_before_the_run_has_a_folder(
    tiny: Path,
    prepared_dir: Path,
    tmp_path: Path,
    complaint: Complaint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(footprint, "available", lambda _: 1000)
    run = tmp_path / "run"
    said = complaint("train", tiny, f"--run_dir={run}", f"--data.prepared_dir={prepared_dir}")
    assert re.match(r"training tiny needs 0\.\d GB of memory .*, there are 0\.0 GB: even", said)
    assert not run.exists()


@pytest.mark.parametrize(("tied", "path"), [("true", "word"), ("false", "word"), ("true", "path")])
def test_sparse_gradients_train_what_dense_ones_train(
    train: Train, tmp_path: Path, tied: str, path: str
) -> None:
    """With clipping and accumulation: the step is plain SGD's."""
    options = ["--model.dropout=0", "--train.precision=64-true", f"--model.tied={tied}"]
    options += ["--optim.optimizer=sgd", "--optim.clip=0.05", "--optim.lr=3"]
    options += ["--train.accumulate=2", "--classes.head=3", f"--model.input={path}"]
    runs = [
        train(tmp_path / sparse, *options, f"--output.sparse={sparse}")
        for sparse in ("true", "false")
    ]
    first, second = (load_file(run / "model.safetensors") for run in runs)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-9, atol=1e-11)


def test_a_table_in_bf16_learns(train: Train, tmp_path: Path) -> None:
    options = ["--output.dtype=bf16", "--train.precision=bf16-mixed", "--model.tied=true"]
    options += ["--optim.table=adagrad", "--optim.table_lr=0.1", "--train.max_steps=60"]
    run = train(tmp_path, *options)
    curve = [line.valid_perplexity for line in read_metrics(run / "metrics.csv")]
    found = [perplexity for perplexity in curve if perplexity is not None]
    assert found[-1] < 12  # of 27 words
    weights = load_file(run / "model.safetensors")
    assert weights["output.weight"].dtype == torch.bfloat16
    assert weights["backbone.layers.0.weight_hh_l0"].dtype == torch.float32


def test_matrices_are_multiplied_as_asked_for_while_training_and_as_before_after_it(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, seen = LanguageModel.loss, set[str]()

    def watched(self: LanguageModel, *arguments: Any) -> Any:
        seen.add(torch.get_float32_matmul_precision())
        return loss(self, *arguments)

    monkeypatch.setattr(LanguageModel, "loss", watched)
    train(tmp_path / "run", "--train.matmul_precision=medium", "--train.max_steps=1")
    assert seen == {"medium"}
    assert torch.get_float32_matmul_precision() == "highest"


def test_wandb_offline_keeps_the_configuration_and_the_figures(
    train: Train, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", "--log.wandb=offline", "--train.max_steps=5")
    (written,) = (run / "wandb").glob("offline-run-*")
    (record,) = written.glob("run-*.wandb")
    content = record.read_bytes()
    assert (run / "wandb-id").read_text().encode() in content
    for figure in (b"checkpoint_every_steps", b"prepared_dir", b"train_perplexity"):
        assert figure in content
