"""What a step of the output layer costs each process, by word and by class, from a plan alone.

The seconds are a sum: products, rows in memory, bytes sent and the start of each exchange, without
any overlap. They compare placements; they are no prediction for a machine whose `Machine` was not
measured.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import row_size
from lm.output.sharded.placement import (
    GATHERED,
    SPLIT,
    PlacementName,
    Plan,
    held_columns,
    visits_of_nodes,
)
from lm.output.tree.class_tree import ClassTree

PASSES_OVER_ROWS = 6
"""A visited row is read by forward, backward and update, and written; so is its gradient."""
REQUIRED_GAIN = 0.9
"""By class is chosen if it takes at most this part of the time: its balance rests on counts."""


class Machine(NamedTuple):
    """What one process has; rates that programs reach rather than those on data sheets."""

    name: str
    flops: float  # per second, of matrix products
    memory: float  # bytes per second
    link: float  # bytes per second that it sends to the other processes, in total
    latency: float  # seconds that an exchange takes at least


CPU = Machine("CPU cores, 1 GB/s", 5e10, 1e10, 1e9, 1e-4)
GPU = Machine("H200, NVLink at 340 of 450 GB/s", 4e14, 3.8e12, 3.4e11, 3e-5)


class Sizes(NamedTuple):
    """A batch and the numbers in it."""

    hidden_size: int  # H
    num_positions: int  # P, of each process
    hidden_bytes: int = 4  # per number of hidden vectors and their gradients
    weight_bytes: int = 4


class StepCost(NamedTuple):
    """Cost of forward, backward and update of the process with the most work."""

    placement: PlacementName
    load: float  # the most columns of a process divided by the mean
    sent_bytes: float
    num_exchanges: int
    flops: float
    memory_bytes: float

    def seconds(self, machine: Machine) -> float:
        """The sum of all parts."""
        work = self.flops / machine.flops + self.memory_bytes / machine.memory
        sent = self.sent_bytes / machine.link + self.num_exchanges * machine.latency
        return work + sent


def step_cost(
    tree: ClassTree,
    world_size: int,
    placement: PlacementName,
    sizes: Sizes,
    counts: Tensor | None = None,
) -> StepCost:
    """The expected cost of a batch whose words are drawn by `counts` [N]; None: uniformly.

    Example:
        >>> tree = ClassTree.two_level(num_words=10_000)
        >>> by = {name: step_cost(tree, 8, name, Sizes(300, 512)) for name in ("word", "class")}
        >>> by["word"].load < 1.05, by["class"].sent_bytes < by["word"].sent_bytes / 3
        (True, True)
    """
    by_class = placement == "class"
    plan = Plan.by_class(tree, world_size, counts) if by_class else Plan.by_word(tree, world_size)
    visits = visits_of_nodes(tree, counts)
    share = visits / visits[0]
    positions = world_size * sizes.num_positions
    columns = held_columns(tree, plan, share * positions)
    process, node = plan.process_of_row(tree), tree.node_of_row.cpu()
    is_visited = 1 - (1 - share.clamp(max=1)) ** positions
    per_process = torch.zeros(world_size, dtype=torch.float64)
    visited = per_process.index_add(0, process, is_visited[node])
    gathered = int((plan.owner == GATHERED)[node].sum())
    row = row_size(sizes.hidden_size)
    others = world_size - 1
    split = _share_of_split(tree, plan, counts)
    recipients = split * others + (1 - split) * others / world_size
    sent = sizes.num_positions * recipients * sum(bytes_of_position(sizes, tree.depth))
    sent += bytes_of_batch(sizes, gathered, world_size)
    most = float(columns.max())
    rows = float(visited.max()) + gathered * (by_class and world_size > 1)
    return StepCost(
        placement,
        load=most / float(columns.mean()),
        sent_bytes=sent,
        num_exchanges=6 + 4 * (gathered > 0),
        flops=6.0 * sizes.hidden_size * most,
        memory_bytes=PASSES_OVER_ROWS * rows * row * sizes.weight_bytes,
    )


def bytes_of_position(sizes: Sizes, depth: int) -> tuple[int, int]:
    """What is sent for a position to another process, and back, in forward and backward."""
    vector, number = sizes.hidden_size * sizes.hidden_bytes, max(4, sizes.hidden_bytes)
    return vector + 8 + (depth + 1) * number, 2 * depth * number + vector


def bytes_of_batch(sizes: Sizes, num_gathered: int, world_size: int) -> int:
    """What a process sends besides: numbers of positions, gathered rows and their gradients."""
    held = -(-num_gathered // world_size)
    rows = 2 * held * (row_size(sizes.hidden_size) + 1) * sizes.weight_bytes
    return (world_size - 1) * (8 + rows)


def choose_placement(
    tree: ClassTree,
    world_size: int,
    sizes: Sizes,
    machine: Machine,
    counts: Tensor | None = None,
) -> tuple[PlacementName, str]:
    """The placement for a run, and why, in a sentence."""
    word, by_class = (step_cost(tree, world_size, p, sizes, counts) for p in ("word", "class"))
    seconds = [cost.seconds(machine) for cost in (word, by_class)]
    shown = ", ".join(
        f"by {cost.placement} {each * 1e3:.2g} ms and {cost.sent_bytes / 1e6:.3g} MB sent"
        for cost, each in zip((word, by_class), seconds, strict=True)
    )
    gain = seconds[1] <= REQUIRED_GAIN * seconds[0]
    name: PlacementName = "class" if gain else "word"
    why = (
        f"most work {by_class.load:.2f} of the mean on text like the training split"
        if gain
        else "as even for any targets"
    )
    return name, f"by {name}, {why}; a step of the layer by this model ({machine.name}): {shown}"


def _share_of_split(tree: ClassTree, plan: Plan, counts: Tensor | None) -> float:
    """The expected share of positions whose path has a split node."""
    word = torch.arange(tree.vocab_size, device="cpu")
    path = tree.rows_on_path(word.to(tree.row_of_word.device)).cpu()
    split = (plan.owner == SPLIT)[tree.node_of_row.cpu()]
    on_path = (split[path.clamp(min=0)] & (path >= 0)).any(-1).double()
    if counts is None:
        return float(on_path.mean())
    weight = counts.cpu().double()
    return float((on_path * weight).sum() / weight.sum())
