"""Trees of usual shapes over given words, to be compared by their cost."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lm.output.tree import shapes
from lm.output.tree.class_tree import ClassTree

SHORTLISTS = (0.0, 0.25, 1.0, 4.0)
"""Sizes of shortlists of trees with two levels, as multiples of √N."""
CLASSES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Numbers of classes, likewise."""


def even_tree(
    order: Tensor, splits: Sequence[int], shortlist: int = 0, *, dealt: bool = False
) -> ClassTree:
    """A tree whose nodes split their words evenly, below a shortlist.

    Example:
        >>> even_tree(torch.arange(9), [2], shortlist=1).num_children.tolist()
        [3, 4, 4]

    Args:
        order: [N], every word once, by falling frequency; its first words are the shortlist.
        splits: numbers of children, root first; the last nodes have the words as children.
        shortlist: number of words that are children of the root.
        dealt: whether words of neighbouring ranks are in different nodes, as nearly are those of
            classes by meaning, instead of the same.
    """
    num_words = len(order) - shortlist
    num_parts = [min(math.prod(splits[: i + 1]), num_words) for i in range(len(splits))]
    while num_parts and num_parts[0] < 2:  # too few words
        num_parts.pop(0)
    if not num_parts:
        return ClassTree.full(len(order))
    if dealt:
        by_part = (torch.arange(num_words) % num_parts[-1]).argsort(stable=True)
        order = torch.cat([order[:shortlist], order[shortlist:][by_part]])
    ends = torch.arange(1, num_parts[0] + 1) * num_words // num_parts[0] + shortlist
    stop = torch.cat([torch.arange(1, shortlist + 1), ends])
    factors = torch.tensor(splits[1:], dtype=torch.int64).expand(len(stop), -1)
    with torch.device("cpu"):
        return ClassTree(*shapes.nested(order, stop, factors))


def splits_of_depth(vocab_size: int, depth: int) -> list[int]:
    """Nearly equal numbers of children on each level but the last, for `even_tree`.

    Example:
        >>> splits_of_depth(10_000, 3), splits_of_depth(10_000, 8)
        ([21, 22], [3, 3, 3, 3, 3, 3, 4])
    """
    splits = [max(1, math.floor(vocab_size ** (1 / depth) + 1e-9))] * depth
    for level in reversed(range(depth)):
        if math.prod(splits) >= vocab_size:
            break
        splits[level] += 1
    return splits[:-1]


def by_frequency(counts: Tensor) -> Tensor:
    """The words by falling frequency, [N]."""
    return counts.argsort(descending=True, stable=True)


def candidates(counts: Tensor, *, dealt: bool) -> dict[str, ClassTree]:
    """Name → tree over words with counts [N]; `dealt` as in `even_tree`."""
    order, num_words = by_frequency(counts.cpu()), len(counts)
    root = math.sqrt(num_words)
    found = {"full": ClassTree.full(num_words)}
    for c in CLASSES:
        for s in SHORTLISTS:
            num_classes, shortlist = round(c * root), min(round(s * root), num_words - 1)
            name = f"two_level, C = {num_classes:,}"
            name += f", shortlist {shortlist:,}" if shortlist else ""
            found[name] = even_tree(order, [max(1, num_classes)], shortlist, dealt=dealt)
    for depth in (3, 4):
        splits = splits_of_depth(num_words, depth)
        found[f"balanced, depth {depth}"] = even_tree(order, splits, dealt=dealt)
    for arity in (2, 16):
        found[f"huffman, arity {arity}"] = ClassTree.huffman(counts, arity)
    return found
