"""What happens between training steps: validation, checkpoints, metrics, progress bar, wandb,
interruptions.
"""

import logging
import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from tqdm import tqdm

from lm.config import Config, to_dict
from lm.evaluation import TextCounts, evaluate
from lm.training.checkpoint import FORMAT_VERSION, Description, save_model
from lm.training.metrics import Metrics, MetricsFile
from lm.training.state import TrainingModule, diverged

_log = logging.getLogger(__name__)


class Interrupted(SystemExit):
    """A signal ended the training after its checkpoint was written; the exit code tells which."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)


@dataclass(frozen=True, kw_only=True)
class ValidationText:
    """The validation split and what evaluating it takes."""

    tokens: NDArray[Any]
    counts: TextCounts


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a model must know of the tokenizer it belongs to."""

    eos_id: int
    unk_id: int | None
    tokenizer_sha256: str


class RunKeeper(Callback):
    """Validates, logs, saves, and stops on SIGTERM and Ctrl-C; in this order, after each optimizer
    step.

    Args:
        config: of the run.
        validation: None if there is no validation split; then the last weights are the best.
        vocabulary: what goes into model.json.
        observers: told of each step and each line of metrics.csv.
    """

    def __init__(
        self,
        config: Config,
        validation: ValidationText | None,
        vocabulary: Vocabulary,
        observers: Sequence["Observer"] = (),
    ) -> None:
        self.config = config
        self.folder = config.run_path
        self.validation = validation
        self.vocabulary = vocabulary
        self.observers = observers
        self.metrics: MetricsFile | None = None
        self._clock = 0.0
        self._signal: int | None = None
        self._processes: Any = None

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Start the observers and open the metrics."""
        assert isinstance(module, TrainingModule)
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            for observer in self.observers:
                observer.start(module)
            self.metrics = MetricsFile(self.folder / "metrics.csv", trainer.global_step)
        if trainer.world_size > 1:  # on the host, whose signals these are
            self._processes = torch.distributed.new_group(backend="gloo")
        self._listen()  # alone: Lightning's own handler would end the training with exit code 0
        self._clock = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Do what is due after this step.

        Raises:
            Interrupted: once a signal has come and the checkpoint is written.
        """
        assert isinstance(module, TrainingModule)
        progress, train = module.progress, self.config.train
        if progress.batches_done % train.accumulate and not module.finished:
            return
        step, stopped_by = trainer.global_step, self._agreed_signal()
        validates = self._is_validation_due(module, step)
        logs = validates or module.finished or step % self.config.log.every_steps == 0
        saves = validates or module.finished or stopped_by is not None
        if train.checkpoint_every_steps is not None:
            saves = saves or step % train.checkpoint_every_steps == 0
        if logs or saves:
            module.gather_losses()
            progress.seconds += time.perf_counter() - self._clock
        improved = validates and self._validate(module)
        if logs:
            self._log(module, step, validates)
        if saves:
            self._save(trainer, module, improved)
        if logs or saves:
            self._clock = time.perf_counter()
        for observer in self.observers if trainer.is_global_zero else ():
            observer.step(module)
        if stopped_by is not None:
            name = signal.Signals(stopped_by).name
            _log.info("stopped by %s at step %d: continue with --resume auto", name, step)
            raise Interrupted(stopped_by)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Stop the observers."""
        self._end()

    def on_exception(
        self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Stop the observers."""
        self._end()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over the signals meanwhile.

        Raises:
            Interrupted: if Lightning noticed one of them first.
        """
        handlers = self._listen()
        try:
            yield
        except SystemExit as error:
            if self._signal is None or isinstance(error, Interrupted):
                raise
            raise Interrupted(self._signal) from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _listen(self) -> dict[int, Any]:
        """Take over the signals; returns what handled them before."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        numbers = (signal.SIGTERM, signal.SIGINT)
        return {number: signal.signal(number, self._on_signal) for number in numbers}

    def _end(self) -> None:
        for observer in self.observers:
            observer.stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:  # Lightning would make exit code 1 of a KeyboardInterrupt
            raise Interrupted(number)
        self._signal = number

    def _agreed_signal(self) -> int | None:
        """The signal that has come to any process, so that all write the checkpoint together."""
        if self._processes is None:
            return self._signal
        number = torch.tensor(self._signal or 0)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=self._processes)
        return int(number) or None

    def _is_validation_due(self, module: TrainingModule, step: int) -> bool:
        if self.validation is None:
            return False
        every, done = self.config.train.val_every_steps, module.progress.batches_done
        if every:
            return step % every == 0 or module.finished
        before = done - self.config.train.accumulate
        per_epoch = module.batches.per_epoch
        return done // per_epoch > before // per_epoch or module.finished

    def _validate(self, module: TrainingModule) -> bool:
        """Measure the validation perplexity; True if it is the best so far.

        Raises:
            UserError: if it is not finite; nothing of this step is written yet.
        """
        assert self.validation is not None
        result = evaluate(
            module.model,
            self.validation.tokens,
            self.validation.counts,
            eos_id=self.vocabulary.eos_id,
            unk_id=self.vocabulary.unk_id,
            context=self.config.train.seq_len,
        )
        if not math.isfinite(result.nll_nats):
            raise diverged(result.nll_nats, module.global_step)
        self.valid_perplexity = result.perplexity
        improved = result.perplexity < module.progress.best
        module.progress.stalls += not improved
        module.progress.best = min(result.perplexity, module.progress.best)
        return improved

    def _log(self, module: TrainingModule, step: int, validated: bool) -> None:
        progress = module.progress
        seconds = progress.seconds - progress.logged_seconds
        line = Metrics(
            step=step,
            epoch=round(progress.batches_done / module.batches.per_epoch, 4),
            tokens=progress.tokens_done,
            learning_rate=module.trainer.optimizers[0].param_groups[0]["lr"],
            train_perplexity=math.exp(min(progress.nll / max(progress.num_tokens, 1), 700)),
            valid_perplexity=self.valid_perplexity if validated else None,
            seconds=round(progress.seconds, 3),
            tokens_per_second=round(progress.num_tokens / max(seconds, 1e-9)),
        )
        progress.nll, progress.num_tokens = 0.0, 0
        progress.logged_seconds = progress.seconds
        if self.metrics is not None:
            self.metrics.append(line)
            for observer in self.observers:
                observer.line(line)

    def _save(self, trainer: pl.Trainer, module: TrainingModule, improved: bool) -> None:
        """last.ckpt comes last: whoever goes on from the one before it makes the others again."""
        folder = self.folder / "checkpoints"
        keeps = improved or (self.validation is None and module.finished)
        if keeps and trainer.is_global_zero:
            self._save_model(trainer, module)
        trainer.save_checkpoint(folder / ("best.ckpt" if keeps else "last.ckpt"))
        if keeps and trainer.is_global_zero:
            link = folder / "last.ckpt.tmp"
            link.unlink(missing_ok=True)
            os.link(folder / "best.ckpt", link)
            os.replace(link, folder / "last.ckpt")

    def _save_model(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        description = Description(
            format_version=FORMAT_VERSION,
            model=self.config.model,
            output=self.config.output,
            context=self.config.train.seq_len,
            weights_sha256="",
            step=trainer.global_step,
            valid_perplexity=None if self.validation is None else module.progress.best,
            **asdict(self.vocabulary),
        )
        save_model(self.folder, module.model, description)


class Observer:
    """Something that is told how the training goes."""

    def start(self, module: TrainingModule) -> None:
        """The training begins or goes on."""

    def step(self, module: TrainingModule) -> None:
        """A step is done."""

    def line(self, line: Metrics) -> None:
        """A line was written to metrics.csv."""

    def stop(self) -> None:
        """The training ended, whatever the reason."""


class ProgressBar(Observer):
    """Steps, time left, perplexities and tokens per second on stderr: one line that changes, or
    where that is no terminal a line for each validation.
    """

    def __init__(self) -> None:
        self.bar: tqdm[Any] | None = None
        self._figures: dict[str, str] = {}

    def start(self, module: TrainingModule) -> None:
        """Show the bar."""
        self.bar = tqdm(
            total=module.total_steps,
            initial=module.global_step,
            desc="train",
            unit="step",
            disable=None,
        )

    def step(self, module: TrainingModule) -> None:
        """Move on."""
        if self.bar is not None:
            self.bar.update(module.global_step - self.bar.n)

    def line(self, line: Metrics) -> None:
        """Show the figures."""
        self._figures |= {
            "epoch": f"{line.epoch:.2f}",
            "ppl": f"{line.train_perplexity:.1f}",
            "tokens/s": f"{line.tokens_per_second:.0f}",
        }
        if line.valid_perplexity is not None:
            self._figures["valid ppl"] = f"{line.valid_perplexity:.2f}"
        if self.bar is not None:
            self.bar.set_postfix(self._figures, refresh=False)
            if self.bar.disable and line.valid_perplexity is not None:
                figures = ", ".join(f"{name} {value}" for name, value in self._figures.items())
                _log.info("step %d of %d: %s", line.step, self.bar.total, figures)

    def stop(self) -> None:
        """Leave the bar as it stands."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class WandbLog(Observer):
    """The lines of metrics.csv, sent to Weights & Biases; a continuation goes on with the same
    wandb run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.run: Any = None

    def start(self, module: TrainingModule) -> None:
        """Open the run with the resolved configuration."""
        import wandb  # takes a second, and only who wants it needs it

        id_file = self.config.run_path / "wandb-id"
        run_id = id_file.read_text() if id_file.exists() else uuid.uuid4().hex[:8]
        id_file.write_text(run_id)
        self.run = wandb.init(
            project=self.config.log.wandb_project,
            name=self.config.name,
            id=run_id,
            resume="allow",
            dir=self.config.run_path,
            mode=self.config.log.wandb,
            config=to_dict(self.config),
        )

    def line(self, line: Metrics) -> None:
        """Send the figures."""
        figures = {name: value for name, value in asdict(line).items() if value is not None}
        self.run.log(figures, step=line.step)

    def stop(self) -> None:
        """Close the run."""
        if self.run is not None:
            self.run.finish()
            self.run = None
