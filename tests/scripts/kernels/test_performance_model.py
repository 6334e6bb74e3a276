"""The schedule and ranges of the performance model; its counts: `tests/output/backends/triton`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.output import ClassTree
from lm.output.backends.base import Problem
from scripts.kernels.host_time import PYTHON, logged_seconds, row_of
from scripts.kernels.peer_work import cce
from scripts.kernels.performance_model import makespan, operation_seconds
from scripts.kernels.rates import A100, H200, Range, Use, seconds_of


def test_programs_take_the_first_free_place() -> None:
    ones = np.ones(H200.processors * 2 + 1)
    assert makespan(ones, 1) == 3
    assert makespan(ones, 2) == 2
    assert makespan(np.array([5.0, *ones]), 1) == 5


def test_a_range_is_from_the_longest_resource_to_the_sum_without_a_pipeline() -> None:
    use = Use(issue=1, latency=2, tensor=4, l2=3, hbm=2)
    assert seconds_of(use, use, stages=1) == (4, 12)
    assert seconds_of(use, use, stages=7) == (4, 6)


def test_methods_whose_ranges_overlap_are_level() -> None:
    ours = Range(2, 4)
    assert Range(1, 2).compared(ours) == "level with"
    assert Range(1, 1.9).compared(ours) == "faster"
    assert Range(4.1, 5).compared(ours) == "slower"


def test_the_range_contains_the_published_time_of_cut_cross_entropy() -> None:
    """8,192 positions, 256,000 words, H = 2,304 on an A100: Wijmans et al. 2025."""
    problem = Problem.without_values(8192, 2304, ClassTree.full(256_000), torch.bfloat16)
    seconds = {each.name: operation_seconds(each, A100) for each in cce(problem)}
    names = ("logits", "target logits")
    forward = [sum(seconds[name][end] for name in names) for end in (0, 1)]
    both = [sum(each[end] for each in seconds.values()) for end in (0, 1)]
    assert forward[0] < 46.4e-3 < forward[1]
    assert both[0] < 134.8e-3 < both[1]
    assert forward == pytest.approx([38.8e-3, 63.6e-3], rel=0.01)
    assert both == pytest.approx([93.7e-3, 163.4e-3], rel=0.01)


def test_the_host_takes_the_python_path_and_all_launches(tmp_path: Path) -> None:
    seconds = {PYTHON: Range(2e-6, 3e-6), "one": Range(1e-6, 4e-6), "two": Range(5e-6, 6e-6)}
    row = row_of(seconds)
    ends = [(row[f"{name}_low_us"], row[f"{name}_high_us"]) for name in ("launching", "host")]
    assert ends == [pytest.approx((6, 10)), pytest.approx((8, 13))]
    assert row["launches"] == 2
    (tmp_path / "log").write_text(json.dumps({"seconds": {}}) + "\n" + json.dumps(row) + "\n")
    assert logged_seconds(tmp_path / "log") == seconds
