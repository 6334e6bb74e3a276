"""Lightning Fabric as a configuration asks for it, and the precision of matrix products."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy

from data_prep.errors import UserError
from lm.config import Config


def build_fabric(config: Config) -> Fabric:
    """Fabric with the accelerator, devices, strategy and precision of the section `train`.

    Raises:
        UserError: if the devices do not exist, or do not support the settings.
    """
    accelerator, num_devices = _find_devices(config)
    strategy: str | DDPStrategy = "auto"
    if config.train.strategy == "ddp" or num_devices > 1:
        strategy = DDPStrategy(
            broadcast_buffers=False,  # the class tree is constant
            find_unused_parameters=config.output.tree == "adaptive",  # clusters without a target
        )
    precision = config.train.precision
    return Fabric(
        accelerator=accelerator, devices=num_devices, strategy=strategy, precision=precision
    )


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set `torch.set_float32_matmul_precision` inside a `with` block."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def _find_devices(config: Config) -> tuple[str, int]:
    """Fabric's name of the accelerator, and the number of devices.

    Apple's accelerator is never used: it lacks the fp64 that losses are summed in.
    """
    train, num_gpus = config.train, torch.cuda.device_count()
    on_cpu = train.accelerator == "cpu" or (train.accelerator == "auto" and num_gpus == 0)
    num_devices = train.devices if train.devices != "auto" else 1 if on_cpu else num_gpus
    if on_cpu and train.precision == "16-mixed":
        raise UserError("train.precision: 16-mixed requires a GPU; use bf16-mixed on a CPU")
    if on_cpu and config.output.backend == "triton":
        raise UserError("output.backend: triton requires a GPU")
    if not on_cpu and not 0 < num_devices <= num_gpus:
        raise UserError(
            f"train.accelerator: {train.accelerator}, train.devices: {train.devices}: expected at"
            f" most {num_gpus} CUDA devices, which is how many there are"
        )
    return "cpu" if on_cpu else "cuda", num_devices
