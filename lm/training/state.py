"""The state of a training run: its parts, validation, and what `contents` saves and restores."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from data_prep.errors import CheckpointError, DataError, NotFiniteError
from data_prep.storage import sync
from lm.evaluation import evaluate_prepared
from lm.figures import MAX_NATS, perplexity
from lm.model.build import build_model, without_weights
from lm.model.files import Description, save_model
from lm.model.input_pieces import PIECES
from lm.model.language_model import LanguageModel
from lm.model.reader import evaluation_mode
from lm.run import Run
from lm.training.batches import Batch, Batches
from lm.training.carried_loss import CarriedLoss
from lm.training.checkpoint import (
    BEST,
    LAST,
    keep_newest,
    numbered_name,
    save_checkpoint,
    what_remains,
)
from lm.training.clock import Clock
from lm.training.contents import gather_contents, load_weights, restore
from lm.training.cuda_graph import InputBuffers, StepGraph
from lm.training.metrics import Metrics
from lm.training.optimizers import build_optimizer, learning_rate
from lm.training.progress import Progress
from lm.training.validation import Validation, rank

_log = logging.getLogger(__name__)


class TrainingState:
    """Model, optimizer, carried state, random numbers and progress of a run, of one process.

    It continues from a checkpoint `saved`, or else starts by `seed`, with the weights of the
    checkpoint if it has weights alone. Fabric is launched.
    """

    def __init__(
        self, fabric: Fabric, run: Run, batches: Batches, saved: dict[str, Any] | None
    ) -> None:
        self.fabric, self.run, self.batches, self.config = fabric, run, batches, run.config
        train, self.word_table, self.progress = run.config.train, run.word_table, Progress()
        continues = saved is not None and "optimizer" in saved
        if saved is not None and continues:
            num_saved, num_devices = len(saved["devices"]), fabric.world_size
            if num_saved != num_devices and train.strategy != "shard_output":
                raise CheckpointError(
                    f"the checkpoint was written by {num_saved} devices,"
                    f" this continuation has {num_devices} (train.devices)"
                )
            if self.word_table.row_wise and "optimizers" not in saved["optimizer"]:
                # `auto` meant dense gradients of a table of this size
                self.word_table = replace(self.word_table, row_wise=False, optimizer=None)
        if saved is not None and saved["text_sha256"] != run.prepared.splits["train"].sha256:
            raise DataError("the training split was prepared again, from another text")
        self.model = self._build_model(saved)
        self.carried_loss = CarriedLoss(self.model, fabric.device)
        # DDP neither averages these gradients nor compares the tables.
        ignored = [f"model.{name}" for name in self.model.dealt_tables]
        ignored += [name for name, _ in self.carried_loss.named_buffers()] if ignored else []
        vars(self.carried_loss)["_ddp_params_and_buffers_to_ignore"] = ignored
        self.loss: Any = fabric.setup_module(self.carried_loss)  # a call of it is one of that
        # With fp16, a fused optimizer would unscale gradients after they have been clipped.
        fused = train.precision != "16-mixed"
        optimizer = build_optimizer(self.model, run.config.optim, self.word_table, fused=fused)
        self.optimizer: Any = fabric.setup_optimizers(optimizer)
        self.parameters = list(self.model.parameters())
        if saved is not None and continues:
            self.progress = Progress(**saved["progress"])
            restore(saved, fabric, self.carried_loss, self.optimizer, run.config.seed)
        self.num_tokens = 0  # of all devices, in their sums `CarriedLoss.nll`
        self.num_nonfinite = torch.zeros_like(self.carried_loss.nll)  # steps since it was read
        self.graph = StepGraph(fabric, train, optimizer)
        shape = batches.seq_len, batches.batch_size // batches.world_size
        self.inputs = InputBuffers(train.accumulate, shape, fabric.device)
        valid = run.prepared.splits.get("valid")
        num_tokens = None if valid is None else valid.tokens
        self.clock = Clock(fabric, self.progress, train, batches, num_tokens)

    def _build_model(self, saved: dict[str, Any] | None) -> LanguageModel:
        """The model with its first weights, or those of a checkpoint."""
        run, config, fabric = self.run, self.config, self.fabric
        sections = config.model, config.output, self.word_table, run.tree, config.train.seq_len
        parts: dict[str, Any] = {
            "input_tree": run.input_tree,
            "counts": torch.tensor(run.prepared.counts()),
            "pieces": saved["model"][PIECES] if saved and PIECES in saved["model"] else run.pieces,
        }
        if config.train.strategy == "shard_output":
            parts["placement"] = "class" if config.train.shard_by == "class" else "word"
        torch.manual_seed(config.seed)
        device = without_weights() if saved else torch.device("cpu")  # a checkpoint has the weights
        with fabric.strategy.precision.module_init_context(), device:
            model = build_model(*sections, **parts)
        if fabric.global_rank:  # the same weights on every device, but different dropout
            torch.manual_seed(config.seed + fabric.global_rank)
        if saved is not None:
            load_weights(model, saved["model"], config.train.precision)
        return model

    @property
    def scales_loss(self) -> bool:
        """Whether the precision is fp16, whose scale is found by gradients that are not finite."""
        return self.config.train.precision == "16-mixed"

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.batches.steps(self.progress.batches_done)

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, or the time or the patience is spent."""
        if self.clock.share == 1 or self.progress.is_patience_spent(self.config.train.patience):
            return True
        return self.batches.num_steps is not None and self.step >= self.batches.num_steps

    @property
    def is_validation_due(self) -> bool:
        """Every `train.val_every_steps`, by default after each epoch, and after the last step."""
        is_due = self.step % self.batches.between_validations == 0
        return is_due or self.is_finished

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(
            self.config.optim,
            step=self.step,
            total_steps=self.batches.num_steps,
            epoch=self.progress.batches_done // self.batches.per_epoch,
            num_bad_validations=self.progress.num_bad_validations,
            time_share=self.clock.share,
        )

    def next_batches(self) -> tuple[list[Batch], bool]:
        """The batches of the next step, in `inputs`, and whether a CUDA graph can replay it.

        Each weighs as much as it has targets, so that the loss is the mean over all targets. A
        graph takes batches of full length with as many targets each, of which at most the first one
        resets the carried state. They count as done from now on.
        """
        model, per_step = self.model, self.batches.per_step
        batches = [self.batches[k] for k in self.batches.of_step(self.progress.batches_done)]
        self.progress.batches_done += len(batches)
        num_tokens = sum(batch.num_tokens for batch in batches)
        shares = [batch.num_tokens / num_tokens for batch in batches]
        batches = [b._replace(weight=b.weight * p) for b, p in zip(batches, shares, strict=True)]
        self.progress.tokens_done += num_tokens
        self.num_tokens += num_tokens
        is_graphable = all(len(batch.targets) == self.batches.seq_len for batch in batches)
        is_graphable &= shares == [1 / per_step] * per_step
        is_graphable &= not model.backbone.carries_state or all(
            each.continues for each in batches[1:]
        )
        batches, carried = self.inputs.load(batches), self.carried_loss.carried
        if is_graphable and self.graph.records and carried is not None:
            if not batches[0].continues:
                torch._foreach_zero_(carried)
            batches[0] = batches[0]._replace(continues=True)
        return batches, is_graphable

    def gather_losses(self) -> None:
        """Add the losses since the last call, of all devices, to the progress."""
        sums = torch.stack([self.carried_loss.nll, self.num_nonfinite])
        self.carried_loss.nll.zero_()
        self.num_nonfinite.zero_()
        self.fabric.all_reduce(sums, reduce_op="sum")
        nll, num_nonfinite = sums.tolist()
        if num_nonfinite:
            raise self._not_finite("the gradient was not finite before", "")
        if self.num_tokens:
            self._check_loss(nll / self.num_tokens)
        self.progress.nll += nll
        self.progress.num_tokens += self.num_tokens
        self.num_tokens = 0

    def validate(self, check: Callable[[], None]) -> Validation:
        """Figures of the first process, for all; `check` is called after a batch, and may raise."""
        prepared = self.run.prepared
        seq_len = self.config.train.seq_len
        result = evaluate_prepared(self.model, prepared, "valid", seq_len, check=check)
        self._check_loss(result.nll_nats / result.tokens)
        found = Validation(result.perplexity)
        if self.config.ranks_items:
            sequences = prepared.sequences("valid", items_alone=True)
            special, exclude = (prepared.eos_id, prepared.unk_id), prepared.proposed_exclusion
            with evaluation_mode(self.model):
                figures = rank(self.model, sequences, special, exclude, check)
            found = Validation(result.perplexity, *figures)
        return self.fabric.broadcast(found) if self.fabric.world_size > 1 else found

    def _check_loss(self, loss: float) -> None:
        if not loss < MAX_NATS:
            raise self._not_finite(f"the loss became {loss:.4g} nats per token before", "")

    def may_update(self, norm: Tensor) -> bool:
        """Whether a step updates: it is skipped if its gradient is not finite, by its norm.

        On a GPU the host does not wait for the answer, unless `train.skip_nonfinite_steps` is set:
        such steps are counted, and it is True. The count is read with the losses.

        Raises:
            NotFiniteError: if no more steps may be skipped.
        """
        num_allowed, progress = self.config.train.skip_nonfinite_steps, self.progress
        on_gpu = self.fabric.device.type == "cuda" or self.graph.records
        if on_gpu and not num_allowed:
            self.num_nonfinite += ~norm.isfinite()
            return True
        if norm.isfinite():
            return True
        epoch, batch = divmod(progress.batches_done - 1, self.batches.per_epoch)
        where = f" (batch {batch + 1} of epoch {epoch + 1})"
        if progress.skipped_steps >= num_allowed:
            raise self._not_finite("the gradient is not finite in", where)
        progress.skipped_steps += 1
        _log.warning("step %d is skipped: its gradient is not finite%s", self.step, where)
        return False

    def _not_finite(self, problem: str, where: str) -> NotFiniteError:
        return NotFiniteError(
            f"{problem} step {self.step}{where};"
            f" {what_remains(self.run.folder / 'checkpoints' / LAST)}"
            " (a lower optim.lr or optim.clip may help)"
        )

    def take_metrics(self, valid: Validation | None) -> Metrics:
        """The figures since the last call."""
        progress, prepared = self.progress, self.run.prepared
        seconds = progress.seconds - progress.logged_seconds
        num_tokens = progress.tokens_done - progress.logged_tokens
        metrics = Metrics(
            step=self.step,
            epoch=round(progress.batches_done / self.batches.per_epoch, 4),
            tokens=progress.tokens_done,
            learning_rate=progress.learning_rate,
            train_perplexity=perplexity(progress.nll, progress.num_tokens),
            valid_perplexity=None if valid is None else valid.perplexity,
            skipped_steps=progress.skipped_steps,
            seconds=round(progress.seconds, 3),
            tokens_per_second=float(round(num_tokens / max(seconds, 1e-9))),
            valid_hit_rate=None if valid is None else valid.hit_rate,
            valid_ndcg=None if valid is None else valid.ndcg,
        )
        averages = prepared.is_independent and "valid" in prepared.splits
        if valid is not None or not averages:
            progress.nll, progress.num_tokens = 0.0, 0
        progress.logged_seconds, progress.logged_tokens = progress.seconds, progress.tokens_done
        return metrics

    def save(self, valid: Validation | None, *, is_best: bool) -> None:
        """Write the checkpoint, and the model if it is the best so far; all processes call this.

        `last.ckpt` is written last: a run that continues from the previous one repeats the rest.
        """
        prepared, folder = self.run.prepared, self.run.folder
        parts = self.fabric, self.carried_loss, self.optimizer.optimizer, self.progress
        checkpoint = gather_contents(*parts) | {"text_sha256": prepared.splits["train"].sha256}
        if self.fabric.is_global_zero:
            if is_best:
                description = Description(
                    model=self.config.model,
                    output=self.config.output,
                    word_table=self.word_table,
                    context=self.config.train.seq_len,
                    eos_id=prepared.eos_id,
                    unk_id=prepared.unk_id,
                    tokenizer_sha256=prepared.tokenizer_sha256,
                    step=self.step,
                    valid_perplexity=None if valid is None else valid.perplexity,
                    valid_ndcg=None if valid is None else valid.ndcg,
                )
                save_model(folder, checkpoint["model"], description)
            sync(folder / "metrics.csv")  # whose lines a continuation does not repeat
            num_kept, folder = self.config.train.keep_checkpoints, folder / "checkpoints"
            names = [BEST] * is_best + [numbered_name(self.step)] * (num_kept > 0) + [LAST]
            save_checkpoint(checkpoint, *(folder / name for name in names))
            keep_newest(folder, num_kept, self.step)
        self.fabric.barrier()  # no process may exit while the first one writes
