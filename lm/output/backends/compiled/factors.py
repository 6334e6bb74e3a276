"""The row-wise gradient of a batch, which compiled loops form and use a few rows at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lm.output.backends.compiled.arrays import Array, as_array, own
from lm.output.backends.compiled.division import bounds_of, divide
from lm.output.rowwise.blocks import Part, Product, Rows, Rule

FORMED_VISITS = 16
"""Visits from which on a node's rows are formed once, not at each use: at most `BLOCK`, from which
on errors have another order, see `column_loops.forward_blocks`."""
NARROW = 8
"""Most children of a node of which the same is true: its factors are larger than its rows."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Factors:
    """The gradient of the weight as errors and hidden vectors.

    See `lm.output.rowwise.blocks.Unformed`. It is independent of the rows.
    """

    nodes: Array  # see `row_loops.update_rows`
    error: Tensor  # as `node_loops.forward` saves it; of rows that are not formed, [visits, n]
    hidden: Tensor  # [P, ≥ W] of the sorted positions, multiplied by their d nll
    formed: Tensor  # [F, W]
    more: Rows  # ascending, each row once
    num_rows: int  # R

    @classmethod
    def of(
        cls,
        nodes: Array,
        error: Tensor,
        hidden: Tensor,
        form: Callable[[Array, Tensor], None],
        shape: tuple[int, ...],
    ) -> "Factors":
        """The gradient of a table.

        Args:
            nodes: from `list_nodes`.
            error, hidden: see above.
            form: writes the gradients of some nodes' rows, given these nodes, with other numbers
                of rows, to a tensor [F, W].
            shape: R and W; for a bias W is 1.
        """
        listed = torch.from_numpy(nodes)
        num_visits, num_children = listed[:, 1] - listed[:, 0], listed[:, 3]
        is_formed = (num_visits >= FORMED_VISITS) | (num_children <= NARROW)
        width = num_children * is_formed
        place = width.cumsum(0) - width
        found, formed = listed[is_formed], hidden.new_empty(int(width.sum()), shape[1])
        found[:, 2] = place[is_formed]
        form(found.numpy(), formed)
        return cls(
            nodes=torch.column_stack([listed, place.where(is_formed, -1)]).numpy(),
            error=error,
            hidden=hidden,
            formed=formed,
            more=Rows(torch.empty(0, dtype=torch.int64), hidden.new_empty(0, shape[1])),
            num_rows=shape[0],
        )

    def parts(self) -> list[Part]:
        """See `Unformed.parts`."""
        nodes, size = self.nodes, self.formed.shape[1]
        is_formed = nodes[:, 6] >= 0
        first, num = torch.from_numpy(nodes[is_formed][:, 2:4]).unbind(1)
        rows = torch.arange(len(self.formed)) + (first - num.cumsum(0) + num).repeat_interleave(num)
        parts: list[Part] = [Rows(rows, self.formed), self.more]
        for start, end, first_row, n, offset, *_ in nodes[~is_formed].tolist():
            errors = self.error[offset : offset + (end - start) * n].view(-1, n)
            parts.append(Product(first_row, errors, self.hidden[start:end, :size]))
        return [part for part in parts if not isinstance(part, Rows) or len(part.row)]

    def plus(self, rows: Rows) -> "Factors":
        """See `Unformed.plus`."""
        row, place = torch.unique(torch.cat([self.more.row, rows.row]), return_inverse=True)
        values = torch.cat([self.more.values, rows.values.to(self.more.values.dtype)])
        values = values.new_zeros(len(row), values.shape[1]).index_add_(0, place, values)
        return replace(self, more=Rows(row, values))

    def square_norm(self) -> Tensor:
        """See `Unformed.square_norm`."""
        from lm.output.backends.compiled import row_loops

        squares = self.formed.new_empty(len(self.nodes) + len(self.more.row))
        self._divide(row_loops.square_norms, own(squares))
        return squares.sum().clamp(min=0)

    def can_update(self, table: Tensor) -> bool:
        """See `Unformed.can_update`."""
        return table.dtype == self.error.dtype

    def update(self, table: Tensor, rule: Rule, factor: float | Tensor) -> None:
        """See `Unformed.update`."""
        from lm.output.backends.compiled import row_loops

        names = "total", "mean", "square"
        known = [name in rule.state for name in names]
        which = row_loops.ADAM if known[1] else row_loops.ADAGRAD if known[0] else row_loops.SGD
        none, dtype = self.formed.new_empty(0, 0), own(self.formed).dtype.type
        state = {"total": none.view(-1), "mean": none, "square": none} | rule.state
        numbers = (float(factor), *rule.numbers, *[0.0] * (6 - len(rule.numbers)))
        self._divide(
            partial(row_loops.update_rows, which),
            as_array(table),
            tuple(as_array(state[name]) for name in names),
            tuple(map(dtype, numbers)),
        )

    def _divide(self, loop: Callable[..., None], *arguments: Any) -> None:
        bounds = bounds_of(self.nodes, self.num_rows, by_rows=True)
        arrays = map(own, (self.error, self.hidden, self.formed))
        divide(bounds, loop, self.nodes, *arrays, tuple(map(own, self.more)), *arguments)
