"""Validation: what it measures, which model it keeps, and when it ends a run."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lm.training import validation
from lm.training.checkpoint import load_checkpoint
from lm.training.metrics import read_metrics
from lm.training.progress import Progress
from lm.training.state import TrainingState
from lm.training.validation import Validation
from tests.conftest import Train
from tests.scoring.test_ranking import EOS, UNK, by_hand, distributions, make, some_sequences

ITEMS = ["--data.sequences=independent", "--data.prepared_dir=null", "--train.val_every_steps=2"]


@pytest.mark.parametrize("backbone", ["lstm", "transformer"])
@pytest.mark.parametrize("exclude", ["nothing", "seen"])
@pytest.mark.parametrize(("users", "items"), [(4_000, 1 << 22), (7, 30)])
def test_items_rank_as_in_an_evaluation_of_the_same_users(
    backbone: str, exclude: Any, users: int, items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "RANKED_USERS", users)
    monkeypatch.setattr(validation, "BLOCK_ITEMS", items)
    model, sequences = make(backbone), some_sequences()
    found = validation.rank(model, sequences, (EOS, UNK), exclude)
    ranked = np.flatnonzero(sequences.num_predicted + sequences.num_left_out)
    ranked = ranked[np.arange(len(ranked)) if users > 99 else np.arange(7) * len(ranked) // 7]
    sample = type(sequences)(sequences.tokens, *(each[ranked] for each in sequences[1:]))
    truth = by_hand(partial(distributions, model), sample, exclude)
    assert found == pytest.approx((truth["hit_rate"][-1], truth["ndcg"][-1]))


@pytest.mark.parametrize(
    ("keep", "perplexities", "ndcgs", "best", "steps"),
    [
        ("ndcg", [9, 8, 7, 6, 5, 4], [0.1, 0.3, 0.2, 0.3, 0.25, 0.9], 4, 10),
        ("perplexity", [9, 8, 9, 7, 7, 8], [0.1, 0.3, 0.2, 0.3, 0.25, 0.9], 8, 12),
        ("null", [9, 8, 9, 9, 9, 9], [0.1, 0.2, 0.3, 0.3, 0.3, 0.4], 12, 12),
    ],
)
def test_the_model_is_kept_by_the_criterion_until_the_patience_is_spent(
    keep: str,
    perplexities: list[float],
    ndcgs: list[float],
    best: int,
    steps: int,
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rigged(state: TrainingState, _: Any) -> Validation:
        number = state.step // 2 - 1
        return Validation(perplexities[number], 0.5, ndcgs[number])

    monkeypatch.setattr(TrainingState, "validate", rigged)
    caplog.set_level("INFO")
    options = [*ITEMS, f"--train.keep={keep}", "--train.max_steps=12", "--train.patience=3"]
    run = train(tmp_path / "run", *options)
    described = json.loads((run / "model.json").read_text())
    assert (described["step"], described["valid_ndcg"]) == (best, ndcgs[best // 2 - 1])
    assert described["valid_perplexity"] == perplexities[best // 2 - 1]
    checkpoint = load_checkpoint(run / "checkpoints" / "best.ckpt")
    assert checkpoint["progress"]["batches_done"] == best
    weights = load_file(run / "model.safetensors")
    torch.testing.assert_close(weights, checkpoint["model"], rtol=0, atol=0)
    lines = [line for line in read_metrics(run / "metrics.csv") if line.valid_ndcg is not None]
    assert [line.valid_ndcg for line in lines] == ndcgs[: steps // 2]
    assert [line.valid_perplexity for line in lines] == perplexities[: steps // 2]
    shown = re.findall(r"step (\d+) of 12: .* valid ppl (.*), NDCG@10 (.*), ppl", caplog.text)
    assert len(shown) == steps // 2
    last = perplexities[len(shown) - 1], ndcgs[len(shown) - 1]
    assert shown[-1] == (str(steps), f"{last[0]:.2f}", f"{last[1]:.4f}")
    planned = " (12 planned)" * (steps < 12)
    assert f"has the model of step {best} of {steps}{planned}: validation " in caplog.text
    assert re.search(r"NDCG@10 of (\d+) of \1 users 0\.[1-4]", caplog.text)
    train(run, *options, "--resume=auto")
    assert "training is already complete" in caplog.text
    train(run, *options, "--train.patience=9", "--resume=auto")  # which may change
    assert read_metrics(run / "metrics.csv")[-1].step == 12


def test_validations_are_judged_by_the_criterion() -> None:
    progress = Progress(best_perplexity=3.5)
    assert progress.record_validation(Validation(3.0, ndcg=0.0), "ndcg")
    assert not progress.record_validation(Validation(2.0, ndcg=0.0), "ndcg")
    assert (progress.best_perplexity, progress.num_since_best) == (2.0, 1)
