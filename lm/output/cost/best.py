"""The tree that costs least by the cost model, chosen by dynamic programming over frequencies.

A tree over words by falling frequency has intervals of them below the children of the root. With λ,
the cost of one more child of the root, and t_d(i, j), that of the softmaxes below a child with
words i … j - 1 in at most d levels, the cheapest intervals of the words from i on take

    f(i) = min over j of λ + t_d(i, j) + f(j),  f(N) = 0,                       (1)

where t_d(i, i + 1) = 0: a single word is a child of the root itself, so that a shortlist is one of
the choices. t_1 is the expected cost of one softmax. The words of an interval are about equally
frequent; so t_d depends on their share p and number n alone:

    t_d(p, n) = min over m of t_1(p, m) + m t_{d-1}(p / m, n / m),              (2)

tabulated for powers of √2 and interpolated. In (1), an interval begins at a multiple of about
i / 4096, and its length is one of about 60 multiples of this; so the cost is within some per mille
of the least. The trees of all depths are then compared by their exact expected cost.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.cost.candidates import by_frequency
from lm.output.cost.rates import Rates, cost_of, gradients, seconds
from lm.output.cost.work import Batch, Gradient, Shape, Work, work_of_nodes
from lm.output.tree import shapes
from lm.output.tree.class_tree import ClassTree

STEPS = 4096
"""Intervals begin at multiples of 1 / STEPS of their rank, rounded down to an integer."""
MOST_DEPTH = 9
"""Of the trees that are tried."""
RATIO = 1.15
"""Of two neighbouring lengths, or numbers of children, that are tried."""


class Classes(NamedTuple):
    """A number of classes, of words that are not in a shortlist."""

    num_word_classes: int
    shortlist: int


def best_tree(counts: Tensor, batch: Batch, rates: Rates, *, row_wise: bool = False) -> ClassTree:
    """The cheapest tree whose nodes have words of neighbouring frequencies.

    Example:
        >>> from lm.output.cost.rates import CPU
        >>> counts = 1e6 / torch.arange(1, 10_001)
        >>> best_tree(counts, Batch(2048, 300), CPU)
        ClassTree(vocab_size=10000, num_nodes=208, depth=4, max_path_columns=101)

    Args:
        counts: [N] of the words, > 0 in total.
        batch: the sizes of a training step.
        rates: constants of the device.
        row_wise: whether gradients are row-wise.
    """
    if len(counts) <= 2:
        return ClassTree.full(len(counts))
    order = by_frequency(counts.cpu())
    share = counts.cpu().double()[order] / counts.sum()
    trees = [ClassTree.full(len(order))]
    units = rates.row_wise if row_wise else rates.dense
    for gradient in gradients(len(order), batch, rates, row_wise=row_wise):
        search = _Search(share, batch, rates.tile, units, gradient)
        least = math.inf
        for levels in range(1, MOST_DEPTH):
            found = search.intervals(levels)
            if found.seconds >= least:
                break
            least = found.seconds
            with torch.device("cpu"):
                trees.append(ClassTree(*shapes.nested(order, found.stop, found.splits)))
    costs = [
        cost_of(Shape.of(tree, counts), batch, rates, row_wise=row_wise).seconds for tree in trees
    ]
    return trees[costs.index(min(costs))]


def best_classes(
    counts: Tensor, batch: Batch, rates: Rates, *, row_wise: bool = False
) -> Classes | None:
    """The cheapest number of classes and shortlist, for classes that come from data.

    Such classes have frequent and rare words alike: they count as having words that are dealt one
    after another, by falling frequency. None: the full softmax is cheaper.

    Example:
        >>> from lm.output.cost.rates import CPU
        >>> best_classes(1e6 / torch.arange(1, 10_001), Batch(700, 200), CPU) is None
        False
    """
    share = counts.cpu().double().sort(descending=True).values / counts.sum()
    num_words, root = len(share), math.sqrt(len(share))
    full = Shape.of(ClassTree.full(num_words))
    least, best = cost_of(full, batch, rates, row_wise=row_wise).seconds, None
    sizes = {round(root * 2 ** (i / 4)) for i in range(-8, 9)}
    shortlists = {0, *(round(root * 2 ** (i / 2)) for i in range(-4, 5))}
    for num_classes in sorted(sizes):
        for shortlist in sorted(shortlists):
            if not 2 <= num_classes <= (num_words - shortlist) // 2:
                continue
            shape = _dealt(share, num_classes, shortlist)
            found = cost_of(shape, batch, rates, row_wise=row_wise).seconds
            if found < least:
                least, best = found, Classes(num_classes, shortlist)
    return best


def _dealt(share: Tensor, num_classes: int, shortlist: int) -> Shape:
    """The shape of a tree whose classes have every `num_classes`-th word."""
    num_words, one = len(share), share.new_ones(1)
    word_class = torch.arange(num_words - shortlist) % num_classes
    below = torch.bincount(word_class, share[shortlist:], minlength=num_classes)
    size = torch.bincount(word_class, minlength=num_classes)
    width = torch.cat([size.new_tensor([shortlist + num_classes]), size])
    level = torch.ones_like(width)
    level[0] = 0
    most = int(width[0]) + int(size.max())
    return Shape(torch.cat([one, below]).clamp(0, 1), width, level, num_words, most)


def _ladder(most: float) -> Tensor:
    """Integers from 1 to `most`, each about `RATIO` times the one before."""
    num = math.ceil(math.log(max(most, 2)) / math.log(RATIO)) + 1
    return torch.tensor(sorted({min(round(RATIO**i), math.ceil(most)) for i in range(num)}))


class _Intervals(NamedTuple):
    """What is below the root, as `shapes.nested` takes it."""

    stop: Tensor  # [B]
    splits: Tensor  # [B, levels - 1]
    seconds: float  # of the step, less what all trees have in common


class _Search:
    """The tables of (1) and (2), for words of shares [N] in falling order."""

    def __init__(
        self, share: Tensor, batch: Batch, tile: int, units: Work, gradient: Gradient
    ) -> None:
        self.batch, self.tile, self.units, self.gradient = batch, tile, units, gradient
        self.num_words = len(share)
        starts, at = [], 0
        while at < self.num_words:
            starts.append(at)
            at += max(1, at // STEPS)
        self.start = torch.tensor([*starts, self.num_words])  # of intervals, and the end
        before = torch.cat([share.new_zeros(1), share.cumsum(0)])
        lengths = _ladder(len(starts))
        index = torch.arange(len(starts))[:, None]
        self.to = (index + lengths).clamp(max=len(starts))  # [G, J]
        self.size = (self.start[self.to] - self.start[index]).double()
        self.share = (before[self.start[self.to]] - before[self.start[index]]).clamp(0, 1)
        one = torch.ones(2, dtype=torch.float64)
        less, more = self._softmax(one, torch.tensor([2048.0, 4096.0])).tolist()
        self.root_child = (more - less) / 2048
        self.leaf = torch.where(self.size > 1, self._softmax(self.share, self.size), 0)
        self.log_share = torch.arange(-120, 1, dtype=torch.float64) / 2
        self.log_size = torch.arange(2 * math.ceil(math.log2(self.num_words)) + 3).double() / 2
        p, n = (2**self.log_share)[:, None], (2**self.log_size)[None]
        self.tables, self.choices = [self._softmax(p, n)], [torch.ones(1, 1)]
        self.children = _ladder(self.num_words**0.5)[1:].double()
        for _ in range(MOST_DEPTH - 2):
            m = self.children[:, None, None]
            split = self._softmax(p, m) + m * self._interpolated(len(self.tables), p / m, n / m)
            split = torch.where(n >= 2 * m, split, torch.inf)
            cost, choice = split.min(0)
            self.tables.append(torch.minimum(cost, self.tables[-1]))
            self.choices.append(torch.where(cost < self.tables[-2], self.children[choice], 1.0))

    def intervals(self, levels: int) -> _Intervals:
        """The best intervals below the root, in nodes of at most `levels` levels."""
        deep = self.leaf if levels == 1 else self._interpolated(levels, self.share, self.size)
        cost = torch.where(self.size > 1, torch.minimum(self.leaf, deep), 0) + self.root_child
        num = len(self.start) - 1
        best, choice = torch.zeros(num + 1, dtype=torch.float64), [0] * num
        for i in range(num - 1, -1, -1):
            total = cost[i] + best[self.to[i]]
            choice[i] = int(total.argmin())
            best[i] = total[choice[i]]
        chosen, at = [], 0
        while at < num:
            chosen.append((at, choice[at]))
            at = int(self.to[chosen[-1]])
        i, j = torch.tensor(chosen).T
        share, size = self.share[i, j], self.size[i, j]
        splits = torch.ones(len(chosen), levels - 1, dtype=torch.int64)
        divided = deep[i, j] < self.leaf[i, j]
        for column, level in enumerate(range(levels, 1, -1)):
            row = (2 * share.log2() - 2 * self.log_share[0]).round().long()
            place = (2 * size.log2()).round().long()
            m = torch.where(divided, self.choices[level - 1][row.clamp(min=0), place].long(), 1)
            splits[:, column] = torch.minimum(m, size.long() // 2).clamp(min=1)
            share, size = share / splits[:, column], size / splits[:, column]
        routing = float(self.units.levels) * self.batch.num_positions * levels
        return _Intervals(self.start[self.to[i, j]], splits, float(best[0]) + routing)

    def _softmax(self, share: Tensor, num_children: Tensor) -> Tensor:
        """t_1 of nodes, with what their rows cost where they are not visited."""
        share, num_children = share + 0 * num_children, num_children + 0 * share
        work = work_of_nodes(share, num_children, self.batch, self.tile, self.gradient)
        found: Tensor = seconds(self.units, work)
        return found

    def _interpolated(self, levels: int, share: Tensor, size: Tensor) -> Tensor:
        """t_d of nodes in at most `levels` levels; bilinear in logarithms."""
        table = self.tables[levels - 1].clamp(min=1e-18).log()
        x = (2 * (share.clamp(min=1e-30).log2() - self.log_share[0])).clamp(0, len(table) - 1.001)
        y = (2 * size.clamp(min=1).log2()).clamp(0, table.shape[1] - 1.001)
        i, j = x.long(), y.long()
        x, y = x - i, y - j
        low = table[i, j] * (1 - y) + table[i, j + 1] * y
        high = table[i + 1, j] * (1 - y) + table[i + 1, j + 1] * y
        return (low * (1 - x) + high * x).exp()
