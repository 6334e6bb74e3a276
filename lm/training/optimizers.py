"""Optimizers and the learning rate over time: a pure function of the step, and of how often
validation has stalled.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lm.config import OptimConfig
from lm.model.language_model import LanguageModel
from lm.output.rowwise.optimizers import RowAdagrad, RowAdam, RowOptimizer, RowSGD


class Together(torch.optim.Optimizer):
    """Several optimizers of different parameters as one: of the backbone and of the table of words.

    Args:
        parts: whose groups it has, and whose states it saves, in this order.
    """

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Of each."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """To each."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def build_optimizer(
    model: nn.Module,
    config: OptimConfig,
    *,
    table: Sequence[nn.Parameter] = (),
    fused: bool = True,
) -> torch.optim.Optimizer:
    """The optimizer over all parameters; matrices decay, vectors (biases, gains) do not.

    Args:
        model: whose parameters.
        config: the section `optim`.
        table: those of them that are updated by rows, as `config.table` says; they do not decay.
        fused: one kernel for the whole step; not where gradients are scaled (fp16), since it would
            unscale them after they have been clipped.

    Returns:
        Groups have `scale`, by which the learning rate is multiplied.
    """
    by_rows = {id(parameter) for parameter in table}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in by_rows]
    usual = _usual(rest, config, fused)
    return Together(usual, _by_rows(table, config)) if table else usual


def table_by_rows(model: LanguageModel, config: OptimConfig) -> Sequence[nn.Parameter]:
    """The `table` of `build_optimizer`: the model's, if it is updated by rows; else nothing."""
    return model.table if config.table is not None or model.output.sparse else ()


def _usual(
    parameters: list[nn.Parameter], config: OptimConfig, fused: bool
) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group | {"scale": 1.0} for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)


def _by_rows(table: Sequence[nn.Parameter], config: OptimConfig) -> RowOptimizer:
    lr = config.table_lr or config.lr
    groups: Any = [{"params": list(table), "scale": lr / config.lr}]
    if config.table == "adam":
        return RowAdam(groups, lr, config.betas)
    return RowAdagrad(groups, lr) if config.table == "adagrad" else RowSGD(groups, lr)


def learning_rate(
    config: OptimConfig, step: int, total_steps: int, epoch: int, stalls: int
) -> float:
    """The rate of one step.

    Args:
        config: the section `optim`.
        step: steps done so far.
        total_steps: of the whole training.
        epoch: epochs completed so far.
        stalls: validations so far that did not improve.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "cosine":
        span = max(1, total_steps - config.warmup_steps)
        wave = (1 + math.cos(math.pi * (step - config.warmup_steps) / span)) / 2
        return config.lr * (config.min_lr_factor + (1 - config.min_lr_factor) * wave)
    if config.schedule == "step":
        return config.lr * config.decay ** max(0, epoch + 1 - config.decay_after_epochs)
    if config.schedule == "plateau":
        return config.lr * config.decay**stalls
    return config.lr
