"""Words get their best classes; with scarce places the result is close to SciPy's optimum."""

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from data_prep.classes.assignment import FloatArray, IntArray, assign, smallest_classes


def assign_all(
    scores: FloatArray, capacity: int, temperature: float
) -> tuple[IntArray, FloatArray]:
    words, prices = np.arange(len(scores)), np.zeros(scores.shape[1], np.float32)
    occupied = prices.astype(np.int64)
    return assign(lambda ids: scores[ids], words, occupied, capacity, prices, temperature)


def test_words_get_their_best_classes_if_these_have_vacancies() -> None:
    preferred = np.array([2, 0, 1, 1, 0, 2])
    assigned, prices = assign_all(np.eye(3, dtype=np.float32)[preferred], 2, 0.01)
    assert assigned.tolist() == preferred.tolist()
    assert prices == pytest.approx(0, abs=1e-3)


def test_assignment_is_close_to_the_best_possible() -> None:
    scores = np.random.default_rng(4).random((120, 12)).astype(np.float32)
    assigned, _ = assign_all(scores, 10, 0.02)
    slots = np.repeat(scores, 10, axis=1)
    best = slots[linear_sum_assignment(slots, maximize=True)].sum()
    assert np.bincount(assigned).tolist() == [10] * 12
    assert scores[np.arange(120), assigned].sum() >= 0.98 * best


def test_further_words_fill_the_smallest_classes() -> None:
    sizes = np.array([3, 0, 5, 1])
    places = smallest_classes(sizes, 5, 6)
    assert sorted((sizes + np.bincount(places, minlength=4)).tolist()) == [3, 3, 4, 5]
    assert len(smallest_classes(sizes, 5, 0)) == 0
    assert (sizes + np.bincount(smallest_classes(sizes, 5, 11), minlength=4)).tolist() == [5] * 4
