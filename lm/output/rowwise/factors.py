"""The layout of a row-wise gradient, and the blocks in which it is used.

The gradient of a visited node's rows is Σ_{v of n} e_v (d nll_p h_p)ᵀ: a product of [children,
visits] and [visits, H]. The backward has the factors anyway; the product would be as large as the
visited rows. So it is formed in blocks that fit in a cache, when the gradient is used: for the norm
of clipping, and in the optimizer's step. Rows that are read as input vectors have a gradient each.

A backend whose loops or kernels form the norm and the step of a batch is a subclass of `RowFactors`
with methods of its own for these. Whatever they do not take, as the sum of several batches, is used
in blocks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output.inputs import compute_dtype

PRODUCT_ELEMENTS = 1 << 19
"""Most elements of a product formed at once: 2 MB in fp32."""
ROWS_ELEMENTS = 1 << 26
"""Most elements of single rows in a block: 256 MB in fp32, of which an optimizer makes copies."""


def on_host(tensor: Tensor) -> bool:
    """Whether the host reads a tensor's values without waiting.

    On other devices, numbers of a step stay tensors and sizes do not depend on values: a CUDA graph
    would repeat those of the step that was captured.
    """
    return tensor.is_cpu


def as_rows(tensor: Tensor) -> Tensor:
    """A tensor [R, ...] as rows [R, W], of a number [1, 1]; a copy if there is no such view."""
    return tensor.reshape(tensor.shape[:1].numel(), tensor.shape[1:].numel())


KINDS = ("sgd", "adagrad", "adam")
"""Kinds of `Rule` that backends apply by themselves."""


class Rule(NamedTuple):
    """How an optimizer changes the rows with a gradient."""

    kind: str  # one of `KINDS`, or another one, which the optimizer applies block by block
    numbers: tuple[Any, ...]  # floats or tensors. SGD: lr; Adagrad: lr, eps; Adam: see `RowAdam`
    state: dict[str, Tensor]  # {}; "total"; "mean" and "square"


class Visited(NamedTuple):
    """The gradients of the nodes that a batch visits, ascending by their rows.

    Those of a node's rows are errorsᵀ hidden; or if it has many visits, they may have been formed.
    Its line of `nodes` has its first visit and the end of its visits, its first row, its number of
    children, where its errors begin, and its first row in `formed`, or -1.
    """

    nodes: Tensor  # [M, 6] int64 of the CPU
    error: Tensor  # flat, [visits, children] of each node
    hidden: Tensor  # [P, ≥ W] by sorted position, d nll · h; for a bias, d nll
    formed: Tensor  # [F, W]

    def formed_rows(self) -> Tensor:
        """The rows whose gradients are `formed`, [F]."""
        first, num = self.nodes[self.nodes[:, 5] >= 0, 2:4].unbind(1)
        rows = (first - num.cumsum(0) + num).repeat_interleave(num)
        rows += torch.arange(len(rows), device=rows.device)
        return rows.to(self.formed.device)


def with_places(nodes: Tensor, is_formed: Tensor) -> Tensor:
    """`Visited.nodes` given all but the last column, and whose rows are formed, [M] bool."""
    width = nodes[:, 3] * is_formed
    place = (width.cumsum(0) - width).where(is_formed, -1)
    return torch.column_stack([nodes[:, :5], place])


@dataclass(frozen=True, eq=False, kw_only=True)
class RowFactors:
    """The gradient of a table [R, W]: that of visited nodes and of single rows, times a factor."""

    visited: tuple[Visited, ...] = ()  # of each batch
    rows: tuple[tuple[Tensor, Tensor], ...] = ()  # [K] int64, which may repeat, and values [K, W]
    factor: float | Tensor = 1

    def in_memory(self) -> "RowFactors":
        """The gradient with factor 1, and with all that has been formed among the single rows."""
        formed = [(each.formed_rows(), each.formed) for each in self.visited if len(each.formed)]
        held = [each._replace(nodes=each.nodes[each.nodes[:, 5] < 0]) for each in self.visited]
        return RowFactors(
            visited=tuple(
                each._replace(hidden=self._times(each.hidden), formed=each.formed[:0])
                for each in held
            ),
            rows=tuple((row, self._times(values)) for row, values in (*formed, *self.rows)),
        )

    def _is_plain(self) -> bool:
        return not isinstance(self.factor, Tensor) and self.factor == 1

    def _times(self, tensor: Tensor) -> Tensor:
        return tensor if self._is_plain() else tensor * self.factor

    def plus(self, other: "RowFactors") -> "RowFactors":
        """The sum of two gradients."""
        are_plain = self._is_plain() and other._is_plain()
        for one, more in ((self, other), (other, self)):
            if type(more) is RowFactors and not more.visited and (are_plain or not more.rows):
                return replace(one, rows=self.rows + other.rows)
        one, more = self.in_memory(), other.in_memory()
        return RowFactors(visited=one.visited + more.visited, rows=one.rows + more.rows)

    def times(self, number: float | Tensor) -> "RowFactors":
        """The gradient times a number."""
        return replace(self, factor=self.factor * number)

    def square_norm(self, table: Tensor) -> Tensor:
        """The sum of the squares, a scalar."""
        none = torch.zeros((), dtype=compute_dtype(table.dtype), device=table.device)
        sums = [block.square_norm() for block in self.blocks(table)]
        return torch.stack(sums).sum() if sums else none

    def update(self, table: Tensor, rule: Rule) -> "Iterable[Block]":
        """The blocks that the optimizer has to apply: all of them here.

        `CompiledFactors` and `TritonFactors` change the table and the state by themselves.
        """
        return self.blocks(table)

    def forget(self) -> None:
        """Forget what was formed, because a CUDA graph has written the factors again."""

    def blocks(self, table: Tensor) -> "Iterator[Block]":
        """The rows of a table that have a gradient, each in one block, in at least fp32.

        Those of visited nodes are portions that fit in a cache; of a vector, all rows are one.
        """
        blocks = _blocks(self.in_memory(), compute_dtype(table.dtype))
        yield from as_one_block(list(blocks)) if table.numel() == len(table) else blocks


@dataclass(eq=False)
class Block:
    """Some rows of the gradient, disjoint from those of all other blocks.

    The values [K, H] are given, or formed as coefficientsᵀ vectors ([visits, K] and [visits, H])
    when they are first used, with `single_rows` added to a few of them: their places and values.
    Where a row is in several places k, their values are equal, and `source` [K] is the first.
    """

    rows: slice | Tensor  # neighbouring rows, or an index [K]
    formed: Tensor | None = None
    factors: tuple[Tensor, Tensor] | None = None
    single_rows: tuple[Tensor, Tensor] | None = None
    source: Tensor | None = None

    def values(self) -> Tensor:
        """The gradient of the rows, [K, H]."""
        if self.formed is None:
            assert self.factors is not None
            coefficients, vectors = self.factors
            self.formed = coefficients.T @ vectors
            if self.single_rows is not None:
                self.formed[self.single_rows[0]] += self.single_rows[1]
        return self.formed

    def index(self, device: torch.device) -> Tensor:
        """The rows as an index [K] int64."""
        if isinstance(self.rows, Tensor):
            return self.rows
        return torch.arange(self.rows.start, self.rows.stop, device=device)

    def square_norms(self) -> Tensor:
        """The squared 2-norm of each row's gradient, [K]."""
        if self.formed is not None or self.factors is None or len(self.factors[0]) > 1:
            return self.values().square().sum(1)
        coefficients, vector = self.factors
        squares = coefficients[0].square() * vector.square().sum()
        if self.single_rows is not None:
            place, values = self.single_rows
            squares[place] = (coefficients[0, place, None] * vector + values).square().sum(1)
        return squares

    def is_first(self) -> Tensor:
        """Which of the places of a block with `source` are the first of their row, [K]."""
        assert self.source is not None
        return self.source == torch.arange(len(self.source), device=self.source.device)

    def square_norm(self) -> Tensor:
        """The sum of the squares."""
        squares = self.square_norms()
        return (squares if self.source is None else squares.where(self.is_first(), 0)).sum()

    def add_into(self, out: Tensor, factor: float | Tensor) -> None:
        """Add factor · gradient to `out` [K, H], of one dtype; one factor for all rows, or [K]."""
        if isinstance(factor, Tensor):
            factor = factor.expand(len(out))
        if self.formed is not None or self.factors is None:
            if isinstance(factor, Tensor):
                out.addcmul_(self.values(), factor[:, None])
            else:
                out.add_(self.values(), alpha=factor)
            return
        coefficients, vectors = self.factors
        if isinstance(factor, Tensor):
            out.addmm_((coefficients * factor).T, vectors)
        else:
            out.addmm_(coefficients.T, vectors, alpha=factor)
        if self.single_rows is not None:
            place, values = self.single_rows
            out[place] += values * (factor[place, None] if isinstance(factor, Tensor) else factor)


def as_one_block(blocks: Sequence[Block]) -> Iterator[Block]:
    """The blocks of a vector as a single one, because each has few elements."""
    if len(blocks) == 1 and blocks[0].source is not None:
        yield blocks[0]
    elif blocks:
        values = torch.cat([block.values() for block in blocks])
        yield Block(torch.cat([block.index(values.device) for block in blocks]), values)


def summed_by_row(row: Tensor, values: Tensor) -> Block:
    """Sums of the gradients [K, W] of each row, of as many places as there are gradients.

    Hence nothing waits for the number of different rows; the places beyond it repeat the first. The
    sums of a row are formed in the order of its gradients.
    """
    row, order = row.sort(stable=True)
    is_new = torch.ones_like(row, dtype=torch.bool)
    is_new[1:] = row[1:] != row[:-1]
    number = is_new.cumsum(0) - 1  # of its row, ascending
    place = torch.arange(len(row), device=row.device)
    begin = torch.searchsorted(number, place)  # of each number; beyond the last one, the end
    source = place.where(place <= number[-1], 0)
    summed = F.embedding_bag(order, values, begin, mode="sum")
    return Block(row[begin[source]], summed[source], source=source)


def each_once(row: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The rows ascending, each once, and the sums of their gradients [K, W]."""
    row, place = torch.unique(row, return_inverse=True)
    return row, values.new_zeros(len(row), values.shape[1]).index_add_(0, place, values)


def _blocks(gradient: RowFactors, dtype: torch.dtype) -> Iterator[Block]:
    """The blocks of a gradient that is in memory."""
    portions = list(_portions(gradient.visited, dtype))
    if not gradient.rows:
        yield from (Block(rows, factors=factors) for rows, factors in portions)
        return
    row, values = (torch.cat(each) for each in zip(*gradient.rows, strict=True))
    values = values.to(dtype)
    if 0 < values.numel() <= ROWS_ELEMENTS and not portions and not on_host(row):
        yield summed_by_row(row, values)
        return
    row, values = each_once(row, values)
    bounds = [end for rows, _ in portions for end in (rows.start, rows.stop)]
    cuts = [0, *torch.searchsorted(row, row.new_tensor(bounds)).tolist(), len(row)]
    for (rows, factors), begin, end in zip(portions, cuts[1::2], cuts[2::2], strict=False):
        block = Block(rows, factors=factors)
        if begin < end:
            block.single_rows = row[begin:end] - rows.start, values[begin:end]
        yield block
    others = [slice(*ends) for ends in zip(cuts[::2], cuts[1::2], strict=True)]
    row, values = (torch.cat([each[some] for some in others]) for each in (row, values))
    step = max(1, ROWS_ELEMENTS // values.shape[1])
    for begin in range(0, len(row), step):
        yield Block(row[begin : begin + step], values[begin : begin + step])


def _portions(
    visited: Iterable[Visited], dtype: torch.dtype
) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
    """Rows of visited nodes, some at a time, with their coefficients and vectors."""
    by_row = defaultdict[int, list[tuple[Tensor, Tensor]]](list)
    for nodes, error, hidden, formed in visited:
        for start, end, row, width, offset, _ in nodes.tolist():
            errors = error[offset : offset + (end - start) * width].view(-1, width)
            by_row[row].append((errors, hidden[start:end, : formed.shape[1]]))
    for row, each in sorted(by_row.items(), key=lambda item: item[0]):
        errors, vectors = each[0]
        if len(each) > 1:  # their sum as one product
            errors, vectors = (torch.cat(tensors) for tensors in zip(*each, strict=True))
        errors, vectors = errors.to(dtype), vectors.to(dtype)
        step = max(1, PRODUCT_ELEMENTS // vectors.shape[1])
        for some in torch.split(errors, step, 1):
            yield slice(row, row + some.shape[1]), (some, vectors)
            row += some.shape[1]
