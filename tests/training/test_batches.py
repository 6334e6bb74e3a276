"""Batches: every token a target once, in an order that depends on (seed, epoch, index) alone."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from data_prep.errors import UserError
from lm.training.batches import Batches

EOS = 99
Tokens = NDArray[np.uint16]


def streams(n: int, batch_size: int = 3, seq_len: int = 4) -> Batches:
    return make(np.arange(n, dtype=np.uint16), False, batch_size, seq_len)


def make(
    tokens: Tokens,
    shuffle: bool,
    batch_size: int = 3,
    seq_len: int = 4,
    seed: int = 7,
    rank: int = 0,
    world_size: int = 1,
) -> Batches:
    return Batches(
        tokens,
        eos_id=EOS,
        batch_size=batch_size,
        seq_len=seq_len,
        shuffle=shuffle,
        seed=seed,
        rank=rank,
        world_size=world_size,
    )


def epoch_targets(batches: Batches, epoch: int) -> torch.Tensor:
    """[tokens of a stream, B]: the targets of one epoch, one batch below the other."""
    numbers = range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)
    return torch.cat([batches[number].targets for number in numbers])


def windows(batches: Batches, epoch: int) -> list[list[int]]:
    """The targets of each window of one epoch, in order."""
    numbers = range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)
    return [column.tolist() for number in numbers for column in batches[number].targets.T]


@pytest.mark.parametrize("n", [12, 23, 24, 25, 36, 50])
def test_streams_make_each_token_a_target_once_in_order(n: int) -> None:
    for epoch in (0, 1):
        targets = epoch_targets(streams(n), epoch)
        assert targets.T.reshape(-1).tolist() == list(range(n // 3 * 3))


def test_streams_read_the_token_before_each_target_and_eos_before_the_first() -> None:
    batches = streams(50)
    for number in range(2 * batches.per_epoch):
        inputs, targets, _ = batches[number]
        expected = torch.where(targets == 0, EOS, targets - 1)
        assert inputs.tolist() == expected.tolist()


def test_streams_continue_column_by_column_until_the_epoch_ends() -> None:
    batches = streams(54)
    assert [batches[number].continues for number in range(10)] == 2 * ([False] + 4 * [True])
    for number in range(1, batches.per_epoch):
        assert batches[number].inputs[0].tolist() == batches[number - 1].targets[-1].tolist()


@pytest.mark.parametrize("n", [15, 16, 40, 61, 100])
def test_windows_of_an_epoch_are_disjoint_stretches_of_the_text(n: int) -> None:
    batches = make(np.arange(n, dtype=np.uint16), True)
    for epoch in range(3):
        found = windows(batches, epoch)
        assert all(window == list(range(window[0], window[0] + 4)) for window in found)
        tokens = [token for window in found for token in window]
        assert len(set(tokens)) == len(tokens) == (n - 1) // 4 // 3 * 12
        assert max(tokens) < n


def test_windows_leave_out_less_than_a_batch_of_windows_and_one_window() -> None:
    batches = make(np.arange(100, dtype=np.uint16), True, batch_size=2)
    assert batches.per_epoch == 12
    assert len({token for window in windows(batches, 0) for token in window}) == 96


def test_windows_come_in_another_order_and_from_another_offset_in_each_epoch() -> None:
    batches = make(np.arange(60, dtype=np.uint16), True)
    epochs = [windows(batches, epoch) for epoch in range(6)]
    assert len({tuple(window[0] for window in epoch) for epoch in epochs}) == 6
    assert len({epoch[0][0] % 4 for epoch in epochs}) > 1


def test_windows_read_the_token_before_each_target_and_eos_before_the_first() -> None:
    batches = make(np.arange(17, dtype=np.uint16), True, batch_size=1)
    first_seen = False
    for number in range(40):
        inputs, targets, continues = batches[number]
        expected = torch.where(targets == 0, EOS, targets - 1)
        assert inputs.tolist() == expected.tolist()
        assert not continues
        first_seen = first_seen or bool((targets == 0).any())
    assert first_seen


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_depends_on_seed_epoch_and_index_alone(shuffle: bool) -> None:
    tokens = np.arange(61, dtype=np.uint16)
    in_order, jumping = make(tokens, shuffle), make(tokens, shuffle)
    expected = [in_order[number].targets.tolist() for number in range(15)]
    for number in (14, 0, 7, 3, 7, 12, 1):
        assert jumping[number].targets.tolist() == expected[number]
    other = make(tokens, shuffle, seed=8)
    assert ([other[number].targets.tolist() for number in range(15)] != expected) is shuffle


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_the_columns_of_all_ranks_are_the_batch_of_one_device(
    shuffle: bool, world_size: int
) -> None:
    tokens = np.arange(200, dtype=np.uint16)
    one = make(tokens, shuffle, batch_size=6)
    ranks = [
        make(tokens, shuffle, batch_size=6, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for number in range(2 * one.per_epoch):
        for name in ("inputs", "targets"):
            parts = [getattr(rank[number], name) for rank in ranks]
            joined = torch.stack(parts, dim=2).flatten(1)
            assert joined.tolist() == getattr(one[number], name).tolist()


@pytest.mark.parametrize(("shuffle", "shortest"), [(False, 3), (True, 15)])
def test_a_text_too_short_is_refused_with_the_length_that_would_do(
    shuffle: bool, shortest: int
) -> None:
    assert make(np.arange(shortest, dtype=np.uint16), shuffle).per_epoch == 1
    message = (
        f"the training split has {shortest - 1} tokens; train.batch_size = 3 and"
        f" train.seq_len = 4 require at least {shortest}"
    )
    with pytest.raises(UserError, match=f"^{message}$"):
        make(np.arange(shortest - 1, dtype=np.uint16), shuffle)


def test_a_batch_that_devices_cannot_share_evenly_is_refused() -> None:
    message = "train.batch_size = 3 must be a multiple of 2 devices"
    with pytest.raises(UserError, match=f"^{message}$"):
        make(np.arange(50, dtype=np.uint16), False, world_size=2)


@pytest.mark.parametrize("n", [17, 18, 20])
def test_every_token_is_in_some_epochs_windows_the_last_one_too(n: int) -> None:
    batches = Batches(
        np.arange(n, dtype=np.uint16), eos_id=99, batch_size=1, seq_len=4, shuffle=True, seed=7
    )
    seen = {
        token
        for number in range(40 * batches.per_epoch)
        for token in batches[number].targets.flatten().tolist()
    }
    assert seen == set(range(n))
