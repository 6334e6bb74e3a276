"""What happens between training steps: validation, checkpoints, metrics, progress bar, wandb,
interruptions.
"""

import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from tqdm import tqdm

from lm.checkpoint import FORMAT_VERSION, Description, save_model
from lm.config import Config, to_dict
from lm.evaluation import TextCounts, evaluate
from lm.metrics import Metrics, MetricsFile
from lm.training_module import TrainingModule


class Interrupted(Exception):
    """A signal ended the training after its checkpoint was written.

    Attributes:
        signal_number: which signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


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
        self._logged_seconds = 0.0
        self._signal: int | None = None
        self._handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Open the metrics and take over the signals."""
        assert isinstance(module, TrainingModule)
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            for observer in self.observers:
                observer.start(module)
            self.metrics = MetricsFile(self.folder / "metrics.csv", trainer.global_step)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._on_signal)
        self._logged_seconds = module.progress.seconds
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
        step = trainer.global_step
        validates = self._is_validation_due(module, step)
        logs = validates or module.finished or step % self.config.log.every_steps == 0
        saves = validates or module.finished or self._signal is not None
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
        if self._signal is not None:
            raise Interrupted(self._signal)

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        """Give the signals back, however the training ended."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        for observer in self.observers:
            observer.stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number

    def _is_validation_due(self, module: TrainingModule, step: int) -> bool:
        if self.validation is None:
            return False
        every = self.config.train.val_every_steps
        due = (
            step % every == 0
            if every
            else module.progress.batches_done % module.batches.per_epoch == 0
        )
        return due or module.finished

    def _validate(self, module: TrainingModule) -> bool:
        """Measure the validation perplexity; True if it is the best so far."""
        assert self.validation is not None
        result = evaluate(
            module.model,
            self.validation.tokens,
            self.validation.counts,
            eos_id=self.vocabulary.eos_id,
            unk_id=self.vocabulary.unk_id,
            context=self.config.train.seq_len,
        )
        self.valid_perplexity = result.perplexity
        improved = result.perplexity < module.progress.best
        module.progress.stalls += not improved
        module.progress.best = min(result.perplexity, module.progress.best)
        return improved

    def _log(self, module: TrainingModule, step: int, validated: bool) -> None:
        progress = module.progress
        seconds = progress.seconds - self._logged_seconds
        line = Metrics(
            step=step,
            epoch=round(progress.batches_done / module.batches.per_epoch, 4),
            tokens=progress.tokens_done,
            learning_rate=module.trainer.optimizers[0].param_groups[0]["lr"],
            train_perplexity=math.exp(min(progress.nll / max(progress.num_tokens, 1), 700)),
            valid_perplexity=self.valid_perplexity if validated else None,
            seconds=round(progress.seconds, 3),
            tokens_per_second=round(
                progress.num_tokens * module.batches.world_size / max(seconds, 1e-9)
            ),
        )
        progress.nll, progress.num_tokens = 0.0, 0
        self._logged_seconds = progress.seconds
        if self.metrics is not None:
            self.metrics.append(line)
            for observer in self.observers:
                observer.line(line)

    def _save(self, trainer: pl.Trainer, module: TrainingModule, improved: bool) -> None:
        last = self.folder / "checkpoints" / "last.ckpt"
        trainer.save_checkpoint(last)
        keeps = improved or (self.validation is None and module.finished)
        if not keeps or not trainer.is_global_zero:
            return
        link = last.with_name("best.ckpt.tmp")
        link.unlink(missing_ok=True)
        os.link(last, link)
        os.replace(link, last.with_name("best.ckpt"))
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
    """One line on stderr: steps, time left, perplexities, tokens per second."""

    def __init__(self) -> None:
        self.bar: tqdm[Any] | None = None
        self._figures: dict[str, str] = {}

    def start(self, module: TrainingModule) -> None:
        """Show the bar."""
        self.bar = tqdm(
            total=module.total_steps, initial=module.global_step, desc="train", unit="step"
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
