"""The schedule and ranges of the performance model; its counts: `tests/output/backends/triton`."""

import numpy as np
import pytest

from scripts.kernels.host_time import PYTHON, row_of
from scripts.kernels.performance_model import (
    PROCESSORS,
    SIZES,
    Range,
    Use,
    makespan,
    measured_us,
    seconds_of,
)


def test_programs_take_the_first_free_place() -> None:
    ones = np.ones(PROCESSORS * 2 + 1)
    assert makespan(ones, 1) == 3
    assert makespan(ones, 2) == 2
    assert makespan(np.array([5.0, *ones]), 1) == 5


def test_a_range_is_from_the_longest_resource_to_the_sum_without_a_pipeline() -> None:
    use = Use(issue=1, latency=2, tensor=4, l2=3, hbm=2)
    assert seconds_of(use, use, stages=1) == (4, 12)
    assert seconds_of(use, use, stages=7) == (4, 6)


def test_the_measured_times_are_those_of_all_launches_of_all_sizes() -> None:
    found = measured_us()
    assert set(found) == set(SIZES)
    assert sum(found[33_278, 650].values()) == pytest.approx(341.7, abs=0.1)


def test_the_host_takes_the_python_path_and_all_launches() -> None:
    seconds = {PYTHON: Range(2e-6, 3e-6), "one": Range(1e-6, 4e-6), "two": Range(5e-6, 6e-6)}
    row = row_of(seconds)
    ends = [(row[f"{name}_low_us"], row[f"{name}_high_us"]) for name in ("launching", "host")]
    assert ends == [pytest.approx((6, 10)), pytest.approx((8, 13))]
    assert row["launches"] == 2
