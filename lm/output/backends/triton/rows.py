"""Gradients of rows: the launch that writes them, and the factors that optimizers use instead."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lm.output.backends.base import Problem, compute_dtype
from lm.output.backends.triton.launch import SLOT, launch
from lm.output.backends.triton.plan import ALIGNED, Plan, Saved, arguments
from lm.output.backends.triton.tile_shapes import Tile
from lm.output.rowwise.blocks import Part, Rows, Rule

ROW_PROGRAMS = 2048
"""Most programs for tiles of heavy nodes' rows: they step through a list that may be short."""
_ZEROING_PROGRAMS = 512
"""Most programs that write zeros for rows of nodes without visits."""
UPDATE_PROGRAMS, SHARED_BLOCKS = 32_768, 8
"""Most programs of an update, and the blocks of children of a light node that one of them takes."""
_OF_UPDATES = (
    "table", "total", "mean", "square", "squares", "sums", "bias_sums", "seed"
)  # fmt: skip


def write_rows(
    plan: Plan,
    known: dict[str, Any],
    *,
    d_hidden: Tensor | None = None,
    d_weight: Tensor | None = None,
    d_bias: Tensor | None = None,
    written_row: Tensor | None = None,
) -> None:
    """Launch the kernel that writes what is given.

    `known` are the arguments of kernels, among them what the other launches wrote.

    `written_row` [I] is where each node's rows begin in d_weight and d_bias; None if these have all
    rows, of which those of nodes without visits are set to 0.
    """
    from lm.output.backends.triton import row_kernel

    lists, of_rows = plan.sizes, d_weight is not None or d_bias is not None
    row_tiles, split_tiles = (lists.row_tiles, lists.split_tiles) if of_rows else (0, 0)
    num_rows = known["node_of_row"].numel() if of_rows and written_row is None else 0
    columns, tile, light = known["weight"].shape[1], plan.tiles.heavy, plan.tiles.light
    row_programs = min(row_tiles * -(-columns // tile.h), ROW_PROGRAMS)
    num_programs = (lists.light_groups + split_tiles) * -(-columns // light.h)
    num_programs += row_programs + min(-(-num_rows // tile.c), _ZEROING_PROGRAMS)
    special = {
        "d_hidden": d_hidden,
        "d_weight": d_weight,
        "d_bias": d_bias,
        "written_row": written_row,
        "row_programs": row_programs,
        "max_split_tiles": split_tiles,
        "max_groups": lists.light_groups,
        "R": num_rows,
        "LIGHT_C": light.c,
        "LIGHT_H": light.h,
        "LIGHT_STAGES": light.stages,
    }
    tile = tile._replace(warps=light.warps)
    launch(row_kernel._rows, num_programs, tile, known, **special)


@dataclass(frozen=True, eq=False, kw_only=True)
class Factors:
    """The gradients of a batch for weight and bias as their factors, which need no rows.

    Squared norms are formed for weight and bias together and kept until the update of each: a CUDA
    graph of the backward alone writes new factors here.
    """

    problem: Problem  # without autograd's history
    saved: Saved  # `exp_logits` are the errors
    plan: Plan
    scale: Tensor | None
    partial_rows: Tensor | None  # sums of chunks; None if the weight has no gradient
    partial_bias: Tensor | None
    formed: dict[bool, tuple[Tensor | None, Tensor]] = field(default_factory=dict)  # norms

    def norms(self, *, of_bias: bool) -> tuple[Tensor | None, Tensor]:
        """Squared norms of rows [R], undefined where there is no gradient, and their sum.

        Those of the numbers of the bias are not kept.
        """
        if of_bias not in self.formed:
            num_rows, num_nodes = self.problem.weight.shape[0], self.saved.routing.visited.numel()
            num_places = -(-(num_rows // SLOT + num_nodes) // ALIGNED) * ALIGNED
            sums = self._new(2, num_places).zero_()
            special: dict[str, Any] = {"numbers": self._new(1).fill_(1)}
            if self.partial_rows is not None:
                special |= {"squares": self._new(num_rows), "sums": sums[0]}
            if self.partial_bias is not None:
                special["bias_sums"] = sums[1]
            self.launch(self.plan.tiles.norm, of_bias=self.partial_rows is None, **special)
            totals = sums.sum(1)
            self.formed[False] = special.get("squares"), totals[0]
            self.formed[True] = None, totals[1]
        return self.formed[of_bias]

    @cached_property
    def known(self) -> dict[str, Any]:
        """The arguments of kernels that all launches share."""
        known = arguments(self.plan, self.problem, self.saved)
        partial = {"partial_rows": self.partial_rows, "partial_bias": self.partial_bias}
        return known | {"errors": self.saved.exp_logits, "scale": self.scale, **partial}

    def launch(self, tile: Tile, *, of_bias: bool, **special: Any) -> None:
        """Launch the kernel for tables, state and norms that are given."""
        from lm.output.backends.triton import update_kernel

        lists, rows = self.plan.sizes, self.plan.tiles.heavy.c
        tile = self.plan.tiles.bias if of_bias else tile
        block = min(tile.c, rows)
        num_shares = -(-self.problem.max_path_columns // (block * SHARED_BLOCKS))
        num_shares = max(1, min(num_shares, UPDATE_PROGRAMS // max(lists.light_nodes, 1)))
        num_items = (lists.row_tiles + lists.split_tiles) * (rows // block)
        num_items += lists.light_nodes * num_shares
        special = {
            **dict.fromkeys(_OF_UPDATES),
            **special,
            "num_shares": num_shares,
            "TILE_C": rows,
        }
        if of_bias:
            special["sorted_hidden"] = None
        tile = tile._replace(c=block)
        num_programs = min(num_items, UPDATE_PROGRAMS)
        launch(update_kernel._update, num_programs, tile, {**self.known}, **special)

    def _new(self, *shape: int) -> Tensor:
        return self.saved.lse.new_empty(shape)


@dataclass(frozen=True, eq=False)
class Unwritten:
    """The gradient of the weight or of the bias, see `lm.output.rowwise.blocks.Unformed`."""

    factors: Factors
    of_bias: bool

    def parts(self) -> list[Part]:
        """See `Unformed.parts`: one, of rows. The host waits for their number."""
        problem, routing = self.factors.problem, self.factors.saved.routing
        tree, visited = problem.tree, routing.visited.bool()
        width = torch.where(visited, tree.num_children, 0)
        index = visited[tree.node_of_row].nonzero().squeeze(1)
        columns = 1 if self.of_bias else problem.weight.shape[1]
        values = self.factors.saved.lse.new_empty(index.numel(), columns)
        output = {"d_bias": values.view(-1)} if self.of_bias else {"d_weight": values}
        known = {**self.factors.known, "partial_hidden": None}
        write_rows(self.factors.plan, known, **output, written_row=width.cumsum(0) - width)
        return [Rows(index, values)]

    def plus(self, rows: Rows) -> None:
        """See `Unformed.plus`."""

    def can_update(self, table: Tensor) -> bool:
        """See `Unformed.can_update`."""
        return True

    def square_norm(self) -> Tensor:
        """See `Unformed.square_norm`."""
        return self.factors.norms(of_bias=self.of_bias)[1]

    def update(self, table: Tensor, rule: Rule, factor: float | Tensor) -> None:
        """See `Unformed.update`."""
        dtype, device = compute_dtype(table.dtype), table.device
        numbers = torch.ones(1 + len(rule.numbers), dtype=dtype, device=device)
        each, values = numbers.unbind(), (factor, *rule.numbers)
        torch._foreach_mul_(each, [1.0 if isinstance(x, Tensor) else x for x in values])
        for number, value in zip(each, values, strict=True):
            if isinstance(value, Tensor):
                number.mul_(value)
        special: dict[str, Any] = {"table": table, "numbers": numbers, **rule.state}
        squares, _ = self.factors.formed.pop(self.of_bias, (None, None))
        if "total" in rule.state:
            special["squares"] = squares
        if table.dtype == torch.bfloat16:
            special["seed"] = torch.randint(1 << 31, (), device=device)
        tiles = self.factors.plan.tiles
        tile = tiles.adam if "mean" in rule.state else tiles.update
        self.factors.launch(tile, of_bias=self.of_bias, **special)
