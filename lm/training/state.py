"""One training step, and all state besides weights and optimizer that a continuation needs."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import lightning.pytorch as pl
import torch
from torch import Tensor

from data_prep.errors import UserError
from lm.config import Config
from lm.model.language_model import LanguageModel
from lm.training.batches import Batch, Batches
from lm.training.optimizers import build_optimizer, learning_rate, table_by_rows


@dataclass
class Progress:
    """Where a training stands.

    Attributes:
        batches_done: batches trained on.
        tokens_done: tokens trained on, over all devices.
        best: lowest validation perplexity so far.
        stalls: validations that did not improve on it.
        nll: nats summed over the tokens since the last line of metrics.csv.
        num_tokens: how many these are.
        seconds: spent training, validation and checkpoints left out.
        logged_seconds: of these, before the last line of metrics.csv.
    """

    batches_done: int = 0
    tokens_done: int = 0
    best: float = math.inf
    stalls: int = 0
    nll: float = 0.0
    num_tokens: int = 0
    seconds: float = 0.0
    logged_seconds: float = 0.0


class TrainingModule(pl.LightningModule):
    """What Lightning trains: the model with its optimizer, carried state, random numbers and
    progress.

    Args:
        config: of the run.
        model: to train.
        batches: what is read.
        total_steps: optimizer steps of the whole training.
        text_sha256: of the training split; a continuation must find the same.
    """

    def __init__(
        self,
        config: Config,
        model: LanguageModel,
        batches: Batches,
        total_steps: int,
        text_sha256: str,
    ) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.batches = batches
        self.total_steps = total_steps
        self.text_sha256 = text_sha256
        self.progress = Progress()
        self._carried: tuple[Tensor, ...] | None = None
        self._pending: list[tuple[Tensor, int]] = []
        self._restored: dict[str, Any] | None = None

    @property
    def total_batches(self) -> int:
        """Batches of the whole training."""
        return self.total_steps * self.config.train.accumulate

    @property
    def finished(self) -> bool:
        """Whether all batches are done."""
        return self.progress.batches_done >= self.total_batches

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        epoch = self.progress.batches_done // self.batches.per_epoch
        return learning_rate(
            self.config.optim, self.global_step, self.total_steps, epoch, self.progress.stalls
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = True
    ) -> Any:
        """Make the tensors the parameters, without a copy.

        Raises:
            UserError: if they are of another model, or its tree is another.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except (RuntimeError, ValueError) as error:
            problem = " ".join(str(error).split())
            raise UserError(f"the checkpoint does not fit the configuration: {problem}") from error

    def cpu(self) -> Self:
        """What Lightning ends with: gradients of rows cannot be moved, and there is nothing to move
        if not all weights were loaded.
        """
        self.zero_grad(set_to_none=True)
        return self if any(part.is_meta for part in self.parameters()) else super().cpu()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the section `optim`."""
        optim, scaled = self.config.optim, self.config.train.precision == "16-mixed"
        table = table_by_rows(self.model, optim)
        return build_optimizer(self.model, optim, table=table, fused=not scaled)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """By the norm of all; Lightning's own refuses fused optimizers even where gradients are
        not scaled.
        """
        if gradient_clip_val:
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def on_train_start(self) -> None:
        """Put restored random numbers in place, after everything that may have drawn some, and the
        restored state of the model where the model is now.
        """
        if self._restored is not None:
            if self._restored["carried"] is not None:
                self._carried = tuple(part.to(self.device) for part in self._restored["carried"])
            torch.set_rng_state(self._restored["cpu"])
            if self._restored["cuda"] is not None:
                torch.cuda.set_rng_state(self._restored["cuda"], self.device)
            self._restored = None

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Set the learning rate of this step."""
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.rate * group["scale"]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean nll of one batch."""
        carried = self._carried if batch.continues else None
        loss, state = self.model.loss(batch.inputs, batch.targets, carried)
        if self.model.backbone.carries_state and state is not None:
            self._carried = self.model.backbone.detach_state(state)
        num_tokens = batch.targets.numel()
        self._pending.append((loss.detach(), num_tokens))
        self.progress.batches_done += 1
        self.progress.tokens_done += num_tokens * self.batches.world_size
        return loss

    def gather_losses(self) -> None:
        """Read the losses of the last batches, of all devices.

        Raises:
            UserError: if one is not finite; whoever asked has written nothing yet.
        """
        if not self._pending:
            return
        nll = sum(float(loss) * num_tokens for loss, num_tokens in self._pending)
        num_tokens = sum(num_tokens for _, num_tokens in self._pending)
        self._pending.clear()
        if self.batches.world_size > 1:
            sums = torch.tensor([nll, num_tokens], dtype=torch.float64, device=self.device)
            torch.distributed.all_reduce(sums)
            nll, num_tokens = float(sums[0]), int(sums[1])
        if not math.isfinite(nll):
            raise diverged(nll / num_tokens, self.global_step)
        self.progress.nll += nll
        self.progress.num_tokens += num_tokens

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning does not know about, of every device."""
        self.gather_losses()
        own = {
            "carried": None if self._carried is None else tuple(s.cpu() for s in self._carried),
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if self.on_gpu else None,
        }
        every: list[Any] = [own]
        if self.batches.world_size > 1:
            every = [None] * self.batches.world_size
            torch.distributed.all_gather_object(every, own)
        checkpoint["sqrtlm"] = {
            "progress": asdict(self.progress),
            "devices": every,
            "text_sha256": self.text_sha256,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take it back.

        Raises:
            UserError: if the checkpoint was written by another number of devices or with parameters
                of another type, or the training split has changed since.
        """
        saved = checkpoint["sqrtlm"]
        if len(saved["devices"]) != self.batches.world_size:
            raise UserError(
                f"the checkpoint is of {len(saved['devices'])} devices,"
                f" this continuation has {self.batches.world_size} (train.devices)"
            )
        if saved["text_sha256"] != self.text_sha256:
            raise UserError("the training split was prepared again since, from another text")
        for name, parameter in self.named_parameters():
            value = checkpoint["state_dict"].get(name, parameter)
            if value.dtype != parameter.dtype:
                raise UserError(
                    f"{name} is {value.dtype} in the checkpoint, and {parameter.dtype} under"
                    f" train.precision: {self.config.train.precision}"
                )
        self.progress = Progress(**saved["progress"])
        self._restored = saved["devices"][self.batches.rank]


def diverged(loss: float, step: int) -> UserError:
    """What is said once a loss, of training or validation text, is not finite."""
    return UserError(
        f"the loss became {loss} before step {step};"
        " the last checkpoint is untouched (a lower optim.lr or optim.clip may help)"
    )
