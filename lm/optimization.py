"""Optimizers and the learning rate over time: a pure function of the step, and of how often
validation has stalled.
"""

import math

import torch
from torch import nn

from lm.config import OptimConfig


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, fused: bool = True
) -> torch.optim.Optimizer:
    """The optimizer over all parameters; matrices decay, vectors (biases, gains) do not.

    Args:
        model: whose parameters.
        config: the section `optim`.
        fused: one kernel for the whole step, which under mixed precision Lightning cannot clip the
            gradients for.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)


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
