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
from lm.config import validate
from lm.training.batches import IGNORED, Batch, Batches, make_batches

EOS, UNK = 65_000, 1
SEQ_LEN = 4
every_kind = pytest.mark.parametrize("kind", ["streams", "windows", "sequences"])


def some_sequences(count: int) -> Sequences:
    """Sequences of different items, empty ones among them."""
    rng = np.random.default_rng(2)
    items = iter(range(2, 60_000))
    lines = [[next(items) for _ in range(rng.integers(14))] for _ in range(count)]
    tokens = np.array([token for line in lines for token in (*line, EOS)], np.uint16)
    return find_sequences(tokens, eos_id=EOS, unk_id=UNK)


def make(
    kind: str,
    size: int = 200,
    batch_size: int = 6,
    seed: int = 7,
    rank: int = 0,
    world_size: int = 1,
    sequences: Sequences | None = None,
) -> Batches:
    """Batches of a text whose tokens are 0, 1, …, size - 1, or of so many sequences."""
    train = {"batch_size": batch_size, "seq_len": SEQ_LEN, "max_steps": 1}
    model = {"backbone": "transformer" if kind == "windows" else "lstm"}
    config = validate({"name": "a", "seed": seed, "train": train, "model": model}, "a")
    text, sequences = np.arange(size, dtype=np.uint16), sequences or some_sequences(size)
    content: Any = {"tokens": lambda _: text, "sequences": lambda _: sequences}
    prepared: Any = SimpleNamespace(eos_id=EOS, is_independent=kind == "sequences", **content)
    return make_batches(config, prepared, rank, world_size)


def epoch_of(batches: Batches, epoch: int) -> list[Batch]:
    numbers = range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)
    return [batches[number] for number in numbers]


def assert_read_from_the_token_before(batch: Batch) -> None:
    assert torch.equal(batch.inputs, torch.where(batch.targets == 0, EOS, batch.targets - 1))


@pytest.mark.parametrize("size", [12, 23, 24, 25, 36, 50, 54])
def test_streams_are_the_text_in_order_and_continue_until_the_epoch_ends(size: int) -> None:
    batches = make("streams", size, batch_size=3)
    for epoch in (0, 1):
        found = epoch_of(batches, epoch)
        targets = torch.cat([batch.targets for batch in found])
        assert targets.T.flatten().tolist() == list(range(size // 3 * 3))
        assert [batch.continues for batch in found] == [False] + [True] * (len(found) - 1)
        for batch in found:
            assert_read_from_the_token_before(batch)


@pytest.mark.parametrize(("size", "batch_size"), [(15, 3), (13, 3), (40, 3), (61, 3), (20, 1)])
def test_windows_are_disjoint_from_another_offset_and_in_another_order_in_each_epoch(
    size: int, batch_size: int
) -> None:
    batches, orders, seen = make("windows", size, batch_size), set(), set[int]()
    for epoch in range(40):
        found = epoch_of(batches, epoch)
        for batch in found:
            assert_read_from_the_token_before(batch)
            assert not batch.continues
        windows = [column for batch in found for column in batch.targets.T.tolist()]
        assert windows == [list(range(first, first + 4)) for first, *_ in windows]
        tokens = [token for window in windows for token in window]
        assert len(set(tokens)) == len(tokens) == (size - 1) // 4 // batch_size * batch_size * 4
        orders.add(tuple(tokens))
        seen |= {*tokens}
    assert seen == {*range(size)}
    assert len(orders) > 10


@every_kind
def test_a_batch_depends_on_seed_epoch_and_index_alone(kind: str) -> None:
    in_order, jumping, other = (make(kind, seed=seed) for seed in (7, 7, 8))
    expected = [in_order[number].targets.tolist() for number in range(2 * in_order.per_epoch)]
    for number in (in_order.per_epoch + 1, 0, 7, 3, 7, 1):
        assert jumping[number].targets.tolist() == expected[number]
    found = [other[number].targets.tolist() for number in range(len(expected))]
    assert (found != expected) == (kind != "streams")


@every_kind
@pytest.mark.parametrize("num", [2, 3, 6])
def test_the_columns_of_all_ranks_are_the_batch_of_one_device(kind: str, num: int) -> None:
    one = make(kind)
    for rank in range(num):
        part = make(kind, rank=rank, world_size=num)
        for number in range(2 * one.per_epoch):
            assert torch.equal(part[number].inputs, one[number].inputs[:, rank::num])
            targets = one[number].targets[:, rank::num]
            assert torch.equal(part[number].targets, targets)
            num_tokens = part[number].num_tokens
            assert num_tokens == one[number].num_tokens
            assert part[number].weight == num * int((targets != IGNORED).sum()) / num_tokens


@pytest.mark.parametrize(("kind", "shortest"), [("streams", 3), ("windows", 13)])
def test_a_short_text_is_refused_with_the_length_that_would_do(kind: str, shortest: int) -> None:
    assert make(kind, shortest, batch_size=3).per_epoch == 1
    message = f"the training split has {shortest - 1} tokens; train.batch_size = 3"
    message += f" and train.seq_len = 4 require at least {shortest}"
    with pytest.raises(UserError, match=f"^{message}$"):
        make(kind, shortest - 1, batch_size=3)


def test_a_batch_that_devices_cannot_share_evenly_and_a_split_without_items_are_refused() -> None:
    message = "train.batch_size = 3 must be a multiple of 2 devices"
    with pytest.raises(UserError, match=f"^{message}$"):
        make("streams", batch_size=3, world_size=2)
    with pytest.raises(UserError, match="the training split has no item"):
        make("sequences", sequences=find_sequences(np.array([UNK, EOS]), eos_id=EOS, unk_id=UNK))


def test_each_epoch_has_each_item_once_after_the_items_before_it() -> None:
    sequences, before, orders = some_sequences(37), dict[int, int](), set()
    for line in sequences.lines():
        before |= zip(line.tolist(), [EOS, *line.tolist()], strict=False)
    batches = make("sequences", sequences=sequences)
    for epoch in range(3):
        predicted: list[int] = []
        for inputs, targets, continues, num_tokens, weight in epoch_of(batches, epoch):
            assert num_tokens == int((targets != IGNORED).sum())
            assert (continues, weight) == (False, 1)
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
    targets = [batch.targets for batch in epoch_of(make("sequences", 2_000, batch_size=10), 0)]
    num_padding = sum(int((each == IGNORED).sum()) for each in targets)
    assert num_padding < 0.05 * sum(each.numel() for each in targets)
