"""RowGradient, the gradient of a table of rows of which a batch touches few, and lookup of rows.

It holds only what is not zero, mostly as unmultiplied products, see `lm.output.rowwise.factors`. To
autograd it is a tensor of the table's shape: it is summed over uses and over batches, clipped by
`torch.nn.utils.clip_grad_norm_`, and found in `.grad`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lm.output.inputs import compute_dtype
from lm.output.rowwise.factors import RowFactors, as_one_block, as_rows, on_host
from lm.output.tracing import differentiable_once, is_captured, not_compiled


class RowGradient(Tensor):
    """The gradient of a table [R, H] or a vector [R] that is zero except for some rows.

    A tensor of that shape whose values `to_dense` and `factors` give. It supports the operations of
    autograd and of clipping: addition, multiplication by a number, and the 2-norm. Any other one
    that neither changes nor converts a tensor is computed from `to_dense()`, which takes memory of
    the table's size. An ordinary tensor that is added in place gives it values of all rows, too.

    Args:
        like: the table; gives shape, dtype and device.
        factors: what the gradient is, in at least fp32; for a vector, H = 1. None for zeros.
    """

    _held: list[RowFactors]  # one, which `detach()` and `data` share
    _is_replayed: bool  # a CUDA graph writes it: what shares it has what the last replay wrote

    @staticmethod
    def __new__(cls, like: Tensor, factors: RowFactors | None = None) -> "RowGradient":
        """Make the wrapper, a tensor without memory."""
        made: RowGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        made._held = [factors or RowFactors()]
        made._is_replayed = is_captured(like.device)
        return made

    @property
    def factors(self) -> RowFactors:
        """What the gradient is."""
        return self._held[0]

    @factors.setter
    def factors(self, factors: RowFactors) -> None:
        self._held[0] = factors

    def __repr__(self) -> str:  # type: ignore[override]
        rows = sum(len(row) for row, _ in self.factors.rows)
        children = sum(int(each.nodes[:, 3].sum()) for each in self.factors.visited)
        return f"RowGradient({list(self.shape)}, {children} rows of nodes, {rows} single rows)"

    def to_dense(self, *args: Any, **kwargs: Any) -> Tensor:
        """The gradient as an ordinary tensor, [R, H] or [R]."""
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for block in self.factors.blocks(self):
            dense[block.rows] = block.values().view(-1, *self.shape[1:]).to(self.dtype)
        return dense

    def to_sparse(self, *args: Any, **kwargs: Any) -> Tensor:
        """The gradient as a coalesced COO tensor over rows, as of a sparse `nn.Embedding`."""
        rows = torch.empty(0, dtype=torch.int64, device=self.device)
        values = torch.empty(0, *self.shape[1:], dtype=self.dtype, device=self.device)
        for block in as_one_block(list(self.factors.blocks(self))):
            rows, values = block.index(self.device), block.values()
            if block.source is not None:
                rows, values = rows[block.is_first()], values[block.is_first()]
            rows, order = rows.sort()
            values = values[order].to(self.dtype).view(-1, *self.shape[1:])
        return torch.sparse_coo_tensor(
            rows[None], values, self.shape, is_coalesced=True, check_invariants=False
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler, kwargs = _HANDLERS.get(func), kwargs or {}
        result = NotImplemented if handler is None else handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func._schema.is_mutable or func is _aten._to_copy.default:
            raise NotImplementedError(
                f"a RowGradient does not support {func}: it can be added, scaled, clipped by"
                " clip_grad_norm_ (not with foreach=True) and used by the optimizers of"
                " lm.output.rowwise; DDP and FSDP require row_wise=False, or lm.output.sharded;"
                " to_dense() converts it to an ordinary tensor, and zero_grad() before moving a"
                " layer removes it"
            )
        args, kwargs = tree_map_only(cls, cls.to_dense, (args, kwargs))
        return func(*args, **kwargs)


def _add(one: Tensor, other: Tensor, alpha: float = 1) -> Tensor:
    if not isinstance(one, RowGradient) or not isinstance(other, RowGradient):
        one, other = (t.to_dense() if isinstance(t, RowGradient) else t for t in (one, other))
        return one.add(other, alpha=alpha)
    more = other.factors if alpha == 1 else other.factors.times(alpha)
    return RowGradient(one, one.factors.plus(more))


def _assign(one: Tensor, result: Any) -> Any:
    """Change a gradient into a result of its shape; an ordinary tensor has values of all rows."""
    if result is NotImplemented or result.shape != one.shape:
        return NotImplemented
    assert isinstance(one, RowGradient)
    if not isinstance(result, RowGradient):
        row = torch.arange(len(one), device=one.device)
        values = as_rows(result).to(compute_dtype(one.dtype))
        result = RowGradient(one, RowFactors(rows=((row, values),)))
    one.factors = result.factors
    return one


def _add_(one: Tensor, other: Tensor, alpha: float = 1) -> Any:
    if isinstance(one, RowGradient):
        return _assign(one, _add(one, other, alpha))
    return one.add_(other.to_dense(), alpha=alpha)


def _mul(one: Any, number: Any) -> Any:
    one, number = (one, number) if isinstance(one, RowGradient) else (number, one)
    if isinstance(number, Tensor) and number.dim():
        return NotImplemented
    return RowGradient(one, one.factors.times(number))


def _div(one: Any, number: Any) -> Any:
    if not isinstance(one, RowGradient):
        return NotImplemented
    if not isinstance(number, Tensor) and number == 0:
        return one.to_dense() / number  # NaN in the rows without a gradient
    return _mul(one, 1 / number)


def _norm(one: RowGradient, ord: float = 2, *options: Any, **dtype: Any) -> Any:
    if ord != 2 or options or dtype:
        return NotImplemented
    return one.factors.square_norm(one).sqrt()


def _new(one: RowGradient, size: Sequence[int], *_: Any, **options: Any) -> Tensor:
    """Memory for the copy that autograd makes of a gradient which a hook has kept."""
    if list(size) == list(one.shape):
        return RowGradient(one)
    return torch.empty(size, **options)


def _copy_(one: Tensor, other: Tensor, *_: Any) -> Any:
    if not isinstance(other, RowGradient):
        return NotImplemented
    return _assign(one, other) if isinstance(one, RowGradient) else one.copy_(other.to_dense())


def _alias(one: RowGradient) -> RowGradient:
    alias = RowGradient(one, one.factors)
    alias._is_replayed = False
    if one._is_replayed:
        one.factors.forget()
    else:
        alias._held = one._held
    return alias


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _add_,
    _aten.mul.Tensor: _mul,
    _aten.mul_.Tensor: lambda one, number: _assign(one, _mul(one, number)),
    _aten.mul.Scalar: _mul,
    _aten.mul_.Scalar: lambda one, number: _assign(one, _mul(one, number)),
    _aten.div.Tensor: _div,
    _aten.div_.Tensor: lambda one, number: _assign(one, _div(one, number)),
    _aten.new_empty_strided.default: _new,
    _aten.copy_.default: _copy_,
    _aten.linalg_vector_norm.default: _norm,
    _aten.detach.default: _alias,
    _aten.clone.default: lambda one, **_: RowGradient(one, one.factors),
    _aten.alias.default: _alias,
    _aten.zero_.default: lambda one: _assign(one, RowGradient(one)),
}


class _Lookup(torch.autograd.Function):
    """Rows of a table, and their gradient."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.table_like = table.detach()
        ctx.save_for_backward(index)
        absent = (index < 0).view(*index.shape, *[1] * (table.dim() - 1))
        return table[index].masked_fill_(absent, 0)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *d_rows: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        table = ctx.table_like
        values, rows = d_rows[0].reshape(index.numel(), table[:1].numel()), index.flatten()
        values, read = values.to(compute_dtype(table.dtype)), rows >= 0
        if on_host(rows) or not len(rows):
            rows, values = rows[read], values[read]
        else:  # without waiting for how many are read: the others add zeros to one that is, or to 0
            rows = rows.where(read, rows.max().clamp(min=0))
            values = values.where(read[:, None], 0)
        return RowGradient(table, RowFactors(rows=((rows, values),))), None


@not_compiled
def lookup(table: Tensor, index: Tensor) -> Tensor:
    """Rows [..., H] of a table [R, H], `torch.nn.functional.embedding` with a `RowGradient`.

    Of a vector [R], numbers [...]. Where the index [...] int64 is -1, there are zeros, and no row
    has a gradient; but on a GPU, if all are -1, row 0 has one of zeros.

    Example:
        >>> table = torch.eye(3, requires_grad=True)
        >>> lookup(table, torch.tensor([2, 2])).sum().backward()
        >>> table.grad
        RowGradient([3, 3], 0 rows of nodes, 2 single rows)
    """
    rows: Tensor = _Lookup.apply(table, index)  # type: ignore[no-untyped-call]
    return rows
