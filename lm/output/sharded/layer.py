"""ShardedSoftmax: a HierarchicalSoftmax whose rows are split over processes."""

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from lm.output.backends.base import Needs, Problem, autocast
from lm.output.functional import BackendName, Reduction
from lm.output.layer import HierarchicalSoftmax
from lm.output.sharded.exchange import nll_by_level, sharded_nll
from lm.output.sharded.placement import place
from lm.output.sharded.rows import DealtRows, gathered
from lm.output.tree.class_tree import ClassTree, Shard, TreeArrays

_OF_SHARD = ("num_children", "first_row", "node_of_row", "column")


class ShardedSoftmax(HierarchicalSoftmax):
    """A softmax over N words whose rows are dealt to the processes of a group.

    Every process holds every W-th row, computes its rows' share of the softmaxes for the positions
    of all processes, and does the same work for any targets. Log-sum-exps, target logits, hidden
    vectors and their gradients are exchanged, never rows. `loss` and its backward are collective:
    all processes call them in the same order, with any number of positions, none included.

    The gradients of `weight` and `bias` belong to the mean over processes of their losses, as those
    that DDP averages; DDP itself must leave these parameters out. Decoding requires the whole
    weight, which `dealt.whole` gathers.

    Args:
        hidden_size, tree, bias, ignore_index, backend, row_wise, dtype: as in
            `HierarchicalSoftmax`.
        group: the processes; None is all of them.

    Attributes:
        weight: [R / W, W'] the process's rows; row r of the whole weight is row r // W of process
            r mod W.
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
    ) -> None:
        self.dealt = DealtRows.of(tree.num_rows, group)
        super().__init__(
            hidden_size,
            tree,
            bias=bias,
            ignore_index=ignore_index,
            backend=backend,
            row_wise=row_wise,
            dtype=dtype,
        )
        placement = place(self.tree, self.dealt.rank, self.dealt.world_size)
        self._max_path_columns = placement.max_path_columns
        for name in _OF_SHARD:
            self.register_buffer(f"_{name}", getattr(placement.tree, name), persistent=False)
        self.register_buffer("_local_row", placement.shard.local_row, persistent=False)

    def _num_held_rows(self, tree: ClassTree) -> int:
        return self.dealt.num_held

    def draw(self, table: Tensor, fill: Callable[[Tensor], Any]) -> None:
        """As of a `HierarchicalSoftmax`: rows do not depend on the number of processes."""
        self.dealt.draw(table, fill)

    def loss(self, hidden: Tensor, target: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Negative log-likelihood of this process's targets, see `hierarchical_cross_entropy`.

        "mean" and "sum" are over the positions of this process.
        """
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be mean, sum or none, got {reduction!r}")
        problem = self._problem(hidden, target)
        enabled, bias = torch.is_grad_enabled(), self.bias
        needs = Needs(
            hidden=enabled and hidden.requires_grad,
            weight=enabled and self.weight.requires_grad,
            bias=enabled and bias is not None and bias.requires_grad,
            row_wise=enabled and self.row_wise,
        )
        nll = sharded_nll(self.backend, needs, self.dealt.group, problem)
        if reduction == "none":
            return nll.view(target.shape)
        if reduction == "sum":
            return nll.sum()
        return nll.sum() / (target != self.ignore_index).sum().clamp(min=1)

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
        nll = nll_by_level(self.backend, problem, nothing, self.dealt.group).nll
        size = -(-len(targets) // world_size)
        depth = self.tree.depth
        shares = gathered(nll.T, size, 0, self.dealt.group).view(world_size, size, depth)
        levels = shares.transpose(0, 1).flatten(0, 1)[: len(targets)]
        return levels.T.reshape(depth, *target.shape)

    def _problem(self, hidden: Tensor, target: Tensor) -> Problem:
        if hidden.shape[:-1] != target.shape or target.dtype != torch.int64:
            raise ValueError(
                "hidden must be [..., H] and target [...] int64, got"
                f" {list(hidden.shape)} and {target.dtype} {list(target.shape)}"
            )
        hidden = autocast(self._checked(hidden), self.weight, self.bias)
        arrays = {name: getattr(self, f"_{name}") for name in _OF_SHARD}
        return Problem(
            hidden.reshape(-1, self.hidden_size),
            self.weight,
            target.reshape(-1),
            TreeArrays(**self.tree.arrays._asdict() | arrays),
            self.bias,
            self.tree.depth,
            self._max_path_columns,
            self.ignore_index,
            Shard(self.tree.node_of_row, cast(Tensor, self._local_row)),
        )

    def lse_by_level(self, hidden: Tensor, target: Tensor) -> NoReturn:
        """Not available for a part of the rows."""
        self._decoded(hidden)

    def candidate_log_prob(self, hidden: Tensor, word: Tensor) -> NoReturn:
        """Likewise."""
        self._decoded(hidden)

    def _decoded(self, hidden: Tensor) -> NoReturn:
        raise RuntimeError(
            "a ShardedSoftmax holds a part of the rows: decode with a HierarchicalSoftmax that has"
            " those of dealt.whole()"
        )
