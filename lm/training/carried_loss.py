"""The loss of a run's batches, as the module that training calls."""

import torch
from torch import Tensor, nn

from lm.model.language_model import LanguageModel, State
from lm.training.batches import Batch


class CarriedLoss(nn.Module):
    """The loss of one batch after another, with the state of the backbone carried between them.

    This is the module that Fabric sets up, because DDP synchronizes the gradients of a module's
    `forward`. Carried state and losses stay inside it: Fabric casts the floating-point arguments
    and results of a module, which would round them.

    Attributes:
        carried: the state after the last batch; None before the first one, and if there is none.
        nll: sum over the tokens since it was last set to zero; fp64, on the device.
    """

    def __init__(self, model: LanguageModel, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.carried: State | None = None
        self._kept: State | None = None
        self.nll = torch.zeros((), dtype=torch.float64, device=device)

    def forward(self, batch: Batch) -> Tensor:
        """A batch's share of the loss of a step, which is averaged over the devices."""
        carried = self.carried if batch.continues else None
        loss, state = self.model.loss(batch.inputs, batch.targets, carried)
        if self.model.backbone.carries_state and state is not None:
            self.carried = tuple(part.detach() for part in state)
        self.nll += loss.detach().double() * (batch.targets >= 0).sum()
        return loss if batch.weight == 1 else loss * batch.weight

    def keep(self) -> None:
        """Move the carried state into the memory it had before, where a CUDA graph reads it."""
        if self.carried is not None and self._kept is not None:
            torch._foreach_copy_(self._kept, self.carried)
            self.carried = self._kept
        self._kept = self.carried
