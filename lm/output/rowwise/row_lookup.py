"""lookup: rows of a table as input vectors, with a row-wise gradient."""

from typing import Any

import torch
from torch import Tensor

from lm.output.rowwise.blocks import Rows
from lm.output.rowwise.eager import differentiable_once, not_compiled
from lm.output.rowwise.row_gradient import RowGradient


class _Lookup(torch.autograd.Function):
    """Rows of a table, and their gradient."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.table_like = table.detach()
        ctx.save_for_backward(index)
        return table[index]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *d_rows: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        table = ctx.table_like
        values = d_rows[0].reshape(index.numel(), table.shape[1])
        return RowGradient(table, [Rows(index.flatten(), values)]), None


@not_compiled
def lookup(table: Tensor, index: Tensor) -> Tensor:
    """`torch.nn.functional.embedding` with a `RowGradient`.

    Args:
        table: [R, H].
        index: [...] int64, rows.

    Returns:
        [..., H].

    Example:
        >>> table = torch.eye(3, requires_grad=True)
        >>> lookup(table, torch.tensor([2, 2])).sum().backward()
        >>> table.grad
        RowGradient([3, 3], 0 rows in products, 2 single rows)
    """
    rows: Tensor = _Lookup.apply(table, index)  # type: ignore[no-untyped-call]
    return rows
