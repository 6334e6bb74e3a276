"""The section `word_table` resolves to one value."""

from typing import Any

import pytest

from data_prep.errors import UserError
from lm.config import WordTable, resolve_word_table, validate

SGD = {"optimizer": "sgd"}


def resolved(
    num_rows: int = 1 << 14, *, num_devices: int = 1, on_gpu: bool = False, **sections: Any
) -> WordTable:
    """The table of `num_rows` rows of 256 elements."""
    minimal = {"name": "run", "train": {"max_steps": 5}, "model": {"hidden": 256}}
    config = validate(minimal | sections, "c")
    return resolve_word_table(config, num_rows, num_devices, on_gpu=on_gpu)


@pytest.mark.parametrize(
    ("row_wise", "num_rows", "sections"),
    [
        (True, 1 << 14, {"optim": SGD}),
        (False, (1 << 14) - 1, {"optim": SGD}),
        (True, 1 << 14, {"word_table": {"optimizer": "adagrad"}}),
        (False, 1 << 14, {"optim": {"optimizer": "adamw"}}),
        (False, 1 << 14, {"optim": SGD | {"momentum": 0.9}}),
        (False, 1 << 14, {"optim": SGD | {"weight_decay": 0.1}}),
        (False, 1 << 14, {"optim": SGD, "output": {"tree": "adaptive"}}),
        (False, 1 << 14, {"optim": SGD, "output": {"tree": "full"}}),  # every row has a gradient
        (False, 1 << 14, {"optim": SGD, "train": {"max_steps": 5, "devices": 2}}),
        (False, 1 << 14, {"optim": SGD, "word_table": {"gradients": "dense"}}),
        (True, 10, {"optim": SGD, "word_table": {"gradients": "row_wise"}}),
        (True, 10, {"word_table": {"optimizer": "adam", "dtype": "bf16"}}),
    ],
)
def test_large_tables_have_row_wise_gradients_where_the_optimizer_allows_it(
    row_wise: bool, num_rows: int, sections: dict[str, Any]
) -> None:
    assert resolved(num_rows, **sections).row_wise == row_wise


def test_on_a_gpu_tables_of_plain_sgd_have_dense_gradients_up_to_a_larger_size() -> None:
    sizes = ((1 << 14), (1 << 20) - 1, 1 << 20)
    assert [resolved(n, on_gpu=True, optim=SGD).row_wise for n in sizes] == [False, False, True]
    assert resolved(on_gpu=True, word_table={"optimizer": "adagrad"}).row_wise


def test_optimizer_and_rate_of_the_table_default_to_those_of_the_model() -> None:
    assert (resolved().optimizer, resolved().lr) == (None, 1e-3)
    plain = resolved(optim=SGD | {"lr": 20})
    assert (plain.row_wise, plain.optimizer, plain.lr) == (True, "sgd", 20)
    table = {"optimizer": "adagrad", "lr": 0.05, "tied": True, "gradients": "dense"}
    assert resolved(word_table=table) == WordTable(tied=True, optimizer="adagrad", lr=0.05)


def test_all_devices_of_a_machine_with_one_have_row_wise_gradients() -> None:
    train = {"max_steps": 5, "devices": "auto"}
    explicit: dict[str, Any] = {"word_table": {"optimizer": "adam", "dtype": "bf16"}}
    assert resolved(optim=SGD, train=train).row_wise
    assert resolved(train=train, **explicit).row_wise
    assert not resolved(optim=SGD, train=train, num_devices=2).row_wise
    with pytest.raises(UserError, match=r"train.devices: auto, which are 2 here"):
        resolved(train=train, **explicit, num_devices=2)
