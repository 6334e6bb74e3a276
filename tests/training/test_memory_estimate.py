"""Memory before it is allocated: what a run needs, and the error if less is available."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_prep.errors import UserError
from lm import device
from lm.config import load_config
from lm.output import ClassTree
from lm.output.backends import saved_bytes
from lm.output.backends.base import Problem
from lm.run import Run
from lm.training.memory_estimate import TOLERANCE, MemoryEstimate, check_memory, estimate_memory

CPU = torch.device("cpu")
NUM_WORDS, NUM_CLASSES = 10_000, 100
TREE = ClassTree.two_level(torch.arange(NUM_WORDS) % NUM_CLASSES)
PREPARED = SimpleNamespace(vocab_size=NUM_WORDS, counts=lambda: [1] * NUM_WORDS)
NUM_ROWS = NUM_WORDS + NUM_CLASSES
ROWS = NUM_ROWS * 304  # of 300 numbers, followed by zeros
TABLE = ROWS + NUM_ROWS
VECTORS = NUM_WORDS * 300
LSTM = 4 * (2 * 300 * 300 + 2 * 300)
TIED, DENSE, PIECES = TABLE + LSTM, TABLE + VECTORS + LSTM, TABLE + VECTORS + LSTM + 4000 * 300
ROW_WISE_ADAM = ("word_table.gradients=row_wise", "word_table.optimizer=adam")
ROW_WISE_ADAGRAD = ("word_table.gradients=row_wise", "word_table.optimizer=adagrad")
BF16 = ("word_table.tied=true", "word_table.dtype=bf16", "train.precision=bf16-mixed")
Configured = Callable[..., Run]


def enough(need: MemoryEstimate) -> int:
    """The least available memory with which a run is not refused."""
    return math.ceil(need.total / (1 + TOLERANCE))


@pytest.fixture
def run(tmp_path: Path) -> Configured:
    """`run(*overrides)`: of an LSTM of 1 × 300 with AdamW, over the words of `TREE`."""
    path, train = tmp_path / "config.yaml", "train: {max_steps: 1, accelerator: cpu}"
    path.write_text(f"name: run\nmodel: {{hidden: 300, layers: 1}}\n{train}\n")

    def configured(*overrides: str) -> Run:
        return Run.of(load_config(path, [f"--{each}" for each in overrides]), tree=TREE)

    return configured


@pytest.mark.parametrize(
    ("overrides", "weights", "gradients", "optimizer"),
    [
        ([], 4 * DENSE, 4 * (DENSE + ROWS), 8 * DENSE),
        (["word_table.tied=true"], 4 * TIED, 4 * (TIED + ROWS), 8 * TIED),
        (["train.accumulate=3"], 4 * DENSE, 4 * (2 * DENSE - LSTM + ROWS), 8 * DENSE),
        (["optim.optimizer=sgd"], 4 * DENSE, 4 * (DENSE + ROWS), 0),
        (["optim.optimizer=sgd", "optim.momentum=0.9"], 4 * DENSE, 4 * (DENSE + ROWS), 4 * DENSE),
        (["train.precision=bf16-true"], 2 * DENSE, 2 * (DENSE + ROWS), 4 * DENSE),
        (["model.input_pieces=4000"], 4 * PIECES, 4 * (PIECES + ROWS), 8 * PIECES),
        ([*ROW_WISE_ADAGRAD, *BF16], 2 * TABLE + 4 * LSTM, 4 * LSTM, 8 * LSTM + 4 * 2 * NUM_ROWS),
    ],
    ids=["adamw", "tied", "accumulated", "sgd", "momentum", "bf16", "pieces", "row-wise"],
)
def test_a_run_needs_weights_gradients_and_states(
    run: Configured, overrides: list[str], weights: int, gradients: int, optimizer: int
) -> None:
    """A row-wise table has no dense gradient, and one number of state per row."""
    need = estimate_memory(run(*overrides))
    assert (need.weights, need.gradients, need.optimizer) == (weights, gradients, optimizer)
    assert need.total == weights + gradients + optimizer + need.batch + need.other
    assert need.graph == 0  # on a CPU


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ([], 1),
        (["model.backbone=transformer"], 0),
        (["model.backbone=transformer", "train.accumulate=2"], 1),
        (["train.cuda_graph=off"], 0),
        (["train.precision=16-mixed"], 0),
    ],
)
def test_a_recorded_step_keeps_its_memory_next_to_that_of_a_shorter_batch(
    run: Configured, options: list[str], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "on_gpu", True)
    options = [*options, "train.accelerator=gpu", "output.backend=reference"]
    need = estimate_memory(run(*options))
    assert need.graph == steps * (need.gradients + need.batch)
    assert need.total == replace(need, graph=0).total + need.graph


def test_a_run_that_does_not_fit_is_refused_with_changes_that_add_up_until_they_suffice(
    run: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    adam, adagrad = run(*ROW_WISE_ADAM), estimate_memory(run(*ROW_WISE_ADAGRAD))
    need, least = estimate_memory(adam), enough(estimate_memory(adam))
    monkeypatch.setattr(Run, "available_bytes", least)
    check_memory(adam)
    monkeypatch.setattr(Run, "available_bytes", least - 2)
    with pytest.raises(UserError) as caught:
        check_memory(adam)
    assert str(caught.value) == (
        f"training run needs {need.total / 1e9:.1f} GB of memory (weights 0.0 GB, gradients 0.0 GB,"
        f" optimizer 0.1 GB, a batch {need.batch / 1e9:.1f} GB, other {need.other / 1e9:.1f} GB),"
        f" {least / 1e9:.1f} GB are available: --word_table.optimizer=adagrad would fit, with"
        f" {adagrad.total / 1e9:.1f} GB"
    )
    least = enough(estimate_memory(run(*ROW_WISE_ADAGRAD, *BF16)))
    options = "--word_table.optimizer=adagrad --word_table.tied=true --word_table.dtype=bf16"
    monkeypatch.setattr(Run, "available_bytes", least)
    with pytest.raises(UserError, match=f": {options} --train.precision=bf16-mixed would fit"):
        check_memory(adam)
    monkeypatch.setattr(Run, "available_bytes", least - 2)
    with pytest.raises(UserError, match=rf"even {options} .* would need .*; use fewer words"):
        check_memory(adam)


def test_settings_that_would_be_refused_or_need_more_are_not_proposed(
    run: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "available_bytes", 1000)
    adaptive = Run.of(run("output.tree=adaptive").config, prepared=PREPARED)
    with pytest.raises(UserError, match=r": even --word_table\.optimizer=adagrad would need"):
        check_memory(adaptive)
    for options in (["model.embedding=8", "train.devices=2"], ["model.hidden=1000000"]):
        with pytest.raises(UserError, match=r"0\.0 GB are available: use fewer words or a smaller"):
            check_memory(run(*options, "word_table.optimizer=adagrad"))


def test_processes_on_a_cpu_share_its_memory(run: Configured) -> None:
    runs = (run("optim.optimizer=sgd", f"train.devices={each}") for each in (1, 2, "auto"))
    one, two, auto = map(estimate_memory, runs)
    assert (two.weights, two.other) == (2 * one.weights, 2 * one.other)
    assert two.gradients == 4 * one.gradients  # with a copy of each, to be summed
    assert two.batch == pytest.approx(one.batch, rel=0.01)  # half of it for each
    assert auto == one


def test_processes_divide_the_rows_that_are_dealt_to_them(run: Configured) -> None:
    """A copy of the table and its state is gathered for a checkpoint."""
    table = ["word_table.optimizer=adagrad", "word_table.gradients=row_wise"]
    one = estimate_memory(run(*table))
    two = estimate_memory(run(*table, "train.devices=2", "train.strategy=shard_output"))
    rows = 4 * 300 * 2 * TREE.num_rows
    assert 0 <= two.weights - one.weights < 0.2 * rows  # the backbone is in both
    gathered = two.other - 2 * one.other
    assert gathered == pytest.approx(one.weights, rel=0.2)


@pytest.mark.parametrize("gradients", ["row_wise", "dense"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("sequences", [1, 400])
def test_a_batch_counts_what_the_backend_saves_with_its_gradient(
    sequences: int, backend: str, gradients: str, run: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: backend == "triton")
    need = estimate_memory(
        run(
            *("optim.optimizer=sgd", f"word_table.gradients={gradients}", "train.seq_len=1024"),
            *(f"train.batch_size={sequences}", f"output.backend={backend}"),
            f"train.accelerator={'gpu' if backend == 'triton' else 'cpu'}",
        )
    )
    num_positions, row_wise = sequences * 1024, gradients == "row_wise"
    problem = Problem.without_values(num_positions, 300, TREE, torch.float32)
    saved = saved_bytes(backend, problem, row_wise=row_wise)
    if backend == "reference" and row_wise:  # errors, or rows if these are fewer numbers
        rows = TREE.num_rows * problem.weight.shape[1]
        saved += 2 * min(num_positions * TREE.max_path_columns, rows)
    assert need.batch == 4 * num_positions * 300 * (12 + 4) + 2 * saved


@pytest.mark.parametrize(
    ("options", "before", "after", "numbers"),
    [
        ("model.layers=3 model.dropout", "0", "0.1", 4 * 4 * 300),
        ("model.embedding", "300", "1000", 8 * 700),
        ("model.backbone=transformer model.feedforward", "300", "4000", 9 * 3700),
        ("output.tree=full output.num_samples", "1000", "5000", 9 * 4000),
        # Each word is as frequent, so that half of the positions visit the second cluster.
        ("output.tree=adaptive output.cutoffs", "[2000]", "[5000]", 3 * (7500 - 8400)),
    ],
)
def test_a_batch_counts_numbers_of_each_position(
    run: Configured, options: str, before: str, after: str, numbers: int
) -> None:
    sizes = "train.batch_size=100", "train.seq_len=100"
    runs = [run(*f"{options}={each}".split(), *sizes) for each in (before, after)]
    if "tree" in options:
        runs = [Run.of(each.config, prepared=PREPARED) for each in runs]
    first, second = (estimate_memory(each).batch for each in runs)
    assert second - first == 4 * 10_000 * numbers


def test_unknown_memory_refuses_nothing(
    run: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "PROC", tmp_path / "none")
    assert device.available_bytes(CPU) is None
    check_memory(run())
