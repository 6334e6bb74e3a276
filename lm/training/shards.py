"""Tables of words that are dealt to processes, in training: saving and continuing.

A checkpoint contains whole tables, as of one process, so that any number of processes continues it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lm.model.language_model import LanguageModel
from lm.output.sharded import DealtRows
from lm.training.optimizers import CombinedOptimizer

Convert = Callable[[DealtRows, Tensor], Tensor | None]


def convert_weights(
    model: LanguageModel, weights: dict[str, Tensor], convert: Convert
) -> dict[str, Any]:
    """The state of a model with its dealt tables converted.

    By `DealtRows.whole`, which all processes call together, tables are whole in the first process
    and None elsewhere; by `DealtRows.held` they are this process's.
    """
    dealt = model.dealt_tables
    return {
        name: convert(dealt[name], tensor) if name in dealt else tensor
        for name, tensor in weights.items()
    }


def convert_optimizer_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], model: LanguageModel, convert: Convert
) -> dict[str, Any]:
    """The state of an optimizer with tensors converted that have an entry for each dealt row."""
    if isinstance(optimizer, CombinedOptimizer):
        pairs = zip(optimizer.optimizers, state["optimizers"], strict=True)
        states = [convert_optimizer_state(each, of, model, convert) for each, of in pairs]
        return {"optimizers": states}
    parameters = dict(model.named_parameters())
    dealt = {id(parameters[name]): rows for name, rows in model.dealt_tables.items()}
    params = [id(param) for group in optimizer.param_groups for param in group["params"]]
    of_params = {
        number: {
            name: convert(dealt[params[number]], value)
            if params[number] in dealt and isinstance(value, Tensor) and value.dim()
            else value
            for name, value in values.items()
        }
        for number, values in state["state"].items()
    }
    # Rates are tensors where a CUDA graph reads them, and numbers in a checkpoint.
    groups = [group | {"lr": float(group["lr"])} for group in state["param_groups"]]
    return {"state": of_params, "param_groups": groups}


def columns_of(states: list[tuple[Tensor, ...]], rank: int, world_size: int) -> tuple[Tensor, ...]:
    """The carried state [L, B / W, H] of one of W processes, given those of all processes before.

    Process r of W has the columns r, r + W, … of a batch.
    """
    whole = (torch.stack(parts, 2).flatten(1, 2) for parts in zip(*states, strict=True))
    return tuple(part[:, rank::world_size].contiguous() for part in whole)
