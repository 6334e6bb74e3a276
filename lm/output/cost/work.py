"""The expected work of a tree: of a training step of P positions, and of decoding one position.

Targets are drawn independently from the words' frequencies. A node whose words have the share p of
all tokens then has V visits, a binomial number, and exactly

    E[V] = P p                                                              (1)
    P(V > 0) = 1 - (1 - p)^P                                                (2)
    E[m ⌈V / m⌉] = P p + (m - 1) / 2 + Σ_{k=1}^{m-1} Re (1 - p + p ω^k)^P / (ω^k - 1)   (3)

with ω = exp(2πi / m): (3) is the number of visits that tiles of m visits compute, from the discrete
Fourier transform of s = -V mod m, Σ_s s ω^{ks} = m / (ω^k - 1). A node of one child is not visited.

Seconds follow from the work: see `rates`.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import row_size
from lm.output.tree.class_tree import ClassTree

Amount = Tensor | float
Gradient = Literal["zeroed", "mapped", "row_wise"]
"""The table's gradient: rows that no target visits are set to 0, or are memory that is not touched;
or it has visited rows alone."""
ITEM = 4
"""Bytes of a number in fp32."""


class Work(NamedTuple):
    """What a forward and backward do; of nodes, tensors of one shape, or of a whole tree."""

    steps: Amount = 0.0
    levels: Amount = 0.0  # P · depth: every position is routed on every level
    vectors: Amount = 0.0  # P · W numbers of hidden vectors
    nodes: Amount = 0.0  # visited
    visits: Amount = 0.0  # (position, node) pairs
    visit_numbers: Amount = 0.0  # visits · W
    columns: Amount = 0.0  # (visit, child) pairs
    products: Amount = 0.0  # multiply-adds of the three products, whole tiles
    row_numbers: Amount = 0.0  # visited rows · W
    zero_numbers: Amount = 0.0  # of the rows whose dense gradient is set to 0, · W
    mapped_numbers: Amount = 0.0  # of the rows whose gradient is in freshly mapped memory, · W

    @property
    def flops(self) -> float:
        """Multiply-adds × 2."""
        return 2 * float(self.products)

    @property
    def bytes(self) -> float:
        """Of the rows and vectors, in fp32: each read twice and its gradient written; zeros too."""
        return ITEM * float(3 * (self.row_numbers + self.vectors) + self.zero_numbers)


class Batch(NamedTuple):
    """The sizes of a step."""

    num_positions: int  # P
    hidden_size: int  # H


class Decoding(NamedTuple):
    """What it takes to find a word or the k best words of one position."""

    steps: float = 0.0
    nodes: float = 0.0  # expanded
    columns: float = 0.0  # of these
    products: float = 0.0  # columns · W


class Shape(NamedTuple):
    """What the cost of a tree depends on."""

    share: Tensor  # [I] fp64, of tokens whose words are below each node
    num_children: Tensor  # [I]
    level: Tensor  # [I]
    vocab_size: int
    max_path_columns: int

    @classmethod
    def of(cls, tree: ClassTree, counts: Tensor | None = None) -> "Shape":
        """The shape of a tree over words with counts [N]; None: all equally frequent."""
        counts = torch.ones(tree.vocab_size) if counts is None else counts
        below = tree.sum_below(counts.to(tree.row_of_word.device, torch.float64)).cpu()
        share = (below / below[0]).clamp(0, 1)
        sizes = tree.vocab_size, tree.max_path_columns
        return cls(share, tree.num_children.cpu(), tree.level.cpu(), *sizes)

    @property
    def depth(self) -> int:
        """Largest number of nodes on a path."""
        return int(self.level.max()) + 1

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.num_children.sum())


def is_visited(share: Tensor, num_positions: int) -> Tensor:
    """(2)."""
    return -torch.expm1(num_positions * torch.log1p(-share))


def visits_in_tiles(share: Tensor, num_positions: int, tile: int) -> Tensor:
    """(3)."""
    total = num_positions * share + (tile - 1) / 2
    for k in range(1, tile):
        angle = 2 * math.pi * k / tile
        root, turn = complex(math.cos(angle), math.sin(angle)), share * math.sin(angle)
        real = 1 - share * (1 - math.cos(angle))
        size = torch.hypot(real, turn) ** num_positions
        phase = num_positions * torch.atan2(turn, real)
        factor = 1 / (root - 1)
        total = total + size * (factor.real * phase.cos() - factor.imag * phase.sin())
    return total


def work_of_nodes(
    share: Tensor,
    num_children: Tensor,
    batch: Batch,
    tile: int,
    gradient: Gradient,
) -> Work:
    """The expected work of nodes with some shares of all tokens; both tensors of one shape.

    Args:
        share: fp64, 0 … 1.
        num_children: of each node.
        batch: its positions and the size of their hidden vectors.
        tile: visits, and children, of a tile of the products.
        gradient: how the gradient of the table is stored.
    """
    num_positions, row = batch.num_positions, row_size(batch.hidden_size)
    width, has_softmax = num_children.double(), num_children > 1
    nodes = torch.where(has_softmax, is_visited(share, num_positions), 0)
    visits = torch.where(has_softmax, num_positions * share, 0)
    in_tiles = torch.where(has_softmax, visits_in_tiles(share, num_positions, tile), 0)
    children = tile * (width / tile).ceil()
    visited = nodes * width * row
    return Work(
        nodes=nodes,
        visits=visits,
        visit_numbers=visits * row,
        columns=visits * width,
        products=row * (in_tiles * (children + width) + visits * children),
        row_numbers=visited,
        zero_numbers=width * row - visited if gradient == "zeroed" else 0 * visited,
        mapped_numbers=visited if gradient == "mapped" else 0 * visited,
    )


def work_of_step(shape: Shape, batch: Batch, tile: int, gradient: Gradient) -> Work:
    """The expected work of a forward and backward of a layer.

    Example:
        >>> shape = Shape.of(ClassTree.two_level(num_words=10_000))
        >>> work = work_of_step(shape, Batch(1, 296), tile=1, gradient="row_wise")
        >>> [round(each) for each in (work.nodes, work.visits, work.columns)]
        [2, 2, 200]
    """
    nodes = work_of_nodes(shape.share, shape.num_children, batch, tile, gradient)
    total = Work(*(float(torch.as_tensor(each).sum()) for each in nodes))
    positions = float(batch.num_positions)
    return total._replace(
        steps=1.0,
        levels=positions * shape.depth,
        vectors=positions * row_size(batch.hidden_size),
    )


def work_of_sample(shape: Shape, hidden_size: int) -> Decoding:
    """The expected work of drawing a word at temperature 1, if P(w) is the words' frequency."""
    columns = float(shape.share @ shape.num_children.double())
    nodes = float(shape.share.sum())
    return Decoding(1.0, nodes, columns, columns * row_size(hidden_size))


def work_of_topk(shape: Shape, kth_share: float, hidden_size: int) -> Decoding:
    """The work of finding the k most probable words, if P(w) is the words' frequency.

    Nodes more probable than the k-th word are expanded.

    Args:
        kth_share: the share of the k-th most frequent word.
    """
    opened = shape.share > kth_share
    opened[0] = True
    columns = float(shape.num_children[opened].sum())
    return Decoding(1.0, float(opened.sum()), columns, columns * row_size(hidden_size))
