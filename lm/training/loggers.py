"""Loggers: where the figures of a run are written while it trains.

Not by Fabric's CSV logger, which deletes the file that a continued run appends to.
"""

import csv
import io
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast, get_args

from tqdm import tqdm

from data_prep.errors import UserError
from data_prep.storage import write_atomically, writing
from lm.config import Config, to_dict
from lm.training.clock import Clock
from lm.training.metrics import Metrics, read_metrics
from lm.training.state import TrainingState
from lm.training.validation import K

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

    def close(self, exit_code: int = 0) -> None:
        """Called once, at the end of the run (0), an error or a signal, with its exit code."""


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
    """The mode of Weights & Biases: `log.wandb`, unless that is on and `WANDB_MODE` is set."""
    mode: Any = os.environ.get("WANDB_MODE")
    if config.log.wandb == "disabled" or not mode:
        return config.log.wandb
    if mode not in get_args(WandbMode):
        raise UserError(f"WANDB_MODE={mode}: expected disabled, offline or online")
    return cast(WandbMode, mode)


class WandbLogger(Logger):
    """Sends each line to Weights & Biases; a continued run continues the same wandb run."""

    def __init__(self, config: Config) -> None:
        import wandb  # takes a second

        id_file = config.run_path / "wandb-id"
        given = id_file.read_text(errors="replace") if id_file.exists() else uuid.uuid4().hex[:8]
        if not re.fullmatch(r"[\w .-]+", run_id := given.strip(), re.ASCII):
            problem = f"expected the id of a wandb run, got {run_id!r:.40}"
            raise UserError(f"{id_file}: {problem}: delete the file to begin a new wandb run")
        write_atomically(id_file, lambda file: file.write(run_id.encode()))
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
        self.run.define_metric("*", step_metric="step")

    def log(self, metrics: Metrics) -> None:
        """Send the figures that there are."""
        figures = {name: value for name, value in asdict(metrics).items() if value is not None}
        # Of a run that continues, its server drops what has a step that it has had.
        self.run.log(figures, step=None if self.run.resumed else metrics.step)

    def close(self, exit_code: int = 0) -> None:
        """Finish the wandb run, as failed unless the code is 0."""
        self.run.finish(exit_code)


def check_wandb(config: Config) -> None:
    """Check that wandb can be used online, if it is; in a terminal, wandb asks for a key."""
    if (mode := wandb_mode(config)) != config.log.wandb:
        _log.info("log.wandb: %s, as WANDB_MODE says", mode)
    if mode in ("online", "shared"):
        import wandb  # takes a second

        try:
            wandb.login()
        except wandb.Error as error:
            hint = "run `wandb login`, set WANDB_API_KEY, or use --log.wandb=offline"
            raise UserError(f"log.wandb: {mode}: {error}: {hint}") from error


class ProgressBar(Logger):
    """Steps, remaining time and figures on stderr; steps of how many, unless the time ends a run.

    Without a terminal these are lines of text: for each validation, for the last step, and for
    lines of `metrics.csv` that are at least `SECONDS_BETWEEN_LINES` apart. Not `shown`, they are
    those of validations only.
    """

    def __init__(self, step: int, clock: Clock, *, shown: bool = True) -> None:
        self._clock, self._valid, self._announced = clock, "", not shown
        self._shown, disable = shown, None if shown else True
        self._total = clock.num_steps if clock.limit is None else None
        left = self._format(step)
        self.bar = tqdm(
            total=self._total, initial=step, desc="train", bar_format=left, disable=disable
        )
        self._next_line = time.monotonic()

    def step(self, step: int) -> None:
        """Show the step and the time that is left; once it is known, as a line of the log."""
        if not self.bar.disable:
            self.bar.bar_format = self._format(step)
            self.bar.update(step - self.bar.n)
        left, pace = self._clock.seconds_left(step), self._clock.step_seconds
        if left is not None and not self._announced:
            self._announced = True
            self.bar.clear()
            _log.info("about %s left, %.2g s a step", timedelta(seconds=round(left)), pace)

    def _format(self, step: int) -> str:
        left = self._clock.seconds_left(step)
        shown = "?" if left is None else str(timedelta(seconds=round(left)))
        return f"{{desc}} {{n_fmt}}/{{total_fmt}} [{{elapsed}}<{shown}]{{postfix}}"

    def log(self, metrics: Metrics) -> None:
        """Show the figures."""
        valid = metrics.valid_perplexity
        if valid is not None:
            self._valid = f"valid ppl {_short(valid, 2)}, "
        if metrics.valid_ndcg is not None:
            self._valid += f"NDCG@{K} {metrics.valid_ndcg:.4f}, "
        figures = f"ppl {_short(metrics.train_perplexity, 1)}"
        figures += f", {metrics.tokens_per_second:.0f} tokens/s"
        self.bar.set_postfix_str(self._valid + figures, refresh=False)
        is_last = metrics.step == self._clock.num_steps or self._clock.share == 1
        is_due = self._shown and (is_last or time.monotonic() >= self._next_line)
        is_due = is_due or valid is not None
        if self.bar.disable and is_due:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            of = "" if self._total is None else f" of {self._total}"
            text = f"step {metrics.step}{of}: epoch {metrics.epoch:.2f}, "
            text += (self._valid if valid is not None else "") + figures
            seconds = round(self._clock.seconds_left(metrics.step) or 0)
            _log.info("%s%s", text, f", {timedelta(seconds=seconds)} left" if seconds else "")

    def close(self, exit_code: int = 0) -> None:
        """Leave the bar as it is."""
        self.bar.close()


def _short(perplexity: float, num_decimals: int) -> str:
    return f"{perplexity:.{num_decimals}f}" if perplexity < 1e6 else f"{perplexity:.3g}"


@contextmanager
def open_loggers(state: TrainingState, *, progress: bool) -> Iterator[list[Logger]]:
    """The loggers of a run that starts or continues, of its first process; closed at the end."""
    config, loggers = state.config, list[Logger]()
    if state.fabric.is_global_zero:
        after_step = state.step - state.progress.awaits_validation  # whose line is written again
        loggers.append(MetricsFile(config.run_path / "metrics.csv", after_step))
        loggers.append(ProgressBar(state.step, state.clock, shown=progress))
        if wandb_mode(config) != "disabled":
            loggers.append(WandbLogger(config))
    exit_code = 0
    try:
        yield loggers
    except BaseException as error:
        exit_code = getattr(error, "exit_code", None) or getattr(error, "code", None) or 1
        raise
    finally:
        for logger in loggers:
            logger.close(exit_code)
