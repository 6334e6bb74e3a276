"""The shapes of a ClassTree: who hangs below whom. Numbers nodes and rows; knows nothing of
weights.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Parents(NamedTuple):
    """A tree with its nodes numbered anyhow, the root 0.

    Attributes:
        of_node: [I] int64, node above each node; -1 for the root.
        node_rank: [I] int64, place of a node among its siblings.
        of_word: [N] int64, node above each word.
        word_rank: [N] int64, place of a word among its siblings.
    """

    of_node: Tensor
    node_rank: Tensor
    of_word: Tensor
    word_rank: Tensor


def two_level(
    word_class: Tensor | Sequence[int], head: int, counts: Tensor | Sequence[int] | None
) -> Parents:
    """`ClassTree.two_level`."""
    word_class = _integers("word_class", word_class)
    vocab_size = word_class.numel()
    if not 0 <= head <= vocab_size:
        raise ValueError(f"head must be within 0 … {vocab_size} words, got {head}")
    by_count = torch.arange(vocab_size)
    if counts is not None:
        counts = _integers("counts", counts)
        if counts.numel() != vocab_size:
            raise ValueError(f"counts must be of {vocab_size} words, got {counts.numel()}")
        by_count = torch.argsort(counts, descending=True, stable=True)
    tail = by_count[head:]
    used, tail_class = torch.unique(word_class[tail], return_inverse=True)
    parent_of_word = torch.zeros(vocab_size, dtype=torch.int64)
    parent_of_word[tail] = tail_class + 1
    parent_of_node = torch.cat([torch.tensor([-1]), torch.zeros(used.numel(), dtype=torch.int64)])
    node_rank = torch.arange(used.numel() + 1) + vocab_size  # after the head's words
    return Parents(parent_of_node, node_rank, parent_of_word, torch.arange(vocab_size))


def balanced(vocab_size: int, branching: int) -> Parents:
    """`ClassTree.balanced`."""
    check_size("vocab_size", vocab_size, 1)
    check_size("branching", branching, 2)
    sizes = [vocab_size]  # numbers of items on each level, from the words up to the root
    while sizes[-1] > 1 or len(sizes) == 1:
        sizes.append(-(-sizes[-1] // branching))
    first_node = [0] * len(sizes)  # node number of each level's first node, the root being 0
    for level in range(len(sizes) - 2, 0, -1):
        first_node[level] = first_node[level + 1] + sizes[level + 1]
    parents = [
        torch.arange(size) * above // size + first_node[level + 1]
        for level, (size, above) in enumerate(pairwise(sizes))
    ]
    parent_of_node = torch.cat([torch.tensor([-1]), *reversed(parents[1:])])
    return Parents(
        parent_of_node,
        torch.arange(parent_of_node.numel()),
        parents[0],
        torch.arange(vocab_size),
    )


def huffman(counts: Tensor | Sequence[int], arity: int) -> Parents:
    """`ClassTree.huffman`."""
    counts = _integers("counts", counts)
    check_size("arity", arity, 2)
    merges = _huffman_merges(counts, arity)
    parent_of_word = torch.zeros(counts.numel(), dtype=torch.int64)
    num_nodes = len(merges)
    parent_of_node = torch.full((num_nodes,), -1, dtype=torch.int64)
    words: list[tuple[int, int]] = []
    nodes: list[tuple[int, int]] = []
    for merged, items in enumerate(merges):  # the last merge is the root: number it 0
        node = num_nodes - 1 - merged
        for item in items:
            (words if item >= 0 else nodes).append((item, node))
    if words:
        word, parent = torch.tensor(words).unbind(1)
        parent_of_word[word] = parent
    if nodes:
        child, parent = torch.tensor(nodes).unbind(1)
        parent_of_node[num_nodes - 1 - (-1 - child)] = parent
    return Parents(
        parent_of_node, torch.arange(num_nodes), parent_of_word, torch.arange(counts.numel())
    )


def from_paths(paths: Iterable[Sequence[int]]) -> Parents:
    """`ClassTree.from_paths`."""
    digit_rows = [torch.as_tensor(path, dtype=torch.int64) for path in paths]
    check_size("number of paths", len(digit_rows), 1)
    for word, path in enumerate(digit_rows):
        if path.dim() != 1 or path.numel() == 0 or bool((path < 0).any()):
            raise ValueError(
                f"path of word {word} must be integers ≥ 0, at least one, got {path.tolist()}"
            )
    digits = nn.utils.rnn.pad_sequence(digit_rows, batch_first=True, padding_value=-1)  # [N, depth]
    lengths = torch.tensor([path.numel() for path in digit_rows])
    parent_of_word = torch.zeros(len(digit_rows), dtype=torch.int64)
    parents, ranks = [torch.tensor([-1])], [torch.tensor([0])]
    num_nodes = 1
    for level in range(digits.shape[1]):
        alive = (lengths > level).nonzero().squeeze(1)
        edge = torch.stack([parent_of_word[alive], digits[alive, level]], dim=1)
        child, which, uses = torch.unique(edge, dim=0, return_inverse=True, return_counts=True)
        ends = lengths[alive] == level + 1
        clash = ends & (uses[which] > 1)
        if bool(clash.any()):
            first = int(alive[clash.nonzero()[0]])
            raise ValueError(
                f"path of word {first} ({digit_rows[first].tolist()})"
                " is also that of another word or begins it"
            )
        leads_on = torch.zeros(child.shape[0], dtype=torch.bool)
        leads_on[which[~ends]] = True
        node = torch.cumsum(leads_on, 0) - 1 + num_nodes
        parents.append(child[leads_on, 0])
        ranks.append(child[leads_on, 1])
        parent_of_word[alive[~ends]] = node[which[~ends]]
        num_nodes += int(leads_on.sum())
    word_rank = digits.gather(1, (lengths - 1)[:, None]).squeeze(1)
    return Parents(torch.cat(parents), torch.cat(ranks), parent_of_word, word_rank)


def read_paths(path: str | Path, words: Sequence[str]) -> list[list[int]]:
    """The child numbers of each word, from a file of `ClassTree.from_file`."""
    place = {word: i for i, word in enumerate(words)}
    paths: list[list[int] | None] = [None] * len(words)
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            word, *digits = line.split() or [""]
            if not word:
                continue
            if word not in place or not digits or not all(d.isdecimal() for d in digits):
                raise ValueError(
                    f"{path}:{number}: expected a word of the vocabulary and its child numbers"
                )
            if paths[place[word]] is not None:
                raise ValueError(f"{path}:{number}: {word} has a path already")
            paths[place[word]] = [int(d) for d in digits]
    missing = [word for word, digits in zip(words, paths, strict=True) if digits is None]
    if missing:
        raise ValueError(
            f"{path}: no path for {len(missing)} words, the first of them {missing[0]!r}"
        )
    return [digits for digits in paths if digits is not None]


def number_breadth_first(parents: Parents) -> tuple[Tensor, Tensor, Tensor]:
    """`num_children` [I], `row_of_node` [I] and `row_of_word` [N] of a ClassTree."""
    parent_of_node, node_rank, parent_of_word, word_rank = parents
    num_nodes, num_words = parent_of_node.numel(), parent_of_word.numel()
    level = _levels(parent_of_node)
    parent = torch.cat([parent_of_node[1:], parent_of_word])
    rank = torch.cat([node_rank[1:], word_rank])
    number = torch.zeros(num_nodes, dtype=torch.int64)  # breadth-first number of each node
    rows = []
    level_of_item = level[parent]
    by_level = torch.argsort(level_of_item, stable=True)
    per_level = torch.bincount(level_of_item).tolist()
    num_numbered = 1
    for items in torch.split(by_level, per_level):
        items = items[torch.argsort(rank[items], stable=True)]
        items = items[torch.argsort(number[parent[items]], stable=True)]
        rows.append(items)
        nodes = items[items < num_nodes - 1] + 1
        number[nodes] = torch.arange(num_numbered, num_numbered + nodes.numel())
        num_numbered += nodes.numel()
    item_of_row = torch.cat(rows)
    row_of_item = torch.empty_like(item_of_row)
    row_of_item[item_of_row] = torch.arange(num_nodes - 1 + num_words)
    row_of_node = torch.full((num_nodes,), -1, dtype=torch.int64)
    row_of_node[number[1:]] = row_of_item[: num_nodes - 1]
    num_children = torch.bincount(number[parent], minlength=num_nodes)
    return num_children, row_of_node, row_of_item[num_nodes - 1 :]


def _integers(name: str, array: Tensor | Sequence[int]) -> Tensor:
    tensor = torch.as_tensor(array)
    if (
        tensor.dim() != 1
        or tensor.numel() == 0
        or tensor.is_floating_point()
        or tensor.is_complex()
    ):
        raise ValueError(
            f"{name} must be a non-empty one-dimensional array of integers,"
            f" got {tensor.dtype} {list(tensor.shape)}"
        )
    tensor = tensor.to("cpu", torch.int64)
    if bool((tensor < 0).any()):
        raise ValueError(f"{name} must be ≥ 0, got {int(tensor.min())}")
    return tensor


def check_size(name: str, value: int, least: int) -> None:
    """Raise a ValueError if a size is too small."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _levels(parent: Tensor) -> Tensor:
    """Level of each node, 0 for the root, by pointer jumping: log(depth) passes."""
    above = parent.clamp(min=0)
    distance = (parent >= 0).to(torch.int64)
    while bool(above.any()):
        distance = distance + distance[above]
        above = above[above]
    return distance


def _huffman_merges(counts: Tensor, arity: int) -> list[list[int]]:
    """Items merged at each step; words are ≥ 0, the result of step i is -1 - i. Ties: words before
    merged, lower ids first.
    """
    if counts.numel() == 1:
        return [[0]]
    order = torch.argsort(counts, stable=True)
    leaves = deque(zip(counts[order].tolist(), order.tolist(), strict=True))
    merged: deque[tuple[int, int]] = deque()
    merges: list[list[int]] = []
    take = (counts.numel() - 2) % (arity - 1) + 2  # so that the last merge is full
    while len(leaves) + len(merged) > 1:
        weight, items = 0, []
        for _ in range(take):
            queue = leaves if leaves and (not merged or leaves[0][0] <= merged[0][0]) else merged
            count, item = queue.popleft()
            weight += count
            items.append(item)
        merged.append((weight, -1 - len(merges)))
        merges.append(items)
        take = arity
    return merges
