"""Going on: interrupted equals never stopped, bit for bit; what does not fit is refused."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import lm.training.batches
from lm.cli import main
from lm.config import load_config
from lm.training.batches import Batches
from lm.training.checkpoint import AtomicCheckpointIO, batches_done
from lm.training.metrics import Metrics, read_metrics
from lm.training.state import TrainingModule

Train = Callable[..., Path]
Contents = Callable[[Path], dict[str, str]]
Complaint = Callable[..., str]

RECIPES = {
    "lstm, dropouts, momentum, accumulate": [
        *("--model.dropout_weight=0.3", "--model.dropout_variational=true"),
        *("--optim.optimizer=sgd", "--optim.lr=0.5", "--optim.momentum=0.9"),
        *("--train.accumulate=3", "--optim.schedule=plateau", "--train.val_every_steps=7"),
    ],
    "transformer, adamw, cosine": [
        *("--model.backbone=transformer", "--optim.schedule=cosine", "--optim.warmup_steps=5"),
        *("--train.val_every_steps=6", "--train.checkpoint_every_steps=4"),
    ],
    "transformer, bf16 parameters": [
        *("--model.backbone=transformer", "--train.precision=bf16-true"),
        *("--train.val_every_steps=6", "--train.checkpoint_every_steps=4"),
    ],
    "tied table in bf16, by rows": [
        *("--model.tied=true", "--output.dtype=bf16", "--train.precision=bf16-mixed"),
        *("--optim.table=adagrad", "--optim.table_lr=0.05", "--train.accumulate=2"),
        *("--train.val_every_steps=6", "--train.checkpoint_every_steps=4"),
    ],
    "input vectors of whole paths, noise by count": [
        *("--model.input=path", "--model.input_backoff=3", "--classes.head=4"),
        *("--model.tied=true", "--train.val_every_steps=6"),
    ],
    "sparse gradients, adam by rows": [
        *("--output.sparse=true", "--optim.table=adam", "--train.val_every_steps=6"),
    ],
    "lstm, two epochs, tied, bf16": [
        *("--train.max_epochs=2", "--train.max_steps=null", "--train.batch_size=16"),
        *("--model.tied=true", "--train.precision=bf16-mixed", "--optim.schedule=step"),
    ],
}


@dataclass(frozen=True)
class Outcome:
    """All of a run that must not depend on interruptions."""

    model: dict[str, Tensor]
    state: dict[str, Any]
    metrics: list[tuple[float | None, ...]]
    description: str

    @classmethod
    def of(cls, run: Path) -> "Outcome":
        checkpoint = AtomicCheckpointIO().load_checkpoint(run / "checkpoints" / "last.ckpt")
        for name in ("seconds", "logged_seconds"):
            checkpoint["sqrtlm"]["progress"].pop(name)
        checkpoint["sqrtlm"].pop("text_sha256")  # text, which assert_close cannot compare
        kept = ("state_dict", "optimizer_states", "sqrtlm", "global_step")
        return cls(
            model=load_file(run / "model.safetensors"),
            state={name: checkpoint[name] for name in kept},
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


def assert_same(run: Path, expected: Path) -> None:
    """Bit for bit: weights, optimizer, random numbers, progress and metrics."""
    ours, truth = Outcome.of(run), Outcome.of(expected)
    assert ours.metrics == truth.metrics
    torch.testing.assert_close(ours.model, truth.model, rtol=0, atol=0)
    torch.testing.assert_close(ours.state, truth.state, rtol=0, atol=0)
    assert ours.description == truth.description


@pytest.fixture(scope="module")
def never_stopped(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`never_stopped(recipe)`: the folder of its run, made when first asked for."""
    runs: dict[str, Path] = {}

    def run(recipe: str) -> Path:
        if recipe not in runs:
            runs[recipe] = train(tmp_path_factory.mktemp("never_stopped"), *RECIPES[recipe])
        return runs[recipe]

    return run


@pytest.fixture
def arguments(tiny: Path, prepared_dir: Path, tmp_path: Path) -> list[str]:
    """Arguments of the command that train `tiny` in `tmp_path / "run"`."""
    folders = [f"--run_dir={tmp_path / 'run'}", f"--data.prepared_dir={prepared_dir}"]
    return ["train", str(tiny), "--no-progress", *folders]


@pytest.fixture
def kill_before_batch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """`kill_before_batch(number, signal)` sends this process a signal, once, when that batch is
    read.
    """
    original = lm.training.batches.Batches.__getitem__

    def arrange(fatal: int, signal_number: int) -> None:
        waiting = [fatal]

        def patched(self: lm.training.batches.Batches, number: int) -> lm.training.batches.Batch:
            if number in waiting:
                waiting.clear()
                os.kill(os.getpid(), signal_number)
            return original(self, number)

        monkeypatch.setattr(lm.training.batches.Batches, "__getitem__", patched)

    return arrange


@pytest.mark.parametrize("recipe", RECIPES)
def test_interrupted_again_and_again_equals_never_stopped(
    recipe: str,
    never_stopped: Callable[[str], Path],
    arguments: list[str],
    tmp_path: Path,
    kill_before_batch: Callable[[int, int], None],
) -> None:
    command = [*arguments, *RECIPES[recipe], "--resume", "auto"]
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    done = [0]
    for fatal, number, code in (
        (0, signal.SIGTERM, 143),
        (5, signal.SIGTERM, 143),
        (17, signal.SIGINT, 130),
    ):
        kill_before_batch(fatal, number)
        with pytest.raises(SystemExit) as end:
            main(command)
        assert end.value.code == code
        done.append(batches_done(last) if last.exists() else 0)
    assert done[0] <= done[1] < done[2] < done[3] < 24
    assert main(command) == 0
    assert_same(tmp_path / "run", never_stopped(recipe))


def test_signals_do_what_they_did_before_when_the_training_is_over(arguments: list[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert main([*arguments, "--train.max_steps=1"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("fatal", [0, 3])
def test_a_second_signal_stops_at_once(
    fatal: int, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = lm.training.batches.Batches.__getitem__

    def kill_twice(self: lm.training.batches.Batches, number: int) -> lm.training.batches.Batch:
        for _ in range(2 if number == fatal else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, number)

    monkeypatch.setattr(lm.training.batches.Batches, "__getitem__", kill_twice)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 130
    assert signal.getsignal(signal.SIGINT) == before
    assert not (tmp_path / "run" / "checkpoints").exists()


def started(command: list[str], run: Path) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, once it has written its first checkpoint."""
    last = run / "checkpoints" / "last.ckpt"
    with subprocess.Popen(
        [sys.executable, "-m", "lm.cli", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        while not last.exists() and process.poll() is None:
            time.sleep(0.01)
        yield process


LONG = ["--train.max_steps=400", "--train.checkpoint_every_steps=3", "--train.val_every_steps=50"]


@pytest.fixture(scope="module")
def long_run(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the run that is killed would have come to."""
    return train(tmp_path_factory.mktemp("long"), *LONG)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_killed_from_outside_at_any_moment_equals_never_stopped(
    number: signal.Signals, code: int, long_run: Path, arguments: list[str], tmp_path: Path
) -> None:
    run, command = tmp_path / "run", [*arguments, *LONG, "--resume", "auto"]
    for process in started(command, run):
        time.sleep(0.1)
        process.send_signal(number)
        _, said = process.communicate()
        assert process.returncode == code
        if code > 0:
            (line,) = re.findall(r"^stopped by .*$", said, re.MULTILINE)
            step = batches_done(run / "checkpoints" / "last.ckpt")
            assert line == f"stopped by {number.name} at step {step}: continue with --resume auto"
        assert "Traceback" not in said
    assert 0 < batches_done(run / "checkpoints" / "last.ckpt") < 400
    assert main(command) == 0
    assert_same(run, long_run)


@pytest.mark.parametrize(
    "what",
    [
        "lm.training.callbacks.save_model",
        "lm.training.checkpoint.AtomicCheckpointIO.save_checkpoint",
        "lm.training.callbacks.os.link",
    ],
)
def test_a_crash_while_the_best_model_is_kept_is_made_good_by_going_on(
    what: str,
    never_stopped: Callable[[str], Path],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = "transformer, adamw, cosine"

    class Crash(BaseException):
        pass

    def crash(*_: object, **__: object) -> None:
        raise Crash

    with monkeypatch.context() as patches:
        patches.setattr(what, crash)
        with pytest.raises(Crash):
            main([*arguments, *RECIPES[recipe]])
    assert main([*arguments, *RECIPES[recipe], "--resume", "auto"]) == 0
    assert_same(tmp_path / "run", never_stopped(recipe))


def test_continuing_a_complete_run_changes_nothing(
    lstm_run: Path, tiny: Path, prepared_dir: Path, contents: Contents
) -> None:
    before = contents(lstm_run)
    folders = [f"--run_dir={lstm_run}", f"--data.prepared_dir={prepared_dir}"]
    assert main(["train", str(tiny), "--no-progress", *folders, "--resume", "auto"]) == 0
    assert contents(lstm_run) == before


def test_a_longer_training_goes_on_where_the_shorter_ended(
    train: Train, arguments: list[str], tmp_path: Path
) -> None:
    options = ["--optim.schedule=constant", "--log.every_steps=4", "--train.val_every_steps=4"]
    truth = train(tmp_path / "truth", *options, "--train.max_steps=12")
    assert main([*arguments, *options, "--train.max_steps=8"]) == 0
    assert main([*arguments, *options, "--train.max_steps=12", "--resume", "auto"]) == 0
    assert_same(tmp_path / "run", truth)
    assert load_config(tmp_path / "run" / "config.yaml").train.max_steps == 12


def test_a_named_checkpoint_is_continued(
    train: Train, arguments: list[str], tmp_path: Path
) -> None:
    options = ["--train.max_steps=8", "--log.every_steps=4", "--train.val_every_steps=4"]
    truth = train(tmp_path / "truth", *options)
    early = train(tmp_path / "early", *options, "--train.max_steps=4")
    checkpoint = early / "checkpoints" / "last.ckpt"
    assert main([*arguments, *options, "--resume", str(checkpoint)]) == 0
    assert Outcome.of(tmp_path / "run").state["global_step"] == 8
    torch.testing.assert_close(
        Outcome.of(tmp_path / "run").state, Outcome.of(truth).state, rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("option", "key"),
    [("--model.hidden=16", "model.hidden: 12 → 16"), ("--output.tree=full", "output.tree")],
)
def test_a_checkpoint_of_a_run_with_another_configuration_is_refused(
    option: str, key: str, lstm_run: Path, arguments: list[str], complaint: Complaint
) -> None:
    checkpoint = lstm_run / "checkpoints" / "last.ckpt"
    said = complaint(*arguments, option, "--resume", checkpoint)
    assert said.startswith(f"{lstm_run} was started with another configuration ({key}")


def test_a_checkpoint_without_its_run_is_refused_if_it_does_not_fit(
    lstm_run: Path, arguments: list[str], tmp_path: Path, complaint: Complaint
) -> None:
    alone = tmp_path / "alone.ckpt"
    shutil.copyfile(lstm_run / "checkpoints" / "last.ckpt", alone)
    for option, problem in (
        ("--model.hidden=16", "size mismatch"),
        ("--output.tree=full", "the weights belong to another tree"),
    ):
        said = complaint(*arguments, "--train.max_steps=30", option, "--resume", alone)
        assert said.startswith("the checkpoint does not fit the configuration: ")
        assert problem in said
    said = complaint(*arguments, "--resume", alone)
    assert said == f"{alone} is of the last step: there is nothing to go on with"
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_carried_state_goes_on_where_the_model_is_by_then(
    lstm_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning moves the model after it has loaded the checkpoint: meta stands for a GPU."""
    checkpoint = AtomicCheckpointIO().load_checkpoint(lstm_run / "checkpoints" / "last.ckpt")
    own = checkpoint["sqrtlm"]["devices"][0]
    module = TrainingModule.__new__(TrainingModule)
    pl.LightningModule.__init__(module)
    module._restored = own
    module.to("meta")
    monkeypatch.setattr(torch, "set_rng_state", lambda _: None)
    module.on_train_start()
    assert module._carried is not None
    assert [part.device.type for part in module._carried] == ["meta"] * len(own["carried"])


def test_tokens_per_second_count_the_time_before_an_interruption(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.training.callbacks.time.perf_counter", iter(range(1000)).__next__)
    options = ["--train.checkpoint_every_steps=4", "--train.val_every_steps=100"]
    options += ["--log.every_steps=6", "--train.max_steps=12"]
    main([*arguments, *options])
    whole = read_metrics(tmp_path / "run" / "metrics.csv")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "config.yaml").unlink()
    kill = lm.training.batches.Batches.__getitem__

    def die_once(self: lm.training.batches.Batches, number: int) -> lm.training.batches.Batch:
        if number == 5:
            raise KeyError("killed")
        return kill(self, number)

    with monkeypatch.context() as patches:
        patches.setattr(lm.training.batches.Batches, "__getitem__", die_once)
        with pytest.raises(KeyError):
            main([*arguments, *options])
    assert main([*arguments, *options, "--resume", "auto"]) == 0
    again = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [line.step for line in again] == [line.step for line in whole] == [6, 12]
    assert again[0].tokens_per_second == pytest.approx(again[0].tokens / again[0].seconds, abs=1)


def test_a_checkpoint_of_parameters_of_another_type_is_refused(
    train: Train, tiny: Path, prepared_dir: Path, tmp_path: Path, complaint: Complaint
) -> None:
    options = ["--train.max_steps=1", "--train.precision=64-true"]
    early = train(tmp_path / "early", *options)
    (early / "config.yaml").unlink()  # which would be refused first
    checkpoint = early / "checkpoints" / "last.ckpt"
    said = complaint(
        *("train", tiny, "--no-progress", f"--run_dir={tmp_path / 'run'}"),
        *(f"--data.prepared_dir={prepared_dir}", "--resume", checkpoint),
    )
    assert said == (
        "model.backbone.layers.0.weight_ih_l0 is torch.float64 in the checkpoint, and torch.float32"
        " under train.precision: 32-true"
    )


def test_a_damaged_checkpoint_is_refused_when_a_run_goes_on(
    train: Train, tiny: Path, tmp_path: Path, prepared_dir: Path, complaint: Complaint
) -> None:
    run = train(tmp_path / "run", "--train.max_steps=1")
    last = run / "checkpoints" / "last.ckpt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    said = complaint(
        *("train", tiny, "--no-progress", f"--run_dir={run}", "--train.max_steps=2"),
        *(f"--data.prepared_dir={prepared_dir}", "--resume", "auto"),
    )
    assert said == f"{last}: damaged checkpoint or none of ours"


def test_auto_without_a_checkpoint_starts_a_run(
    lstm_run: Path, arguments: list[str], tmp_path: Path
) -> None:
    assert main([*arguments, "--resume", "auto"]) == 0
    assert_same(tmp_path / "run", lstm_run)


def test_the_same_configuration_gives_the_same_run_and_another_seed_another(
    lstm_run: Path, train: Train, tmp_path: Path
) -> None:
    assert_same(train(tmp_path / "same"), lstm_run)
    other = Outcome.of(train(tmp_path / "other", "--seed=2"))
    assert other.metrics != Outcome.of(lstm_run).metrics


def test_a_changed_configuration_is_refused_naming_the_keys(
    lstm_run: Path, tiny: Path, complaint: Complaint, contents: Contents
) -> None:
    before = contents(lstm_run)
    said = complaint(
        *("train", tiny, f"--run_dir={lstm_run}", "--resume", "auto"),
        *("--model.hidden=16", "--optim.lr=1", "--train.max_steps=99", "--log.every_steps=2"),
    )
    assert said == (
        f"{lstm_run} was started with another configuration"
        " (model.hidden: 12 → 16, optim.lr: 0.01 → 1.0)"
    )
    assert contents(lstm_run) == before


def assert_data_are_kept(
    run: Path, command: list[str], complaint: Complaint, contents: Contents
) -> None:
    """The continuation after `text.txt` changed is refused, and the run is as it was."""
    before = contents(run)
    assert complaint(*command) == (
        f"{run}/data was prepared from something else (train: text.txt changed), and a run goes on"
        " with the data it began with"
    )
    assert contents(run) == before
    assert main(["evaluate", str(run), "--split=train"]) == 0


def test_a_corpus_with_other_words_is_refused_when_a_run_goes_on(
    tiny: Path, corpus: Path, tmp_path: Path, complaint: Complaint, contents: Contents
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes((corpus / "train.txt").read_bytes())
    command = ["train", str(tiny), f"--data.dir={tmp_path}", "--data.files={train: text.txt}"]
    command += [f"--run_dir={tmp_path / 'run'}", "--no-progress", "--resume", "auto"]
    assert main([*command, "--train.max_steps=2"]) == 0
    text.write_text(text.read_text() + "a new word\n")
    assert_data_are_kept(tmp_path / "run", [*command, "--train.max_steps=4"], complaint, contents)


def test_a_corpus_in_another_order_is_refused_when_a_run_goes_on(
    tiny: Path, corpus: Path, tmp_path: Path, complaint: Complaint, contents: Contents
) -> None:
    text = tmp_path / "text.txt"
    lines = (corpus / "train.txt").read_text().splitlines(keepends=True)
    text.write_text("".join(lines))
    command = ["train", str(tiny), f"--data.dir={tmp_path}", "--data.files={train: text.txt}"]
    command += [f"--run_dir={tmp_path / 'run'}", "--no-progress", "--resume", "auto"]
    assert main([*command, "--train.max_steps=2"]) == 0
    text.write_text("".join(reversed(lines)))  # the same words as often: the same vocabulary
    assert_data_are_kept(tmp_path / "run", [*command, "--train.max_steps=4"], complaint, contents)


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--train.batch_size=8", "train.batch_size: 4 → 8"),
        ("--train.seq_len=9", "train.seq_len: 8 → 9"),
        ("--train.accumulate=2", "train.accumulate: 1 → 2"),
        ("--train.precision=64-true", "train.precision: 32-true → 64-true"),
        ("--seed=2", "seed: 1 → 2"),
    ],
)
def test_what_a_continuation_would_read_otherwise_is_refused(
    option: str,
    key: str,
    lstm_run: Path,
    tiny: Path,
    prepared_dir: Path,
    complaint: Callable[..., str],
) -> None:
    said = complaint(
        *("train", tiny, f"--run_dir={lstm_run}", f"--data.prepared_dir={prepared_dir}"),
        *("--no-progress", "--train.max_steps=30", "--resume", "auto", option),
    )
    assert said == f"{lstm_run} was started with another configuration ({key})"


def test_another_seed_reads_windows_in_another_order(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    item = Batches.__getitem__

    def noted(self: Batches, number: int) -> Any:
        batch = item(self, number)
        if number == 0:
            read.append(batch.targets)
        return batch

    monkeypatch.setattr(Batches, "__getitem__", noted)
    for seed in (1, 1, 2):
        name = tmp_path / str(len(read))
        train(name, "--model.backbone=transformer", f"--seed={seed}", "--train.max_steps=1")
    assert torch.equal(read[0], read[1])
    assert not torch.equal(read[0], read[2])
