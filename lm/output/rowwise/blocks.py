"""What a row-wise gradient consists of: parts, whose sum it is, and blocks, in which it is used.

The gradient of a visited node's rows is Σ_{v of n} e_v (d nll_p h_p)ᵀ: a product of [children,
visits] and [visits, H]. The backward has the factors anyway; the product would be as large as the
visited rows. So it is formed in portions that fit in a cache, when the gradient is used: for the
norm of clipping, and in the optimizer's step. Rows that are read as input vectors have a gradient
each. Compiled loops and fused kernels have factors of their own, for all nodes of a batch: what
they cannot do, as adding up gradients of several batches, is done with these parts.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol

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


class Unformed(Protocol):
    """The gradient of a whole batch that a backend forms a few rows at a time, when it uses them.

    It can do less than `Block` can: see `RowGradient.append` and `RowOptimizer`.
    """

    def parts(self) -> "list[Part]":
        """The gradient in a form that can do everything."""

    def plus(self, rows: Rows) -> "Unformed | None":
        """With the gradients of single rows added; None if the backend cannot."""

    def square_norm(self) -> Tensor:
        """The sum of its squares, a scalar."""

    def can_update(self, table: Tensor) -> bool:
        """Whether the backend can change the rows of a table."""

    def update(self, table: Tensor, rule: Rule, factor: float | Tensor) -> None:
        """Change the rows and the state of an optimizer by factor · gradient."""


class Factored(NamedTuple):
    """A batch's gradient times a number."""

    batch: Unformed
    factor: float | Tensor

    def parts(self) -> "list[Part]":
        """The gradient in a form that can do everything."""
        return [scaled(part, self.factor) for part in self.batch.parts()]

    def plus(self, rows: Rows) -> "Factored | None":
        """With the gradients of single rows added; None if the backend cannot."""
        is_one = not isinstance(self.factor, Tensor) and self.factor == 1
        batch = self.batch.plus(rows) if is_one else None
        return None if batch is None else Factored(batch, 1)


Part = Product | Rows | Factored


def scaled(part: Any, number: float | Tensor) -> Any:
    """A part times a number; its last field is a factor of it."""
    return part._make([*part[:-1], part[-1] * number])


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


def blocks_of(parts: Sequence[Part]) -> Iterator[Block]:
    """The rows that have a gradient, each in one block, in portions that fit in a cache."""
    products: defaultdict[int, list[Product]] = defaultdict(list)
    for part in parts:
        if isinstance(part, Product):
            products[part.first_row].append(part)
    nodes = []
    for first, each in sorted(products.items()):
        coefficients, vectors = each[0][1:]
        if len(each) > 1:  # their sum as one product
            coefficients = torch.cat([product.coefficients for product in each])
            vectors = torch.cat([product.vectors for product in each])
        nodes.append(Product(first, coefficients, vectors))
    of_nodes: list[Rows | None] = [None] * len(nodes)
    single = [part for part in parts if isinstance(part, Rows)]
    num_elements = sum(part.values.numel() for part in single)
    if 0 < num_elements <= ROWS_ELEMENTS and not nodes and not on_host(single[0].row):
        yield _summed_by_row(single)
        return
    if single:
        of_nodes, rest = _split_by_node(single, nodes)
    yield from chain.from_iterable(map(_portions, nodes, of_nodes))
    if single:
        step = max(1, ROWS_ELEMENTS // rest.values.shape[1])
        for begin in range(0, rest.row.numel(), step):
            yield Block(rest.row[begin : begin + step], rest.values[begin : begin + step])


def as_one_block(blocks: Sequence[Block]) -> Iterator[Block]:
    """The blocks of a vector as a single one, because each has few elements."""
    if len(blocks) == 1 and blocks[0].source is not None:
        yield blocks[0]
    elif blocks:
        values = torch.cat([block.values() for block in blocks])
        yield Block(torch.cat([block.index(values.device) for block in blocks]), values)


def _summed_by_row(single: Sequence[Rows]) -> Block:
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
