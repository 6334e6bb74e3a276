"""Processes connected by gloo."""

import os
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


def _work(
    rank: int, world_size: int, port: int, job: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
    try:
        job(rank, world_size, *args)
    finally:
        dist.destroy_process_group()


def in_processes(world_size: int, job: Callable[..., None], *args: Any) -> None:
    """Run job(rank, world_size, *args), importable by name, in processes connected by gloo.

    They are forks of a server that has computed nothing: autograd does not survive a fork where
    PyTorch has CUDA and fake tensors were used.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    get_context("forkserver").set_forkserver_preload([__name__, "lm.output.sharded"])
    start_processes(_work, (world_size, port, job, args), world_size, start_method="forkserver")  # type: ignore[no-untyped-call]
