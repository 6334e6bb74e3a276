"""Signals, Ctrl-C, kill -9: exit code, checkpoint, and the same result once continued."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lm.cli import main
from lm.training.batches import Batches
from lm.training.checkpoint import load_checkpoint
from lm.training.signals import SIGNALS, StopSignals
from scripts.benchmarks.faults.work import outcome

Train = Callable[..., Path]


FATAL = {signal.SIGTERM: 143, signal.SIGKILL: -9, signal.SIGUSR1: 138}
NUM_STEPS = 300
LONG = [f"--train.max_steps={NUM_STEPS}", "--train.checkpoint_every_steps=3"]
LONG += ["--train.val_every_steps=50"]
SLOW = """
import time
from lm.__main__ import command
from lm.training.batches import Batches

read = Batches.__getitem__
Batches.__getitem__ = lambda batches, number: time.sleep(0.02) or read(batches, number)
command()
"""
"""The command, at less than 50 steps a second: it does not end before it is stopped."""


@pytest.fixture(autouse=True)
def _signals_are_not_ignored() -> Iterator[None]:
    """Neither here nor in the processes that a test starts, as they would be under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_signals_stop_training_unless_that_of_a_closed_terminal_is_ignored() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
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
    fatal: int, arguments: list[str], tmp_path: Path, before_call: Callable[..., None]
) -> None:
    def kill_twice(batches: Batches, number: int) -> None:
        for _ in range(2 if number == fatal else 0):
            os.kill(os.getpid(), signal.SIGINT)

    before_call(Batches, "__getitem__", kill_twice)
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 130
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_killed_from_outside_again_and_again_equals_uninterrupted(
    train: Train, arguments: list[str], tmp_path: Path
) -> None:
    command, last = [*arguments, *LONG, "--resume", "auto"], tmp_path / "run/checkpoints/last.ckpt"
    step = 0
    for number, code in FATAL.items():
        written = last.stat().st_mtime_ns if step else 0
        with subprocess.Popen(
            [sys.executable, "-c", SLOW, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as process:
            while process.poll() is None and not (
                last.exists() and last.stat().st_mtime_ns > written
            ):
                time.sleep(0.01)
            time.sleep(0.1)
            process.send_signal(number)
            _, message = process.communicate()
        assert process.returncode == code
        assert "Traceback" not in message
        before, step = step, load_checkpoint(last)["progress"]["batches_done"]
        assert before < step < NUM_STEPS
        if code > 0:
            (line,) = re.findall(r"^stopped by .*$", message, re.MULTILINE)
            assert line == f"stopped by {number.name} at step {step}: continue with --resume auto"
    assert main(command) == 0
    assert outcome(tmp_path / "run") == outcome(train(tmp_path / "uninterrupted", *LONG))
