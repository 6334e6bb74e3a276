"""The end of a run by `train.max_minutes`, and the time that is left."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric import Fabric

from lm.config import TrainConfig
from lm.model.language_model import LanguageModel
from lm.training import state
from lm.training.checkpoint import load_checkpoint
from lm.training.clock import Clock
from lm.training.metrics import read_metrics
from lm.training.progress import Progress
from tests.conftest import Train
from tests.training.conftest import BeforeCall
from tests.training.tiny_runs import LAST

BY_TIME = ["--train.max_steps=null", "--optim.schedule=cosine", "--optim.lr=1"]
BY_TIME += ["--optim.optimizer=sgd", "--log.every_steps=1"]


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch, before_call: BeforeCall) -> list[float]:
    """A clock on which a batch takes two seconds and a validation ten."""
    passed: list[float] = []
    monkeypatch.setattr("lm.training.clock.time.perf_counter", lambda: sum(passed))
    before_call(LanguageModel, "loss", lambda *_: passed.append(2.0))
    before_call(state, "evaluate_prepared", lambda *_, **__: passed.append(10.0))
    return passed


def test_seconds_and_speed_leave_out_validation_and_checkpoints(
    train: Train, tmp_path: Path, seconds: list[float]
) -> None:
    options = ["--train.max_steps=6", "--log.every_steps=2", "--train.val_every_steps=3"]
    lines = read_metrics(train(tmp_path, *options) / "metrics.csv")
    assert [(line.step, line.seconds) for line in lines] == [(2, 4), (3, 6), (4, 8), (6, 12)]
    assert [line.tokens_per_second for line in lines] == [16] * 4
    assert sum(seconds) == 12 + 2 * 10


def test_the_rate_reaches_its_end_with_the_time(
    train: Train, tmp_path: Path, seconds: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Two minutes are 55 steps and a validation, whose length that of step 20 tells."""
    caplog.set_level("INFO")
    options = [*BY_TIME, "--train.max_minutes=2", "--train.val_every_steps=20"]
    options.append("--train.max_epochs=10")
    lines = read_metrics(train(tmp_path, *options) / "metrics.csv")
    # 2 · 20 + 10 + 2 · 20 + 10 + 2 · 5 seconds, then the last validation
    assert [line.step for line in lines if line.valid_perplexity is not None] == [20, 40, 45]
    assert sum(seconds) == 120
    share = (2 * 44 + 20) / 110  # spent before the last step
    assert lines[-1].learning_rate == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)
    rates = [line.learning_rate for line in lines[25:]]
    assert rates == sorted(rates, reverse=True)
    assert (tmp_path / "model.safetensors").exists()
    assert "step 45 of 45 (720 planned): validation" in caplog.text


def test_a_continued_run_keeps_counting_and_says_if_no_step_is_left(
    train: Train, tmp_path: Path, seconds: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    options, resume = [*BY_TIME, "--train.val_every_steps=10"], "--resume=auto"
    train(tmp_path, *options, "--train.max_minutes=1")
    steps = len(read_metrics(tmp_path / "metrics.csv"))
    assert load_checkpoint(tmp_path / LAST)["progress"]["elapsed_seconds"] == sum(seconds) == 60
    caplog.set_level("INFO")
    train(tmp_path, *options, "--train.max_minutes=1", resume)  # nothing is left
    assert "train.max_minutes: 1 is spent: a larger one continues the training" in caplog.text
    assert "leaves no time" not in caplog.text
    train(tmp_path, *options, "--train.max_minutes=1.1", resume)  # six seconds are left
    assert "1.1 leaves no time for a step: a validation takes 10 s" in caplog.text
    assert "continues with" not in caplog.text
    assert sum(seconds) == 60
    train(tmp_path, *options, "--train.max_minutes=2", resume)
    assert load_checkpoint(tmp_path / LAST)["progress"]["elapsed_seconds"] == sum(seconds) == 120
    assert len(read_metrics(tmp_path / "metrics.csv")) > steps


def test_steps_end_a_run_with_time_left(train: Train, tmp_path: Path, seconds: list[float]) -> None:
    options = [*BY_TIME, "--train.max_minutes=100", "--train.max_steps=8"]
    lines = read_metrics(train(tmp_path, *options) / "metrics.csv")
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
    assert [line.learning_rate for line in lines] == pytest.approx(expected)


def test_all_devices_follow_the_clock_of_the_first() -> None:
    fabric: Any = SimpleNamespace(world_size=2, broadcast=lambda _: 0.75)
    batches: Any = SimpleNamespace(num_steps=None)
    assert Clock(fabric, Progress(), TrainConfig(max_minutes=1000), batches, None).share == 0.75
    fabric.broadcast = None  # without a limit, nothing is sent
    assert Clock(fabric, Progress(), TrainConfig(), batches, None).share == 0.0


def test_a_continuation_estimates_the_first_validation_by_all_steps_of_the_run(
    seconds: list[float],
) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    train = TrainConfig(batch_size=4, seq_len=5, accumulate=2, max_minutes=10)
    batches: Any = SimpleNamespace(
        num_steps=None, between_validations=2_000_000, steps=lambda n: n // 2
    )
    progress = Progress(batches_done=480, seconds=240.0, elapsed_seconds=240.0)
    clock = Clock(fabric, progress, train, batches, 30 * 4 * 5 * 2)  # the work of ten steps
    assert clock.share == pytest.approx(240 / (600 - 10))
    seconds.append(1.0)
    progress.batches_done = 482
    clock.step()
    assert clock.share == pytest.approx(241 / (600 - 10))


def test_the_time_left_counts_steps_and_validations(seconds: list[float]) -> None:
    fabric, train = Fabric(accelerator="cpu", devices=1), TrainConfig(batch_size=4, seq_len=5)
    batches: Any = SimpleNamespace(num_steps=1000, between_validations=100, steps=int)
    clock = Clock(fabric, Progress(), train, batches, 30 * 4 * 5)
    for step in range(1, 36):
        assert clock.seconds_left(step - 1) is None
        seconds.append(50 if step <= 5 else 0.1)  # the first steps compile
        clock.step()
    # 965 steps and ten validations, each of the work of ten steps
    assert clock.seconds_left(35) == pytest.approx(96.5 + 10)
    clock.pause()
    seconds.append(7)
    clock.resume(validated=True)
    assert clock.seconds_left(100) == pytest.approx(90 + 9 * 7)
    clock.num_steps, clock.limit = None, clock.progress.elapsed_seconds + 60
    assert clock.seconds_left(100) == pytest.approx(60)
