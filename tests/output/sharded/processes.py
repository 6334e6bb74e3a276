"""Processes connected by gloo."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


def _work(
    rank: int, world_size: int, port: int, job: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
    try:
        job(rank, world_size, *args)
    finally:
        dist.destroy_process_group()


def in_processes(world_size: int, job: Callable[..., None], *args: Any) -> None:
    """Run job(rank, world_size, *args), importable by name, in processes connected by gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(_work, (world_size, port, job, args), world_size, start_method="fork")  # type: ignore[no-untyped-call]
