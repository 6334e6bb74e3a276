"""ShardedSoftmax: a HierarchicalSoftmax whose rows are split over processes."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lm.output.backends.autograd import row_wise_nll
from lm.output.backends.base import Needs, Problem
from lm.output.functional import Reduction, reduced
from lm.output.inputs import autocast, check_positions, check_words
from lm.output.layer import HierarchicalSoftmax
from lm.output.sharded.communication import Gathered, ShardedSolver
from lm.output.sharded.placement import Placement, PlacementName, Plan, place, recipients_of
from lm.output.sharded.rows import interleaved
from lm.output.tree.class_tree import ClassTree


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
        hidden_size, tree, options: as in `HierarchicalSoftmax`.
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
        group: Any = None,
        placement: PlacementName = "word",
        counts: Tensor | None = None,
        **options: Any,
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
        super().__init__(hidden_size, tree, **options)
        self._placement = place(tree, plan, self.dealt)

    def _num_held_rows(self, tree: ClassTree) -> int:
        return self.dealt.num_held

    def draw(self, table: Tensor, fill: Callable[[Tensor], Any]) -> None:
        """As of a `HierarchicalSoftmax`: rows do not depend on the number of processes."""
        self.dealt.draw(table, fill)

    def loss(self, hidden: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Negative log-likelihood of this process's targets, see `hierarchical_cross_entropy`.

        "mean" and "sum" are over the positions of this process.
        """
        problem, flat = self._problem(hidden, target), target.flatten()
        needs = Needs.of(hidden, self.weight, self.bias, row_wise=self.row_wise)
        nll, _ = row_wise_nll(self._backend(flat), flat, needs, problem)
        return reduced(nll.view(target.shape), target, reduction, self.ignore_index)

    @torch.no_grad()
    def nll_by_level(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The terms of the loss at each level; all processes have the same inputs and results.

        Each computes the softmaxes with its rows, and has its share of the positions in between.
        """
        share = slice(self.dealt.rank, None, self.dealt.world_size)
        every, mine = self._problem(hidden, target), target.flatten()[share]
        problem, needs = every._replace(hidden=every.hidden[share]), Needs(False, False, False)
        softmaxes, _ = self._backend(mine).softmaxes(mine, problem, needs)
        nll = interleaved(softmaxes.nll_by_level().T, every.num_positions, self.dealt.group)
        return nll.T.reshape(self.tree.depth, *target.shape)

    def _problem(self, hidden: Tensor, target: Tensor) -> Problem:
        check_positions(hidden, target)
        hidden = autocast(self._checked(hidden), self.weight, self.bias)
        return Problem(
            hidden=hidden.reshape(-1, self.hidden_size),
            weight=self.weight,
            bias=self.bias,
            depth=self.tree.depth,
            ignore_index=self.ignore_index,
            **self._placed().held.of(self.tree),
        )

    def _placed(self) -> Placement:
        """What this process computes, on the device of the tree."""
        device = self.tree.arrays.row_of_word.device
        if self._placement.owner.device != device:
            moved: Placement = tree_map_only(Tensor, lambda each: each.to(device), self._placement)
            self._placement = moved
        return self._placement

    def _backend(self, target: Tensor) -> ShardedSolver:
        """The exchange of a batch [P] between the processes, which begins it together."""
        sizes = (self.dealt.world_size, self.ignore_index)
        check_words("target", target, self.vocab_size, self.ignore_index)
        placed = self._placed()
        recipients = recipients_of(target, self.tree, placed.owner, *sizes)
        gathered = None
        if placed.gathered is not None:
            gathered = Gathered(placed.gathered.of(self.tree), placed.num_gathered)
        return ShardedSolver(self.backend, gathered, recipients, self.dealt.group)

    def lookup(self, row: Tensor, *, row_wise: bool) -> Tensor:
        """Rows of the whole weight, see `DealtRows.lookup`."""
        return self.dealt.lookup(self.weight, row, row_wise=row_wise, find=self._find)

    def _rows(self, row: Tensor) -> Tensor:
        return self.lookup(row, row_wise=self.row_wise)

    def _find(self, row: Tensor) -> Tensor:
        """Where rows of the whole weight are in `weight`, -1 if in another process."""
        placed = self._placed()
        local = placed.held.local_row[row]
        if placed.gathered is None:
            return local
        held = self.dealt.held_row(placed.gathered.local_row[row])
        return torch.where(held >= 0, held, local)

    def lse_by_level(self, hidden: Tensor, target: Tensor) -> NoReturn:
        """Not available for a part of the rows."""
        self._decoded(hidden)

    def _decoded(self, hidden: Tensor) -> NoReturn:
        raise RuntimeError(
            "a ShardedSoftmax holds a part of the rows: decode with a HierarchicalSoftmax that has"
            " those of dealt.whole()"
        )
