"""What a checkpoint contains: gathered from the processes of a run, and given back to them.

Tables of words that are dealt to processes are whole in it, as of one process, so that any number
of processes continues it.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from data_prep.errors import CheckpointError
from lm.model.language_model import LanguageModel
from lm.model.lstm import LSTM
from lm.output.sharded import DealtRows
from lm.training.carried_loss import CarriedLoss
from lm.training.checkpoint import FORMAT_VERSION
from lm.training.optimizers import CombinedOptimizer
from lm.training.progress import Progress

_Convert = Callable[[DealtRows, Tensor], Tensor | None]


def gather_contents(
    fabric: Fabric, carried_loss: CarriedLoss, optimizer: torch.optim.Optimizer, progress: Progress
) -> dict[str, Any]:
    """Everything that a run continues from, as plain data; all processes call this together."""
    device, carried, model = fabric.device, carried_loss.carried, carried_loss.model
    noise = model.backbone.noise if isinstance(model.backbone, LSTM) else None
    device_state = {
        "carried": None if carried is None else tuple(tensor.cpu() for tensor in carried),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "noise": noise if noise is None else noise.cpu(),
    }
    devices: list[Any] = [device_state]
    if fabric.world_size > 1:
        devices = [None] * fabric.world_size
        torch.distributed.all_gather_object(devices, device_state)
    state, whole = optimizer.state_dict(), DealtRows.whole
    return {
        "format_version": FORMAT_VERSION,
        "model": _convert_weights(model, model.state_dict(), whole),
        "optimizer": _convert_optimizer_state(optimizer, state, model, whole),
        "precision": fabric.strategy.precision.state_dict(),  # the scale of fp16 losses
        "progress": asdict(progress),
        "devices": devices,
    }


def load_weights(model: LanguageModel, weights: dict[str, Tensor], precision: str) -> None:
    """Make the tensors of a checkpoint the parameters, without a copy."""
    for name, parameter in model.named_parameters():
        dtype = weights.get(name, parameter).dtype
        if dtype != parameter.dtype:
            raise CheckpointError(
                f"{name} is {dtype} in the checkpoint, and {parameter.dtype} under"
                f" train.precision: {precision}"
            )
    try:
        model.load_state_dict(_convert_weights(model, weights, DealtRows.held), assign=True)
    except (RuntimeError, ValueError) as error:
        problem = f"the checkpoint does not fit the configuration: {' '.join(str(error).split())}"
        raise CheckpointError(problem) from error


def restore(
    checkpoint: dict[str, Any], fabric: Fabric, carried_loss: CarriedLoss, optimizer: Any, seed: int
) -> None:
    """Continue from a checkpoint whose weights the model already has.

    Random numbers are restored too: nothing may draw any before the first step.
    """
    model, saved = carried_loss.model, checkpoint["optimizer"]
    state = _convert_optimizer_state(optimizer.optimizer, saved, model, DealtRows.held)
    optimizer.load_state_dict(state)
    fabric.strategy.precision.load_state_dict(checkpoint["precision"])
    devices, device = checkpoint["devices"], fabric.device
    rank, world_size = fabric.global_rank, fabric.world_size
    if devices[0]["carried"] is not None:
        carried = _columns_of([each["carried"] for each in devices], rank, world_size)
        carried_loss.carried = tuple(part.to(device) for part in carried)
    if len(devices) != world_size:  # other random numbers than those of any process before
        torch.manual_seed(seed + 1_000_003 * checkpoint["progress"]["batches_done"] + rank)
        return
    torch.set_rng_state(devices[rank]["cpu"])
    if devices[rank]["cuda"] is not None:
        torch.cuda.set_rng_state(devices[rank]["cuda"], device)
    noise, backbone = devices[rank].get("noise"), model.backbone
    if noise is not None and isinstance(backbone, LSTM):
        backbone.noise = noise.to(device)


def _convert_weights(
    model: LanguageModel, weights: dict[str, Tensor], convert: _Convert
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


def _convert_optimizer_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], model: LanguageModel, convert: _Convert
) -> dict[str, Any]:
    """The state of an optimizer with tensors converted that have an entry for each dealt row."""
    if isinstance(optimizer, CombinedOptimizer):
        pairs = zip(optimizer.optimizers, state["optimizers"], strict=True)
        states = [_convert_optimizer_state(each, of, model, convert) for each, of in pairs]
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


def _columns_of(states: list[tuple[Tensor, ...]], rank: int, world_size: int) -> tuple[Tensor, ...]:
    """The carried state [L, B / W, H] of one of W processes, given those of all processes before.

    Process r of W has the columns r, r + W, … of a batch.
    """
    whole = (torch.stack(parts, 2).flatten(1, 2) for parts in zip(*states, strict=True))
    return tuple(part[:, rank::world_size].contiguous() for part in whole)
