"""Tables whose rows are dealt to processes: which rows, drawing, gathering and looking them up.

Row r of a whole table is row r // W of process r mod W. The rows of another number of processes are
slices `whole[rank::W]` of the same whole table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lm.output.rowwise import lookup
from lm.output.rowwise.eager import differentiable_once, not_compiled

BLOCK_ROWS = 1 << 16
"""Rows of a whole table that are drawn or gathered at a time."""


class DealtRows(NamedTuple):
    """The rows of a table that one process of a group holds."""

    num_rows: int  # R, of the whole table
    rank: int
    world_size: int  # W
    group: Any  # of `torch.distributed`; None is all processes

    @classmethod
    def of(cls, num_rows: int, group: Any = None) -> "DealtRows":
        """Those of this process."""
        return cls(num_rows, dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def num_held(self) -> int:
        """Number of rows of this process."""
        return len(range(self.rank, self.num_rows, self.world_size))

    def held(self, whole: Tensor) -> Tensor:
        """The rows of this process in a whole table, a view."""
        return whole[self.rank :: self.world_size]

    @torch.no_grad()
    def draw(self, table: Tensor, fill: Callable[[Tensor], Any]) -> None:
        """Fill the rows of this process as `fill` would fill the whole table.

        The whole table is drawn in blocks, so that its values do not depend on the processes.
        """
        for begin in range(0, self.num_rows, BLOCK_ROWS):
            rows = table.new_empty(min(BLOCK_ROWS, self.num_rows - begin), *table.shape[1:])
            fill(rows)
            first = (self.rank - begin) % self.world_size
            held = rows[first :: self.world_size]
            place = (begin + first) // self.world_size
            table[place : place + len(held)] = held

    @torch.no_grad()
    def whole(self, table: Tensor) -> Tensor | None:
        """The tables [R / W, ...] of all processes as [R, ...] on the CPU of the first; else None.

        All processes call it together. The first one needs memory for the whole table.
        """
        shape, most = (self.num_rows, *table.shape[1:]), -(-self.num_rows // self.world_size)
        whole = torch.empty(shape, dtype=table.dtype) if self.rank == 0 else None
        for begin in range(0, most, BLOCK_ROWS):
            size = min(BLOCK_ROWS, most - begin)
            rows = gathered(table[begin : begin + size], size, 0, self.group).cpu()
            if whole is not None:
                dealt = rows.view(self.world_size, size, *shape[1:]).transpose(0, 1).flatten(0, 1)
                part = whole[begin * self.world_size :][: len(dealt)]
                part.copy_(dealt[: len(part)])
        return whole

    @not_compiled
    def lookup(self, table: Tensor, index: Tensor, *, row_wise: bool) -> Tensor:
        """Rows [..., H] of the whole table for this process's index [...], zeros where it is -1.

        All processes call it, and its backward, together, with indices of any shape. Each looks up
        those of all processes that it holds. The gradient of `table` is as of `sharded_nll`.
        """
        longest = torch.tensor(index.numel(), device=index.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        row = gathered(index.flatten(), int(longest), -1, self.group)
        local = torch.where(row % self.world_size == self.rank, row // self.world_size, -1)
        local = torch.where(row >= 0, local, -1)
        if row_wise:
            rows = lookup(table, local)
        else:
            rows = F.embedding(local.clamp(min=0), table) * (local >= 0)[:, None]
        own: Tensor = _Returned.apply(rows, index.numel(), self.group)  # type: ignore[no-untyped-call]
        return own.view(*index.shape, -1)


class _Returned(torch.autograd.Function):
    """What all processes found for the indices of this one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_positions: int, group: Any) -> Tensor:
        ctx.group, ctx.size = group, len(rows) // dist.get_world_size(group)
        return sum_of_shares(rows, num_positions, group)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *d_rows: Tensor) -> tuple[Tensor, None, None]:
        mean = d_rows[0] / dist.get_world_size(ctx.group)
        return gathered(mean, ctx.size, 0, ctx.group), None, None


def gathered(tensor: Tensor, size: int, padding: float, group: Any) -> Tensor:
    """The tensors [P, ...] of all processes in order, each padded to `size`: [W · size, ...]."""
    missing = size - len(tensor)
    padded = F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing), value=padding)
    out = tensor.new_empty(dist.get_world_size(group) * size, *tensor.shape[1:])
    parts = list(out.chunk(dist.get_world_size(group))) if size else []
    if parts:
        dist.all_gather(parts, padded.contiguous(), group=group)
    return out


def sum_of_shares(shares: Tensor, num_positions: int, group: Any) -> Tensor:
    """What all processes have for this process's positions, summed: [P, H] of [W · size, H]."""
    received = torch.empty_like(shares)
    dist.all_to_all_single(received, shares.contiguous(), group=group)
    world_size = dist.get_world_size(group)
    each = (world_size, len(shares) // world_size, *shares.shape[1:])
    parts = received.view(each)[:, :num_positions]
    total: Tensor = parts.to(torch.promote_types(shares.dtype, torch.float32)).sum(0)
    return total.to(shares.dtype)
