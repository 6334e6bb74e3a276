"""Ranks of log-probabilities, and the time of building trees."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks.log_prob_rank import bound_on_rank, figures_of, singular_values
from scripts.benchmarks.tree_building import SHAPES
from tests.output.decoding.truth import TREES, H, random_layer, word_log_prob

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("shape", TREES)
def test_random_weights_have_the_rank_of_the_bound(shape: str) -> None:
    """H features, and a dimension for each node with words among its children."""
    layer = random_layer(shape, 60, num_positions=90, scale=0.5)
    log_prob = word_log_prob(*layer)
    bound = bound_on_rank(layer[2], H, 90)
    assert bound == (H + 1 if shape == "full" else min(bound, 59))
    figures = figures_of(singular_values(log_prob), log_prob.shape, H)
    assert figures["rank"] == bound
    centred = (log_prob - log_prob.mean(dim=1, keepdim=True)).numpy()
    left, values, right = np.linalg.svd(centred, full_matrices=False)
    nearest = (left[:, : H + 1] * values[: H + 1]) @ right[: H + 1]
    distance = np.sqrt(((centred - nearest) ** 2).mean())
    assert figures["beyond_nats"] == pytest.approx(distance, rel=1e-9, abs=1e-12)


def test_a_trained_run_is_below_its_bound(
    lstm_run: Path, tmp_path: Path, run_benchmark: Run
) -> None:
    options = ["--contexts", "40", "--json", tmp_path / "rows"]
    result = run_benchmark("log_prob_rank", lstm_run, *options)
    assert result.returncode == 0, result.stderr
    row = json.loads((tmp_path / "rows").read_text())
    assert row["contexts"] == 40
    assert 12 < row["rank"] <= row["bound"] <= 40
    assert row["bound"] == min(40, row["vocab_size"] - 1, 12 + row["num_word_nodes"])
    assert row["singular_values"] == sorted(row["singular_values"], reverse=True)


def test_every_shape_is_built(tmp_path: Path, run_benchmark: Run) -> None:
    options = ["--words", "500", "--depth", "6", "--json", tmp_path / "rows"]
    result = run_benchmark("tree_building", *options, "--shapes", "from_levels", "from_clusters")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["shape"] for row in rows] == ["from_levels", "from_clusters"]
    assert {row["shape"] for row in rows} < set(SHAPES)
    assert [(row["depth"], row["num_nodes"]) for row in rows] == [(6, 63)] * 2
