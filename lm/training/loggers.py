"""Loggers: where the figures of a run are written while it trains.

Fabric has a CSV logger, but it deletes the file that a continued run appends to, keeps lines in
memory and sorts the columns; it has no logger for wandb. Both are therefore ours.
"""

import csv
import io
import logging
import os
import time
import uuid
from dataclasses import asdict, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from tqdm import tqdm

from data_prep.errors import UserError
from data_prep.storage import write_atomically, writing
from lm.config import Config, to_dict
from lm.training.clock import Clock, in_words
from lm.training.metrics import Metrics, read_metrics
from lm.training.state import TrainingState

_log = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 30.0
WandbMode = Literal["disabled", "offline", "online", "shared"]
_NAMES = [field.name for field in fields(Metrics)]


class Logger:
    """What receives the steps and the figures of a run; by itself it ignores them."""

    def step(self, step: int) -> None:
        """Called after every optimizer step, with the number of steps done."""

    def log(self, metrics: Metrics) -> None:
        """Called with each line of `metrics.csv`."""

    def close(self) -> None:
        """Called once, at the end of the run or at an error."""


class MetricsFile(Logger):
    """Appends each line to `metrics.csv` at once.

    Lines of steps later than `after_step` are removed: a continued run writes them again.
    """

    def __init__(self, path: Path, after_step: int) -> None:
        self.path = path
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, _NAMES)
        writer.writeheader()
        writer.writerows(asdict(line) for line in read_metrics(path) if line.step <= after_step)
        write_atomically(path, lambda file: file.write(text.getvalue().encode()))

    def log(self, metrics: Metrics) -> None:
        """Append one line."""
        with writing(self.path), open(self.path, "a", newline="") as file:
            csv.DictWriter(file, _NAMES).writerow(asdict(metrics))


def wandb_mode(config: Config) -> WandbMode:
    """The mode of Weights & Biases: `log.wandb`, unless that is on and `WANDB_MODE` is set.

    Raises:
        UserError: if `WANDB_MODE` is no mode.
    """
    mode = os.environ.get("WANDB_MODE", "")
    if config.log.wandb == "disabled" or not mode:
        return config.log.wandb
    known: WandbMode | None = next((each for each in get_args(WandbMode) if each == mode), None)
    if known is None:
        raise UserError(f"WANDB_MODE={mode}: expected disabled, offline or online")
    return known


class WandbLogger(Logger):
    """Sends each line to Weights & Biases; a continued run continues the same wandb run."""

    def __init__(self, config: Config) -> None:
        import wandb  # takes a second

        id_file = config.run_path / "wandb-id"
        run_id = id_file.read_text() if id_file.exists() else uuid.uuid4().hex[:8]
        id_file.write_text(run_id)
        try:
            self.run: Any = wandb.init(
                project=config.log.wandb_project,
                name=config.name,
                id=run_id,
                resume="allow",
                dir=config.run_path,
                mode=wandb_mode(config),
                config=to_dict(config),
            )
        except wandb.Error as error:
            raise UserError(f"log.wandb: {config.log.wandb}: {error}") from error

    def log(self, metrics: Metrics) -> None:
        """Send the figures that there are."""
        figures = {name: value for name, value in asdict(metrics).items() if value is not None}
        self.run.log(figures, step=metrics.step)

    def close(self) -> None:
        """Finish the wandb run."""
        self.run.finish()


def check_wandb(config: Config) -> None:
    """Check that wandb can be used online, if it is; in a terminal, wandb asks for a key.

    Raises:
        UserError: with the reason of wandb, if it cannot.
    """
    if (mode := wandb_mode(config)) != config.log.wandb:
        _log.info("log.wandb: %s, as WANDB_MODE says", mode)
    if mode in ("online", "shared"):
        import wandb  # takes a second

        try:
            wandb.login()
        except wandb.errors.UsageError as error:  # there is no key
            raise UserError(
                "log.wandb: online requires a key: run `wandb login`, set WANDB_API_KEY, or use"
                f" --log.wandb=offline ({error})"
            ) from error
        except wandb.Error as error:
            raise UserError(f"log.wandb: {mode}: {error} (or use --log.wandb=offline)") from error


class ProgressBar(Logger):
    """Steps, remaining time and figures on stderr; once, how long the run takes.

    In a terminal this is a progress bar of at most 80 columns. Elsewhere it is a line of text for
    each validation, for the last step, and for lines of `metrics.csv` that are at least
    `SECONDS_BETWEEN_LINES` apart.
    """

    def __init__(self, step: int, clock: Clock, epoch_steps: float) -> None:
        self._clock, self._epoch_steps, self._announced = clock, epoch_steps, False
        self.total_steps = clock.num_steps
        self.bar = tqdm(
            total=self.total_steps,
            initial=step,
            desc="train",
            bar_format=self._format(step, None),
            disable=None,
        )
        self._next_line = time.monotonic()
        self._valid = ""

    def step(self, step: int) -> None:
        """Show the step and, once it is known, how long the run takes."""
        left = self._clock.seconds_left(step)
        if not self.bar.disable:
            self.bar.bar_format = self._format(step, left)
            self.bar.update(step - self.bar.n)
        if left is not None and not self._announced:
            self._announced = True
            self.bar.clear()
            _log.info("%s", self._announcement(step, left))

    def _format(self, step: int, left: float | None) -> str:
        shown = "?" if left is None else str(timedelta(seconds=round(left)))
        total, pace = "{total_fmt}", self._clock.step_seconds
        if self._ends_by_time(left):
            total = "?"
            if self._clock.limit is not None and left is not None and pace:
                total = f"about {step + left / pace:.0f}"
        return f"{{desc}} {{n_fmt}}/{total} [{{elapsed}}<{shown}]{{postfix}}"

    def _ends_by_time(self, left: float | None) -> bool:
        """Whether `train.max_minutes` ends the run, or may do so, before the last step."""
        clock = self._clock
        if clock.limit is None or self.total_steps is None:
            return self.total_steps is None
        return left is None or clock.progress.elapsed_seconds + left >= clock.limit - 1

    def _announcement(self, step: int, left: float) -> str:
        clock = self._clock
        pace = clock.step_seconds or 0.0
        steps = step + left / pace if self.total_steps is None else self.total_steps
        if self._ends_by_time(left):
            steps = min(steps, step + left / pace)
        epochs = f"{steps / self._epoch_steps:.1f}".removesuffix(".0")
        text = f"{epochs} epoch{'s' * (epochs != '1')} ("
        if step > 100:  # resumed
            text = f"about {in_words(left)} left of {text}step {step:,} of {steps:,.0f}"
            text += f", {pace:.2g} s each"
        else:
            text = f"about {in_words(left)} for {text}{steps:,.0f} steps of {pace:.2g} s"
        if clock.validation_seconds:
            text += f", validations of {in_words(clock.validation_seconds)}"
        return text + ")"

    def log(self, metrics: Metrics) -> None:
        """Show the figures."""
        valid = metrics.valid_perplexity
        if valid is not None:
            self._valid = f"valid ppl {_short(valid, 2)}, "
        figures = f"ppl {_short(metrics.train_perplexity, 1)}"
        figures += f", {metrics.tokens_per_second:.0f} tokens/s"
        self.bar.set_postfix_str(self._valid + figures, refresh=False)
        is_milestone = valid is not None or metrics.step == self.total_steps
        if self.bar.disable and (is_milestone or time.monotonic() >= self._next_line):
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            left = self._clock.seconds_left(metrics.step)
            of = "" if self._ends_by_time(left) else f" of {self.total_steps}"
            text = f"step {metrics.step}{of}: epoch {metrics.epoch:.2f}, "
            text += (self._valid if valid is not None else "") + figures
            seconds = round(left or 0)
            _log.info("%s%s", text, f", {timedelta(seconds=seconds)} left" if seconds else "")

    def close(self) -> None:
        """Leave the bar as it is."""
        self.bar.close()


def _short(perplexity: float, num_decimals: int) -> str:
    return f"{perplexity:.{num_decimals}f}" if perplexity < 1e6 else f"{perplexity:.3g}"


def open_loggers(config: Config, state: TrainingState, *, progress: bool) -> list[Logger]:
    """The loggers of a run that starts, or continues from `state`."""
    loggers: list[Logger] = []
    if progress:
        epoch_steps = state.batches.per_epoch / config.train.accumulate
        loggers.append(ProgressBar(state.step, state.clock, epoch_steps))
    if wandb_mode(config) != "disabled":
        loggers.append(WandbLogger(config))
    return [MetricsFile(config.run_path / "metrics.csv", state.step), *loggers]
