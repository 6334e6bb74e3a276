"""The training loop, from a configuration to the folder of a trained run.

One step sets the learning rate, runs forward and backward on every accumulated batch, clips the
gradients and updates the parameters. On a GPU the device's part of it, `update`, is recorded as a
CUDA graph. After the step, what is due happens in this order: validation, logging, saving, stopping
on a signal. A signal ends a validation too, which is then the first thing that a continuation does.
"""

import logging
import math
import signal
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

from data_prep.errors import UserError
from data_prep.storage import locked, make_folder
from data_prep.tokenizer.serialization import TOKENIZER, verify_tokenizer
from lm.config import Config, Criterion
from lm.device import keep_freed_memory, peak_memory
from lm.model.files import DESCRIPTION, read_description
from lm.run import Run
from lm.training.batches import Batch, Batches, make_batches
from lm.training.checkpoint import load_checkpoint, load_newest
from lm.training.devices import build_fabric, launched
from lm.training.loggers import Logger, open_loggers
from lm.training.memory_estimate import check_memory
from lm.training.optimizers import clip_gradients, set_learning_rate
from lm.training.progress import Progress
from lm.training.run_folder import LOCK, checkpoint_to_resume, report_new_length, write_run_metadata
from lm.training.signals import Interrupted, Stopped, StopSignals
from lm.training.state import TrainingState
from lm.training.validation import Validation, check_validation

_log = logging.getLogger(__name__)
_BF16 = (
    "train.precision: bf16-true: an update of less than about 1/500 of a weight is lost, as with a"
    " low optim.lr; train.precision: bf16-mixed has weights in fp32"
)


def train(
    run: Run,
    *,
    resume: str | None = None,
    progress: bool = True,
    stop_after_validation: bool = False,
) -> int | None:
    """Train a run on its prepared data.

    Args:
        run: the run, opened by its configuration.
        resume: `auto` continues the newest checkpoint of the run that is not damaged, or starts a
            new run if there is none; a path continues that checkpoint and no other; None starts a
            new run in an empty folder.
        progress: whether to show a progress bar on stderr.
        stop_after_validation: whether to end the run after its first validation, whose figures are
            then the last line of `metrics.csv`; without a validation split it has no effect.

    Returns:
        The number of steps of the run in its first process, which writes its files, else None.

    Raises:
        UserError: if the folder already contains a run, the checkpoint does not fit the
            configuration, the memory does not suffice, the loss diverged, or another process of
            the run has ended.
        Interrupted: if one of `SIGNALS` ended the run, after its checkpoint was written.
    """
    config, folder = run.config, run.folder
    fabric = build_fabric(run)
    is_main = fabric.is_global_zero
    check_validation(config, run.prepared)
    check_memory(run)  # which builds the tree
    batches = make_batches(config, run.prepared, fabric.global_rank, fabric.world_size)
    if is_main:
        make_folder(folder)
        if config.train.precision == "bf16-true":
            _log.warning(_BF16)
    busy = f"{folder}: another process trains this run"
    with locked(folder / LOCK, busy=busy) if is_main else nullcontext():
        checkpoint, saved = None, None
        if is_main or resume:
            checkpoint = checkpoint_to_resume(config, resume)
        if checkpoint is not None:
            if (folder / TOKENIZER).exists():
                verify_tokenizer(folder, run.prepared.tokenizer_sha256)
            if resume == "auto":
                checkpoint, saved = load_newest(checkpoint)
            else:
                saved = load_checkpoint(checkpoint)
        done = Progress() if saved is None else Progress(**saved["progress"])
        ended = _ended(config, batches, done)
        if checkpoint is None or not ended:
            if checkpoint is not None and done.batches_done:
                _log.info("continuing from %s", checkpoint)
            with StopSignals() as signals, launched(fabric, run):
                state = TrainingState(fabric, run, batches, saved)
                done = state.progress
                if is_main:
                    if saved is not None:
                        report_new_length(state)
                    write_run_metadata(run)
                with open_loggers(state, progress=progress) as loggers:
                    keep_freed_memory()  # of the steps, not of the initialization
                    _fit(state, loggers, signals, stop_after_validation)
            if is_main and (peak := peak_memory()):
                _log.info("most memory of the process: %s", peak)
        elif checkpoint.resolve().parent.parent == folder.resolve():
            _log.info("%s: %s", folder, ended)
        else:
            raise UserError(f"{checkpoint}: {ended}")
    return batches.steps(done.batches_done) if is_main else None


def _ended(config: Config, batches: Batches, progress: Progress) -> str:
    """Why a run does not continue: it has all steps, or has spent the patience or the time."""
    num_steps, minutes = batches.num_steps, config.train.max_minutes
    if progress.awaits_validation or progress.judged_batches < progress.batches_done:
        return ""  # at the end, for what it lacks
    if num_steps is not None and batches.steps(progress.batches_done) >= num_steps:
        return "training is already complete"
    if progress.is_patience_spent(config.train.patience):
        return "training is already complete: train.patience is spent"
    if minutes and progress.elapsed_seconds >= 60 * minutes:
        return f"train.max_minutes: {minutes:g} is spent: a larger one continues the training"
    return ""


def _fit(
    state: TrainingState,
    loggers: Sequence[Logger],
    signals: StopSignals,
    stop_after_validation: bool,
) -> None:
    """Train from the current state to the last step, or until the time is spent."""
    train, log, folder, clock = state.config.train, state.config.log, state.run.folder, state.clock
    validates_at_all = "valid" in state.run.prepared.splits
    progress, criterion = state.progress, state.config.criterion
    kept = _score_of_model(folder, criterion)
    _start(state)
    while progress.awaits_validation or not state.is_finished:
        if not progress.awaits_validation:
            train_step(state)
            clock.step()
        signal_number = signals.agreed()
        validates = validates_at_all and (progress.awaits_validation or state.is_validation_due)
        logs = validates or state.is_finished or state.step % log.every_steps == 0
        saves = validates or state.is_finished or signal_number is not None
        if train.checkpoint_every_steps is not None:
            saves = saves or state.step % train.checkpoint_every_steps == 0
        if logs or saves:
            state.gather_losses()
            clock.pause()
        valid = None
        if validates:
            with suppress(Stopped):
                valid = state.validate(signals.check)
            signal_number = signals.agreed()
        progress.awaits_validation = validates and valid is None
        is_best: bool = not validates_at_all and state.is_finished
        if valid is not None:
            # A continuation in a new folder has no model yet, whatever the best one was before.
            score = valid.score(criterion)
            is_best = progress.record_validation(valid, criterion) or score > kept
            kept = max(score, kept)
        if valid is not None or is_best:
            progress.judged_batches = progress.batches_done
        if logs and (valid or (progress.num_tokens and not progress.awaits_validation)):
            metrics = state.take_metrics(valid)
            for logger in loggers:
                logger.log(metrics)
        if saves:
            state.save(valid, is_best=is_best)
        if logs or saves:
            clock.resume(validated=valid is not None)
        for logger in loggers:
            logger.step(state.step)
        if signal_number is not None:
            name = signal.Signals(signal_number).name
            _log.info("stopped by %s at step %d: continue with --resume auto", name, state.step)
            raise Interrupted(signal_number)
        if validates and stop_after_validation:
            return
    if progress.is_patience_spent(train.patience):
        text = "training ends at step %d: train.patience: the last %d validations have not improved"
        _log.info(text, state.step, progress.num_since_best)


def _start(state: TrainingState) -> None:
    """Start the clock; a run that is at its end may lack its last validation."""
    progress, clock = state.progress, state.clock
    if "valid" not in state.run.prepared.splits:
        _warn_of_no_validation(state.config)
    clock.start()
    if state.is_finished and progress.judged_batches < progress.batches_done:
        progress.awaits_validation = True  # a signal has stopped it at what is now its end
    elif state.is_finished and not progress.awaits_validation:  # else `_ended`
        text = "%s: train.max_minutes: %g leaves no time for a step: a validation takes %.0f s"
        minutes, seconds = state.config.train.max_minutes, clock.validation_seconds
        _log.warning(text, state.run.folder, minutes, seconds)


def _score_of_model(folder: Path, criterion: Criterion) -> float:
    """The score of the model that is in the folder of a run, -∞ without one."""
    if (folder / DESCRIPTION).exists() and (found := read_description(folder)).valid_perplexity:
        return Validation(found.valid_perplexity, ndcg=found.valid_ndcg).score(criterion)
    return -math.inf


def _warn_of_no_validation(config: Config) -> None:
    """Warn of keys that have no effect without a validation split."""
    plateau = "plateau" if config.optim.schedule == "plateau" else None
    values = {"optim.schedule": plateau, "train.keep": config.train.keep}
    for key, value in (values | {"train.patience": config.train.patience}).items():
        if value is not None:
            _log.warning("%s: %s has no effect: there is no validation split", key, value)


def train_step(state: TrainingState) -> None:
    """Train on `train.accumulate` batches and update the parameters.

    On a GPU, `update` is recorded once and then launched as a whole, except for unusual batches.
    """
    state.progress.learning_rate = state.learning_rate
    set_learning_rate(state.optimizer, state.progress.learning_rate)
    batches, is_graphable = state.next_batches()
    state.graph.run(partial(update, state, batches), is_graphable=is_graphable)


def update(state: TrainingState, batches: Sequence[Batch]) -> None:
    """The device's part of a step; where it is recorded, the host reads nothing of it."""
    fabric, optimizer, clip = state.fabric, state.optimizer, state.config.optim.clip
    carried_loss, may_update = state.carried_loss, True
    nll = carried_loss.nll.clone()  # before the step, as the state, unless an epoch begins in it
    carried = carried_loss.carried if all(batch.continues for batch in batches) else None
    for number, batch in enumerate(batches, start=1):
        with fabric.no_backward_sync(state.loss, enabled=number < len(batches)):
            fabric.backward(state.loss(batch))
    if clip or not state.scales_loss:
        # Not `fabric.clip_gradients`, which sums the norms in the order of the optimizer's groups:
        # the result must not depend on how parameters are grouped.
        fabric.strategy.precision.unscale_gradients(optimizer.optimizer)
        norm = clip_gradients(state.model, state.parameters, clip)
        may_update = state.scales_loss or state.may_update(norm)
    if may_update:
        optimizer.step()
    else:
        carried_loss.nll.copy_(nll)
        carried_loss.carried = carried
        num_skipped = sum(batch.num_tokens for batch in batches)
        state.num_tokens -= num_skipped
        state.progress.tokens_done -= num_skipped
    for parameter in state.parameters:
        parameter.grad = None
    carried_loss.keep()
