"""The schedule of the performance model; what it counts: `tests/output/backends/triton`."""

import numpy as np

from scripts.kernels.peer_work import PROCESSORS
from scripts.kernels.performance_model import makespan


def test_programs_take_the_first_free_place() -> None:
    ones = np.ones(PROCESSORS * 2 + 1)
    assert makespan(ones, 1) == 3
    assert makespan(ones, 2) == 2
    assert makespan(np.array([5.0, *ones]), 1) == 5
