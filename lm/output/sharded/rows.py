"""Tables whose rows are dealt to processes: which rows, drawing, gathering and looking them up.

Row r of a whole table is in slot r, unless a plan says another one; slot s is row s // W of process
s mod W. The rows of another number of processes are other rows of the same whole table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lm.output.rowwise import lookup
from lm.output.tracing import differentiable_once, not_compiled

BLOCK_ROWS = 1 << 16
"""Rows of a whole table that are drawn or gathered at a time."""


class DealtRows(NamedTuple):
    """The rows of a table that one process of a group holds."""

    num_rows: int  # R, of the whole table
    rank: int
    world_size: int  # W
    group: Any = None  # of `torch.distributed`; None is all processes
    slot: Tensor | None = None  # [R] int64 on the CPU; None: row r in slot r

    @property
    def num_held(self) -> int:
        """Number of rows of this process."""
        return self.num_held_by(self.rank)

    def num_held_by(self, rank: int) -> int:
        """Number of rows of a process."""
        if self.slot is None:
            return len(range(rank, self.num_rows, self.world_size))
        return int((self.slot % self.world_size == rank).sum())

    def slots(self, row: Tensor) -> Tensor:
        """The slots of rows, on the CPU."""
        return row if self.slot is None else self.slot[row]

    def held_row(self, slot: Tensor) -> Tensor:
        """The rows of this process in slots, -1 for other processes' and for -1."""
        return torch.where(slot % self.world_size == self.rank, slot // self.world_size, -1)

    def held(self, whole: Tensor) -> Tensor:
        """The rows of this process in a whole table, contiguous; the inverse of `whole`."""
        slots = torch.arange(self.num_held, device="cpu") * self.world_size + self.rank
        return whole[self._rows_in(slots).to(whole.device)]

    def _rows_in(self, slots: Tensor) -> Tensor:
        """The rows in slots on the CPU, -1 where there is none; the inverse of `slots`."""
        if self.slot is None:
            return torch.where(slots < self.num_rows, slots, -1)
        size = int(torch.cat([self.slot, slots]).max()) + 1
        row = torch.full((size,), -1, device="cpu")
        row[self.slot] = torch.arange(self.num_rows, device="cpu")
        return row[slots]

    @torch.no_grad()
    def draw(self, table: Tensor, fill: Callable[[Tensor], Any]) -> None:
        """Fill the rows of this process as `fill` would fill the whole table.

        The whole table is drawn in blocks, so that its values do not depend on the processes.
        """
        if table.is_meta:
            return
        for begin in range(0, self.num_rows, BLOCK_ROWS):
            rows = table.new_empty(min(BLOCK_ROWS, self.num_rows - begin), *table.shape[1:])
            fill(rows)
            slot = self.slots(torch.arange(begin, begin + len(rows), device="cpu"))
            row = self.held_row(slot).to(table.device)
            table[row[row >= 0]] = rows[row >= 0]

    @torch.no_grad()
    def whole(self, table: Tensor) -> Tensor | None:
        """The tables [R / W, ...] of all processes as [R, ...] on the CPU of the first; else None.

        All processes call it together. The first one needs memory for the whole table.
        """
        shape = (self.num_rows, *table.shape[1:])
        most = max(map(self.num_held_by, range(self.world_size)))
        whole = torch.empty(shape, dtype=table.dtype, device="cpu") if self.rank == 0 else None
        for begin in range(0, most, BLOCK_ROWS):
            size = min(BLOCK_ROWS, most - begin)
            num_rows = size * self.world_size
            rows = interleaved(table[begin : begin + size], num_rows, self.group).cpu()
            if whole is not None:
                slots = begin * self.world_size + torch.arange(num_rows, device="cpu")
                row = self._rows_in(slots)
                whole[row[row >= 0]] = rows[row >= 0]
        return whole

    @not_compiled
    def lookup(
        self,
        table: Tensor,
        index: Tensor,
        *,
        row_wise: bool,
        find: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Rows [..., H] of the whole table for this process's index [...], zeros where it is -1.

        All processes call it, and its backward, together, with indices of any shape. Each looks up
        those of all processes that it holds. The gradient of `table` is as of the loss.

        Args:
            find: where rows are in `table`, -1 for those of other processes; required if rows have
                other slots than their numbers.
        """
        longest = torch.tensor(index.numel(), device=index.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        row = gathered(index.flatten(), int(longest), -1, self.group)
        local = self.held_row(row) if find is None else find(row.clamp(min=0))
        local = torch.where(row >= 0, local, -1)
        if len(table) == 0:
            rows = table.new_zeros(len(local), table.shape[1]) + table.sum()  # for autograd
        elif row_wise:
            rows = lookup(table, local)
        else:
            rows = F.embedding(local.clamp(min=0), table) * (local >= 0)[:, None]
        own: Tensor = _Returned.apply(rows, index.numel(), self.group)  # type: ignore[no-untyped-call]
        return own.view(*index.shape, table.shape[1])


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


def interleaved(rows: Tensor, num_rows: int, group: Any) -> Tensor:
    """Rows [R, ...] of which all processes have those that are dealt to them: every W-th one."""
    world_size = dist.get_world_size(group)
    size = -(-num_rows // world_size)
    dealt = gathered(rows, size, 0, group).view(world_size, size, *rows.shape[1:])
    return dealt.transpose(0, 1).flatten(0, 1)[:num_rows]


def sum_of_shares(shares: Tensor, num_positions: int, group: Any) -> Tensor:
    """What all processes have for this process's positions, summed: [P, H] of [W · size, H]."""
    received = torch.empty_like(shares)
    dist.all_to_all_single(received, shares.contiguous(), group=group)
    world_size = dist.get_world_size(group)
    each = (world_size, len(shares) // world_size, *shares.shape[1:])
    parts = received.view(each)[:, :num_positions]
    total: Tensor = parts.to(torch.promote_types(shares.dtype, torch.float32)).sum(0)
    return total.to(shares.dtype)
