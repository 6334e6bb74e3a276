"""Training: what a run leaves, and that mistakes leave the last good checkpoint."""

import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_prep.prepared import open_prepared
from data_prep.storage import locked
from lm.evaluation import evaluate
from lm.model.language_model import LanguageModel
from lm.output.rowwise.row_gradient import RowGradient
from lm.training import memory_estimate as footprint
from lm.training.checkpoint import AtomicCheckpointIO, batches_done
from lm.training.metrics import Metrics, MetricsFile, read_metrics
from lm.training.state import TrainingModule

Train = Callable[..., Path]
Contents = Callable[[Path], dict[str, str]]
Failed = Callable[..., str]


@pytest.fixture
def failed(tiny: Path, prepared_dir: Path, complaint: Callable[..., str]) -> Failed:
    """`failed(folder, *options)`: what a training of `tiny` in `folder` that must fail says."""

    def run(folder: Path, *options: str) -> str:
        folders = [f"--run_dir={folder}", f"--data.prepared_dir={prepared_dir}"]
        return complaint("train", tiny, "--no-progress", *folders, *options)

    return run


def test_a_loss_that_is_not_finite_stops_and_leaves_the_last_checkpoint(
    tmp_path: Path, failed: Failed
) -> None:
    options = ["--optim.optimizer=sgd", "--optim.lr=1e38", "--optim.clip=0"]
    said = failed(tmp_path, *options, "--train.checkpoint_every_steps=1")
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
    tmp_path: Path, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, written = torch.save, list[str]()

    def full_after_two(checkpoint: object, file: Any) -> None:
        if len(written) == 2:
            file.write(b"half of it")
            raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
        save(checkpoint, file)
        written.append(file.name)

    monkeypatch.setattr(torch, "save", full_after_two)
    said = failed(tmp_path, "--train.checkpoint_every_steps=3")
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert said == f"{last}: the disk is full; the checkpoint before it is untouched"
    assert batches_done(last) == 6
    assert [entry.name for entry in last.parent.iterdir()] == ["last.ckpt"]


def test_a_run_leaves_everything_that_its_use_needs(lstm_run: Path) -> None:
    files = {path.name for path in lstm_run.rglob("*") if path.is_file()}
    assert files == {
        *(".lock", "config.yaml", "classes.npy", "env.json", "tokenizer.json", "vocab.txt"),
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
    tmp_path: Path, failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "available", lambda _: 1000)
    run = tmp_path / "run"
    said = failed(run)
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


def rates(train: Train, folder: Path, *options: str) -> list[tuple[float, float]]:
    """Epoch after each step, and the learning rate of the step."""
    lines = read_metrics(
        train(folder, "--log.every_steps=1", "--optim.lr=1", *options) / "metrics.csv"
    )
    return [(line.epoch, line.learning_rate) for line in lines]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedules_count_the_steps_and_epochs_of_the_training(
    accumulate: int, train: Train, tmp_path: Path
) -> None:
    options = ["--optim.optimizer=sgd", f"--train.accumulate={accumulate}", "--train.batch_size=16"]
    cosine = rates(
        train, tmp_path / "cosine", *options, "--optim.schedule=cosine", "--train.max_steps=8"
    )
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert [rate for _, rate in cosine] == pytest.approx(expected)
    steps = [*options, "--optim.schedule=step", "--train.max_epochs=3", "--train.max_steps=null"]
    halved = rates(train, tmp_path / "step", *steps)
    before = [0.0, *(epoch for epoch, _ in halved[:-1])]  # epochs done when the step began
    spacing = halved[0][0]
    begun = [int(epoch + spacing * (accumulate - 1) / accumulate + 1e-3) for epoch in before]
    assert [rate for _, rate in halved] == [0.5 ** (epoch + 1) for epoch in begun]


def test_the_rate_falls_with_each_validation_that_did_not_improve(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perplexities = iter([9.0, 8.0, 8.0, 8.5, 7.0, 7.0])

    def rigged(*args: Any, **options: Any) -> Any:
        result = evaluate(*args, **options)
        object.__setattr__(result, "perplexity", next(perplexities))
        return result

    monkeypatch.setattr("lm.training.callbacks.evaluate", rigged)
    options = ["--optim.schedule=plateau", "--optim.decay=0.5", "--train.val_every_steps=1"]
    found = rates(train, tmp_path / "run", *options, "--train.max_steps=6")
    assert [rate for _, rate in found] == [1, 1, 1, 0.5, 0.25, 0.25]


def test_seconds_and_speed_are_of_training_alone_since_the_line_before(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock on which a batch takes a second, and a validation a thousand."""
    now = [0.0]
    monkeypatch.setattr("lm.training.callbacks.time.perf_counter", lambda: now[0])
    loss = LanguageModel.loss

    def slow_loss(*args: Any) -> Any:
        now[0] += 1
        return loss(*args)

    def slower_evaluate(*args: Any, **options: Any) -> Any:
        now[0] += 1000
        return evaluate(*args, **options)

    monkeypatch.setattr(LanguageModel, "loss", slow_loss)
    monkeypatch.setattr("lm.training.callbacks.evaluate", slower_evaluate)
    options = ["--train.max_steps=6", "--log.every_steps=2", "--train.val_every_steps=3"]
    lines = read_metrics(train(tmp_path / "run", *options) / "metrics.csv")
    assert [(line.step, line.seconds) for line in lines] == [(2, 2), (3, 3), (4, 4), (6, 6)]
    assert [line.tokens_per_second for line in lines] == [32] * 4


def test_the_perplexity_of_a_line_is_that_of_its_tokens_since_the_line_before(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of unequal lengths: the last of an epoch is shorter."""
    losses: list[tuple[float, int]] = []
    step = TrainingModule.training_step

    def noted(self: TrainingModule, batch: Any, batch_idx: int) -> Any:
        loss = step(self, batch, batch_idx)
        losses.append((float(loss.detach()), batch.targets.numel()))
        return loss

    monkeypatch.setattr(TrainingModule, "training_step", noted)
    options = ["--train.max_epochs=2", "--train.max_steps=null", "--train.batch_size=16"]
    lines = read_metrics(train(tmp_path / "run", *options, "--log.every_steps=4") / "metrics.csv")
    assert len({num_tokens for _, num_tokens in losses}) == 2
    for before, after in pairwise([0, *(line.step for line in lines)]):
        nll = sum(loss * num_tokens for loss, num_tokens in losses[before:after])
        mean = nll / sum(num_tokens for _, num_tokens in losses[before:after])
        (line,) = [line for line in lines if line.step == after]
        assert line.train_perplexity == pytest.approx(math.exp(mean), rel=1e-9)


def test_training_hands_the_model_the_counts_and_the_kind_of_gradient_it_asks_for(
    train: Train, prepared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    end = TrainingModule.configure_gradient_clipping

    def noted(self: TrainingModule, *args: Any, **options: Any) -> None:
        found[:] = [self.model.input_backoff, self.model.output.weight.grad]
        end(self, *args, **options)

    monkeypatch.setattr(TrainingModule, "configure_gradient_clipping", noted)
    options = ["--model.input_backoff=3", "--optim.optimizer=sgd", "--train.max_steps=1"]
    train(tmp_path / "sparse", *options, "--output.sparse=true")
    counts = torch.tensor(open_prepared(prepared_dir).counts())
    torch.testing.assert_close(found[0], 3 / (3 + counts))
    assert isinstance(found[1], RowGradient)
    train(tmp_path / "dense", *options, "--output.sparse=false")
    assert not isinstance(found[1], RowGradient)


@pytest.mark.parametrize("sparse", ["true", "false"])
def test_a_step_is_no_longer_than_the_clip_allows(
    sparse: str, train: Train, tmp_path: Path
) -> None:
    options = ["--optim.optimizer=sgd", "--train.precision=64-true", "--model.dropout=0"]
    options += ["--train.max_steps=1", "--optim.lr=1", f"--output.sparse={sparse}"]
    weights = [
        load_file(train(tmp_path / clip, *options, f"--optim.clip={clip}") / "model.safetensors")
        for clip in ("1e-9", "0.01", "0")
    ]
    start, clipped, free = (
        torch.cat([w[name].flatten() for name in sorted(w) if w[name].is_floating_point()])
        for w in weights
    )
    assert float((clipped - start).norm()) == pytest.approx(0.01, rel=1e-4)
    assert float((free - start).norm()) > 0.02


def test_a_new_epoch_begins_without_the_state_of_the_one_before(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    loss = LanguageModel.loss

    def watched(self: LanguageModel, tokens: Any, targets: Any, state: Any = None) -> Any:
        begun.append(state is None)
        return loss(self, tokens, targets, state)

    monkeypatch.setattr(LanguageModel, "loss", watched)
    run = train(tmp_path, "--train.max_epochs=2", "--train.max_steps=null", "--train.batch_size=16")
    per_epoch = read_metrics(run / "metrics.csv")[-1].step // 2
    assert begun == 2 * ([True] + (per_epoch - 1) * [False])


def test_the_table_has_its_own_rate_in_a_training(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[float]] = []
    begin = TrainingModule.on_train_batch_start

    def noted(self: TrainingModule, batch: Any, batch_idx: int) -> None:
        begin(self, batch, batch_idx)
        seen.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])

    monkeypatch.setattr(TrainingModule, "on_train_batch_start", noted)
    train(
        *(tmp_path, "--optim.lr=0.01", "--optim.table=adagrad", "--optim.table_lr=0.05"),
        *("--optim.warmup_steps=2", "--train.max_steps=3"),
    )
    assert [rates[0] for rates in seen] == pytest.approx([0.005, 0.01, 0.01])
    assert [rates[-1] for rates in seen] == pytest.approx([0.025, 0.05, 0.05])


def test_weights_that_a_validation_shows_to_be_broken_are_not_kept(
    tmp_path: Path, failed: Failed
) -> None:
    options = ["--optim.optimizer=sgd", "--optim.lr=1e39", "--optim.clip=0"]
    said = failed(tmp_path, *options, "--train.val_every_steps=1")
    assert re.match(r"the loss became (nan|inf) before step 1; the last checkpoint is unt", said)
    assert not (tmp_path / "checkpoints").exists()
    assert read_metrics(tmp_path / "metrics.csv") == []


def test_a_run_is_trained_by_one_process_at_a_time(
    train: Train, tmp_path: Path, failed: Failed, contents: Contents
) -> None:
    with locked(tmp_path / ".lock"):
        before = contents(tmp_path)
        said = failed(tmp_path, "--resume", "auto")
        assert contents(tmp_path) == before
    assert said == f"{tmp_path}: another process trains this run"
    assert train(tmp_path, "--train.max_steps=2") == tmp_path


def test_the_picture_is_drawn_if_the_end_of_the_training_came_before(
    train: Train, tmp_path: Path
) -> None:
    run = train(tmp_path, "--train.max_steps=2")
    (run / "curves.png").unlink()
    train(tmp_path, "--train.max_steps=2", "--resume", "auto")
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train.accelerator=gpu"], "train.accelerator: gpu, train.devices: 1: there are 0 CUDA"),
        (["--output.backend=triton"], "output.backend: triton wants a GPU"),
        (["--train.precision=16-mixed"], "train.precision: 16-mixed wants a GPU"),
        (
            ["--train.precision=16-mixed", "--train.accelerator=cpu"],
            "train.precision: 16-mixed wants a GPU; on a CPU it is bf16-mixed",
        ),
    ],
)
def test_what_wants_a_gpu_is_refused_without_one(
    options: list[str],
    message: str,
    tmp_path: Path,
    failed: Failed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = tmp_path / "run"
    assert failed(run, *options).startswith(message)
    assert not run.exists()
