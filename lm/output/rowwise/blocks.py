"""What a row-wise gradient consists of: factors, and blocks, in which they are used.

The gradient of a visited node's rows is Σ_{v of n} e_v (d nll_p h_p)ᵀ: a product of [children,
visits] and [visits, H]. The backward has the factors anyway; the product would be as large as the
visited rows. So it is formed in portions that fit in a cache, when the gradient is used: for the
norm of clipping, and in the optimizer's step. Rows that are read as input vectors have a gradient
each. Compiled loops and fused kernels have factors of their own, for all nodes of a batch: what
they cannot do, as adding up gradients of several batches, is done with blocks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

PRODUCT_ELEMENTS = 1 << 19
"""Most elements of a product formed at once: 2 MB in fp32."""
ROWS_ELEMENTS = 1 << 26
"""Most elements of single rows in a block: 256 MB in fp32, of which an optimizer makes copies."""


def on_host(tensor: Tensor) -> bool:
    """Whether the host reads a tensor's values without waiting.

    Elsewhere numbers that differ between steps remain tensors, and sizes do not depend on values: a
    CUDA graph would have them from the step that was recorded.
    """
    return tensor.is_cpu


class Product(NamedTuple):
    """The gradient coefficientsᵀ vectors of neighbouring rows."""

    first_row: int  # row of the node's first child
    coefficients: Tensor  # [visits, children]
    vectors: Tensor  # [visits, H]


class Rows(NamedTuple):
    """Gradients of single rows."""

    row: Tensor  # [K] int64; rows may repeat
    values: Tensor  # [K, H]


class Rule(NamedTuple):
    """How an optimizer changes the rows with a gradient."""

    numbers: tuple[Any, ...]  # floats or tensors. SGD: lr; Adagrad: lr, eps; Adam: see `RowAdam`
    state: dict[str, Tensor]  # {}; "total"; "mean" and "square"


@dataclass(frozen=True, kw_only=True)
class RowFactors:
    """The gradient of a table as products, one for each visited node, and single rows.

    A backend that has the products of all nodes of a batch in another form is a subclass, which
    forms a few rows at a time for the norm and for updates. Its single rows are added to them.
    """

    products: list[Product] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)

    def general(self) -> "RowFactors":
        """The gradient in this form, which can do everything."""
        return self

    def plus(self, other: "RowFactors") -> "RowFactors":
        """The sum of two gradients."""
        if self == RowFactors():
            return other
        if type(other) is RowFactors and not other.products:
            return replace(self, rows=self.rows + other.rows)
        one, more = self.general(), other.general()
        return RowFactors(products=one.products + more.products, rows=one.rows + more.rows)

    def times(self, number: float | Tensor) -> "RowFactors":
        """The gradient times a number."""
        products = [Product(row, e, vectors * number) for row, e, vectors in self.products]
        rows = [Rows(row, values * number) for row, values in self.rows]
        return RowFactors(products=products, rows=rows)

    def square_norm(self) -> Tensor | None:
        """The sum of the squares, a scalar; None where blocks give it."""
        return None

    def update(self, table: Tensor, rule: Rule) -> "Iterable[Block]":
        """Change rows of a table and the state of an optimizer; the blocks that remain to do."""
        return self.blocks(table)

    def blocks(self, table: Tensor) -> "Iterator[Block]":
        """The rows of a table that have a gradient, each in one block, in at least fp32.

        Blocks are portions that fit in a cache; of a vector, all rows.
        """
        blocks = self.general()._blocks(torch.promote_types(table.dtype, torch.float32))
        yield from as_one_block(list(blocks)) if table.numel() == len(table) else blocks

    def _blocks(self, dtype: torch.dtype) -> "Iterator[Block]":
        by_row: defaultdict[int, list[Product]] = defaultdict(list)
        for product in self.products:
            by_row[product.first_row].append(product)
        nodes = []
        for first, each in sorted(by_row.items()):
            coefficients, vectors = each[0].coefficients, each[0].vectors
            if len(each) > 1:  # their sum as one product
                coefficients = torch.cat([product.coefficients for product in each])
                vectors = torch.cat([product.vectors for product in each])
            nodes.append(Product(first, coefficients.to(dtype), vectors.to(dtype)))
        single = [Rows(row, values.to(dtype)) for row, values in self.rows]
        of_nodes = list[Rows | None]([None] * len(nodes))
        num_elements = sum(part.values.numel() for part in single)
        if 0 < num_elements <= ROWS_ELEMENTS and not nodes and not on_host(single[0].row):
            yield summed_by_row(single)
            return
        if single:
            of_nodes, rest = _split_by_node(single, nodes)
        yield from chain.from_iterable(map(_portions, nodes, of_nodes))
        if single:
            step = max(1, ROWS_ELEMENTS // rest.values.shape[1])
            for begin in range(0, rest.row.numel(), step):
                yield Block(rest.row[begin : begin + step], rest.values[begin : begin + step])


@dataclass(eq=False)
class Block:
    """Some rows of the gradient, disjoint from those of all other blocks.

    The values [K, H] are given, or formed as coefficientsᵀ vectors ([visits, K] and [visits, H])
    when they are first used, with `more` added to a few of the rows, counted from the first one.
    With `source` [K], a row may be in several places, with equal values: those of the place that
    `source` is.
    """

    rows: slice | Tensor  # neighbouring rows, or an index [K]
    formed: Tensor | None = None
    factors: tuple[Tensor, Tensor] | None = None
    more: Rows | None = None
    source: Tensor | None = None

    def values(self) -> Tensor:
        """The gradient of the rows, [K, H]."""
        if self.formed is None:
            assert self.factors is not None
            coefficients, vectors = self.factors
            self.formed = coefficients.T @ vectors
            if self.more is not None:
                self.formed[self.more.row] += self.more.values
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
        if self.more is not None:
            row, values = self.more
            squares[row] = (coefficients[0, row, None] * vector + values).square().sum(1)
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
        if self.more is not None:
            row, values = self.more
            out[row] += values * (factor[row, None] if isinstance(factor, Tensor) else factor)


def as_one_block(blocks: Sequence[Block]) -> Iterator[Block]:
    """The blocks of a vector as a single one, because each has few elements."""
    if len(blocks) == 1 and blocks[0].source is not None:
        yield blocks[0]
    elif blocks:
        values = torch.cat([block.values() for block in blocks])
        yield Block(torch.cat([block.index(values.device) for block in blocks]), values)


def summed_by_row(single: Sequence[Rows]) -> Block:
    """Sums of the gradients of each row, of as many places as there are gradients.

    Hence nothing waits for the number of different rows; the places beyond it repeat the first. The
    sums of a row are formed in the order of its gradients.
    """
    row, order = torch.cat([part.row for part in single]).sort(stable=True)
    is_new = torch.ones_like(row, dtype=torch.bool)
    is_new[1:] = row[1:] != row[:-1]
    number = is_new.cumsum(0) - 1  # of its row, ascending
    place = torch.arange(len(row), device=row.device)
    begin = torch.searchsorted(number, place)  # of each number; beyond the last one, the end
    source = place.where(place <= number[-1], 0)
    values = torch.cat([part.values for part in single])
    summed = F.embedding_bag(order, values, begin, mode="sum")
    return Block(row[begin[source]], summed[source], source=source)


def _split_by_node(
    single: Sequence[Rows], nodes: Sequence[Product]
) -> tuple[list[Rows | None], Rows]:
    """Sums of single rows by the node whose children they are, and those of other nodes.

    Each row is in them once; `nodes` and the results are in the order of their rows.
    """
    row, place = torch.unique(torch.cat([part.row for part in single]), return_inverse=True)
    values = torch.cat([part.values for part in single])
    values = values.new_zeros(row.numel(), values.shape[1]).index_add_(0, place, values)
    bounds = [(node.first_row, node.first_row + node.coefficients.shape[1]) for node in nodes]
    cuts = torch.searchsorted(row, row.new_tensor(bounds).flatten()).tolist()
    sizes = [stop - begin for begin, stop in pairwise([0, *cuts, len(row)])]
    rows = list(map(Rows, torch.split(row, sizes), torch.split(values, sizes)))
    row, values = (torch.cat(tensors) for tensors in zip(*rows[::2], strict=True))
    return [each if each.row.numel() else None for each in rows[1::2]], Rows(row, values)


def _portions(node: Product, rows: Rows | None) -> Iterator[Block]:
    """A node's rows, some at a time, with the gradients of single rows among them added."""
    width, step = node.coefficients.shape[1], max(1, PRODUCT_ELEMENTS // node.vectors.shape[1])
    for begin in range(0, width, step):
        end = min(begin + step, width)
        first, stop = node.first_row + begin, node.first_row + end
        coefficients, more = node.coefficients, rows
        if end - begin < width:
            coefficients = node.coefficients[:, begin:end]
            if rows is not None:
                inside = (rows.row >= first) & (rows.row < stop)
                more = Rows(rows.row[inside], rows.values[inside])
        if more is not None:
            more = Rows(more.row - first, more.values)
        yield Block(slice(first, stop), factors=(coefficients, node.vectors), more=more)
