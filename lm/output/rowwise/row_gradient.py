"""RowGradient: the gradient of a table of rows, of which a batch touches few. Holds what is not
zero, and most of that unmultiplied.

The gradient of a visited node's rows is Σ_{v of n} e_v (d nll_p h_p)ᵀ: a product of [children,
visits] and [visits, H], of rank 1 where the node has one visit. The factors are what the backward
has at hand anyway; the product would be as large as the visited rows, gigabytes where a table has
ten million. So it is formed in portions that fit in a cache, by whoever uses the gradient: the norm
for clipping, the optimizer's step. Rows that are read as input vectors have a gradient each.

To autograd it is a tensor of the table's shape: it is added up over uses and over batches,
clipped by `torch.nn.utils.clip_grad_norm_` and found in `.grad`.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import chain
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")
_PORTION = 1 << 19
"""Most elements of a product formed at once: 2 MB in fp32."""
_ROWS_PORTION = 1 << 26
"""Most elements of single rows in a block: 256 MB in fp32, of which an optimizer makes copies."""


class Product(NamedTuple):
    """Gradient leftᵀ right of the rows first_row, first_row + 1, …

    Attributes:
        first_row: of the node's children.
        left: [visits, children].
        right: [visits, H].
    """

    first_row: int
    left: Tensor
    right: Tensor


class Rows(NamedTuple):
    """Gradients of single rows.

    Attributes:
        row: [K] int64; they may repeat.
        values: [K, H].
    """

    row: Tensor
    values: Tensor


class Block:
    """Some rows of the gradient, no two blocks of which share one: values, or leftᵀ right, formed
    when they are wanted, with values added to a few of the rows.

    Args:
        rows: which: neighbours, or an index [K].
        values: [K, H], or None.
        factors: left [visits, K] and right [visits, H], or None.
        more: what is added to some of the K rows; rows counted from the block's first, each once.
    """

    def __init__(
        self,
        rows: slice | Tensor,
        values: Tensor | None = None,
        factors: tuple[Tensor, Tensor] | None = None,
        more: Rows | None = None,
    ) -> None:
        self.rows = rows
        self._values, self._factors, self._more = values, factors, more

    def formed(self) -> Tensor:
        """The values [K, H]."""
        if self._values is None:
            assert self._factors is not None
            left, right = self._factors
            self._values = left.T @ right
            if self._more is not None:
                self._values[self._more.row] += self._more.values
        return self._values

    def square_norms(self) -> Tensor:
        """Of each row, [K]."""
        if self._values is not None or self._factors is None or len(self._factors[0]) > 1:
            return self.formed().square().sum(1)
        left, right = self._factors
        squares = left[0].square() * right.square().sum()
        if self._more is not None:
            row, values = self._more
            squares[row] = (left[0, row, None] * right + values).square().sum(1)
        return squares

    def add_into(self, out: Tensor, factor: float | Tensor) -> None:
        """out += factor * values.

        Args:
            out: [K, H], in the values' dtype.
            factor: one for all rows, or [K].
        """
        if self._values is not None or self._factors is None:
            if isinstance(factor, Tensor):
                out.addcmul_(self.formed(), factor[:, None])
            else:
                out.add_(self.formed(), alpha=factor)
            return
        left, right = self._factors
        if isinstance(factor, Tensor):
            out.addmm_((left * factor).T, right)
        else:
            out.addmm_(left.T, right, alpha=factor)
        if self._more is not None:
            row, values = self._more
            out[row] += values * (factor[row, None] if isinstance(factor, Tensor) else factor)


class RowGradient(Tensor):
    """The gradient of a table [R, H] or a vector [R] that is zero but for some rows.

    A tensor of that shape whose numbers `to_dense` and `blocks` tell; other operations than those
    of autograd and of clipping (addition, multiplication by a number, the 2-norm) are refused.

    Args:
        like: the table; gives shape, dtype and device.
        parts: whose sum the gradient is, kept in at least fp32; for a vector, H = 1.
    """

    parts: list[Product | Rows]

    @staticmethod
    def __new__(cls, like: Tensor, parts: Sequence[Product | Rows]) -> "RowGradient":
        made: RowGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        dtype = torch.promote_types(like.dtype, torch.float32)
        made.parts = [_cast(part, dtype) for part in parts]
        return made

    def __init__(self, like: Tensor, parts: Sequence[Product | Rows]) -> None:
        pass  # made in __new__, as a wrapper of no memory must be

    def __repr__(self) -> str:  # type: ignore[override]
        rows = sum(part.row.numel() for part in self.parts if isinstance(part, Rows))
        children = sum(part.left.shape[1] for part in self.parts if isinstance(part, Product))
        return f"RowGradient({list(self.shape)}, {children} rows in products, {rows} single rows)"

    def blocks(self) -> Iterator[Block]:
        """The rows that are not zero, each in one block, in portions of a cache's size."""
        products: defaultdict[int, list[Product]] = defaultdict(list)
        for part in self.parts:
            if isinstance(part, Product):
                products[part.first_row].append(part)
        single = _coalesced([part for part in self.parts if isinstance(part, Rows)])
        nodes = [_joined(products[first]) for first in sorted(products)]
        own, rest = _shared_out(single, nodes)
        blocks = chain.from_iterable(map(_portions, nodes, own))
        if rest is not None and rest.row.numel():
            step = max(1, _ROWS_PORTION // rest.values.shape[1])
            parts = torch.split(rest.row, step), torch.split(rest.values, step)
            blocks = chain(blocks, (Block(*part) for part in zip(*parts, strict=True)))
        yield from blocks if self.dim() > 1 else _as_one(list(blocks))

    def square_norm(self) -> Tensor:
        """Sum of the squares, a scalar."""
        sums = [block.square_norms().sum() for block in self.blocks()]
        return torch.stack(sums).sum() if sums else torch.zeros((), device=self.device)

    def to_dense(self, *args: Any, **kwargs: Any) -> Tensor:
        """The gradient as an ordinary tensor, [R, H] or [R]."""
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for block in self.blocks():
            dense[block.rows] = block.formed().view(-1, *self.shape[1:]).to(self.dtype)
        return dense

    def to_sparse(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same as a coalesced sparse COO tensor, whose index runs over rows: what
        `nn.Embedding(sparse=True)` has, and torch's own sparse optimizers take.
        """
        index = [torch.empty(0, dtype=torch.int64, device=self.device)]
        values = [torch.empty(0, *self.shape[1:], dtype=self.dtype, device=self.device)]
        for block in self.blocks():
            index.append(_index(block, self.device))
            values.append(block.formed().to(self.dtype).view(-1, *self.shape[1:]))
        order = torch.cat(index).argsort()
        rows, formed = torch.cat(index)[order], torch.cat(values)[order]
        return torch.sparse_coo_tensor(
            rows[None], formed, self.shape, is_coalesced=True, check_invariants=False
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise NotImplementedError(
                f"{func}: a RowGradient is added, scaled, clipped and handed to the optimizers of"
                " lm.output.rowwise; to_dense() makes an ordinary tensor of it, and zero_grad()"
                " lets a layer be moved"
            )
        return handler(*args, **(kwargs or {}))


def _cast(part: Product | Rows, dtype: torch.dtype) -> Product | Rows:
    if isinstance(part, Product):
        return Product(part.first_row, part.left.to(dtype), part.right.to(dtype))
    return Rows(part.row, part.values.to(dtype))


def _joined(products: Sequence[Product]) -> Product:
    """The sum of products over the same rows, as one."""
    if len(products) == 1:
        return products[0]
    left = torch.cat([product.left for product in products])
    return Product(products[0].first_row, left, torch.cat([product.right for product in products]))


def _coalesced(parts: Sequence[Rows]) -> Rows | None:
    """The same with each row once, in their order."""
    if not parts:
        return None
    row, values = parts[0]
    if len(parts) > 1:
        row = torch.cat([part.row for part in parts])
        values = torch.cat([part.values for part in parts])
    rows, place = torch.unique(row, return_inverse=True)
    summed = values.new_zeros(rows.numel(), values.shape[1])
    return Rows(rows, summed.index_add_(0, place, values))


def _shared_out(
    single: Rows | None, nodes: Sequence[Product]
) -> tuple[list[Rows | None], Rows | None]:
    """Single rows by the node that they are children of, and those of nodes without visits.

    Args:
        single: each row once, in their order.
        nodes: in the order of their rows.
    """
    if single is None or not nodes:
        return [None] * len(nodes), single
    first = torch.tensor([node.first_row for node in nodes])
    stop = first + torch.tensor([node.left.shape[1] for node in nodes])
    index = single.row.to(first.device)
    begin = torch.searchsorted(index, first).tolist()
    end = torch.searchsorted(index, stop).tolist()
    own = [
        Rows(single.row[a:b], single.values[a:b]) if a < b else None
        for a, b in zip(begin, end, strict=True)
    ]
    owner = torch.searchsorted(first, index, right=True) - 1
    outside = (owner < 0) | (index >= stop[owner.clamp(min=0)])
    outside = outside.to(single.row.device)
    return own, Rows(single.row[outside], single.values[outside])


def _portions(node: Product, rows: Rows | None) -> Iterator[Block]:
    """A node's rows, some at a time, with what single rows among them have besides."""
    width, step = node.left.shape[1], max(1, _PORTION // node.right.shape[1])
    for begin in range(0, width, step):
        end = min(begin + step, width)
        first, stop = node.first_row + begin, node.first_row + end
        left, more = node.left, rows
        if end - begin < width:
            left = node.left[:, begin:end]
            if rows is not None:
                inside = (rows.row >= first) & (rows.row < stop)
                more = Rows(rows.row[inside], rows.values[inside])
        if more is not None:
            more = Rows(more.row - first, more.values)
        yield Block(slice(first, stop), factors=(left, node.right), more=more)


def _as_one(blocks: Sequence[Block]) -> Iterator[Block]:
    """A vector's blocks as a single one: there is so little to each."""
    if blocks:
        values = torch.cat([block.formed() for block in blocks])
        yield Block(torch.cat([_index(block, values.device) for block in blocks]), values)


def _index(block: Block, device: torch.device) -> Tensor:
    rows = block.rows
    return torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows


def _changed(gradient: RowGradient, change: Callable[[Tensor], Tensor]) -> list[Product | Rows]:
    """The parts with `change` applied to what is linear in each."""
    return [
        part._replace(right=change(part.right))
        if isinstance(part, Product)
        else part._replace(values=change(part.values))
        for part in gradient.parts
    ]


def _add(one: Tensor, other: Tensor, alpha: float = 1) -> Tensor:
    if not isinstance(one, RowGradient) or not isinstance(other, RowGradient):
        one, other = (t.to_dense() if isinstance(t, RowGradient) else t for t in (one, other))
        return one.add(other, alpha=alpha)
    more = other.parts if alpha == 1 else _changed(other, lambda part: part * alpha)
    return RowGradient(one, [*one.parts, *more])


def _add_(one: Tensor, other: Tensor, alpha: float = 1) -> Tensor:
    if isinstance(one, RowGradient) and isinstance(other, RowGradient):
        one.parts = _add(one, other, alpha).parts  # type: ignore[attr-defined]
        return one
    if isinstance(one, RowGradient):
        raise NotImplementedError("an ordinary gradient cannot be added to a RowGradient in place")
    return one.add_(other.to_dense(), alpha=alpha)


def _mul(one: Tensor, number: Tensor | float) -> Tensor:
    if not isinstance(one, RowGradient):
        one, number = number, one  # type: ignore[assignment]
    assert isinstance(one, RowGradient)
    if isinstance(number, Tensor) and number.dim():
        raise NotImplementedError("a RowGradient is multiplied by numbers only")
    return RowGradient(one, _changed(one, lambda part: part * number))


def _mul_(one: RowGradient, number: Tensor | float) -> Tensor:
    one.parts = _mul(one, number).parts  # type: ignore[attr-defined]
    return one


def _norm(
    one: RowGradient, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    if ord != 2 or dim is not None:
        raise NotImplementedError("a RowGradient has a 2-norm over all of it only")
    return one.square_norm().sqrt()


def not_compiled(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """`torch.compiler.disable` that loads the compiler for nobody who has not loaded it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        compiler = sys.modules.get("torch._dynamo")
        run: Callable[P, Tensor] = function if compiler is None else compiler.disable(function)
        return run(*args, **kwargs)

    return call


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that refuses to be differentiated, where autograd would take what it returns for
    constants.
    """

    @wraps(backward)
    def refusing(ctx: Any, *upstream: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("gradients of rows are differentiable once: not with create_graph")
        return backward(ctx, *upstream)

    return refusing


class _Lookup(torch.autograd.Function):
    """Rows of a table, whose gradient is theirs alone."""

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
    """
    rows: Tensor = _Lookup.apply(table, index)  # type: ignore[no-untyped-call]
    return rows


def _same(one: RowGradient, **_: Any) -> RowGradient:
    return RowGradient(one, one.parts)


def _zero_(one: RowGradient) -> RowGradient:
    one.parts = []
    return one


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _add_,
    _aten.mul.Tensor: _mul,
    _aten.mul_.Tensor: _mul_,
    _aten.mul.Scalar: _mul,
    _aten.mul_.Scalar: _mul_,
    _aten.linalg_vector_norm.default: _norm,
    _aten.detach.default: _same,
    _aten.clone.default: _same,
    _aten.alias.default: _same,
    _aten.zero_.default: _zero_,
}
