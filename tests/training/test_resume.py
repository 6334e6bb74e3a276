"""Signals stop a run, and continuing it: interrupted equals uninterrupted, bit for bit."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import pytest

from lm.config import load_config
from lm.run import Run
from lm.training.checkpoint import load_checkpoint, save_checkpoint
from lm.training.signals import SIGNALS, StopSignals
from tests.conftest import Printed, Train, recipes
from tests.training.tiny_runs import LAST, outcome, steps_done

RECIPES = recipes("""\
lstm, dropouts, momentum, accumulate | model.dropout_weight=0.3 model.dropout_variational=true \
optim.optimizer=sgd optim.lr=0.5 optim.momentum=0.9 train.accumulate=3 optim.schedule=plateau \
train.val_every_steps=7
transformer, bf16 parameters | model.backbone=transformer train.precision=bf16-true \
output.tree=huffman output.arity=3 train.val_every_steps=6 train.checkpoint_every_steps=4
pieces of words | output.tree=balanced output.branching=2 model.input_pieces=40 \
model.count_word_dropout=3 train.precision=bf16-true train.val_every_steps=6
sampled softmax, path sums of another tree | output.tree=full output.num_samples=9 \
train.val_every_steps=6 model.input_embedding=path_sum model.input_tree=two_level \
word_table.tied=true model.count_word_dropout=3
independent sequences, lstm | data.sequences=independent data.prepared_dir=null train.seq_len=3 \
train.val_every_steps=6 train.checkpoint_every_steps=4
independent sequences, transformer, their ends predicted | data.sequences=independent \
data.prepared_dir=null train.accumulate=2 data.predict_eos=true model.backbone=transformer \
train.val_every_steps=6
lstm, two epochs, tied, bf16 | train.max_epochs=2 train.max_steps=null train.batch_size=16 \
word_table.tied=true train.precision=bf16-mixed optim.schedule=step
""")  # `test_cuda_graph.py` has others, which stop once


@pytest.fixture(autouse=True)
def _signals_are_not_ignored() -> Iterator[None]:
    """As they would be under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_signals_stop_training_unless_that_of_a_closed_terminal_is_ignored() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM):
        with StopSignals() as signals:
            os.kill(os.getpid(), number)
            assert signals.agreed() == number
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under `nohup`
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.agreed() is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("fatal", [0, 3])
def test_a_second_signal_stops_at_once(
    fatal: int, train: Train, tmp_path: Path, signals_at: dict[int, list[int]]
) -> None:
    signals_at[fatal] = [signal.SIGINT] * 2
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(SystemExit, match="130"):
        train(tmp_path)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("recipe", RECIPES)
def test_interrupted_again_and_again_equals_uninterrupted(
    recipe: str, train: Train, tmp_path: Path, signals_at: dict[int, list[int]]
) -> None:
    options, done, run = RECIPES[recipe], [0], tmp_path / "run"
    for batch, number in ((0, signal.SIGTERM), (5, signal.SIGTERM), (17, signal.SIGINT)):
        signals_at[batch] = [number]
        with pytest.raises(SystemExit, match=f"{128 + number}"):
            train(run, *options, "--resume", "auto")
        done.append(steps_done(run))
    assert done[0] <= done[1] < done[2] < done[3] < 24
    expected = outcome(train(tmp_path / "uninterrupted", *options))
    assert outcome(train(run, *options, "--resume", "auto")) == expected


@pytest.mark.parametrize("limit", ["--train.max_steps=6", "--train.max_minutes=0.00001"])
def test_a_run_that_a_smaller_limit_ends_where_a_signal_stopped_it_has_a_model(
    limit: str, train: Train, tmp_path: Path, signals_at: dict[int, list[int]]
) -> None:
    signals_at[5] = [signal.SIGTERM]
    options = ["--train.max_steps=50", "--train.val_every_steps=100", "--resume=auto"]
    with pytest.raises(SystemExit, match="143"):
        train(tmp_path, *options)
    train(tmp_path, *options, limit)
    description = json.loads((tmp_path / "model.json").read_text())
    assert (description["step"], description["valid_perplexity"] > 1) == (6, True)


def test_a_model_after_whose_validation_others_were_is_not_replaced_without_a_checkpoint(
    train: Train, failed: Printed, tmp_path: Path
) -> None:
    options = ["--train.max_steps=8", "--train.val_every_steps=4"]
    rmtree(train(tmp_path, *options) / "checkpoints")
    message = failed(tmp_path, *options, "--resume=auto")
    assert "has a model, but no checkpoint that training could continue from" in message


@pytest.mark.parametrize("change", ["none", "last.ckpt is deleted", "auto is row-wise"])
def test_a_longer_training_continues_where_the_shorter_ended(
    change: str, train: Train, failed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `last.ckpt`, `best.ckpt` is the last one; `auto` may change between versions."""
    options = ["--log.every_steps=4", "--train.val_every_steps=4"]
    options += ["--optim.optimizer=sgd", "--optim.lr=0.5", "--optim.weight_decay=0"]
    truth = train(tmp_path / "truth", *options, "--train.max_steps=12")
    run = train(tmp_path / "run", *options, "--train.max_steps=8")
    if change == "last.ckpt is deleted":
        (run / LAST).unlink()
    if change == "auto is row-wise":
        monkeypatch.setattr("lm.config.word_table.ROW_WISE_ELEMENTS", 0)
        assert Run.read(run / "config.yaml", []).word_table.row_wise
    options.append("--train.max_steps=12")
    assert "already contains a run" in failed(run, *options)
    assert outcome(train(run, *options, "--resume", "auto")) == outcome(truth)
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
    train: Train,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    schedule: str,
    steps: int,
    expected: list[str],
) -> None:
    caplog.set_level("INFO")
    run = train(tmp_path, f"--optim.schedule={schedule}", "--train.max_steps=8")
    caplog.clear()
    train(run, f"--optim.schedule={schedule}", f"--train.max_steps={steps}", "--resume", "auto")
    lines = [line for line in caplog.messages if "the learning rate was" in line]
    assert [line.partition(" continues")[0] for line in lines] == expected


def test_a_continuation_in_a_new_folder_has_a_model_though_it_never_beats_the_old_best(
    train: Train, tmp_path: Path
) -> None:
    options = ["--log.every_steps=4", "--train.val_every_steps=4"]
    early = train(tmp_path / "early", *options, "--train.max_steps=8")
    best = json.loads((early / "model.json").read_text())["valid_perplexity"]
    checkpoint = load_checkpoint(early / LAST)
    checkpoint["progress"]["best_perplexity"] = 1.0
    save_checkpoint(checkpoint, early / LAST)
    run = train(tmp_path, *options, "--train.max_steps=12", "--resume", str(early / LAST))
    description = json.loads((run / "model.json").read_text())
    assert 1 < description["valid_perplexity"] < best
    assert description["step"] == 12
