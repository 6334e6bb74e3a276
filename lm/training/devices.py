"""Lightning Fabric as a configuration asks for it, CPU threads, precision of matrix products."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy

from data_prep.errors import UserError
from lm.config import TrainConfig
from lm.device import set_num_threads
from lm.run import Run


def build_fabric(run: Run) -> Fabric:
    """Fabric with the accelerator, devices, strategy and precision of the section `train`."""
    for package in ("fabric", "pytorch"):  # either has the logger, whichever is imported last
        logging.getLogger(f"lightning.{package}").setLevel(logging.WARNING)
    config = run.config
    strategy: str | DDPStrategy = "auto"
    if config.train.strategy != "auto" or run.num_devices > 1:
        strategy = DDPStrategy(
            broadcast_buffers=False,  # the class tree is constant
            find_unused_parameters=config.output.tree == "adaptive",  # clusters without a target
        )
    return Fabric(
        accelerator="cuda" if run.on_gpu else "cpu",
        devices=run.num_devices,
        # Machines, each with as many devices, as torchrun and SLURM count them.
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or 1),
        strategy=strategy,
        precision=config.train.precision,
    )


@contextmanager
def launched(fabric: Fabric, train: TrainConfig) -> Iterator[None]:
    """Launch the processes; inside the `with` block, matrix products have their precision."""
    fabric.launch()
    set_num_threads(train.threads)
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(train.matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


@contextmanager
def reporting_lost_processes(fabric: Fabric) -> Iterator[None]:
    """If a process of the run has ended, the others end, and the first one says so in a line.

    Raises:
        UserError: in the first process; SystemExit in the others.
    """
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error)
        if not lost or fabric.world_size == 1:
            raise
        if not fabric.is_global_zero:
            raise SystemExit(1) from error
        raise UserError(
            "training ended because another process of the run did, or cannot be reached (its own"
            " messages say why): continue with --resume auto"
        ) from error


def check_devices(run: Run) -> None:
    """Check that the devices exist and support the settings.

    Raises:
        UserError: if they do not.
    """
    train, num_gpus = run.config.train, torch.cuda.device_count()
    if run.on_gpu or train.accelerator == "gpu":
        if not 0 < run.num_devices <= num_gpus:
            raise UserError(
                f"train.accelerator: {train.accelerator}, train.devices: {train.devices}: expected"
                f" at most {num_gpus} CUDA devices, which is how many there are"
            )
        return
    if train.precision == "16-mixed":
        raise UserError("train.precision: 16-mixed requires a GPU; use bf16-mixed on a CPU")
    if run.config.output.backend == "triton":
        raise UserError("output.backend: triton requires a GPU")
