"""The class report equals what is computed by hand."""

import math

import numpy as np
import pytest

from data_prep.classes import report as report_module
from data_prep.classes.report import class_report
from data_prep.errors import UserError

TOKENS = np.array([0, 1, 0, 2, 3, 0, 1], dtype=np.uint16)
COUNTS, CLASSES = np.array([3, 2, 1, 1, 0]), np.array([0, 1, 1, 0, 0])


def test_report_equals_the_computation_by_hand() -> None:
    report = class_report(COUNTS, CLASSES, TOKENS)
    assert (report.num_word_classes, report.min_words, report.max_words) == (2, 2, 3)
    assert report.median_words == 2.5
    assert report.sizes == (3, 2)
    assert report.token_mass == pytest.approx((4 / 7, 3 / 7))
    assert report.columns_per_token == pytest.approx(2 + 4 / 7 * 3 + 3 / 7 * 2)
    assert report.top_words == ((0, 3, 4), (1, 2))
    # Classes 0 1 0 1 0 0 1: 0 → 0 once, 0 → 1 three times, 1 → 0 twice.
    transitions = 1 * math.log(1 / 4) + 3 * math.log(3 / 4) + 2 * math.log(2 / 2)
    words = 2 * math.log(3 / 4) + 1 * math.log(1 / 4) + 2 * math.log(2 / 3) + 1 * math.log(1 / 3)
    assert report.log_likelihood == pytest.approx((transitions + words) / 6)
    assert report.class_entropy == pytest.approx(
        -4 / 7 * math.log2(4 / 7) - 3 / 7 * math.log2(3 / 7)
    )
    in_class = 3 * math.log2(3 / 4) + math.log2(1 / 4) + 2 * math.log2(2 / 3) + math.log2(1 / 3)
    assert report.word_entropy == pytest.approx(-in_class / 7)


def test_each_word_of_the_shortlist_is_a_class_in_the_report() -> None:
    """With words 0 and 1 in the shortlist, class 0 has words 3 and 4, class 1 word 2."""
    report = class_report(COUNTS, CLASSES, TOKENS, shortlist=2)
    assert (report.num_word_classes, report.shortlist) == (2, 2)
    assert report.sizes == (2, 1)
    assert report.shortlist_mass == pytest.approx(5 / 7)
    assert report.token_mass == pytest.approx((1 / 7, 1 / 7))
    assert report.columns_per_token == pytest.approx(4 + 1 / 7 * 2 + 1 / 7 * 1)
    assert report.top_words == ((3, 4), (2,))
    separate = class_report(COUNTS, np.array([2, 3, 1, 0, 0]), TOKENS)
    assert report.log_likelihood == pytest.approx(separate.log_likelihood)
    assert report.class_entropy == pytest.approx(separate.class_entropy)
    assert report.word_entropy == pytest.approx(separate.word_entropy)
    all_at_the_root = class_report(COUNTS, CLASSES, TOKENS, shortlist=5)
    assert all_at_the_root.sizes == (0, 0)
    assert all_at_the_root.columns_per_token == 5


def test_report_does_not_depend_on_the_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = class_report(COUNTS, CLASSES, TOKENS)
    monkeypatch.setattr(report_module, "TOKENS_PER_CHUNK", 2)
    assert class_report(COUNTS, CLASSES, TOKENS) == whole


def test_report_refuses_arrays_that_do_not_match() -> None:
    tokens = np.array([0, 1, 1], dtype=np.uint16)
    with pytest.raises(ValueError, match="expected classes of 2 words and 4 tokens"):
        class_report(np.array([1, 3]), np.array([0, 1]), tokens)
    with pytest.raises(UserError, match=r"needs at least two tokens of training text, got 1$"):
        class_report(np.array([1, 0]), np.array([0, 0]), np.array([0], dtype=np.uint16))
    with pytest.raises(ValueError, match="class 1 has no words"):
        class_report(np.array([1, 2]), np.array([0, 2]), tokens)
