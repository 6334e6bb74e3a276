"""Lightning Fabric as a configuration asks for it, and the precision of matrix products."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy

from data_prep.errors import UserError
from lm.config import Config
from lm.device import is_on_gpu, num_devices


def build_fabric(config: Config) -> Fabric:
    """Fabric with the accelerator, devices, strategy and precision of the section `train`.

    Raises:
        UserError: if the devices do not exist, or do not support the settings.
    """
    devices = num_devices(config)
    strategy: str | DDPStrategy = "auto"
    if config.train.strategy == "ddp" or devices > 1:
        strategy = DDPStrategy(
            broadcast_buffers=False,  # the class tree is constant
            find_unused_parameters=config.output.tree == "adaptive",  # clusters without a target
        )
    return Fabric(
        accelerator="cuda" if is_on_gpu(config) else "cpu",
        devices=devices,
        strategy=strategy,
        precision=config.train.precision,
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


def check_devices(config: Config) -> None:
    """Check that the devices exist and support the settings.

    Raises:
        UserError: if they do not.
    """
    train, num_gpus = config.train, torch.cuda.device_count()
    if is_on_gpu(config) or train.accelerator == "gpu":
        if not 0 < num_devices(config) <= num_gpus:
            raise UserError(
                f"train.accelerator: {train.accelerator}, train.devices: {train.devices}: expected"
                f" at most {num_gpus} CUDA devices, which is how many there are"
            )
        return
    if train.precision == "16-mixed":
        raise UserError("train.precision: 16-mixed requires a GPU; use bf16-mixed on a CPU")
    if config.output.backend == "triton":
        raise UserError("output.backend: triton requires a GPU")
