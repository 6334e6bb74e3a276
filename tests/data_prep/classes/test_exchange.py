"""Exchange never lowers the objective, and at the end no single move raises it."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse

from data_prep.classes import exchange as exchange_module
from data_prep.classes.bigrams import count_bigrams
from data_prep.classes.exchange import exchange

IntArray = NDArray[np.int64]


def text(vocab_size: int, num_tokens: int, seed: int) -> tuple[NDArray[np.uint16], IntArray]:
    """A Markov chain over words with frequent and rare ones, and their counts."""
    generator = np.random.default_rng(seed)
    rows = generator.dirichlet(1 / np.arange(1, vocab_size + 1), size=vocab_size)
    tokens = np.zeros(num_tokens, dtype=np.uint16)
    for place in range(1, num_tokens):
        tokens[place] = generator.choice(vocab_size, p=rows[tokens[place - 1]])
    return tokens, np.bincount(tokens, minlength=vocab_size).astype(np.int64)


def x_log_x(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values * np.log(np.where(values > 0, values, 1))


def objective(bigrams: sparse.csr_array, counts: IntArray, word_class: IntArray) -> float:
    """F, equation (1) of `exchange`, in nats, from its definition."""
    num_word_classes = int(word_class.max()) + 1
    pairs = bigrams.tocoo()
    follows: NDArray[np.float64] = np.zeros((num_word_classes, num_word_classes))
    np.add.at(follows, (word_class[pairs.row], word_class[pairs.col]), pairs.data)
    mass = np.bincount(word_class, weights=counts).astype(np.float64)
    return float(x_log_x(follows).sum() - 2 * x_log_x(mass).sum())


def without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the loops as plain Python from now on."""
    for name in ("_f", "_sum_by_class", "_shift", "_set_gains", "_move_words"):
        loops = getattr(exchange_module, name)
        monkeypatch.setattr(exchange_module, name, getattr(loops, "py_func", loops))


@pytest.mark.parametrize("table_size", [1 << 16, 1])
@pytest.mark.parametrize("sizes", [(14, 3, 14, 0), (23, 5, 7, 0), (23, 4, 9, 5)])
def test_no_single_move_raises_the_objective_further(
    sizes: tuple[int, int, int, int], table_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Separate words stay and count as one class each."""
    vocab_size, num_word_classes, capacity, num_separate = sizes
    monkeypatch.setattr(exchange_module, "TABLE_SIZE", table_size)
    tokens, counts = text(vocab_size, 900, seed=vocab_size)
    bigrams, start = count_bigrams(tokens, vocab_size), np.arange(vocab_size) % num_word_classes
    separate = np.argsort(-counts, kind="stable")[:num_separate]

    def as_classes(word_class: IntArray) -> IntArray:
        word_class = word_class.copy()
        word_class[separate] = num_word_classes + np.arange(num_separate)
        return word_class

    limits: Any = {"separate": separate, "passes": 50}
    found = exchange(bigrams, counts, start, num_word_classes, capacity, **limits)
    assert np.array_equal(found[separate], start[separate])
    word_class = as_classes(found)
    end = objective(bigrams, counts, word_class)
    assert end > objective(bigrams, counts, as_classes(start))
    members = np.bincount(word_class)[:num_word_classes]
    assert num_separate or members.min() >= 1
    assert members.max() <= capacity
    words = np.setdiff1d(np.flatnonzero(counts > 0), separate)
    for word, other in product(words, range(num_word_classes)):
        if members[other] < capacity and members[word_class[word]] > 1:
            moved = word_class.copy()
            moved[word] = other
            assert objective(bigrams, counts, moved) <= end + 1e-6


def test_a_class_of_separate_words_can_be_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words 4 and 5 have different neighbours and belong apart; class 1 has only word 0."""
    tokens = np.array([0, 4, 2, 1, 5, 3] * 20, dtype=np.uint16)
    counts = np.bincount(tokens).astype(np.int64)
    start = np.array([1, 0, 0, 0, 0, 0])
    for _ in range(2):
        found = exchange(count_bigrams(tokens, 6), counts, start, 2, 6, separate=np.arange(4))
        assert found[4] != found[5]
        assert np.array_equal(found[:4], start[:4])
        without_compilation(monkeypatch)


def test_unseen_words_stay_and_equal_starts_end_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without compilation."""
    tokens, counts = text(30, 600, seed=1)
    bigrams, start = count_bigrams(tokens, 30), np.arange(30) % 5
    unseen = counts == 0
    assert unseen.any()
    first = exchange(bigrams, counts, start, 5, 12)
    assert np.array_equal(first, exchange(bigrams, counts, start, 5, 12))
    without_compilation(monkeypatch)
    assert np.array_equal(first, exchange(bigrams, counts, start, 5, 12))
    assert np.array_equal(first[unseen], start[unseen])
    assert np.array_equal(start, np.arange(30) % 5)
