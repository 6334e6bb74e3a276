"""Histories of faults: whatever happens to a run, it continues to the same bits, or names a file.

A history is a sequence of commands, each of which may be killed (`kill -9`: the folder stays as it
is at that moment), lose power, receive a signal or find no space, and of bytes that change on the
disk. More of them: `HISTORIES=2000 pytest tests/training/test_interruptions.py`.
"""

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, cast

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import data_prep.storage
from lm.model.files import read_description
from lm.training.batches import Batches
from lm.training.contents import gather_contents
from lm.training.metrics import read_metrics
from lm.training.signals import StopSignals
from tests.training.disk import Disk, Moments, Policy
from tests.training.tiny_runs import LAST, command, damage, dataset, lm, noting, outcome, steps_done

NUM_HISTORIES = int(os.environ.get("HISTORIES", "20"))
LENGTHS = (4, 8, 12)
"""Steps of the training; each has a validation at its end, as longer ones have there."""
MOST_MOMENTS, MOST_BYTES = 320, 30_000
"""About as many moments and bytes as the longest command and the largest file have."""


class Crash(BaseException):
    """The process has ended at once."""


@dataclass(frozen=True)
class Fault:
    """What happens to a command, and when."""

    kind: str = "none"
    at: int = 0
    policy: Policy = "dropped"


MOMENTS = st.integers(0, MOST_MOMENTS)
SEEDS = st.integers(0, 999)
POLICIES = cast(st.SearchStrategy[Policy], st.sampled_from(("dropped", "any")))
FAULTS = st.one_of(
    st.just(Fault()),
    st.builds(Fault, st.just("kill"), MOMENTS),
    st.builds(Fault, st.just("power"), MOMENTS, POLICIES),
    st.builds(Fault, st.just("full"), st.integers(0, MOST_BYTES)),
    st.builds(Fault, st.just("signal"), st.integers(0, LENGTHS[-1] - 1)),
    st.builds(Fault, st.just("signal in a validation"), st.integers(0, 2)),
)


class Truth:
    """What undisturbed commands come to: `prepared`, and by number of steps, `runs`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.arguments = folder, command(folder)
        self.runs: dict[int, dict[str, Any]] = {}
        self.evaluations: dict[int, dict[str, Any]] = {}  # by the step of the model
        for length in LENGTHS:
            run = folder / str(length)
            options = f"--train.max_steps={length}", f"--data.prepared_dir={folder / 'data'}"
            assert lm(self.arguments("train", run, *options)).code == 0
            self.runs[length] = outcome(run)
            assert lm(["evaluate", str(run)]).code == 0
            step = self.runs[length]["description"]["step"]
            self.evaluations[step] = evaluation_of(run)
        self.prepared = dataset(folder / "data")
        assert len({each["state"] for each in self.runs.values()}) == len(LENGTHS)


def evaluation_of(run: Path) -> dict[str, Any]:
    """What `lm evaluate` has written, without the length of the run."""
    figures: dict[str, Any] = json.loads((run / "evaluate-test.json").read_text())
    return figures | {"num_steps": None}


class Histories(RuleBasedStateMachine):
    """One folder of runs, and what has happened to it."""

    truth: Truth

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(mkdtemp(dir=self.truth.folder))
        self.runs = self.base / "runs"
        self.run = self.runs / "0"
        self.runs.mkdir()
        self.length, self.saved = LENGTHS[0], 0
        self.is_whole = True  # the run has been in one folder all the time
        self.damaged: dict[Path, tuple[bytes, bytes]] = {}  # its bytes before and after
        self.moments = Moments(self.runs)
        self._new_disk()

    @rule(fault=FAULTS)
    def prepare(self, fault: Fault) -> None:
        if self._do(fault, self.truth.arguments("prepare", self.run)):
            assert dataset(self.run / "data") == self.truth.prepared

    @rule(length=st.sampled_from(LENGTHS), fault=FAULTS)
    def train(self, length: int, fault: Fault) -> None:
        """Start the run, continue it, or extend it."""
        self.length = max(length, self.length)
        self._train("auto", fault)

    @rule(fault=FAULTS)
    def continue_in_a_new_folder(self, fault: Fault) -> None:
        checkpoint = self.run / LAST
        if checkpoint.exists() and checkpoint not in self.damaged:
            if steps_done(self.run) >= self.length:
                return
            self.is_whole = False
            self.run, self.saved = self.runs / str(int(self.run.name) + 1), 0
            self._train(str(checkpoint), fault)

    @rule(seed=SEEDS)
    def damage(self, seed: int) -> None:
        """Change bytes of a file that no command is writing."""
        rng, paths = random.Random(seed), sorted(self.run.rglob("*.*"))
        paths = [path for path in paths if path.is_file() and path.stat().st_size]
        if not paths:
            return
        path = rng.choice(paths)
        before = path.read_bytes()
        after = damage(path, rng)
        if path.name == "metrics.csv":  # has no checksum
            self.is_whole = False
        self.damaged[path] = self.damaged.get(path, (before,))[0], after

    @rule(policy=POLICIES, seed=SEEDS)
    def lose_power(self, policy: Policy, seed: int) -> None:
        self._crash("power", policy, seed)
        self._restart()
        self._check_saved()

    @rule()
    def evaluate(self) -> None:
        ended = lm(["evaluate", str(self.run)])
        if ended.code == 0:
            step = read_description(self.run).step
            assert evaluation_of(self.run) == self.truth.evaluations[step]
        else:
            assert ended.names(self.run), ended

    def teardown(self) -> None:
        """Whatever has happened, the run is continued to its end."""
        try:
            for _ in range(2):  # the first may be refused, because of damage
                if self._train("auto", Fault()):
                    break
            else:
                raise AssertionError("the run cannot be continued")
        finally:
            shutil.rmtree(self.base)

    def _train(self, resume: str, fault: Fault) -> bool:
        options = f"--train.max_steps={self.length}", f"--resume={resume}"
        completed = self._do(fault, self.truth.arguments("train", self.run, *options))
        if completed:
            self._repair_model()
            found = outcome(self.run, is_whole=self.is_whole)
            assert self.truth.runs[self.length] | found == self.truth.runs[self.length]
        return completed

    def _do(self, fault: Fault, arguments: list[str]) -> bool:
        """Whether a command has completed; if not, for a good reason, which is then removed."""
        try:
            with self._happening(fault):
                ended = lm(arguments)
        except Crash:
            self._check_saved()
            return False
        if ended.code == 0:
            return True
        if fault.kind.startswith("signal") and ended.code == 128 + signal.SIGTERM:
            self._check_saved()
            return False
        assert ended.names(self.base), ended
        assert self.damaged or fault.kind == "full", ended
        self._repair(list(self.damaged))
        return False

    def _repair(self, paths: list[Path]) -> None:
        """Write the bytes of damaged files again, unless a command has done so."""
        for path in paths:
            before, after = self.damaged.pop(path)
            if path.exists() and path.read_bytes() == after:
                path.write_bytes(before)

    def _repair_model(self) -> None:
        """A completed training does not read the model; what does so refuses it."""
        paths = [path for path in self.damaged if path.name.startswith("model.")]
        if any(path.read_bytes() == self.damaged[path][1] for path in paths):
            ended = lm(["evaluate", str(self.run)])
            assert ended.names(self.run), ended
        self._repair(paths)

    @contextmanager
    def _happening(self, fault: Fault) -> Iterator[None]:
        """A `with` block in which a fault happens to a command."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        is_crash = fault.kind in ("kill", "power")

        def crash() -> None:
            self._crash(fault.kind, fault.policy, fault.at)
            raise Crash

        def read(batches: Batches, number: int) -> Any:
            if fault.kind == "signal" and number == fault.at:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(batches, number)

        def check(signals: StopSignals) -> None:
            if fault.kind == "signal in a validation" and next(checks) == fault.at:
                os.kill(os.getpid(), signal.SIGTERM)
            check_signals(signals)

        original, check_signals, checks = Batches.__getitem__, StopSignals.check, count()
        with ExitStack() as stack:
            patches = stack.enter_context(pytest.MonkeyPatch.context())
            patches.setattr(Batches, "__getitem__", read)
            patches.setattr(StopSignals, "check", check)
            stack.enter_context(noting(partial(setattr, self, "saved")))
            stack.enter_context(self.disk.watching())
            stack.enter_context(self.moments.acting(fault.at if is_crash else None, crash))
            if fault.kind == "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (fault.at, limits[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                if (self.base / "after").exists():
                    self._restart()

    def _crash(self, kind: str, policy: Policy, seed: int) -> None:
        if kind == "kill":
            shutil.copytree(self.runs, self.base / "after")
        else:
            self.disk.lose_power(self.base / "after", policy, random.Random(seed))

    def _restart(self) -> None:
        shutil.rmtree(self.runs)
        (self.base / "after").rename(self.runs)
        self._new_disk()

    def _new_disk(self) -> None:
        self.disk = Disk(self.runs, Path(mkdtemp(dir=self.base)))

    def _check_saved(self) -> None:
        """A checkpoint that was said to be saved is there."""
        if self.run / LAST not in self.damaged:
            assert steps_done(self.run) >= self.saved


@pytest.fixture(scope="module", autouse=True)
def _truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with noting(lambda _: None):
        Histories.truth = Truth(tmp_path_factory.mktemp("truth"))
        yield


def test_whatever_happens_a_run_continues_to_the_same_bits_or_names_a_file() -> None:
    steps = settings(max_examples=NUM_HISTORIES, stateful_step_count=6, phases=[Phase.generate])
    run_state_machine_as_test(Histories, settings=steps)


@pytest.mark.parametrize("number", [0, 1])
def test_a_signal_ends_a_validation_with_which_a_continuation_begins(number: int) -> None:
    history = Histories()
    history.train(length=LENGTHS[1], fault=Fault("signal in a validation", number))
    steps = [4, 8][: number + 1]
    assert steps_done(history.run) == steps[-1]
    lines = read_metrics(history.run / "metrics.csv") if number else []
    assert [line.step for line in lines] == steps[:-1]
    history.train(length=LENGTHS[1], fault=Fault())
    lines = read_metrics(history.run / "metrics.csv")
    assert [line.step for line in lines if line.valid_perplexity] == [4, 8]


@pytest.mark.parametrize("what", ["nothing", "random state", "content", "names"])
def test_a_checkpoint_without_its_random_state_and_a_missing_fsync_are_caught(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "random state":
        monkeypatch.setattr("lm.training.state.gather_contents", without_random_state)
    elif what == "content":
        monkeypatch.setattr("data_prep.storage._sync", sync_folders_only)
    elif what == "names":
        monkeypatch.setattr("data_prep.storage.sync", lambda _: None)
    history = Histories()
    with nullcontext() if what == "nothing" else pytest.raises(AssertionError):
        history.train(length=LENGTHS[0], fault=Fault())
        history.lose_power(policy="dropped", seed=0)
        history.train(length=LENGTHS[1], fault=Fault())


sync = data_prep.storage._sync


def without_random_state(*parts: Any) -> dict[str, Any]:
    checkpoint = gather_contents(*parts)
    checkpoint["devices"][0]["cpu"] = torch.Generator().get_state()
    return checkpoint


def sync_folders_only(descriptor: int) -> None:
    if os.path.isdir(f"/proc/self/fd/{descriptor}"):
        sync(descriptor)
