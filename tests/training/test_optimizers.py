"""The learning rate at the corners of its curves, and the groups of the optimizer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lm.config import OptimConfig, WordTable
from lm.training.optimizers import build_optimizer, learning_rate


def rate(step: int = 0, epoch: int = 0, num_bad_validations: int = 0, **settings: Any) -> float:
    state = {"step": step, "epoch": epoch, "num_bad_validations": num_bad_validations}
    return learning_rate(OptimConfig(lr=2.0, **settings), total_steps=100, **state)


def build(other: nn.Module, config: OptimConfig, words: Any = None, **table: Any) -> Any:
    """The optimizer of a model whose word table is `words`, with the settings `table`."""
    rows = [] if words is None else [*words.parameters()]
    model: Any = SimpleNamespace(table=rows, parameters=lambda: [*other.parameters(), *rows])
    return build_optimizer(model, config, WordTable(**table))


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step", "plateau"])
def test_warm_up_rises_linearly_to_the_full_rate_at_its_last_step(schedule: str) -> None:
    rates = [rate(step, schedule=schedule, warmup_steps=4) for step in range(5)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_rates_at_the_corners_of_their_curves() -> None:
    assert {rate(step, step // 10, step) for step in range(0, 200, 7)} == {2.0}
    cosine: Any = {"schedule": "cosine"}
    # Highest after the warm-up, halfway in the middle and lowest at the end.
    rates = [rate(step, **cosine, warmup_steps=20) for step in (20, 60, 100)]
    assert rates == pytest.approx([2.0, 1.1, 0.2], rel=1e-15)
    # Without a warm-up it begins at the full rate, and may end at zero.
    rates = [rate(step, **cosine, min_lr_factor=0.0) for step in (0, 50, 100)]
    assert rates == pytest.approx([2.0, 1.0, 0.0], rel=1e-15, abs=1e-15)
    # A warm-up for the whole run divides by nothing.
    assert rate(99, **cosine, warmup_steps=100) == 2.0
    halving: Any = {"schedule": "step", "decay": 0.5, "decay_after_epochs": 3}
    assert [rate(epoch=each, **halving) for each in range(6)] == [2.0, 2.0, 2.0, 1.0, 0.5, 0.25]
    for after in (0, 1):
        halving["decay_after_epochs"] = after
        assert [rate(epoch=each, **halving) for each in range(3)] == [2.0, 1.0, 0.5]
    plateau: Any = {"schedule": "plateau", "decay": 0.25}
    assert [rate(num_bad_validations=n, **plateau) for n in range(4)] == [2.0, 0.5, 0.125, 0.03125]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_updates_every_number_in_half_precision(momentum: float) -> None:
    model = nn.Linear(40, 5, bias=False).bfloat16()
    stepper = build(model, OptimConfig(optimizer="sgd", lr=0.25, momentum=momentum))
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    stepper.step()
    assert torch.equal(model.weight.detach(), before - 0.25)


def test_the_word_table_has_its_own_optimizer_and_rate() -> None:
    model, table = nn.Linear(3, 2, bias=False), nn.Embedding(5, 2)
    linear, rows = (each.weight.detach().clone() for each in (model, table))
    config = OptimConfig(optimizer="sgd", lr=2.0, weight_decay=0.1)
    optimizer = build(model, config, table, optimizer="adagrad", lr=0.5)
    assert [group["scale"] for group in optimizer.param_groups] == [1.0, 0.25]
    for each in (model, table):
        each.weight.grad = torch.ones_like(each.weight)
    for group in optimizer.param_groups:
        group["lr"] = 1.0 * group["scale"]
    assert optimizer.step(lambda: 7.0) == 7.0
    torch.testing.assert_close(model.weight.detach(), linear - 1.0 * (1 + 0.1 * linear))
    torch.testing.assert_close(table.weight.detach(), rows - 0.25)
