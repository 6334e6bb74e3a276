"""The time of a run: what is spent, what is left, and the end by `train.max_minutes`.

Spent time is that of the training loop, validations and checkpoints included, over all
continuations of a run. Starting the process and preparing the data are not included.
"""

import math
import time
from dataclasses import dataclass

import torch
from lightning.fabric import Fabric

WARM_UP_STEPS = 5
"""First steps of a process, which compile and allocate: they do not count in the pace."""
MEASURED_STEPS, MEASURED_SECONDS = 30, 10.0
"""The pace is known after so many steps, or seconds, whichever comes first."""
FORWARD_SHARE = 1 / 3
"""Part of a training step's work that predicting the same tokens takes."""


@dataclass
class Progress:
    """How far a run has come."""

    batches_done: int = 0
    tokens_done: int = 0  # over all devices
    best_perplexity: float = math.inf  # the lowest of all validations
    num_bad_validations: int = 0  # that did not improve on it
    skipped_steps: int = 0  # whose gradient was not finite
    nll: float = 0.0  # nats summed over the tokens since the last line of `metrics.csv`
    num_tokens: int = 0  # number of these tokens
    seconds: float = 0.0  # training time, without validation and checkpoints
    logged_seconds: float = 0.0  # the same before the last line of `metrics.csv`
    elapsed_seconds: float = 0.0  # of the training loop, with validations and checkpoints
    validation_seconds: float = 0.0  # of the last validation and checkpoint; 0 before the first

    def record_validation(self, perplexity: float) -> bool:
        """Record a validation perplexity; returns whether it is the lowest so far."""
        improved = perplexity < self.best_perplexity
        self.num_bad_validations += not improved
        self.best_perplexity = min(perplexity, self.best_perplexity)
        return improved


class Clock:
    """Measures the loop, and says how much of the run's time is spent.

    Without `train.max_minutes`, processes do not communicate. With it, `share` after each step is
    that of the first process.

    Args:
        progress: that of the run; its times are updated.
        max_minutes: `train.max_minutes`.
        num_steps: steps of the whole run; None: until the time is spent.
        validation_steps: steps between two validations; None: there is no validation.
        relative_size: tokens of the validation split per token of a training step.

    Attributes:
        share: part of `train.max_minutes` that is spent, from 0 to 1; 0 without a limit. At 1, only
            the last validation and checkpoint are left.
    """

    def __init__(
        self,
        fabric: Fabric,
        progress: Progress,
        *,
        max_minutes: float | None,
        num_steps: int | None,
        validation_steps: float | None,
        relative_size: float,
    ) -> None:
        self._fabric, self.progress = fabric, progress
        self.limit = None if max_minutes is None else 60 * max_minutes
        self.num_steps, self._validation_steps = num_steps, validation_steps
        self._relative_size = relative_size
        self.share = 0.0
        self.start()

    def start(self) -> None:
        """Begin to measure, now."""
        now = time.perf_counter()
        self._began = now - self.progress.elapsed_seconds
        self._resumed = now
        self._paused_at = now
        self._steps_here = 0
        self._warm_up_training = self.progress.seconds
        self._training = self.progress.seconds
        self._check_limit()

    def step(self) -> None:
        """Count a training step, now."""
        self._steps_here += 1
        if self._steps_here == WARM_UP_STEPS:
            self._synchronize()
        now = time.perf_counter()
        self.progress.elapsed_seconds = now - self._began
        self._training = self.progress.seconds + now - self._resumed
        if self._steps_here == WARM_UP_STEPS:
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
        if self.progress.validation_seconds:
            return self.progress.validation_seconds
        pace = self.step_seconds or self._training / max(self._steps_here, 1)
        return FORWARD_SHARE * self._relative_size * pace

    def seconds_left(self, step: int) -> float | None:
        """Seconds from `step` to the end of the run; None while the pace is not known."""
        pace = self.step_seconds
        if pace is None:
            return None
        left = math.inf
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
        if self.limit is None:
            return
        available = self.limit - min(self.limit / 2, self.validation_seconds)
        share = min(1.0, self.progress.elapsed_seconds / available)
        if self._fabric.world_size > 1:
            share = self._fabric.broadcast(share)
        self.share = share
        if share == 1.0:  # the rest is for the last validation: a continuation has nothing to do
            self.progress.elapsed_seconds = max(self.progress.elapsed_seconds, self.limit)

    def _synchronize(self) -> None:
        if self._fabric.device.type == "cuda":
            torch.cuda.synchronize(self._fabric.device)


def in_words(seconds: float) -> str:
    """A duration, rounded.

    Example:
        >>> [in_words(seconds) for seconds in (8, 100, 4800, 200_000)]
        ['8 s', '1 min 40 s', '1 h 20 min', '2 d 8 h']
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    units = (("min", 60, "s", 10), ("h", 3600, "min", 1), ("d", 86400, "h", 1))
    large, size, small, step = next(
        each for each in reversed(units) if seconds >= each[1] or each is units[0]
    )
    part = {"s": 1, "min": 60, "h": 3600}[small]
    whole, rest = divmod(round(seconds / part / step) * step, size // part)
    return f"{whole} {large}" + (f" {rest} {small}" if rest else "")
