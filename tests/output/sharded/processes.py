"""Processes connected by gloo, and the work that a plan gives them."""

import os
import socket
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from lm.output import ClassTree
from lm.output.sharded.placement import GATHERED, Plan, visits_of_nodes


def _work(rank: int, world_size: int, port: int, job: Callable[..., None], args: Any) -> None:
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


def columns_per_process(tree: ClassTree, plan: Plan, target: Tensor) -> Tensor:
    """The work of each process for a batch [P], [W] fp64, in columns of visits.

    A column costs three products of H numbers, and a row read and a gradient written in the memory
    of the process. Positions belong to processes in equal shares.
    """
    visits = visits_of_nodes(tree, torch.bincount(target, minlength=tree.vocab_size))
    is_gathered, size = plan.owner == GATHERED, tree.num_children
    columns = torch.where((size > 1) & ~is_gathered, visits, 0)[tree.node_of_row]
    work = torch.zeros(plan.world_size, dtype=torch.float64)
    work.index_add_(0, plan.process_of_row(tree), columns)
    return work + (visits * size)[is_gathered].sum() / plan.world_size
