"""Continuing a run: interrupted equals uninterrupted, bit for bit."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lm.cli import main
from lm.config import load_config
from lm.run import Run
from lm.training.batches import Batches
from lm.training.checkpoint import load_checkpoint, save_checkpoint
from lm.training.devices import build_fabric
from lm.training.sequence_batches import SequenceBatches
from lm.training.state import TrainingState

Train = Callable[..., Path]
Contents = Callable[[Path], dict[str, str]]
AssertSame = Callable[[Path, Path], None]


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
    "tied table in bf16, row-wise adagrad": [
        *("--word_table.tied=true", "--word_table.dtype=bf16", "--train.precision=bf16-mixed"),
        *("--word_table.optimizer=adagrad", "--word_table.lr=0.05", "--train.accumulate=2"),
        *("--train.val_every_steps=6", "--train.checkpoint_every_steps=4"),
    ],
    "path-sum input embedding, count-based word dropout": [
        *("--model.input_embedding=path_sum", "--model.count_word_dropout=3"),
        *("--classes.shortlist=4", "--word_table.tied=true", "--train.val_every_steps=6"),
    ],
    "pieces of words": [
        *("--model.input_pieces=40", "--model.count_word_dropout=3"),
        *("--train.precision=bf16-true", "--train.val_every_steps=6"),
    ],
    "sampled softmax, path sums of another tree": [
        *("--output.tree=full", "--output.num_samples=9", "--train.val_every_steps=6"),
        *("--model.input_embedding=path_sum", "--model.input_tree=two_level"),
        *("--word_table.tied=true", "--model.count_word_dropout=3"),
    ],
    "row-wise gradients, row-wise adam": [
        *("--word_table.gradients=row_wise", "--word_table.optimizer=adam"),
        "--train.val_every_steps=6",
    ],
    "independent sequences, lstm": [
        *("--data.sequences=independent", "--data.prepared_dir=null", "--train.seq_len=3"),
        *("--train.val_every_steps=6", "--train.checkpoint_every_steps=4"),
    ],
    "independent sequences, transformer, their ends predicted": [
        *("--data.sequences=independent", "--data.prepared_dir=null", "--train.accumulate=2"),
        *("--data.predict_eos=true", "--model.backbone=transformer", "--train.val_every_steps=6"),
    ],
    "lstm, two epochs, tied, bf16": [
        *("--train.max_epochs=2", "--train.max_steps=null", "--train.batch_size=16"),
        *("--word_table.tied=true", "--train.precision=bf16-mixed", "--optim.schedule=step"),
    ],
}


@pytest.fixture(scope="module")
def uninterrupted(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`uninterrupted(recipe)`: the folder of its run, made when first asked for."""
    runs: dict[str, Path] = {}

    def run(recipe: str) -> Path:
        if recipe not in runs:
            runs[recipe] = train(tmp_path_factory.mktemp("uninterrupted"), *RECIPES[recipe])
        return runs[recipe]

    return run


@pytest.fixture
def kill_before_batch(before_call: Callable[..., None]) -> dict[int, int]:
    """`kill_before_batch[number] = signal` sends this process a signal, once, when that batch is
    read.
    """
    waiting: dict[int, int] = {}

    def kill(_: Batches, number: int) -> None:
        if number in waiting:
            os.kill(os.getpid(), waiting.pop(number))

    for kind in (Batches, SequenceBatches):
        before_call(kind, "__getitem__", kill)
    return waiting


@pytest.mark.parametrize("recipe", RECIPES)
def test_interrupted_again_and_again_equals_uninterrupted(
    recipe: str,
    uninterrupted: Callable[[str], Path],
    arguments: list[str],
    tmp_path: Path,
    kill_before_batch: dict[int, int],
    assert_same: AssertSame,
) -> None:
    command = [*arguments, *RECIPES[recipe], "--resume", "auto"]
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    done = [0]
    for fatal, number in ((0, signal.SIGTERM), (5, signal.SIGTERM), (17, signal.SIGINT)):
        kill_before_batch[fatal] = number
        with pytest.raises(SystemExit) as end:
            main(command)
        assert end.value.code == 128 + number
        done.append(load_checkpoint(last)["progress"]["batches_done"] if last.exists() else 0)
    assert done[0] <= done[1] < done[2] < done[3] < 24
    assert main(command) == 0
    assert_same(tmp_path / "run", uninterrupted(recipe))


@pytest.mark.parametrize("lost", ["nothing", "random state", "optimizer state", "a batch"])
def test_a_continuation_without_a_part_of_the_checkpoint_is_seen(
    lost: str,
    uninterrupted: Callable[[str], Path],
    arguments: list[str],
    tmp_path: Path,
    kill_before_batch: dict[int, int],
    assert_same: AssertSame,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restore, recipe = TrainingState.restore, "transformer, adamw, cosine"

    def restore_the_rest(state: TrainingState, checkpoint: dict[str, Any]) -> None:
        if lost == "random state":
            checkpoint["devices"][0]["cpu"] = torch.Generator().get_state()
        elif lost == "optimizer state":
            checkpoint["optimizer"]["state"] = {}
        elif lost == "a batch":
            checkpoint["progress"]["batches_done"] += 1
        restore(state, checkpoint)

    monkeypatch.setattr(TrainingState, "restore", restore_the_rest)
    kill_before_batch[7] = signal.SIGTERM
    command = [*arguments, *RECIPES[recipe], "--resume", "auto"]
    with pytest.raises(SystemExit):
        main(command)
    assert main(command) == 0
    with nullcontext() if lost == "nothing" else pytest.raises(AssertionError):
        assert_same(tmp_path / "run", uninterrupted(recipe))


@pytest.mark.parametrize(
    "what", ["lm.training.state.save_model", "lm.training.state.save_checkpoint", "os.link"]
)
def test_a_crash_while_the_best_model_is_saved_is_repaired_by_continuing(
    what: str,
    uninterrupted: Callable[[str], Path],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    assert_same: AssertSame,
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
    assert_same(tmp_path / "run", uninterrupted(recipe))


def test_a_run_begins_again_from_its_seed_and_is_continued_without_a_change(
    lstm_run: Path,
    train: Train,
    tmp_path: Path,
    contents: Contents,
    assert_same: AssertSame,
    outcome_of: Callable[[Path], Any],
) -> None:
    same = train(tmp_path / "same", "--resume", "auto")  # there is no checkpoint
    assert_same(same, lstm_run)
    other = outcome_of(train(tmp_path / "other", "--seed=2"))
    assert other["metrics"] != outcome_of(lstm_run)["metrics"]
    before = contents(same)
    (same / "curves.png").unlink()
    train(same, "--resume", "auto")  # the run is complete
    assert contents(same) == before


@pytest.mark.parametrize("change", ["none", "last.ckpt is deleted", "auto is row-wise"])
def test_a_longer_training_continues_where_the_shorter_ended(
    change: str,
    train: Train,
    arguments: list[str],
    tmp_path: Path,
    assert_same: AssertSame,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without `last.ckpt`, `best.ckpt` is the last one. `auto` depends on a size that versions may
    change: gradients remain dense.
    """
    run, options = tmp_path / "run", ["--log.every_steps=4", "--train.val_every_steps=4"]
    options += ["--optim.optimizer=sgd", "--optim.lr=0.5", "--optim.weight_decay=0"]
    truth = train(tmp_path / "truth", *options, "--train.max_steps=12")
    assert main([*arguments, *options, "--train.max_steps=8"]) == 0
    if change == "last.ckpt is deleted":
        (run / "checkpoints" / "last.ckpt").unlink()
    if change == "auto is row-wise":
        monkeypatch.setattr("lm.config.word_table.ROW_WISE_ELEMENTS", 0)
        assert Run.read(run / "config.yaml", []).word_table.row_wise
    options.append("--train.max_steps=12")
    assert main([*arguments, *options]) == 2
    assert main([*arguments, *options, "--resume", "auto"]) == 0
    assert_same(run, truth)
    assert load_config(run / "config.yaml").train.max_steps == 12


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        ("cosine", 16, ["train.max_steps: 8 → 16: the learning rate was 0.00134 at step 8, and"]),
        ("cosine", 8, []),
        ("constant", 16, []),
    ],
)
def test_a_longer_training_says_how_its_learning_rate_changes(
    arguments: list[str],
    caplog: pytest.LogCaptureFixture,
    schedule: str,
    steps: int,
    expected: list[str],
) -> None:
    caplog.set_level("INFO")
    options = [*arguments, f"--optim.schedule={schedule}"]
    assert main([*options, "--train.max_steps=8"]) == 0
    caplog.clear()
    assert main([*options, f"--train.max_steps={steps}", "--resume", "auto"]) == 0
    lines = [line for line in caplog.messages if "the learning rate was" in line]
    assert [line.partition(" continues")[0] for line in lines] == expected


def test_a_named_checkpoint_is_continued(
    train: Train, arguments: list[str], tmp_path: Path, outcome_of: Callable[[Path], Any]
) -> None:
    options = ["--train.max_steps=8", "--log.every_steps=4", "--train.val_every_steps=4"]
    truth = train(tmp_path / "truth", *options)
    early = train(tmp_path / "early", *options, "--train.max_steps=4")
    checkpoint = early / "checkpoints" / "last.ckpt"
    assert main([*arguments, *options, "--resume", str(checkpoint)]) == 0
    states = [outcome_of(run)["state"] for run in (tmp_path / "run", truth)]
    assert states[0]["progress"]["batches_done"] == 8
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_continuation_in_a_new_folder_has_a_model_though_it_never_beats_the_old_best(
    train: Train, arguments: list[str], tmp_path: Path
) -> None:
    options = ["--log.every_steps=4", "--train.val_every_steps=4"]
    early = train(tmp_path / "early", *options, "--train.max_steps=8")
    best = json.loads((early / "model.json").read_text())["valid_perplexity"]
    worse = [*options, "--train.max_steps=12", "--resume", str(early / "checkpoints" / "last.ckpt")]
    checkpoint = load_checkpoint(early / "checkpoints" / "last.ckpt")
    checkpoint["progress"]["best_perplexity"] = 1.0
    save_checkpoint(checkpoint, early / "checkpoints" / "last.ckpt")
    assert main([*arguments, *worse]) == 0
    description = json.loads((tmp_path / "run" / "model.json").read_text())
    assert 1 < description["valid_perplexity"] < best
    assert description["step"] == 12


def test_a_continuation_moves_the_carried_state_to_the_device(
    lstm_run: Path,
) -> None:
    """The device is meta in place of a GPU."""
    run, path = Run.read(lstm_run), lstm_run / "checkpoints" / "last.ckpt"
    fabric, batches = build_fabric(run), Batches(run.config, run.prepared)
    state = TrainingState(fabric, run, batches, load_checkpoint(path))
    carried = state.carried_loss.carried
    assert carried is not None
    assert [tensor.device.type for tensor in carried] == ["cpu"] * len(carried)
    state.fabric = cast(
        Any, SimpleNamespace(device="meta", global_rank=0, world_size=1, strategy=fabric.strategy)
    )
    state.restore(load_checkpoint(path))
    moved = state.carried_loss.carried
    assert moved is not None
    assert [tensor.device.type for tensor in moved] == ["meta"] * len(carried)
