"""Batches of independent sequences: every item once, from its own sequence, in a fixed order."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.errors import UserError
from data_prep.sequences import Sequences, find_sequences
from lm.config import Config, TrainConfig
from lm.training.sequence_batches import IGNORED, SequenceBatches

EOS, UNK = 0, 1
SEQ_LEN = 4


def some_sequences(count: int = 37) -> Sequences:
    """Sequences of different items, empty ones among them."""
    rng = np.random.default_rng(2)
    items = iter(range(2, 60_000))
    lines = [[next(items) for _ in range(rng.integers(14))] for _ in range(count)]
    tokens = np.array([token for line in lines for token in (*line, EOS)], np.uint16)
    return find_sequences(tokens, eos_id=EOS, unk_id=UNK)


def batches(sequences: Sequences, rank: int = 0, world_size: int = 1, **settings: Any) -> Any:
    train = TrainConfig(**{"max_steps": 9, "batch_size": 6, "seq_len": SEQ_LEN} | settings)
    prepared: Any = SimpleNamespace(sequences=lambda split: sequences, eos_id=EOS)
    return SequenceBatches(Config(name="run", train=train, seed=3), prepared, rank, world_size)


def test_each_epoch_has_each_item_once_after_the_items_before_it() -> None:
    sequences = some_sequences()
    before: dict[int, int] = {}
    for line in sequences.lines():
        before |= zip(line.tolist(), [EOS, *line.tolist()], strict=False)
    found = batches(sequences)
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


def test_batches_depend_on_their_number_alone() -> None:
    sequences = some_sequences()
    one, again = batches(sequences), batches(sequences)
    expected = [one[number].targets for number in range(2 * one.per_epoch)]
    for number in (one.per_epoch + 1, 0, 5):
        assert torch.equal(again[number].targets, expected[number])


def test_devices_share_the_columns_of_a_batch() -> None:
    sequences = some_sequences()
    whole, parts = batches(sequences), [batches(sequences, rank=r, world_size=3) for r in range(3)]
    for number in range(whole.per_epoch):
        for rank, part in enumerate(parts):
            assert torch.equal(part[number].inputs, whole[number].inputs[:, rank::3])
            assert torch.equal(part[number].targets, whole[number].targets[:, rank::3])


def test_a_batch_has_windows_of_similar_length() -> None:
    found = batches(some_sequences(2_000), batch_size=10)
    targets = [found[number].targets for number in range(found.per_epoch)]
    num_padding = sum(int((each == IGNORED).sum()) for each in targets)
    assert num_padding < 0.05 * sum(each.numel() for each in targets)


def test_without_an_item_there_is_nothing_to_train_on() -> None:
    with pytest.raises(UserError, match="the training split has no item"):
        batches(find_sequences(np.array([UNK, EOS]), eos_id=EOS, unk_id=UNK))
