"""Tries of each fault: what a folder is good for after something has happened to a process.

Whatever it was, the command is then repeated without a fault, and compared with an undisturbed one.
Processes are forked, and start at once because everything is imported and compiled.
"""

import logging
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from lm.__main__ import command
from scripts.benchmarks.faults.disk import Disk, Moments, replace_folder
from scripts.benchmarks.faults.work import (
    Ended,
    Work,
    contents,
    damage,
    lm,
    outcome,
    prepared_to_fail,
    steps_done,
)

Verdict = Literal["survived", "refused", "unclear", "lost", "undetected"]
PHASES = {
    "preparing": (),
    "training": ("--train.checkpoint_every_steps=5", "--train.val_every_steps=6"),
    "saving": ("--train.checkpoint_every_steps=1", "--train.val_every_steps=6"),
    "exporting": ("--train.val_every_steps=1",),
}
"""Options of `lm train`, which in the last phase writes `model.safetensors` after most steps."""
MOST_KILOBYTES = 160
"""More than a run writes."""
LONGEST_SECONDS = 120.0
"""A process that takes longer hangs."""
_saved = mmap.mmap(-1, 8)
"""Steps of the last checkpoint that the last process, which is forked, said it had saved."""


class Tries:
    """A folder for tries, what undisturbed commands come to there, and how long they take."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.work, self.rng = folder, Work(folder), random.Random(seed)
        self.tried = folder / "tried" / "run"  # no other run next to it has data to take over
        self.data, self.half = folder / "data", folder / "half"
        self.truth: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.num_moments: dict[str, int] = {}
        for phase in PHASES:
            moments = Moments(self.tried)
            for _ in range(2):  # the first time compiles
                self._empty()
                with prepared_to_fail(lambda _: None), moments.acting(None, _kill):
                    start = time.perf_counter()
                    assert lm(self._arguments(phase)).code == 0
                    self.seconds[phase] = time.perf_counter() - start
            self.num_moments[phase] = moments.num_moments
            self.truth[phase] = self._found(phase)
            if phase == "preparing":
                shutil.copytree(self.tried / "data", self.data)
        self._empty()
        with prepared_to_fail(_stop_after_six_steps):
            assert lm(self._whole()).code == 128 + signal.SIGTERM
            shutil.copytree(self.tried, self.half)
            assert lm(self._whole()).code == 0
            assert lm(["evaluate", str(self.tried)]).code == 0
        self.truth["all"] = self._found("all")

    def signalled(self, number: int) -> Verdict:
        """A signal at a random time, by which the process ends, or of which it takes no notice."""
        phase = self._new_try()
        seconds = self.rng.uniform(0, 1.2 * self.seconds[phase])
        ended = run_forked(self._arguments(phase), number=number, after_seconds=seconds)
        is_clear = ended.code in (0, 128 + number) and "Traceback" not in ended.message
        return self._continued(phase) if is_clear else "unclear"

    def killed(self) -> Verdict:
        """SIGKILL before a random one of the moments at which files change."""
        phase = self._new_try()
        during = Moments(self.tried).acting(self._moment(phase), _kill)
        run_forked(self._arguments(phase), during)
        return self._continued(phase)

    def without_power(self) -> Verdict:
        """SIGKILL at such a moment, and what was not synchronized is dropped, or some of it."""
        phase = self._new_try()
        journal, after = self.folder / "journal", self.folder / "after"
        shutil.rmtree(journal, ignore_errors=True)
        journal.mkdir()
        disk = Disk(self.tried, journal)
        moment = Moments(self.tried).acting(self._moment(phase), _kill)
        run_forked(self._arguments(phase), disk.watching(), moment)
        disk.lose_power(after, self.rng.choice(("dropped", "any")), self.rng)
        replace_folder(self.tried, after)
        return self._continued(phase)

    def on_a_full_disk(self, share: float) -> Verdict:
        """A disk of a part of the size that a run needs; it is larger when the run continues."""
        self._empty()
        with _mounted(self.tried, f"size={max(4, round(share * MOST_KILOBYTES))}k"):
            ended = run_forked(self._whole())
            if ended.code and not ended.names(self.tried):
                return "unclear"
            subprocess.run(["mount", "-o", "remount,size=64m", self.tried], check=True)
            return self._continued("all")

    def on_a_read_only_disk(self, place: str) -> Verdict:
        """Part of the folder of a run is read-only while it is continued or evaluated."""
        self._take_half()
        command = self.rng.choice((["evaluate", str(self.tried)], self._whole()))
        path = self.tried / place
        with _mounted(path, "bind", source=path):
            subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
            ended = run_forked(command)
            if ended.code and not ended.names(self.tried):
                return "unclear"
        verdict = self._continued("all")
        return "refused" if verdict == "survived" and ended.code else verdict

    def damaged(self) -> Verdict:
        """Other bytes in a file of a run that is not complete; it is then continued and evaluated.

        Not in `metrics.csv`, `env.json` and earlier evaluations, which are reports.
        """
        self._take_half()
        names = {"metrics.csv", "env.json"}
        paths = [path for path in sorted(self.tried.rglob("*.*")) if path.is_file()]
        paths = [path for path in paths if path.name not in names and path.stat().st_size]
        damage(self.rng.choice(paths), self.rng)
        ended = run_forked(self._whole())
        if ended.code == 0:
            ended = run_forked(["evaluate", str(self.tried)])
        if ended.code:
            return "refused" if ended.names(self.tried) else "unclear"
        return "survived" if self._found("all") == self.truth["all"] else "undetected"

    def _arguments(self, phase: str) -> list[str]:
        """The command of a phase, which continues what it finds."""
        if phase == "preparing":
            return self.work.arguments("prepare", self.tried)
        if phase == "all":
            return self._whole()
        options = f"--data.prepared_dir={self.data}", "--resume=auto", *PHASES[phase]
        return self.work.arguments("train", self.tried, *options)

    def _whole(self) -> list[str]:
        """The command of all phases in one."""
        return self.work.arguments("train", self.tried, "--resume=auto")

    def _found(self, phase: str) -> Any:
        """What a completed phase has come to."""
        return contents(self.tried / "data") if phase == "preparing" else outcome(self.tried)

    def _empty(self) -> None:
        if self.tried.exists():
            shutil.rmtree(self.tried)
        self.tried.mkdir(parents=True)

    def _take_half(self) -> None:
        shutil.rmtree(self.tried)
        shutil.copytree(self.half, self.tried)

    def _new_try(self) -> str:
        self._empty()
        return self.rng.choice(list(PHASES))

    def _moment(self, phase: str) -> int:
        return self.rng.randrange(self.num_moments[phase])

    def _continued(self, phase: str) -> Verdict:
        """Continue without a fault."""
        (saved,) = struct.unpack("q", _saved[:8])
        if phase != "preparing" and steps_done(self.tried) < saved:
            return "lost"
        ended = run_forked(self._arguments(phase))
        if ended.code:
            return "lost"
        return "survived" if self._found(phase) == self.truth[phase] else "undetected"


def _stop_after_six_steps(steps: int) -> None:
    if steps == 6:
        os.kill(os.getpid(), signal.SIGTERM)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _mounted(path: Path, options: str, *, source: Path | None = None) -> Iterator[None]:
    """A `with` block in which a tmpfs, or the folder itself, is mounted on a folder."""
    kind = [] if source else ["-t", "tmpfs"]
    command = ["mount", *kind, "-o", options, source or "tmpfs", path]
    subprocess.run(command, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def run_forked(
    arguments: Sequence[str],
    *during: AbstractContextManager[None],
    number: int = 0,
    after_seconds: float = 0.0,
) -> Ended:
    """Run a command inside of `during` in a process of its own, which may get signal `number`.

    The exit code of a process that a signal has ended is that which a shell reports.
    """
    _note(0)
    with tempfile.TemporaryFile() as err:
        process = os.fork()
        if process == 0:
            _be(arguments, during, err.fileno())
        start = time.monotonic()
        if number:
            time.sleep(after_seconds)
            os.kill(process, number)
        while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
            time.sleep(0.002)
            if time.monotonic() > start + LONGEST_SECONDS:
                os.kill(process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(ended[1])
        err.seek(0)
        return Ended(128 - code if code < 0 else code, err.read().decode(errors="replace"))


def _be(arguments: Sequence[str], during: Sequence[AbstractContextManager[None]], err: int) -> None:
    """Be the command from now on."""
    code = 1
    try:
        os.dup2(err, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stderr, sys.stdout = os.fdopen(2, "w"), os.fdopen(1, "w")
        logging.getLogger().handlers.clear()
        sys.argv = ["lm", *arguments]
        with ExitStack() as stack:
            for context in (prepared_to_fail(_note), *during):
                stack.enter_context(context)
            command()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _note(steps: int) -> None:
    _saved[:8] = struct.pack("q", steps)
