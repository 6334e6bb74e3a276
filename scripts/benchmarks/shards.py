"""How evenly the rows of an output layer share the work of processes, and what these send.

For a prepared configuration: its tree, and batches of its training split and of the worst cases:
all targets in one class, all the same word, and sorted text. Placements by word, by class (planned
by the counts of the training split, and by those of the batches themselves) and, to compare with,
contiguous blocks of classes. `load` is the most work of a process divided by the mean, in columns
of visits: 1 is even, and the number of processes is the worst. Bytes are those that the busiest
process sends for a batch, forward and backward.

--measure runs two and four processes connected by gloo on the same batches: columns, bytes handed
to torch.distributed, and CPU seconds, next to what the plan says. --memory N:H measures memory of
each process for a layer of N words with row-wise gradients. --estimate N:H computes a step of eight
GPUs.
"""

import argparse
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from lm.output import ClassTree
from lm.output.backends.base import Needs
from lm.output.backends.visits import route
from lm.output.rowwise import RowAdagrad
from lm.output.sharded import ShardedSoftmax
from lm.output.sharded.cost import (
    GPUS,
    Sizes,
    bytes_of_batch,
    bytes_of_position,
    step_cost,
)
from lm.output.sharded.exchange import forward
from lm.output.sharded.placement import GATHERED, Plan, columns_per_process, recipients_of
from lm.run import Run
from scripts.benchmarks.reporting import Table, benchmark_parser, problem_size


def streams(tree: ClassTree, tokens: Tensor, num_positions: int) -> Iterator[tuple[str, Tensor]]:
    """Batches of each kind."""
    text = tokens[: num_positions * 8]
    yield "text", text
    yield "sorted text", tokens.sort().values[:: max(1, len(tokens) // len(text))][: len(text)]
    counts = torch.bincount(tokens, minlength=tree.vocab_size)
    words = (tree.node_of_row == tree.num_nodes - 1).nonzero().squeeze(1)
    words = tree.item_of_row[words]
    yield "one class", words[torch.arange(num_positions) % len(words)]
    yield "one word", counts.argmax().expand(num_positions)


def plans(tree: ClassTree, world_size: int, counts: Tensor, batch: Tensor) -> dict[str, Plan]:
    """The placements, by name."""
    of_batch = torch.bincount(batch, minlength=tree.vocab_size)
    return {
        "word": Plan.by_word(tree, world_size),
        "class": Plan.by_class(tree, world_size, counts),
        "class, batch counted": Plan.by_class(tree, world_size, of_batch),
        "contiguous": Plan.contiguous(tree, world_size),
    }


def sent_bytes(tree: ClassTree, plan: Plan, target: Tensor, sizes: Sizes) -> Tensor:
    """What each process sends for a batch of which each has an equal part, [W]."""
    world_size = plan.world_size
    recipients = recipients_of(target, tree, plan.owner, world_size)
    owner = torch.arange(len(target)) * world_size // len(target)
    pairs = torch.zeros(world_size, world_size, dtype=torch.int64)  # recipient, process
    pairs.index_add_(1, owner, recipients.long())
    pairs.fill_diagonal_(0)
    there, back = bytes_of_position(sizes, tree.depth)
    gathered = int((plan.owner == GATHERED)[tree.node_of_row].sum())
    return pairs.sum(0) * there + pairs.sum(1) * back + bytes_of_batch(sizes, gathered, world_size)


def simulate(tree: ClassTree, tokens: Tensor, options: argparse.Namespace, table: Table) -> None:
    """Loads and bytes from the plans."""
    counts = torch.bincount(tokens, minlength=tree.vocab_size)
    for world_size in options.processes:
        positions = options.positions * world_size
        for stream, target in streams(tree, tokens, positions):
            for name, plan in plans(tree, world_size, counts, target).items():
                batches = torch.split(target, positions)
                columns = [columns_per_process(tree, plan, batch) for batch in batches]
                sizes = Sizes(options.hidden, options.positions)
                sent = [sent_bytes(tree, plan, batch, sizes) for batch in batches]
                table.add(
                    {
                        "kind": "plan",
                        "processes": world_size,
                        "targets": stream,
                        "placement": name,
                        "load": round(max(float(c.max() / c.mean()) for c in columns), 3),
                        "sent_mb": round(max(float(s.max()) for s in sent) / 1e6, 2),
                    }
                )


class Traffic:
    """Bytes that this process hands to torch.distributed for others."""

    def __init__(self) -> None:
        self.sent = 0
        self._functions = {
            name: getattr(dist, name) for name in ("all_to_all_single", "all_gather")
        }
        for name in self._functions:
            setattr(dist, name, getattr(self, name))

    def all_to_all_single(self, out: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Count all but the part for the process itself."""
        size, rank = dist.get_world_size(), dist.get_rank()
        own = args[1][rank] if len(args) > 1 else len(tensor) // size
        self.sent += (len(tensor) - own) * (tensor[:1].numel() or 1) * tensor.element_size()
        self._functions["all_to_all_single"](out, tensor, *args, **kwargs)

    def all_gather(self, parts: list[Tensor], tensor: Tensor, **kwargs: Any) -> None:
        """Count the tensor once for each other process."""
        self.sent += (dist.get_world_size() - 1) * tensor.nbytes
        self._functions["all_gather"](parts, tensor, **kwargs)


def _measured(
    rank: int,
    world_size: int,
    tree: ClassTree,
    tokens: Tensor,
    options: argparse.Namespace,
    table: Table,
) -> None:
    """One of the processes."""
    counts = torch.bincount(tokens, minlength=tree.vocab_size)
    positions, sizes = options.positions * world_size, Sizes(options.hidden, options.positions)
    traffic = Traffic()
    for placement in ("word", "class"):
        layer = ShardedSoftmax(
            options.hidden, tree, row_wise=True, placement=placement, counts=counts
        )
        plan = plans(tree, world_size, counts, tokens)[placement]
        for stream, target in streams(tree, tokens, positions):
            batch = target[:positions]
            own = batch[rank * options.positions :][: options.positions]
            hidden = torch.randn(len(own), options.hidden, requires_grad=True)
            layer.loss(hidden, own).backward()  # type: ignore[no-untyped-call]
            traffic.sent, start = 0, time.process_time()
            layer.loss(hidden, own).backward()  # type: ignore[no-untyped-call]
            seconds, sent = time.process_time() - start, traffic.sent
            layer.zero_grad()
            problem = layer._problem(hidden.detach(), own)
            exchanged, nothing = layer._exchanged(problem), Needs(False, False, False)
            with torch.no_grad():
                done = forward(layer.backend, problem, *exchanged, nothing, None)
            columns = 0
            for each, _, _ in done.solved:
                at = (each.depth, each.ignore_index, each.shard)
                node = route(each.target, each.tree, *at).node
                columns += int(each.tree.num_children[node[node >= 0]].sum())
            every = torch.zeros(world_size, 3, dtype=torch.float64)
            every[rank] = torch.tensor([columns, sent, seconds])
            dist.all_reduce(every)
            planned = columns_per_process(tree, plan, batch)
            bytes_planned = sent_bytes(tree, plan, batch, sizes)
            if rank == 0:
                load = [float(column.max() / column.mean()) for column in every.T]
                table.add(
                    {
                        "kind": "measured",
                        "processes": world_size,
                        "targets": stream,
                        "placement": placement,
                        "load": round(load[0], 3),
                        "planned_load": round(float(planned.max() / planned.mean()), 3),
                        "sent_bytes": int(every[:, 1].max()),
                        "planned_bytes": int(bytes_planned.max()),
                        "cpu_seconds_max_by_mean": round(load[2], 2),
                    }
                )


def _memory(rank: int, world_size: int, options: argparse.Namespace, table: Table) -> None:
    """One of the processes: what the layer and a step take."""

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    vocab_size, hidden_size = options.memory
    tree, before = ClassTree.two_level(num_words=vocab_size), held()
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    layer = ShardedSoftmax(hidden_size, tree, row_wise=True, dtype=dtype)
    optimizer = RowAdagrad(layer.parameters(), lr=0.1)
    hidden = torch.randn(options.positions, hidden_size, dtype=dtype, requires_grad=True)
    for _ in range(2):
        target = torch.randint(vocab_size, (options.positions,))
        layer.loss(hidden, target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    taken = torch.zeros(world_size, dtype=torch.float64)
    taken[rank] = held() - before
    dist.all_reduce(taken)
    state = sum(value.nbytes for of in optimizer.state.values() for value in of.values())
    shard = layer.weight.nbytes + (0 if layer.bias is None else layer.bias.nbytes) + state
    if rank == 0:
        table.add(
            {
                "kind": "memory",
                "processes": world_size,
                "words": vocab_size,
                "hidden": hidden_size,
                "dtype": str(dtype).removeprefix("torch."),
                "rows_and_state_gb": round(shard / 1e9, 2),
                "measured_gb": round(float(taken.max()) / 1e9, 2),
                "tree_gb": round(sum(each.nbytes for each in tree.arrays) / 1e9, 2),
            }
        )


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


def estimate(vocab_size: int, hidden_size: int, num_positions: int, table: Table) -> None:
    """Eight GPUs, from the cost model: classes of equal sums of √count, counts by Zipf's law."""
    counts = 1 / (torch.arange(vocab_size, dtype=torch.float64) + 2.7)
    mass = counts.sqrt().cumsum(0)
    num_classes = round(vocab_size**0.5)
    tree = ClassTree.two_level((mass / mass[-1] * num_classes).long().clamp(max=num_classes - 1))
    sizes = Sizes(hidden_size, num_positions, hidden_bytes=2, weight_bytes=2)
    for placement in ("word", "class"):
        cost = step_cost(tree, 8, placement, sizes, counts)
        table.add(
            {
                "kind": "estimate",
                "words": vocab_size,
                "hidden": hidden_size,
                "placement": placement,
                "load": round(cost.load, 3),
                "held_gb": round(cost.held_rows * hidden_size * 2 / 1e9, 2),
                "memory_gb": round(cost.memory_bytes / 1e9, 2),
                "gflop": round(cost.flops / 1e9),
                "sent_mb": round(cost.sent_bytes / 1e6, 1),
                "nvlink_ms": round(cost.seconds(GPUS[0]) * 1e3, 2),
                "pcie_ms": round(cost.seconds(GPUS[1]) * 1e3, 2),
            }
        )


def main() -> None:
    """Print the table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("config", metavar="CONFIG", nargs="?", help="whose tree and training split are used")
    add("--measure", action="store_true", help="run processes connected by gloo")
    add("--memory", type=problem_size, metavar="N:H")
    add("--bf16", action="store_true", help="rows in bf16, for --memory")
    add("--estimate", type=problem_size, metavar="N:H", nargs="+")
    add("--processes", type=int, nargs="+", metavar="W", help="default 2 4 8 64, measured 2 4")
    add("--positions", type=int, default=2048, help="of each process, default 2048")
    add("--hidden", type=int, default=300, help="H, default 300")
    options, overrides = parser.parse_known_args()
    table = Table(log=options.json)
    runs_processes = options.measure or options.memory
    options.processes = options.processes or ([2, 4] if runs_processes else [2, 4, 8, 64])
    for vocab_size, hidden_size in options.estimate or ():
        estimate(vocab_size, hidden_size, options.positions, table)
    if options.memory:
        for world_size in options.processes:
            in_processes(world_size, _memory, options, table)
    if options.config is None:
        return
    run = Run.read(options.config, overrides)
    run.check_classes()
    assert run.tree is not None
    tokens = torch.from_numpy(run.prepared.tokens("train").astype(np.int64))
    if not options.measure:
        simulate(run.tree, tokens, options, table)
        return
    for world_size in options.processes:
        in_processes(world_size, _measured, run.tree, tokens, options, table)


if __name__ == "__main__":
    main()
