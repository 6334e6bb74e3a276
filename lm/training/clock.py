"""The time of a run: what is spent, what is left, and the end by `train.max_minutes`.

Spent time is that of the training loop, validations and checkpoints included, over all
continuations of a run. Starting the process and preparing the data are not included.
"""

import math
import time

import torch
from lightning.fabric import Fabric

from lm.config import TrainConfig
from lm.training.batches import Batches
from lm.training.progress import Progress

WARM_UP_STEPS = 5
"""First steps of a process, which compile and allocate: they do not count in the pace."""
MEASURED_STEPS, MEASURED_SECONDS = 30, 10.0
"""The pace is known after this many steps or seconds, whichever comes first."""
FORWARD_SHARE = 1 / 3
"""Part of a training step's work that predicting the same tokens takes."""


class Clock:
    """Measures the loop, and says how much of the run's time is spent.

    Args:
        progress: that of the run; its times are updated.
        train: the section `train`.
        batches: the batches of the run.
        num_valid_tokens: tokens of the validation split; None: there is no validation.

    Attributes:
        share: part of `train.max_minutes` that is spent, by the clock of the first process; 0
            without a limit. At 1, only the last validation and checkpoint are left.
    """

    def __init__(
        self,
        fabric: Fabric,
        progress: Progress,
        train: TrainConfig,
        batches: Batches,
        num_valid_tokens: int | None,
    ) -> None:
        self._fabric, self.progress = fabric, progress
        self.limit = None if train.max_minutes is None else 60 * train.max_minutes
        self.num_steps, self._batches = batches.num_steps, batches
        self._validation_steps: float | None = None
        if num_valid_tokens is not None:
            self._validation_steps = batches.between_validations
            step_tokens = train.batch_size * train.seq_len * train.accumulate
            self._relative_size = num_valid_tokens / step_tokens * fabric.world_size
        self.share = 0.0
        self.start()

    def start(self) -> None:
        """Begin to measure, now."""
        self._resumed = self._paused_at = time.perf_counter()
        self._began = self._resumed - self.progress.elapsed_seconds
        self._steps_here = 0
        self._warm_up_training = self._training = self.progress.seconds
        self._check_limit()

    def step(self) -> None:
        """Count a training step, now."""
        self._steps_here += 1
        is_warm = self._steps_here == WARM_UP_STEPS
        if is_warm and self._fabric.device.type == "cuda":
            torch.cuda.synchronize(self._fabric.device)
        now = time.perf_counter()
        self.progress.elapsed_seconds = now - self._began
        self._training = self.progress.seconds + now - self._resumed
        if is_warm:
            self._warm_up_training = self._training
        self._check_limit()

    def pause(self) -> None:
        """Training time ends: figures, a validation or a checkpoint follow."""
        self._paused_at = time.perf_counter()
        self.progress.seconds += self._paused_at - self._resumed

    def resume(self, *, validated: bool) -> None:
        """Training time begins again, `validated` if a validation has been done since `pause`."""
        self._resumed = time.perf_counter()
        if validated:
            self.progress.validation_seconds = self._resumed - self._paused_at

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step of this process, without its first ones; None if too few."""
        num_steps = self._steps_here - WARM_UP_STEPS
        seconds = self._training - self._warm_up_training
        if num_steps < 1 or (num_steps < MEASURED_STEPS and seconds < MEASURED_SECONDS):
            return None
        return seconds / num_steps

    @property
    def validation_seconds(self) -> float:
        """Seconds of a validation and its checkpoint: the last one, or estimated from the steps."""
        if self._validation_steps is None:
            return 0.0
        num_steps = self._batches.steps(self.progress.batches_done)  # of earlier processes too
        pace = self.step_seconds or self._training / max(num_steps, 1)
        return self.progress.validation_seconds or FORWARD_SHARE * self._relative_size * pace

    def seconds_left(self, step: int) -> float | None:
        """Seconds from `step` to the end of the run; None while the pace is not known."""
        pace, left = self.step_seconds, math.inf
        if pace is None:
            return None
        if self.num_steps is not None:
            validations = 0.0
            if self._validation_steps is not None:
                done = step // self._validation_steps
                validations = max(1.0, self.num_steps // self._validation_steps - done)
            left = (self.num_steps - step) * pace + validations * self.validation_seconds
        if self.limit is None:
            return left
        return min(left, max(0.0, self.limit - self.progress.elapsed_seconds))

    def _check_limit(self) -> None:
        """Set `share`, by which `TrainingState.is_finished` ends the run."""
        if self.limit is None:
            return
        available = self.limit - min(self.limit / 2, self.validation_seconds)
        self.share = min(1.0, self.progress.elapsed_seconds / available)
        if self._fabric.world_size > 1:
            self.share = self._fabric.broadcast(self.share)
        if self.share == 1:  # the rest is for a validation: a continuation has nothing to do
            self.progress.elapsed_seconds = max(self.progress.elapsed_seconds, self.limit)
