"""Several devices compute what one does; settings that require a GPU are refused without one."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.strategies.ddp import DDPStrategy

from data_prep.errors import UserError
from lm.cli import main
from lm.config import validate
from lm.device import launch
from lm.model.files import load_model
from lm.output import ClassTree
from lm.run import Run
from lm.training import devices as module
from lm.training.batches import Batches
from lm.training.checkpoint import load_checkpoint
from lm.training.metrics import read_metrics
from tests.conftest import Printed, Train, python, recipes
from tests.training.tiny_runs import outcome

Command = Callable[[Path], list[str]]


def launched(launcher: str, *command: str, devices: int = 2) -> list[subprocess.Popen[str]]:
    """The process of Python with arguments, that of torchrun, or those of two tasks of SLURM."""
    start = [sys.executable]
    environments = [{"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}]
    if launcher == "torchrun":
        start += ["-m", "torch.distributed.run", f"--nproc-per-node={devices}", "--standalone"]
    elif launcher == "SLURM":
        given = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": str(os.getpid())}
        given |= {"SLURM_STEP_ID": "0", "SLURM_NODELIST": "127.0.0.1", "SLURM_NODEID": "0"}
        ranks = [{"SLURM_PROCID": each, "SLURM_LOCALID": each} for each in "01"]
        environments = [given | each | environments[0] for each in ranks]
    start += [*command, "--train.accelerator=cpu"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(start, env=os.environ | each, **pipes) for each in environments]


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Wait until the command ends with this exit code; returns its stdout and stderr."""
    with process:
        try:
            printed, message = process.communicate(timeout=900)  # far more than on a busy computer
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == code, message
    return printed, message


SHARDED = "train.strategy=shard_output optim.optimizer=sgd optim.lr=0.5"
TIED_ADAGRAD = "word_table.tied=true word_table.optimizer=adagrad word_table.lr=0.05"
ALIKE = recipes(f"""\
pieces of items of independent sequences, more in one process | model.input_pieces=40 \
data.sequences=independent data.prepared_dir=null train.batch_size=50 train.accumulate=4
adaptive, batches without a target in a cluster | output.tree=adaptive output.cutoffs=[15,21]
by class, clipped, pieces | {SHARDED} {TIED_ADAGRAD} train.shard_by=class optim.clip=0.1 \
model.input_pieces=40
tied, adagrad | {SHARDED} {TIED_ADAGRAD}
path sums, row-wise | {SHARDED} model.input_embedding=path_sum word_table.gradients=row_wise
adamw | {SHARDED} optim.optimizer=adamw optim.lr=1e-3 optim.clip=0.1 model.init_range=0.2
""")
DEALT = "--train.strategy=shard_output"
EVERY_SECOND = ["--model.dropout=0", "--train.max_steps=8", "--log.every_steps=2"]


def train_in_two_parts(folder: Path, arguments: list[str]) -> None:
    """Be one of two processes that train half of each recipe and, unless rows are dealt, the rest;
    or the process that trains the rest of these.
    """
    is_alone = "WORLD_SIZE" not in os.environ
    for name, options in ALIKE.items():
        command = [*arguments, *EVERY_SECOND, *options, f"--run_dir={folder}/{name}"]
        if not is_alone:
            assert main([*command, "--train.max_steps=4"]) == 0
        if is_alone == (DEALT in options):
            assert main([*command, "--resume=auto"]) == 0


def test_two_processes_train_as_one_and_continue_where_they_stopped(
    tiny: Path, prepared_dir: Path, train: Train, tmp_path: Path
) -> None:
    """Dealt rows are continued by one process."""
    data = f"--data.prepared_dir={prepared_dir}"
    words = [__file__, "parts", tmp_path, "train", tiny, "--no-progress", data]
    for launcher in ("torchrun", ""):
        (processes,) = launched(launcher, *map(str, words))
        finish(processes)
    for name, options in ALIKE.items():
        is_dealt, run = DEALT in options, tmp_path / name
        alone = [*EVERY_SECOND, *(each for each in options if "--train.s" not in each)]
        one = train(tmp_path / "one" / name, *alone)
        both, truth = (read_metrics(folder / "metrics.csv") for folder in (run, one))
        steps = [[(line.step, line.tokens) for line in lines] for lines in (both, truth)]
        assert [step for step, _ in steps[0]] == [2, 4, 6, 8]
        assert steps[0] == steps[1]
        perplexities = [[line.train_perplexity for line in lines] for lines in (both, truth)]
        assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-5)
        assert both[-1].valid_perplexity == pytest.approx(truth[-1].valid_perplexity, rel=1e-5)
        if not is_dealt:
            devices = load_checkpoint(run / "checkpoints/last.ckpt")["devices"]
            assert not torch.equal(*(device["cpu"] for device in devices))  # dropout
            continue
        weights, expected = (load_model(folder)[0].state_dict() for folder in (run, one))
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("launcher", "devices"), [("torchrun", "null"), ("SLURM", "auto"), ("", "2")]
)
def test_the_processes_that_are_started_train_one_run(
    command: Command, lstm_run: Path, tmp_path: Path, launcher: str, devices: str
) -> None:
    options = ["--train.max_steps=2", f"--train.devices={devices}"]
    options += [f"--init-from={lstm_run}", "--data.prepared_dir=null"]
    processes = launched(launcher, "-m", "lm", *command(tmp_path / "run"), *options)
    assert "".join(finish(each)[0] for each in processes) == f"{tmp_path / 'run'}\n"  # once
    assert len(load_checkpoint(tmp_path / "run/checkpoints/last.ckpt")["devices"]) == 2


CONTINUED = recipes("""\
lstm | model.dropout_weight=0.3 model.dropout_variational=true
lstm, row-wise in bf16, accumulate | word_table.optimizer=adagrad train.strategy=shard_output \
word_table.dtype=bf16 train.precision=bf16-mixed train.accumulate=2
transformer, bf16, accumulate | model.backbone=transformer train.precision=bf16-true \
train.accumulate=2
transformer, bf16, row-wise | model.backbone=transformer train.precision=bf16-mixed \
word_table.optimizer=adam train.strategy=shard_output
transformer, row-wise, accumulate | model.backbone=transformer train.accumulate=2 \
word_table.optimizer=sgd train.strategy=shard_output
""")
"""Every pair of a backbone, a kind of gradients, a number of batches per step and a precision.

Rows are dealt where gradients are row-wise, which several processes require.
"""


def train_and_continue(folder: Path, arguments: list[str]) -> None:
    """Be one of several processes that train each recipe as a whole, and with a stop."""
    read, before = Batches.__getitem__, [-1]

    def read_or_stop(self: Batches, number: int) -> Any:
        if number == before[0] and self.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(self, number)

    Batches.__getitem__ = read_or_stop  # type: ignore[method-assign]
    for name, options in CONTINUED.items():
        command = [*arguments, *options, "--output.backend=reference", "--train.val_every_steps=6"]
        assert main([*command, f"--run_dir={folder}/{name}/whole"]) == 0
        command += [f"--run_dir={folder}/{name}/stopped", "--resume=auto"]
        before[0] = 7  # one of the processes receives a signal before this batch
        with pytest.raises(SystemExit, match="143"):
            main(command)
        before[0] = -1
        assert main(command) == 0


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.long), 3])
def test_several_processes_continue_bit_for_bit_or_refuse_another_number_of_them(
    tiny: Path, prepared_dir: Path, tmp_path: Path, complaint: Printed, devices: int
) -> None:
    data = f"--data.prepared_dir={prepared_dir}"
    command = ["train", tiny, "--no-progress", data, "--train.batch_size=6", "--train.max_steps=12"]
    words = [__file__, "stops", tmp_path, *command]
    (processes,) = launched("torchrun", *map(str, words), devices=devices)
    finish(processes)
    for name in CONTINUED:
        whole, stopped = tmp_path / name / "whole", tmp_path / name / "stopped"
        assert len(load_checkpoint(whole / "checkpoints" / "last.ckpt")["devices"]) == devices
        assert outcome(stopped) == outcome(whole)
    options = [f"--run_dir={tmp_path / 'lstm' / 'stopped'}", "--train.accelerator=cpu"]
    options += [*CONTINUED["lstm"], "--output.backend=reference", "--train.val_every_steps=6"]
    assert complaint(*command, *options, "--train.max_steps=15", "--resume=auto") == (
        f"the checkpoint was written by {devices} devices, this continuation has 1 (train.devices)"
    )


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "RANK": "5"}
SLURM = {"SLURM_NTASKS": "6", "SLURM_NNODES": "3", "SLURM_PROCID": "4", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (TORCHRUN, ("torchrun", 4, 2, 5)),
        (TORCHRUN | SLURM | {"RANK": "0"}, ("torchrun", 4, 2, 0)),
        ({"WORLD_SIZE": "8", "RANK": "1"}, None),  # of no launcher that Fabric knows
        (SLURM, ("SLURM", 2, 3, 4)),
        (SLURM | {"ENVIRONMENT": "BATCH"}, ("SLURM", 2, 3, 4)),  # srun in a script
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, None),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_NNODES": "1"}, None),
        ({k: SLURM[k] for k in SLURM if k != "SLURM_STEP_ID"} | {"ENVIRONMENT": "BATCH"}, None),
        ({k: SLURM[k] for k in SLURM if k != "SLURM_PROCID"}, None),  # a shell of salloc
        (TORCHRUN | {"WORLD_SIZE": "7"}, "torchrun has started 7 processes on 2 machines: expecte"),
        (SLURM | {"SLURM_NTASKS": "4"}, "SLURM has started 4 processes on 3 machines: expected"),
    ],
)
def test_launchers_are_known_by_their_variables(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: object
) -> None:
    for name in [*TORCHRUN, *SLURM, "SLURM_JOB_NAME", "ENVIRONMENT"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            launch()
        return
    found = launch()
    assert found == expected
    train: dict[str, Any] = {"max_steps": 1, "accelerator": "cpu"}
    for devices, alone in ((None, 1), ("auto", 1), (3, 3)):
        run = Run(validate({"name": "run", "train": train | {"devices": devices}}, "c"))
        if found is None or devices != 3:
            assert run.num_devices == (alone if found is None else found.per_machine)
            continue
        with pytest.raises(SystemExit if found.rank else UserError) as caught:
            run.num_devices  # noqa: B018
        if not found.rank:  # the first process reports
            expected = f"3, but {found.launcher} started {found.per_machine} on each"
            assert str(caught.value).startswith(f"train.devices: {expected}")


def test_a_process_on_each_of_several_machines_is_not_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    first |= {"SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": ""}
    for name, value in (SLURM | first).items():
        monkeypatch.setenv(name, value)
    train = {"max_steps": 1, "accelerator": "cpu", "devices": "auto"}
    table = {"gradients": "row_wise", "optimizer": "sgd"}
    values: dict[str, Any] = {"name": "run", "train": train, "word_table": table}
    run = Run.of(validate(values, "c"), tree=ClassTree.full(5))
    assert run.num_devices == 1
    with pytest.raises(UserError, match=r"combined with train.devices: auto, which are 3 here"):
        run.word_table  # noqa: B018
    strategy = module.build_fabric(run).strategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy._ddp_kwargs["broadcast_buffers"] is False


def long_run(command: Command, run: Path, *options: str) -> subprocess.Popen[str]:
    """Two processes of a run, which have trained some steps of very many."""
    many = ["--train.max_steps=100000", "--train.val_every_steps=100000", "--log.every_steps=5"]
    (process,) = launched("", "-m", "lm", *command(run), *many, *options, "--train.devices=2")
    while not read_metrics(run / "metrics.csv") and process.poll() is None:
        time.sleep(0.05)
    return process


def test_a_signal_to_one_of_two_processes_stops_both_at_one_step(
    command: Command, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = long_run(command, run)
    process.send_signal(signal.SIGTERM)
    _, message = finish(process, 143)
    assert "Traceback" not in message
    (step,) = set(re.findall(r"stopped by SIGTERM at step (\d+)", message))
    progress = load_checkpoint(run / "checkpoints" / "last.ckpt")["progress"]
    assert progress["batches_done"] == int(step)


def test_a_killed_process_ends_the_run_with_one_line(command: Command, tmp_path: Path) -> None:
    process = long_run(command, tmp_path / "run", "--train.strategy=shard_output")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
    _, message = finish(process, 2)
    assert "Traceback" not in message
    assert message.count("lm: ") == 1
    assert "another process of the run" in message.splitlines()[-1]


@pytest.mark.parametrize(
    ("is_first", "size", "expected"),
    [(True, 2, UserError), (False, 2, SystemExit), (True, 1, RuntimeError)],
)
def test_the_first_process_reports_that_another_is_lost(
    lstm_run: Path, is_first: bool, size: int, expected: type[BaseException]
) -> None:
    fabric: Any = SimpleNamespace(launch=lambda: None, world_size=size, is_global_zero=is_first)
    with pytest.raises(expected), module.launched(fabric, Run.read(lstm_run)):
        raise RuntimeError("third_party/gloo/transport: connection reset by peer")


def test_after_an_error_a_process_of_a_group_ends_without_finalization(tmp_path: Path) -> None:
    program = f"""
import atexit, sys
from torch import distributed
from lm.cli import run_process
store = "file://{tmp_path}/store"
distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
atexit.register(print, "finalized")
sys.argv[1:] = ["info", "missing"]
sys.exit(run_process())
"""
    ended = python("-c", program)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("lm: missing")


def test_no_more_devices_are_used_than_exist(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module.check_devices(Run.read(tiny, ["--train.precision=16-mixed"]))
    with pytest.raises(UserError, match=r"train.devices: 2: expected at most 1 CUDA dev"):
        module.check_devices(Run.read(tiny, ["--train.devices=2"]))


if __name__ == "__main__":
    works = {"parts": train_in_two_parts, "stops": train_and_continue}
    works[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:])
