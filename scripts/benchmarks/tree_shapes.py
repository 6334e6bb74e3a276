"""Trees that `trees` measures and `scripts.kernels.trees` models, by name."""

import math

import torch

from lm.output import ClassTree
from lm.output.cost.best import best_classes, best_tree
from lm.output.cost.candidates import even_tree, splits_of_depth
from lm.output.cost.rates import Rates
from lm.output.cost.work import Batch
from scripts.benchmarks.methods import zipf

BASELINE = "two_level"
"""The tree that a layer has by default: √N classes of neighbouring words."""


def trees(vocab_size: int, *, few: bool = False) -> dict[str, ClassTree]:
    """Name → tree; `few` leaves out those that differ little, and the slowest."""
    rank, root = torch.arange(vocab_size), round(math.sqrt(vocab_size))
    shuffled = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    found = {BASELINE: ClassTree.two_level(num_words=vocab_size)}
    if not few:
        found["full"] = ClassTree.full(vocab_size)
    shapes = {f"depth {depth}": splits_of_depth(vocab_size, depth) for depth in (3, 4, 8)}
    for branching in (2, 8, 32):
        depth = math.ceil(round(math.log(vocab_size, branching), 9))
        shapes[f"branching {branching}"] = [branching] * (depth - 1)
    if few:
        del shapes["depth 8"], shapes["branching 2"]
    for name, splits in shapes.items():
        found[f"{name}, clustered"] = even_tree(rank, splits)
        found[f"{name}, random"] = even_tree(shuffled, splits)
    found["two_level, random"] = even_tree(shuffled, [root])
    for name, splits in {"two_level": [root], "depth 3": shapes["depth 3"]}.items():
        for factor in (0.25, 1, 4) if name == "two_level" else (1,):
            shortlist = round(factor * root)
            found[f"{name}, shortlist {factor:g}√N"] = even_tree(rank, splits, shortlist)
    for factor in (0.25, 0.5, 2, 4):
        found[f"two_level, {factor:g}√N classes"] = even_tree(rank, [round(factor * root)])
    counts = zipf(vocab_size, 0)[1]
    found["huffman 16"] = ClassTree.huffman(counts, 16)
    if not few:
        found["huffman 2"] = ClassTree.huffman(counts, 2)
    return found


def best_trees(size: tuple[int, int], num_positions: int, rates: Rates) -> dict[str, ClassTree]:
    """The trees that the cost model chooses for Zipf targets.

    *classes* is for classes of data, here of random words.
    """
    counts = 1 / torch.arange(1, size[0] + 1, dtype=torch.float64)
    batch = Batch(num_positions, size[1])
    found = {
        "best": best_tree(counts, batch, rates),
        "best, row-wise": best_tree(counts, batch, rates, row_wise=True),
    }
    sizes = best_classes(counts, batch, rates)
    if sizes is not None:
        words, shortlist = torch.arange(size[0]), sizes.shortlist
        shuffled = words[shortlist:][torch.randperm(size[0] - shortlist)]
        order = torch.cat([words[:shortlist], shuffled])
        found["best, classes"] = even_tree(order, [sizes.num_word_classes], shortlist)
    return found
