"""The benchmark of training steps: its rows, its steps and its peers."""

import json
from pathlib import Path

import pytest
import torch

from lm.output import HierarchicalSoftmax
from lm.training.batches import SequenceBatches
from scripts.benchmarks.training_speed import start_training, torch_loss
from tests.scripts.conftest import Run


def test_training_steps_are_timed_side_by_side(
    tiny: Path, tmp_path: Path, run_benchmark: Run
) -> None:
    rows = tmp_path / "rows"
    options = ["--rounds", "1", "--steps", "2", "--json", str(rows)]
    options += ["--trees", "two_level,classes.shortlist=3", "torch", "none", "full"]
    done = run_benchmark("training_speed", tiny, f"--run_dir={tmp_path / 'run'}", *options)
    assert done.returncode == 0, done.stderr
    two_level, *peers, full = (json.loads(line) for line in rows.read_text().splitlines())
    assert (two_level["tree"], full["tree"]) == ("two_level,classes.shortlist=3", "full")
    assert full["ratio"] == 1
    ratio = two_level["tokens_per_second_median"] / full["tokens_per_second_median"]
    assert two_level["ratio"] == pytest.approx(ratio)
    assert [peer["tree"] for peer in peers] == ["torch", "none"]
    assert (full["batch_size"], full["seq_len"], full["graph"]) == (4, 8, False)
    assert full["step_seconds"] == pytest.approx(32 / full["tokens_per_second_median"])
    assert all(peer["tokens_per_second_median"] > 0 for peer in peers)
    assert str(tmp_path) not in full["command"]


def test_a_recipe_on_independent_sequences_trains_on_these(tiny: Path, tmp_path: Path) -> None:
    options = [f"--run_dir={tmp_path}", "--data.sequences=independent"]
    state = start_training(str(tiny), options, "two_level", num_steps=1)
    assert isinstance(state.batches, SequenceBatches)
    assert not any(state.batches[number].continues for number in range(3))


def test_the_peer_of_training_steps_has_the_same_loss(tiny: Path, tmp_path: Path) -> None:
    state = start_training(str(tiny), [f"--run_dir={tmp_path}"], "torch", num_steps=1)
    model = state.model.eval()
    assert isinstance(model.output, HierarchicalSoftmax)
    tokens, targets = torch.randint(model.vocab_size, (2, 4, 3))
    peer, _ = model.loss(tokens, targets)
    torch.testing.assert_close(peer, torch_loss(model.output, model(tokens)[0], targets))
    ours = HierarchicalSoftmax.loss(model.output, model(tokens)[0], targets)
    torch.testing.assert_close(peer, ours)
