"""Lightning Fabric as a configuration asks for it, CPU threads, precision of matrix products."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy

from data_prep.errors import UserError
from lm.device import launch, set_num_threads
from lm.run import Run


def build_fabric(run: Run) -> Fabric:
    """Fabric with the accelerator, devices, strategy and precision of the section `train`."""
    for package in ("fabric", "pytorch"):  # either has the logger, whichever is imported last
        logging.getLogger(f"lightning.{package}").setLevel(logging.WARNING)
    config = run.config
    strategy: str | DDPStrategy = "auto"
    found = launch()
    if config.train.strategy != "auto" or run.world_size > 1:
        strategy = DDPStrategy(
            broadcast_buffers=False,  # the class tree is constant
            # Clusters without a target. It takes 4 % of a step, but DDP then keeps its buckets as
            # they are: a continued run adds up three or more gradients in the same order.
            find_unused_parameters=config.output.tree == "adaptive" or run.world_size > 2,
        )
    alone = found is None and SLURMEnvironment.detect()  # as a job's script, which has no tasks
    if found is not None and found.launcher == "SLURM":  # Lightning requires the variable
        os.environ["SLURM_NTASKS_PER_NODE"] = str(found.per_machine)
    return Fabric(
        accelerator="cuda" if run.on_gpu else "cpu",
        devices=run.num_devices,
        num_nodes=1 if found is None else found.machines,
        plugins=LightningEnvironment() if alone else None,
        strategy=strategy,
        precision=config.train.precision,
    )


@contextmanager
def launched(fabric: Fabric, run: Run) -> Iterator[None]:
    """Launch the processes; in the `with` block, matrix products have the precision of the run.

    If a process ends, the others end too: the first one with a UserError that says so.
    """
    train, mkldnn = run.config.train, cast(Any, torch.backends.mkldnn)
    backends = torch.backends.cuda.matmul, mkldnn.matmul
    previous, name = [backend.fp32_precision for backend in backends], "highest"
    with suppress(RuntimeError):  # raised where a program has set the precision of one backend
        name = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(train.matmul_precision)  # Fabric reads it on a GPU
        fabric.launch()
        set_num_threads(train.threads, run.num_devices)
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
    finally:
        torch.set_float32_matmul_precision(name)
        for backend, precision in zip(backends, previous, strict=True):
            backend.fp32_precision = precision


def check_devices(run: Run) -> None:
    """Raise a UserError if the devices do not exist, or do not support the settings."""
    train, num_devices, num_gpus = run.config.train, run.num_devices, torch.cuda.device_count()
    if run.on_gpu or train.accelerator == "gpu":
        if not 0 < num_devices <= num_gpus:
            raise UserError(
                f"train.accelerator: {train.accelerator}, train.devices: {num_devices}:"
                f" expected at most {num_gpus} CUDA devices, which is how many there are"
            )
        return
    if train.precision == "16-mixed":
        raise UserError("train.precision: 16-mixed requires a GPU; use bf16-mixed on a CPU")
    if run.config.output.backend == "triton":
        raise UserError("output.backend: triton requires a GPU")
