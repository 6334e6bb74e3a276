"""Words get their best classes; with scarce places the result is close to SciPy's optimum."""

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from data_prep.classes.assignment import assign, smallest_classes


def test_words_get_their_best_classes_if_these_have_vacancies() -> None:
    preferred = np.array([2, 0, 1, 1, 0, 2])
    assigned, prices = assign(
        lambda ids: np.eye(3, dtype=np.float32)[preferred[ids]],
        np.arange(6),
        np.zeros(3, dtype=np.int64),
        2,
        np.zeros(3, dtype=np.float32),
        0.01,
    )
    assert assigned.tolist() == preferred.tolist()
    assert prices == pytest.approx(0, abs=1e-3)


def test_scarce_places_are_given_to_the_words_that_lose_most() -> None:
    scores = np.array([[5, 4], [5, 0], [5, 3], [5, 1]], dtype=np.float32)
    nothing = np.zeros(2, dtype=np.float32)
    assigned, _ = assign(
        lambda ids: scores[ids], np.arange(4), nothing.astype(np.int64), 2, nothing, 0.1
    )
    assert assigned.tolist() == [1, 0, 1, 0]


def test_assignment_is_close_to_the_best_possible() -> None:
    scores = np.random.default_rng(4).random((120, 12)).astype(np.float32)
    assigned, _ = assign(
        lambda ids: scores[ids],
        np.arange(120),
        np.zeros(12, dtype=np.int64),
        10,
        np.zeros(12, dtype=np.float32),
        0.02,
    )
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
