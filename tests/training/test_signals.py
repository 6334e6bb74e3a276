"""SIGTERM, Ctrl-C and kill -9: exit code and checkpoint, and the same result once continued."""

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
from lm.training.batches import Batch, Batches
from lm.training.checkpoint import batches_done

Train = Callable[..., Path]
AssertSame = Callable[[Path, Path], None]


LONG = ["--train.max_steps=400", "--train.checkpoint_every_steps=3", "--train.val_every_steps=50"]


def started(command: list[str], run: Path) -> Iterator[subprocess.Popen[str]]:
    """The command in a separate process, once it has written its first checkpoint."""
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


@pytest.fixture(scope="module")
def long_run(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that is killed, uninterrupted."""
    return train(tmp_path_factory.mktemp("long"), *LONG)


def test_the_signal_handlers_are_restored_after_a_run(arguments: list[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert main([*arguments, "--train.max_steps=1"]) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize("fatal", [0, 3])
def test_a_second_signal_stops_at_once(
    fatal: int, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Batches.__getitem__

    def kill_twice(self: Batches, number: int) -> Batch:
        for _ in range(2 if number == fatal else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, number)

    monkeypatch.setattr(Batches, "__getitem__", kill_twice)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 130
    assert signal.getsignal(signal.SIGINT) == before
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_killed_from_outside_at_any_moment_equals_uninterrupted(
    number: signal.Signals,
    code: int,
    long_run: Path,
    arguments: list[str],
    tmp_path: Path,
    assert_same: AssertSame,
) -> None:
    run, command = tmp_path / "run", [*arguments, *LONG, "--resume", "auto"]
    for process in started(command, run):
        time.sleep(0.1)
        process.send_signal(number)
        _, message = process.communicate()
        assert process.returncode == code
        if code > 0:
            (line,) = re.findall(r"^stopped by .*$", message, re.MULTILINE)
            step = batches_done(run / "checkpoints" / "last.ckpt")
            assert line == f"stopped by {number.name} at step {step}: continue with --resume auto"
        assert "Traceback" not in message
    assert 0 < batches_done(run / "checkpoints" / "last.ckpt") < 400
    assert main(command) == 0
    assert_same(run, long_run)
