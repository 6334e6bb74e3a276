"""Batches: every token a target once, in an order that depends on (seed, epoch, index) alone.

Those of independent sequences have every item once, from its own sequence.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.errors import UserError
from data_prep.sequences import Sequences, find_sequences
from lm.config import Config, TrainConfig, validate
from lm.training.batches import Batches
from lm.training.sequence_batches import IGNORED, SequenceBatches

EOS, UNK = 0, 1
SEQ_LEN = 4


def make(
    n: int, shuffle: bool, batch_size: int = 3, seed: int = 7, rank: int = 0, world_size: int = 1
) -> Batches:
    """Batches of sequences of 4 tokens from a text whose tokens are 0, 1, …, n - 1."""
    train = {"batch_size": batch_size, "seq_len": SEQ_LEN, "max_steps": 1}
    model = {"backbone": "transformer" if shuffle else "lstm"}
    config = validate({"name": "a", "seed": seed, "train": train, "model": model}, "a")
    text = np.arange(n, dtype=np.uint16)
    prepared: Any = SimpleNamespace(eos_id=99, tokens=lambda _: text)
    return Batches(config, prepared, rank, world_size)


def some_sequences(count: int = 37) -> Sequences:
    """Sequences of different items, empty ones among them."""
    rng = np.random.default_rng(2)
    items = iter(range(2, 60_000))
    lines = [[next(items) for _ in range(rng.integers(14))] for _ in range(count)]
    tokens = np.array([token for line in lines for token in (*line, EOS)], np.uint16)
    return find_sequences(tokens, eos_id=EOS, unk_id=UNK)


def of_sequences(
    sequences: Sequences, batch_size: int = 6, seed: int = 7, rank: int = 0, world_size: int = 1
) -> SequenceBatches:
    config = Config(
        name="a", train=TrainConfig(batch_size=batch_size, seq_len=SEQ_LEN, max_steps=1), seed=seed
    )
    prepared: Any = SimpleNamespace(sequences=lambda split: sequences, eos_id=EOS)
    return SequenceBatches(config, prepared, rank, world_size)


def of_kind(kind: str, **options: int) -> Batches | SequenceBatches:
    """Batches of six sequences."""
    if kind == "sequences":
        return of_sequences(some_sequences(), **options)
    return make(200, kind == "windows", 6, **options)


every_kind = pytest.mark.parametrize("kind", ["streams", "windows", "sequences"])


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
        assert inputs.tolist() == torch.where(targets == 0, 99, targets - 1).tolist()
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


@every_kind
def test_a_batch_depends_on_seed_epoch_and_index_alone(kind: str) -> None:
    in_order, jumping, other = (of_kind(kind, seed=seed) for seed in (7, 7, 8))
    expected = [in_order[number].targets.tolist() for number in range(2 * in_order.per_epoch)]
    for number in (in_order.per_epoch + 1, 0, 7, 3, 7, 1):
        assert jumping[number].targets.tolist() == expected[number]
    found = [other[number].targets.tolist() for number in range(len(expected))]
    assert (found != expected) == (kind != "streams")


@every_kind
@pytest.mark.parametrize("num", [2, 3, 6])
def test_the_columns_of_all_ranks_are_the_batch_of_one_device(kind: str, num: int) -> None:
    one = of_kind(kind)
    for rank in range(num):
        part = of_kind(kind, rank=rank, world_size=num)
        for number in range(2 * one.per_epoch):
            assert torch.equal(part[number].inputs, one[number].inputs[:, rank::num])
            assert torch.equal(part[number].targets, one[number].targets[:, rank::num])


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


def test_each_epoch_has_each_item_once_after_the_items_before_it() -> None:
    sequences = some_sequences()
    before: dict[int, int] = {}
    for line in sequences.lines():
        before |= zip(line.tolist(), [EOS, *line.tolist()], strict=False)
    found = of_sequences(sequences)
    orders = set()
    for epoch in range(3):
        predicted: list[int] = []
        for number in range(epoch * found.per_epoch, (epoch + 1) * found.per_epoch):
            inputs, targets, continues, num_ignored = found[number]
            assert num_ignored == int((targets == IGNORED).sum())
            assert not continues
            assert targets.shape[1] == 6
            assert len(targets) <= SEQ_LEN
            for column, target in zip(inputs.T.tolist(), targets.T.tolist(), strict=True):
                items = [each for each in target if each != IGNORED]
                assert target == items + [IGNORED] * (len(target) - len(items))
                assert column[: len(items)] == [before[each] for each in items]
                predicted += items
        assert sorted(predicted) == sorted(before)
        orders.add(tuple(predicted))
    assert len(orders) == 3


def test_a_batch_has_windows_of_similar_length() -> None:
    found = of_sequences(some_sequences(2_000), batch_size=10)
    targets = [found[number].targets for number in range(found.per_epoch)]
    num_padding = sum(int((each == IGNORED).sum()) for each in targets)
    assert num_padding < 0.05 * sum(each.numel() for each in targets)


def test_without_an_item_there_is_nothing_to_train_on() -> None:
    with pytest.raises(UserError, match="the training split has no item"):
        of_sequences(find_sequences(np.array([UNK, EOS]), eos_id=EOS, unk_id=UNK))
