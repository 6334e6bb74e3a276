"""The optimizer, clipping, and the learning rate as a function of the step and the validations."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lm.config import OptimConfig, WordTable
from lm.model.language_model import LanguageModel
from lm.output.rowwise import RowAdagrad, RowAdam, RowSGD


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers of disjoint parameters as one, with their parameter groups in order."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every optimizer; returns the loss that `closure` reevaluates, None without one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of every optimizer."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]


def build_optimizer(
    model: LanguageModel, config: OptimConfig, word_table: WordTable, *, fused: bool = True
) -> torch.optim.Optimizer:
    """The optimizer of all parameters; each group has a `scale` of the learning rate.

    Matrices decay, vectors (biases, gains) do not, and neither does a word table that has its own
    optimizer. `fused` (a single kernel) must be False with a gradient scaler (fp16).
    """
    table = [] if word_table.optimizer is None else model.table
    in_table = {id(parameter) for parameter in table}
    trained = [p for p in model.parameters() if id(p) not in in_table]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    decays = ((matrices, config.weight_decay), (vectors, 0.0))
    groups = [{"params": p, "weight_decay": decay, "scale": 1.0} for p, decay in decays if p]
    dense: torch.optim.Optimizer
    if config.optimizer == "sgd":
        # Fused steps leave parameters in half precision on a CPU unchanged (PyTorch #191763).
        fused = fused and not any(p.is_cpu and p.itemsize < 4 for p in trained)
        dense = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    else:
        dense = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)
    if word_table.optimizer is None:
        return dense
    rows: Any = [{"params": table, "scale": word_table.lr / config.lr}]
    if word_table.optimizer == "adam":
        return CombinedOptimizer(dense, RowAdam(rows, word_table.lr, config.betas))
    kind = {"adagrad": RowAdagrad, "sgd": RowSGD}[word_table.optimizer]
    return CombinedOptimizer(dense, kind(rows, word_table.lr))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group; where it is a tensor, in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * group["scale"])
        else:
            group["lr"] = rate * group["scale"]


def learning_rate(
    config: OptimConfig,
    *,
    step: int,
    total_steps: int | None,
    epoch: int,
    num_bad_validations: int,
    time_share: float = 0.0,
) -> float:
    """The learning rate of one step, after `step` steps and `epoch` complete epochs.

    `num_bad_validations` validations did not improve on the best one, and `time_share` of
    `train.max_minutes` is spent. The progress of a cosine is the larger one of that share and the
    share of `total_steps`, if they are known.

    Example:
        >>> config = OptimConfig(lr=1.0, schedule="cosine", warmup_steps=2)
        >>> state = {"total_steps": 102, "epoch": 0, "num_bad_validations": 0}
        >>> [round(learning_rate(config, step=step, **state), 3) for step in (0, 1, 2, 52, 102)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "cosine":
        position = time_share
        if total_steps is not None:
            span = max(1, total_steps - config.warmup_steps)
            position = max(time_share, (step - config.warmup_steps) / span)
        wave = (1 + math.cos(math.pi * position)) / 2
        return config.lr * (config.min_lr_factor + (1 - config.min_lr_factor) * wave)
    if config.schedule == "step":
        return config.lr * config.decay ** max(0, epoch + 1 - max(1, config.decay_after_epochs))
    if config.schedule == "plateau":
        return config.lr * config.decay**num_bad_validations
    return config.lr


def clip_gradients(model: LanguageModel, parameters: Sequence[Tensor], largest: float) -> Tensor:
    """Scale the gradients of all processes so that their norm as one vector is at most `largest`.

    Like `torch.nn.utils.clip_grad_norm_` of all parameters of the model, with the tables of all
    processes in the norm; `RowFactors.square_norm` has that of a row-wise gradient. They are
    not scaled if `largest` is 0. Returns the norm before.
    """
    dealt = model.dealt_tables
    grads: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grads[name in dealt].append(parameter.grad)
    total = torch.nn.utils.get_total_norm(grads[False])
    if dealt:
        squares = torch.nn.utils.get_total_norm(grads[True]).square().to(model.device)
        dist.all_reduce(squares)
        total = (total.square() + squares).sqrt()
    if largest:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, total)
    return total
