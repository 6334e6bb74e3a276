"""Memory before it is taken: what a training needs, and what is said if there is not so much."""

from pathlib import Path

import pytest
import torch

from data_prep.errors import UserError
from lm.config import Config, load_config
from lm.output import ClassTree
from lm.training import memory_estimate as module
from lm.training.memory_estimate import check_memory, footprint

NUM_WORDS, NUM_CLASSES = 10_000, 100
TREE = ClassTree.two_level(torch.arange(NUM_WORDS) % NUM_CLASSES)
NUM_ROWS = NUM_WORDS + NUM_CLASSES
TABLE = NUM_ROWS * 301
VECTORS = NUM_WORDS * 300
LSTM = 4 * (2 * 300 * 300 + 2 * 300)


@pytest.fixture
def config(tmp_path: Path) -> "Configured":
    return Configured(tmp_path / "config.yaml")


class Configured:
    """`config(*overrides)`: an LSTM of 1 × 300 with AdamW."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text(
            "name: run\nmodel: {hidden: 300, layers: 1}\ntrain: {max_steps: 1, accelerator: cpu}\n"
        )

    def __call__(self, *overrides: str) -> Config:
        return load_config(self.path, [f"--{override}" for override in overrides])


@pytest.mark.parametrize(
    ("overrides", "parameters", "bytes_each", "states"),
    [
        ([], TABLE + VECTORS + LSTM, 4, 2),
        (["model.tied=true"], TABLE + LSTM, 4, 2),
        (["optim.optimizer=sgd"], TABLE + VECTORS + LSTM, 4, 0),
        (["optim.optimizer=sgd", "optim.momentum=0.9"], TABLE + VECTORS + LSTM, 4, 1),
        (["train.precision=bf16-true"], TABLE + VECTORS + LSTM, 2, 2),
    ],
    ids=["adamw", "tied", "sgd", "momentum", "bf16"],
)
def test_dense_trainings_need_weights_gradients_and_states(
    config: Configured, overrides: list[str], parameters: int, bytes_each: int, states: int
) -> None:
    need = footprint(config(*overrides), TREE)
    size = parameters * bytes_each
    assert (need.weights, need.gradients, need.optimizer) == (size, size, states * size)
    parts = (need.weights, need.gradients, need.optimizer, need.batch, need.other)
    assert need.total == sum(parts)


def test_a_sparse_table_has_no_gradient_and_a_number_of_state_a_row(config: Configured) -> None:
    need = footprint(
        config(
            *("model.tied=true", "optim.table=adagrad", "output.sparse=true"),
            *("output.dtype=bf16", "train.precision=bf16-mixed"),
        ),
        TREE,
    )
    assert need.weights == 2 * TABLE + 4 * LSTM
    assert need.gradients == 4 * LSTM
    assert need.optimizer == 8 * LSTM + 4 * 2 * NUM_ROWS


def test_what_does_not_fit_is_refused_with_the_first_change_that_would(
    config: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = config("output.sparse=true", "optim.table=adam")
    need = footprint(wanted, TREE).total
    monkeypatch.setattr(module, "available", lambda _: need)
    check_memory(wanted, TREE)
    monkeypatch.setattr(module, "available", lambda _: need - 1)
    lighter = footprint(config("output.sparse=true", "optim.table=adagrad"), TREE).total
    with pytest.raises(UserError) as caught:
        check_memory(wanted, TREE)
    assert str(caught.value) == (
        f"training run needs {need / 1e9:.1f} GB of memory (weights 0.0 GB, gradients 0.0 GB,"
        f" optimizer 0.1 GB, a batch {footprint(wanted, TREE).batch / 1e9:.1f} GB, other 0.6 GB),"
        f" there are {(need - 1) / 1e9:.1f} GB: --optim.table=adagrad would fit, with"
        f" {lighter / 1e9:.1f} GB"
    )


def test_changes_add_up_until_they_suffice(
    config: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = config("output.sparse=true", "optim.table=adam")
    lightest = config(
        *("output.sparse=true", "optim.table=adagrad", "model.tied=true"),
        *("output.dtype=bf16", "train.precision=bf16-mixed"),
    )
    least = footprint(lightest, TREE).total
    monkeypatch.setattr(module, "available", lambda _: least)
    options = "--optim.table=adagrad --model.tied=true --output.dtype=bf16"
    with pytest.raises(UserError, match=f": {options} --train.precision=bf16-mixed would fit"):
        check_memory(wanted, TREE)
    monkeypatch.setattr(module, "available", lambda _: least - 1)
    with pytest.raises(UserError, match=rf"even {options} .* would need .*; fewer words"):
        check_memory(wanted, TREE)


def test_what_would_be_refused_is_not_proposed(
    config: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available", lambda _: 1000)
    with_head = ClassTree.two_level(torch.arange(NUM_WORDS) % NUM_CLASSES, head=100)
    with pytest.raises(UserError, match=r": even --optim\.table=adagrad would need"):
        check_memory(config("output.tree=adaptive"), with_head)
    other_size = config("model.embedding=8", "optim.table=adagrad", "train.devices=2")
    with pytest.raises(UserError, match=r"are 0\.0 GB: fewer words or a smaller model\.hidden"):
        check_memory(other_size, TREE)


def test_memory_that_cannot_be_told_refuses_nothing(
    config: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available", lambda _: None)
    check_memory(config(), TREE)


def test_a_limit_of_the_group_of_processes_counts(
    config: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(module, "_CGROUP_LIMITS", (str(limit), str(tmp_path / "none")))
    machine = module.available(config())
    assert machine is not None
    limit.write_text("max\n")
    assert module.available(config()) == machine
    limit.write_text("12345678\n")
    assert module.available(config()) == 12345678


def test_processes_on_a_cpu_share_its_memory(config: Configured) -> None:
    one, two = (
        footprint(config("optim.optimizer=sgd", f"train.devices={devices}"), TREE)
        for devices in (1, 2)
    )
    assert (two.weights, two.other) == (2 * one.weights, 2 * one.other)
    assert two.gradients == 4 * one.gradients  # with a copy of each, to be summed
    assert two.batch == pytest.approx(one.batch, rel=0.01)  # half of it for each
    assert footprint(config("optim.optimizer=sgd", "train.devices=auto"), TREE) == one


@pytest.mark.parametrize("sequences", [1, 400])
def test_what_sparse_gradients_are_made_of_counts_however_many_positions(
    config: Configured, sequences: int
) -> None:
    """Columns on the path are kept for each, where dense gradients form them again."""
    sparse, dense = (
        footprint(
            config(
                *("optim.optimizer=sgd", f"output.sparse={sparse}", "train.seq_len=1024"),
                f"train.batch_size={sequences}",
            ),
            TREE,
        ).batch
        for sparse in ("true", "false")
    )
    vectors = sequences * 1024 * 300 * (12 + 4) * 4
    assert sparse - vectors == 2 * 4 * sequences * 1024 * TREE.max_path_columns
    assert (sparse == dense) == (sequences == 1)
