"""Gradients of rows: the launch that writes them, and the factors that optimizers use instead."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lm.output.backends.base import Problem, compute_dtype
from lm.output.backends.triton.launch import SLOT, launch
from lm.output.backends.triton.plan import Plan, Saved, arguments
from lm.output.rowwise.blocks import Part, Rows, Rule

ROW_PROGRAMS = 2048
"""Most programs for tiles of heavy nodes' rows: they step through a list that may be short."""
_ZEROING_PROGRAMS = 512
"""Most programs that write zeros for rows of nodes without visits."""
_COLUMNS, _ADAM_COLUMNS = 64, 32
"""Most columns of a tile of an update, whose rows and state take registers besides the gradient."""


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
    """The gradient of a batch for the weight as its factors; of the bias without `partial_rows`.

    See `lm.output.rowwise.blocks.Unformed`. The factors are independent of the rows. Squared norms
    are formed once, until an update: a CUDA graph of the backward alone writes new factors here.
    """

    problem: Problem  # without autograd's history
    saved: Saved  # `exp_logits` are the errors
    plan: Plan
    scale: Tensor | None
    partial_rows: Tensor | None  # sums of chunks
    partial_bias: Tensor | None

    def parts(self) -> list[Part]:
        """See `Unformed.parts`: one, of rows. The host waits for their number."""
        tree, routing = self.problem.tree, self.saved.routing
        visited = routing.visited.bool()
        width = torch.where(visited, tree.num_children, 0)
        index = visited[tree.node_of_row].nonzero().squeeze(1)
        columns = self.problem.weight.shape[1] if self.partial_bias is None else 1
        values = self._new(index.numel(), columns)
        output = {"d_weight": values} if self.partial_bias is None else {"d_bias": values.view(-1)}
        sums = {"partial_hidden": None, "partial_rows": self.partial_rows}
        known = self._known | sums | {"partial_bias": self.partial_bias}
        write_rows(self.plan, known, **output, written_row=width.cumsum(0) - width)
        return [Rows(index, values)]

    def plus(self, rows: Rows) -> None:
        """See `Unformed.plus`."""

    def can_update(self, table: Tensor) -> bool:
        """See `Unformed.can_update`."""
        return True

    def square_norm(self) -> Tensor:
        """See `Unformed.square_norm`."""
        return self._norms[1].sum()

    def update(self, table: Tensor, rule: Rule, factor: float | Tensor) -> None:
        """See `Unformed.update`."""
        dtype, device = compute_dtype(table.dtype), table.device
        numbers = torch.ones(1 + len(rule.numbers), dtype=dtype, device=device)
        each, values = numbers.unbind(), (factor, *rule.numbers)
        torch._foreach_mul_(each, [1.0 if isinstance(x, Tensor) else x for x in values])
        for number, value in zip(each, values, strict=True):
            if isinstance(value, Tensor):
                number.mul_(value)
        squares = self._norms[0] if "total" in rule.state else None
        special: dict[str, Any] = {"table": table, "squares": squares, **rule.state}
        if table.dtype == torch.bfloat16:
            special["seed"] = torch.randint(1 << 31, (), device=device)
        self._launch(numbers=numbers, **special)
        vars(self).pop("_norms", None)

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        """Squared norms [R] of rows, undefined where there is no gradient, and sums of them."""
        num_rows, num_nodes = self.problem.weight.shape[0], self.saved.routing.visited.numel()
        squares, sums = self._new(num_rows), self._new(num_rows // SLOT + num_nodes).zero_()
        self._launch(numbers=self._new(1).fill_(1), squares=squares, sums=sums)
        return squares, sums

    @cached_property
    def _known(self) -> dict[str, Any]:
        """The arguments of kernels that all launches share."""
        known = arguments(self.plan, self.problem, self.saved)
        return known | {"errors": self.saved.exp_logits, "scale": self.scale}

    def _launch(self, **special: Any) -> None:
        from lm.output.backends.triton import update_kernel

        lists = self.plan.sizes
        row_programs = min(lists.row_tiles, ROW_PROGRAMS)
        most = _COLUMNS if special.get("mean") is None else _ADAM_COLUMNS
        light, tile = (
            each._replace(h=min(each.h, most))
            for each in (self.plan.tiles.light, self.plan.tiles.heavy)
        )
        special = {
            **dict.fromkeys(("table", "total", "mean", "square", "squares", "sums", "seed"), None),
            **special,
            "partial": self.partial_rows if self.partial_bias is None else self.partial_bias,
            "row_programs": row_programs,
            "max_nodes": lists.light_nodes,
            "LIGHT": light.v,
            "LIGHT_C": light.c,
            "LIGHT_H": light.h,
        }
        if self.partial_bias is not None:
            special["sorted_hidden"] = None
        num_programs = row_programs + lists.light_nodes + lists.split_tiles
        kernel = update_kernel._update
        launch(kernel, num_programs, tile, {**self._known}, **special)

    def _new(self, *shape: int) -> Tensor:
        return self.saved.lse.new_empty(shape)
