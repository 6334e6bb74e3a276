"""Computed bytes of a step: the rows that a batch visits, and the figures that follow from them."""

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks.step_bytes import visited_rows

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("positions", [1, 40, 3000])
def test_visited_rows_are_those_of_classes_laid_out_word_by_word(positions: int) -> None:
    num_words, num_classes, seed = 10_000, 100, 3
    generator = np.random.default_rng(seed)
    weight = generator.random(positions) * (np.log(num_words) + np.euler_gamma)
    rank = np.floor(np.clip(np.exp(weight - np.euler_gamma) - 0.5, 0, num_words - 1))
    word_class = np.array([math.isqrt(num_classes**2 * r // num_words) for r in range(num_words)])
    visited = word_class[rank.astype(int)]
    expected = num_classes + np.isin(word_class, visited).sum()
    assert visited_rows(num_words, positions, seed) == expected


def test_all_words_and_classes_are_the_most_that_a_batch_visits() -> None:
    assert visited_rows(400, 100_000, 1) == 420


def test_figures_follow_from_the_rows(tmp_path: Path, run_benchmark: Run) -> None:
    options = ["--sizes", "1000000", "--positions", "2048", "--bandwidth", "2"]
    result = run_benchmark("step_bytes", *options, "--json", tmp_path / "rows")
    assert result.returncode == 0, result.stderr
    fp32, bf16 = (json.loads(line) for line in (tmp_path / "rows").read_text().splitlines())
    rows = fp32["visited_rows"] + 2048
    assert fp32["row_wise_gb"] == pytest.approx((6 * 300 * 4 + 8) * rows / 1e9, abs=5e-4)
    assert fp32["row_wise_ms"] == pytest.approx(fp32["row_wise_gb"] / 2, abs=2e-3)
    assert fp32["dense_adam_gb"] == bf16["dense_adam_gb"] == pytest.approx(9.6)
    assert bf16["floor_gb"] == pytest.approx(fp32["floor_gb"] / 2, abs=1e-3)
    assert fp32["dense_held_gb"] == 4.8
    assert f" {fp32['visited_rows']} " in result.stdout


def test_a_size_of_zero_is_refused(run_benchmark: Run) -> None:
    result = run_benchmark("step_bytes", "--positions", "0")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.endswith("error: --positions must be positive, got 0\n")
