"""Batches: every token a target once, in an order that depends on (seed, epoch, index) alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.errors import UserError
from lm.config import validate
from lm.training.batches import Batches

EOS = 99
SHUFFLE = pytest.mark.parametrize("shuffle", [False, True], ids=["streams", "windows"])


def make(
    n: int, shuffle: bool, batch_size: int = 3, seed: int = 7, rank: int = 0, world_size: int = 1
) -> Batches:
    """Batches of sequences of 4 tokens from a text whose tokens are 0, 1, …, n - 1."""
    train = {"batch_size": batch_size, "seq_len": 4, "max_steps": 1}
    model = {"backbone": "transformer" if shuffle else "lstm"}
    config = validate({"name": "a", "seed": seed, "train": train, "model": model}, "a")
    text = np.arange(n, dtype=np.uint16)
    prepared: Any = SimpleNamespace(eos_id=EOS, tokens=lambda _: text)
    return Batches(config, prepared, rank, world_size)


def epoch_targets(batches: Batches, epoch: int) -> list[torch.Tensor]:
    """The targets [T, B] of each batch of one epoch."""
    numbers = range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)
    return [batches[number].targets for number in numbers]


def windows(batches: Batches, epoch: int) -> list[list[int]]:
    """The targets of each window of one epoch, in order."""
    return [column.tolist() for targets in epoch_targets(batches, epoch) for column in targets.T]


@pytest.mark.parametrize("n", [12, 23, 24, 25, 36, 50])
def test_streams_make_each_token_a_target_once_in_order(n: int) -> None:
    for epoch in (0, 1):
        targets = torch.cat(epoch_targets(make(n, False), epoch))
        assert targets.T.reshape(-1).tolist() == list(range(n // 3 * 3))


@pytest.mark.parametrize(("n", "shuffle", "batch_size"), [(50, False, 3), (17, True, 1)])
def test_each_target_is_read_from_the_token_before_and_the_first_from_eos(
    n: int, shuffle: bool, batch_size: int
) -> None:
    batches = make(n, shuffle, batch_size=batch_size)
    first_seen = False
    for number in range(10 * batches.per_epoch):
        inputs, targets, continues, _ = batches[number]
        assert inputs.tolist() == torch.where(targets == 0, EOS, targets - 1).tolist()
        assert not (continues and shuffle)
        first_seen = first_seen or bool((targets == 0).any())
    assert first_seen


def test_streams_continue_column_by_column_until_the_epoch_ends() -> None:
    batches = make(54, False)
    assert [batches[number].continues for number in range(10)] == 2 * ([False] + 4 * [True])
    for number in range(1, batches.per_epoch):
        assert batches[number].inputs[0].tolist() == batches[number - 1].targets[-1].tolist()


@pytest.mark.parametrize("n", [15, 16, 40, 61, 100])
def test_windows_of_an_epoch_are_disjoint_stretches_of_the_text(n: int) -> None:
    for epoch in range(3):
        found = windows(make(n, True), epoch)
        assert all(window == list(range(window[0], window[0] + 4)) for window in found)
        tokens = [token for window in found for token in window]
        assert len(set(tokens)) == len(tokens) == (n - 1) // 4 // 3 * 12
        assert max(tokens) < n


def test_windows_come_in_another_order_and_from_another_offset_in_each_epoch() -> None:
    epochs = [windows(make(60, True), epoch) for epoch in range(6)]
    assert len({tuple(window[0] for window in epoch) for epoch in epochs}) == 6
    assert len({epoch[0][0] % 4 for epoch in epochs}) > 1


@SHUFFLE
def test_a_batch_depends_on_seed_epoch_and_index_alone(shuffle: bool) -> None:
    in_order, jumping, other = (make(61, shuffle, seed=seed) for seed in (7, 7, 8))
    expected = [in_order[number].targets.tolist() for number in range(15)]
    for number in (14, 0, 7, 3, 7, 12, 1):
        assert jumping[number].targets.tolist() == expected[number]
    assert ([other[number].targets.tolist() for number in range(15)] != expected) is shuffle


@SHUFFLE
@pytest.mark.parametrize("num", [2, 3, 6])
def test_the_columns_of_all_ranks_are_the_batch_of_one_device(shuffle: bool, num: int) -> None:
    one = make(200, shuffle, batch_size=6)
    ranks = [make(200, shuffle, batch_size=6, rank=rank, world_size=num) for rank in range(num)]
    for number in range(2 * one.per_epoch):
        for name in ("inputs", "targets"):
            parts = [getattr(rank[number], name) for rank in ranks]
            joined = torch.stack(parts, dim=2).flatten(1)
            assert joined.tolist() == getattr(one[number], name).tolist()


@pytest.mark.parametrize(("shuffle", "shortest"), [(False, 3), (True, 15)])
def test_a_text_too_short_is_refused_with_the_length_that_would_do(
    shuffle: bool, shortest: int
) -> None:
    assert make(shortest, shuffle).per_epoch == 1
    message = (
        f"the training split has {shortest - 1} tokens; train.batch_size = 3 and"
        f" train.seq_len = 4 require at least {shortest}"
    )
    with pytest.raises(UserError, match=f"^{message}$"):
        make(shortest - 1, shuffle)


def test_a_batch_that_devices_cannot_share_evenly_is_refused() -> None:
    message = "train.batch_size = 3 must be a multiple of 2 devices"
    with pytest.raises(UserError, match=f"^{message}$"):
        make(50, False, world_size=2)


@pytest.mark.parametrize("n", [17, 18, 20])
def test_every_token_is_in_some_epochs_windows_the_last_one_too(n: int) -> None:
    batches = make(n, True, batch_size=1)
    found = [window for epoch in range(40) for window in windows(batches, epoch)]
    assert {token for window in found for token in window} == set(range(n))
