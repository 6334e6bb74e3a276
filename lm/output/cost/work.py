"""The expected work of a tree: of a training step of P positions, and of decoding one position.

Targets are drawn independently from the words' frequencies. A node whose words have the share p of
all tokens then has V visits, a binomial number, and exactly

    E[V] = P p                                                              (1)
    P(V > 0) = 1 - (1 - p)^P                                                (2)
    E[m ⌈V / m⌉] = P p + (m - 1) / 2 + Σ_{k=1}^{m-1} Re (1 - p + p ω^k)^P / (ω^k - 1)   (3)

with ω = exp(2πi / m): (3) is the number of visits that tiles of m visits compute, from the discrete
Fourier transform of s = -V mod m, Σ_s s ω^{ks} = m / (ω^k - 1). A node of one child is not visited.

Memory and seconds follow from the work: see `rates`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import row_size
from lm.output.backends.reference.gradient_memory import is_mapped
from lm.output.decoding.search import EXPANSION_COST, MOST_COST, SOFTMAX_COST
from lm.output.tree.class_tree import ClassTree

Amount = Tensor | float
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

    def plus(self, other: "Work") -> "Work":
        """The sum."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def flops(self) -> float:
        """Multiply-adds × 2."""
        return 2 * float(self.products)

    @property
    def bytes(self) -> float:
        """Of the rows and vectors, in fp32: each read twice and its gradient written; zeros too."""
        return ITEM * float(3 * (self.row_numbers + self.vectors) + self.zero_numbers)


class Decoding(NamedTuple):
    """What it takes to find a word or the k best words of one position."""

    steps: float = 0.0
    levels: float = 0.0  # of expansions, one after another
    nodes: float = 0.0  # expanded
    columns: float = 0.0  # of these
    products: float = 0.0  # columns · W
    softmaxes: float = 0.0  # of all nodes, where all words are evaluated in one product
    words: float = 0.0  # N · depth then, and 0 otherwise
    table_numbers: float = 0.0  # R · W then


def shares_of_nodes(tree: ClassTree, counts: Tensor | None = None) -> Tensor:
    """The share [I] fp64 of tokens below each node, by counts [N] of words; None: all equal."""
    counts = torch.ones(tree.vocab_size) if counts is None else counts
    below = tree.sum_below(counts.to(tree.row_of_word.device, torch.float64)).cpu()
    return (below / below[0]).clamp(0, 1)


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
    share: Tensor, num_children: Tensor, num_positions: int, hidden_size: int, tile: int
) -> Work:
    """The expected work of nodes with a share of all tokens; both tensors of one shape.

    Args:
        share: fp64, 0 … 1.
        num_children: of each node.
        num_positions: P.
        hidden_size: H.
        tile: visits, and children, of a tile of the products.
    """
    width, row = num_children.double(), row_size(hidden_size)
    counts = num_children > 1
    nodes = torch.where(counts, is_visited(share, num_positions), 0)
    visits = torch.where(counts, num_positions * share, 0)
    in_tiles = torch.where(counts, visits_in_tiles(share, num_positions, tile), 0)
    children = tile * (width / tile).ceil()
    return Work(
        nodes=nodes,
        visits=visits,
        visit_numbers=visits * row,
        columns=visits * width,
        products=row * (in_tiles * (children + width) + visits * children),
        row_numbers=nodes * width * row,
    )


def work_of_step(
    tree: ClassTree,
    counts: Tensor | None,
    num_positions: int,
    hidden_size: int,
    *,
    tile: int,
    row_wise: bool = False,
) -> Work:
    """The expected work of a forward and backward of a layer.

    With `row_wise`, gradients are of visited rows only: nothing is zeroed or mapped.

    Example:
        >>> tree = ClassTree.two_level(num_words=10_000)
        >>> work = work_of_step(tree, None, 1, 296, tile=1)
        >>> work.nodes, work.visits, work.columns, work.row_numbers / 296
        (2.0, 2.0, 200.0, 200.0)
    """
    share = shares_of_nodes(tree, counts)
    row, num_rows = row_size(hidden_size), tree.num_rows
    nodes = work_of_nodes(share, tree.num_children.cpu(), num_positions, hidden_size, tile)
    total = Work(*(float(each.sum()) if isinstance(each, Tensor) else each for each in nodes))
    zero, mapped = 0.0, 0.0
    if not row_wise:
        visited = total.row_numbers / row
        if is_mapped(num_rows * row * ITEM, visited / num_rows):
            mapped = total.row_numbers
        else:
            zero = (num_rows - visited) * row
    return total._replace(
        steps=1.0,
        levels=float(num_positions * tree.depth),
        vectors=float(num_positions * row),
        zero_numbers=zero,
        mapped_numbers=mapped,
    )


def work_of_sample(tree: ClassTree, counts: Tensor | None, hidden_size: int) -> Decoding:
    """The expected work of drawing a word at temperature 1, if P(w) is the words' frequency."""
    share = shares_of_nodes(tree, counts)
    columns = float(share @ tree.num_children.cpu().double())
    nodes = float(share.sum())
    return Decoding(1.0, nodes, nodes, columns, columns * row_size(hidden_size))


def work_of_topk(tree: ClassTree, counts: Tensor | None, hidden_size: int, k: int) -> Decoding:
    """The work of finding the k most probable words, if P(w) is the words' frequency.

    Nodes more probable than the k-th word are expanded; all words at once where these are many.
    """
    counts = torch.ones(tree.vocab_size) if counts is None else counts.double()
    share, row = shares_of_nodes(tree, counts), row_size(hidden_size)
    least = counts.topk(min(k, tree.vocab_size)).values[-1] / counts.sum()
    opened = share > float(least)
    opened[0] = True
    width, level = tree.num_children.cpu(), tree.level.cpu()
    columns = float(width[opened].sum())
    nodes, levels = float(opened.sum()), float(level[opened].max() + 1)
    most = MOST_COST * (tree.num_rows + SOFTMAX_COST * tree.num_nodes)
    if columns + EXPANSION_COST * nodes <= most or nodes == 1:
        return Decoding(1.0, levels, nodes, columns, columns * row)
    begun = columns_until(width[opened], level[opened], most)
    words = float(tree.vocab_size * tree.depth)
    whole = float(tree.num_nodes), words, float(tree.num_rows * row)
    return Decoding(1.0, *begun, begun[-1] * row, *whole)


def columns_until(width: Tensor, level: Tensor, most: float) -> tuple[float, float, float]:
    """Levels, nodes and columns of a search level by level that ends when it costs too much."""
    levels, nodes, columns = 0.0, 0.0, 0.0
    for each in range(int(level.max()) + 1):
        here = width[level == each]
        more = float(here.sum()), float(len(here))
        if each and columns + more[0] + EXPANSION_COST * (nodes + more[1]) > most:
            break
        levels, nodes, columns = levels + 1, nodes + more[1], columns + more[0]
    return levels, nodes, columns
