"""Gradients that are not finite: the run stops before the update, or it is left out and counted."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_prep.errors import NotFiniteError
from lm.run import Run
from lm.training import optimizers
from lm.training.batches import Batches
from lm.training.checkpoint import load_checkpoint
from lm.training.devices import build_fabric
from lm.training.metrics import read_metrics
from lm.training.state import TrainingState
from tests.conftest import Printed, Train
from tests.training.tiny_runs import LAST, outcome, steps_done

Poison = Callable[..., None]
INDEPENDENT = ["--data.sequences=independent", "--data.prepared_dir=null"]
SAVES = ["--train.checkpoint_every_steps=1", "--train.val_every_steps=4", "--log.every_steps=1"]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    """`poison(numbers, value)`: the largest gradient of these steps of the process is `value`."""
    clip = optimizers.clip_gradients

    def patch(numbers: set[int], value: float = float("nan")) -> None:
        calls = iter(range(1, 1000))

        def poisoned(model: Any, parameters: Any, largest: float) -> Any:
            if next(calls) in numbers:
                parameters[0].grad.view(-1)[0] = value
            return clip(model, parameters, largest)

        monkeypatch.setattr("lm.training.loop.clip_gradients", poisoned)

    return patch


@pytest.mark.parametrize(("value", "clip"), [(float("nan"), "0"), (float("inf"), "1")])
def test_a_gradient_that_is_not_finite_stops_before_the_update_and_names_step_and_batch(
    tmp_path: Path, train: Train, failed: Printed, poison: Poison, value: float, clip: str
) -> None:
    options, run = [*SAVES, f"--optim.clip={clip}", "--train.max_steps=8"], tmp_path / "run"
    truth = outcome(train(tmp_path / "truth", *options))
    poison({6}, value)
    assert failed(run, *options) == (
        "the gradient is not finite in step 6 (batch 6 of epoch 1); the last checkpoint is"
        " untouched (a lower optim.lr or optim.clip may help)"
    )
    assert steps_done(run) == 5
    poison(set())
    assert outcome(train(run, *options, "--resume=auto")) == truth


@pytest.mark.parametrize(
    "options", [[], ["--train.accumulate=2"], [*INDEPENDENT, "--train.seq_len=9"]]
)
def test_skipped_steps_change_no_parameter_and_are_counted(
    tmp_path: Path,
    train: Train,
    failed: Printed,
    poison: Poison,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    monkeypatch.setattr("lm.training.batches.SORTED_BATCHES", 1)  # most have padding
    options = [*SAVES, *options, "--train.skip_nonfinite_steps=2"]
    run = train(tmp_path, *options, "--train.max_steps=3")
    before = load_checkpoint(run / LAST)
    weights, carried = before["model"], before["devices"][0]["carried"]
    if INDEPENDENT[0] in options:  # each begins without a state
        carried = None
    weights = {name: weight.clone() for name, weight in weights.items()}
    poison({1, 2})
    after = load_checkpoint(train(run, *options, "--train.max_steps=5", "--resume=auto") / LAST)
    torch.testing.assert_close(after["model"], weights, rtol=0, atol=0)
    torch.testing.assert_close(after["devices"][0]["carried"], carried, rtol=0, atol=0)
    assert after["progress"]["skipped_steps"] == 2
    lines = read_metrics(run / "metrics.csv")
    assert [line.skipped_steps for line in lines] == [0, 0, 0, 1, 2]
    assert [line.step for line in lines] == [1, 2, 3, 4, 5]
    assert [line.tokens_per_second for line in lines[3:]] == [0, 0]  # their tokens are not counted
    assert [line.tokens for line in lines[3:]] == [lines[2].tokens] * 2
    assert [math.isnan(line.train_perplexity) for line in lines] == [False] * 3 + [True] * 2
    poison({1})
    message = failed(run, *options, "--train.max_steps=6", "--resume=auto")
    assert re.match(r"the gradient is not finite in step 6 \(batch \d+ of epoch 1\)", message)
    assert all(weight.isfinite().all() for weight in load_file(run / "model.safetensors").values())


@pytest.mark.parametrize(("accumulate", "steps", "num_batches"), [(1, 4, 4), (2, 3, 5)])
def test_no_state_is_carried_into_an_epoch_that_begins_in_a_skipped_step(
    accumulate: int, steps: int, num_batches: int, tmp_path: Path, train: Train, poison: Poison
) -> None:
    options = [f"--train.accumulate={accumulate}", f"--train.max_steps={steps}"]
    poison({steps})
    skips = ["--train.skip_nonfinite_steps=1", "--train.seq_len=200"]
    last = load_checkpoint(train(tmp_path, *options, *skips) / LAST)
    epoch = read_metrics(tmp_path / "metrics.csv")[-1].epoch
    assert epoch == pytest.approx(num_batches / 3, abs=1e-4)
    assert last["progress"]["skipped_steps"] == 1
    assert last["devices"][0]["carried"] is None


def test_on_a_gpu_steps_that_are_not_finite_are_found_when_losses_are_read(lstm_run: Path) -> None:
    """Which is before anything is saved; a device of another name takes the place of a GPU."""
    run = Run.read(lstm_run)
    fabric, batches = build_fabric(run), Batches(run.config, run.prepared, 0, 1)
    state = TrainingState(fabric, run, batches, load_checkpoint(lstm_run / LAST))
    state.gather_losses()
    gpu: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), all_reduce=fabric.all_reduce)
    state.fabric = gpu
    assert state.may_update(torch.tensor(1.0))
    state.gather_losses()
    assert state.may_update(torch.tensor(float("inf")))
    with pytest.raises(NotFiniteError, match=r"^the gradient was not finite before step 24; the"):
        state.gather_losses()
    state.gather_losses()
