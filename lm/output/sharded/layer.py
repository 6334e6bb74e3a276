"""ShardedSoftmax: a HierarchicalSoftmax whose rows are split over processes."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lm.output.backends.base import Needs, Problem, autocast
from lm.output.backends.visits import check_words
from lm.output.functional import BackendName, Reduction, reduced
from lm.output.layer import HierarchicalSoftmax
from lm.output.sharded.exchange import Gathered, forward, sharded_nll
from lm.output.sharded.placement import Part, PlacementName, Plan, place, recipients_of
from lm.output.sharded.rows import gathered
from lm.output.tree.arrays import Shard
from lm.output.tree.class_tree import ClassTree

_OF_PART = ("num_children", "first_row", "node_of_row", "column")


class ShardedSoftmax(HierarchicalSoftmax):
    """A softmax over N words whose rows are dealt to the processes of a group.

    By word, every process holds every W-th row, computes its rows' share of the softmaxes for the
    positions of all processes, and does the same work for any targets. By class, it holds all words
    of some classes and computes them for the positions whose targets are in these, and all classes
    for its own positions: positions are sent to one process instead of all, and the work is even
    for text like the one that was counted. `loss` and its backward are collective: all processes
    call them in the same order, with any number of positions, none included.

    The gradients of `weight` and `bias` belong to the mean over processes of their losses, as those
    that DDP averages; DDP itself must leave these parameters out. Decoding requires the whole
    weight, which `dealt.whole` gathers.

    Args:
        hidden_size, tree, bias, ignore_index, backend, row_wise, dtype: as in
            `HierarchicalSoftmax`.
        group: the processes; None is all of them.
        placement: "word" or "class".
        counts: [N], how often each word is expected, for "class"; None: equally often.

    Attributes:
        weight: [R / W, W'] the process's rows.
        bias: likewise, or None.
        dealt: which rows these are.

    Example:
        In each process after `torch.distributed.init_process_group`:

        layer = ShardedSoftmax(300, ClassTree.two_level(num_words=1_000_000))
        layer.loss(hidden, target).backward()  # the process's own positions
    """

    def __init__(
        self,
        hidden_size: int,
        tree: ClassTree,
        *,
        bias: bool = True,
        ignore_index: int = -100,
        backend: BackendName = "auto",
        row_wise: bool = False,
        dtype: torch.dtype | None = None,
        group: Any = None,
        placement: PlacementName = "word",
        counts: Tensor | None = None,
    ) -> None:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if placement not in ("word", "class"):
            raise ValueError(f'placement must be "word" or "class", got {placement!r}')
        with torch.device("cpu"):  # under any default device
            if placement == "word":
                plan = Plan.by_word(tree, world_size)
            else:
                plan = Plan.by_class(tree, world_size, counts)
            self.dealt = plan.dealt(tree, rank, group)
        super().__init__(
            hidden_size,
            tree,
            bias=bias,
            ignore_index=ignore_index,
            backend=backend,
            row_wise=row_wise,
            dtype=dtype,
        )
        held, of_gathered, self._num_gathered = place(tree, plan, self.dealt)
        self._held = _Arrays(held)
        self._gathered = None if of_gathered is None else _Arrays(of_gathered)
        self._owner = _Constants(plan.owner)

    def _num_held_rows(self, tree: ClassTree) -> int:
        return self.dealt.num_held

    def draw(self, table: Tensor, fill: Callable[[Tensor], Any]) -> None:
        """As of a `HierarchicalSoftmax`: rows do not depend on the number of processes."""
        self.dealt.draw(table, fill)

    def loss(self, hidden: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Negative log-likelihood of this process's targets, see `hierarchical_cross_entropy`.

        "mean" and "sum" are over the positions of this process.
        """
        problem = self._problem(hidden, target)
        needs = Needs.of(hidden, self.weight, self.bias, row_wise=self.row_wise)
        nll = sharded_nll(self.backend, problem, *self._exchanged(problem), needs, self.dealt.group)
        return reduced(nll.view(target.shape), target, reduction, self.ignore_index)

    @torch.no_grad()
    def nll_by_level(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The terms of the loss at each level; all processes have the same inputs and results.

        Each computes the softmaxes with its rows, and has its share of the positions in between.
        """
        world_size = self.dealt.world_size
        share = slice(self.dealt.rank, None, world_size)
        flat, targets = hidden.reshape(-1, hidden.shape[-1]), target.flatten()
        problem = self._problem(flat[share], targets[share])
        nothing = Needs(False, False, False)
        exchanged = self._exchanged(problem)
        nll = forward(self.backend, problem, *exchanged, nothing, self.dealt.group).nll
        size = -(-len(targets) // world_size)
        depth = self.tree.depth
        shares = gathered(nll, size, 0, self.dealt.group).view(world_size, size, depth)
        levels = shares.transpose(0, 1).flatten(0, 1)[: len(targets)]
        return levels.T.reshape(depth, *target.shape)

    def _problem(self, hidden: Tensor, target: Tensor) -> Problem:
        if hidden.shape[:-1] != target.shape or target.dtype != torch.int64:
            raise ValueError(
                "hidden must be [..., H] and target [...] int64, got"
                f" {list(hidden.shape)} and {target.dtype} {list(target.shape)}"
            )
        hidden = autocast(self._checked(hidden), self.weight, self.bias)
        part = self._held.part(self.tree)
        return Problem(
            hidden.reshape(-1, self.hidden_size),
            self.weight,
            target.reshape(-1),
            part.tree,
            self.bias,
            self.tree.depth,
            part.max_path_columns,
            self.ignore_index,
            shard=part.shard,
        )

    def _exchanged(self, problem: Problem) -> tuple[Gathered | None, Tensor]:
        """What is gathered for a problem, and which process gets which position, [W, P]."""
        target, sizes = problem.target, (self.dealt.world_size, self.ignore_index)
        check_words("target", target, self.vocab_size, self.ignore_index)
        (owner,) = self._owner.on(target.device)
        recipients = recipients_of(target, self.tree, owner, *sizes)
        if self._gathered is None:
            return None, recipients
        return Gathered(self._gathered.part(self.tree), self._num_gathered), recipients

    def lookup(self, row: Tensor, *, row_wise: bool) -> Tensor:
        """Rows of the whole weight, see `DealtRows.lookup`."""
        return self.dealt.lookup(self.weight, row, row_wise=row_wise, find=self._find)

    def _find(self, row: Tensor) -> Tensor:
        """Where rows of the whole weight are in `weight`, -1 if in another process."""
        local = self._held.part(self.tree).shard.local_row[row]
        if self._gathered is None:
            return local
        number = self._gathered.part(self.tree).shard.local_row[row]
        mine = (number >= 0) & (number % self.dealt.world_size == self.dealt.rank)
        return torch.where(mine, number // self.dealt.world_size, local)

    def lse_by_level(self, hidden: Tensor, target: Tensor) -> NoReturn:
        """Not available for a part of the rows."""
        self._decoded(hidden)

    def candidate_log_prob(self, hidden: Tensor, word: Tensor) -> NoReturn:
        """Not available for a part of the rows."""
        self._decoded(hidden)

    def _decoded(self, hidden: Tensor) -> NoReturn:
        raise RuntimeError(
            "a ShardedSoftmax holds a part of the rows: decode with a HierarchicalSoftmax that has"
            " those of dealt.whole()"
        )


class _Constants:
    """Arrays that follow from the layer's arguments. No loader of weights replaces them."""

    def __init__(self, *arrays: Tensor) -> None:
        self._arrays = arrays

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The arrays, moved to a device."""
        if self._arrays[0].device != device:
            self._arrays = tuple(array.to(device) for array in self._arrays)
        return self._arrays


class _Arrays:
    """The arrays of a `Part` that are not those of the whole tree."""

    def __init__(self, part: Part) -> None:
        of_tree = (getattr(part.tree, name) for name in _OF_PART)
        self._own = _Constants(part.shard.local_row, *of_tree)
        self.max_path_columns = part.max_path_columns

    def part(self, tree: ClassTree) -> Part:
        """The part of the tree that it is of."""
        arrays = tree.arrays
        local_row, *own = self._own.on(arrays.row_of_word.device)
        shard = Shard(arrays.node_of_row, local_row)
        own_arrays = dict(zip(_OF_PART, own, strict=True))
        return Part(arrays._replace(**own_arrays), shard, self.max_path_columns)
