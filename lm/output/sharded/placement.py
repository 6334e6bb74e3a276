"""Which rows of the weight a process holds, and what it computes with them.

By word, rows are dealt like cards: row r belongs to process r mod W, as its row r // W. The
children of a node are consecutive rows, so every node is split to within one row, and so is the
whole weight; a node of three children on eight processes has children on three of them, which
differ from node to node. All positions go to all processes, and the work is the same on each,
whatever the targets are.

By class, a node whose children are words belongs to one process, and positions go to the owner of
their class only: W times fewer bytes. Nodes are dealt so that the expected work is even, which
holds for batches like the text that was counted. A node with a large share of the work is split by
word. The rows of nodes above others, such as the root, are dealt by word, and every process gathers
all of them for each batch, about √N rows, for its own positions.
"""

import heapq
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lm.output.sharded.rows import DealtRows
from lm.output.tree import shapes
from lm.output.tree.arrays import Shard, TreeArrays
from lm.output.tree.class_tree import ClassTree

PlacementName = Literal["word", "class"]
SPLIT, GATHERED = -1, -2
"""Owners of nodes whose rows are dealt to all processes; the second are gathered for each batch."""
LARGEST_SHARE = 0.1
"""Share of the work of a process: nodes that cost more are split by word."""
MOST_ROWS = 1.1
"""Most rows that a process may hold, relative to the mean."""


class Plan(NamedTuple):
    """Which process holds the children of each node."""

    owner: Tensor  # [I] int64: a process, SPLIT or GATHERED
    world_size: int

    @classmethod
    def by_word(cls, tree: ClassTree, world_size: int) -> "Plan":
        """Every node split."""
        return cls(torch.full((tree.num_nodes,), SPLIT, device="cpu"), world_size)

    @classmethod
    def by_class(cls, tree: ClassTree, world_size: int, counts: Tensor | None = None) -> "Plan":
        """Classes dealt by their expected work, the number of tokens times that of children.

        The most expensive class goes first, always to the process with the least work so far that
        has memory left.

        Args:
            counts: [N], how often each word is expected; None: equally often.
        """
        size = tree.num_children.cpu()
        cost = visits_of_nodes(tree, counts) * size
        owner = torch.full((tree.num_nodes,), SPLIT)
        owner[tree.node_of_row.cpu()[tree.row_of_node.cpu()[1:]]] = GATHERED  # parents of nodes
        mean = cost[owner != GATHERED].sum() / world_size
        single = ((owner != GATHERED) & (cost <= LARGEST_SHARE * mean)).nonzero().squeeze(1)
        single = single[cost[single].argsort(descending=True, stable=True)]
        most = MOST_ROWS * int(size[single].sum()) / world_size
        processes = [(0.0, 0, process) for process in range(world_size)]  # work, rows, process
        for node in single.tolist():
            full = []
            while processes and processes[0][1] + int(size[node]) > most:
                full.append(heapq.heappop(processes))
            if not processes:  # none has space for a whole node of this size
                processes, full = sorted(full), []
                continue
            work, rows, process = heapq.heappop(processes)
            owner[node] = process
            done = (work + float(cost[node]), rows + int(size[node]), process)
            for each in (*full, done):
                heapq.heappush(processes, each)
        return cls(owner, world_size)

    def process_of_row(self, tree: ClassTree) -> Tensor:
        """[R] int64."""
        owner = self.owner[tree.node_of_row.cpu()]
        for dealt in (SPLIT, GATHERED):
            rows = (owner == dealt).nonzero().squeeze(1)
            owner[rows] = torch.arange(len(rows)) % self.world_size
        return owner

    def dealt(self, tree: ClassTree, rank: int, group: object = None) -> DealtRows:
        """The rows of a process: gathered ones first, in the order of the whole weight."""
        if bool((self.owner == SPLIT).all()):
            return DealtRows(tree.num_rows, rank, self.world_size, group)
        process = self.process_of_row(tree)
        last = self.owner[tree.node_of_row.cpu()] != GATHERED
        order = (process * 2 + last).argsort(stable=True)
        held = torch.bincount(process, minlength=self.world_size)
        first = held.cumsum(0) - held
        local = torch.empty_like(process)
        local[order] = torch.arange(tree.num_rows) - first[process[order]]
        return DealtRows(
            tree.num_rows, rank, self.world_size, group, local * self.world_size + process
        )


class Part(NamedTuple):
    """Some rows of the weight: what differs from the whole tree, see `Shard`."""

    num_children: Tensor
    first_row: Tensor
    node_of_row: Tensor
    column: Tensor
    local_row: Tensor
    max_path_columns: int

    def of(self, tree: ClassTree) -> dict[str, Any]:
        """The fields of a `Problem` of these rows."""
        arrays = tree.arrays
        names = ("num_children", "first_row", "node_of_row", "column")
        return {
            "tree": arrays._replace(**{name: getattr(self, name) for name in names}),
            "shard": Shard(arrays.node_of_row, self.local_row),
            "max_path_columns": self.max_path_columns,
        }


class Placement(NamedTuple):
    """What one process computes."""

    owner: Tensor  # see `Plan`
    held: Part  # for the positions that it receives
    gathered: Part | None = None  # for its own positions; its rows are those of all processes
    num_gathered: int = 0  # of the rows that it holds, the first ones


def place(tree: ClassTree, plan: Plan, dealt: DealtRows) -> Placement:
    """What the process of `dealt`, which `plan` gave, computes.

    Example:
        >>> tree = ClassTree.two_level([0, 0, 1, 1, 1])  # rows: 2 classes, then 2 and 3 words
        >>> plan = Plan.by_word(tree, 2)
        >>> place(tree, plan, plan.dealt(tree, rank=1)).held.num_children.tolist()
        [1, 1, 1]
    """
    with torch.device("cpu"):
        local_row = dealt.held_row(dealt.slots(torch.arange(tree.num_rows)))
        is_gathered = (plan.owner == GATHERED)[tree.node_of_row.cpu()]
        if not is_gathered.any():
            return Placement(plan.owner, _part(tree, local_row))
        all_gathered = torch.where(is_gathered, is_gathered.cumsum(0) - 1, -1)
        num_gathered = int((is_gathered & (local_row >= 0)).sum())
        held = _part(tree, torch.where(is_gathered, -1, local_row), first=num_gathered)
        return Placement(plan.owner, held, _part(tree, all_gathered), num_gathered)


def _part(tree: ClassTree, local_row: Tensor, first: int = 0) -> Part:
    """The rows with a number, which begin at `first` and are neighbours if they have one node."""
    arrays = TreeArrays(*(array.cpu() for array in tree.arrays))
    row = (local_row >= 0).nonzero().squeeze(1)
    row = row[local_row[row].argsort()]
    node_of_row = torch.cat([torch.zeros(first, dtype=torch.int64), arrays.node_of_row[row]])
    held = torch.bincount(node_of_row[first:], minlength=tree.num_nodes)
    first_row = torch.zeros(tree.num_nodes, dtype=torch.int64)
    first_row.scatter_reduce_(0, node_of_row[first:], local_row[row], "amin", include_self=False)
    num_children = torch.where(arrays.num_children > 1, held, 0)
    parent = torch.cat([torch.tensor([0]), arrays.node_of_row[arrays.row_of_node[1:]]])
    column = shapes.sum_over_ancestors(parent, num_children[parent] * (arrays.row_of_node >= 0))
    most = int((column + num_children).max())
    return Part(num_children, first_row, node_of_row, column, local_row, most)


def recipients_of(
    target: Tensor, tree: ClassTree, owner: Tensor, world_size: int, ignore_index: int = -100
) -> Tensor:
    """Which processes get positions, [W, P] bool: owners of its nodes, all for split ones."""
    is_word = target != ignore_index
    path = tree.rows_on_path(torch.where(is_word, target, 0)).T
    node = tree.node_of_row[path.clamp(min=0)]
    owners = owner[node].masked_fill((path < 0) | (tree.num_children[node] == 1), GATHERED)
    process = torch.arange(world_size, device=owner.device)[:, None]
    recipients = torch.zeros(world_size, len(target), dtype=torch.bool, device=owner.device)
    for level in owners:
        recipients |= (level == process) | (level == SPLIT)
    return recipients & is_word


def visits_of_nodes(tree: ClassTree, counts: Tensor | None = None) -> Tensor:
    """How often each node is on the path of words with these counts [N], [I] fp64."""
    if counts is None:
        return tree.num_words_below.cpu().double()
    return tree.sum_below(counts.to(tree.row_of_word.device, torch.float64)).cpu()
