"""The estimate of a run's time before its data are prepared."""

import time
from itertools import count
from typing import Literal

import pytest

from data_prep.settings import ClassesConfig
from lm.config import Config, ModelConfig, TrainConfig
from lm.training.clock import FORWARD_SHARE
from lm.training.pace import training_seconds


@pytest.mark.parametrize("backbone", ["lstm", "transformer"])
def test_the_estimate_counts_the_steps_and_validations_of_the_run(
    backbone: Literal["lstm", "transformer"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", count(0.0, 2.0).__next__)  # seconds per step
    config = Config(
        name="run",
        model=ModelConfig(backbone=backbone, hidden=16, layers=1, input_pieces=8),
        classes=ClassesConfig(shortlist=10),
        train=TrainConfig(max_epochs=3, batch_size=4, seq_len=5, threads=1),
    )
    steps = 3 * (2000 // 20 if backbone == "lstm" else 1999 // 20)
    training = 2.0 * steps
    validations = 3 * FORWARD_SHARE * 2.0 * (400 / 20)
    assert training_seconds(config, 300, {"train": 2000}) == pytest.approx(training)
    sizes = {"train": 2000, "valid": 400, "test": 400}
    assert training_seconds(config, 300, sizes) == pytest.approx(training + validations)
