"""Shapes of a `ClassTree`: the parents of nodes and words, and the numbering breadth first.

`ClassTree` documents the arguments of each shape.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, pairwise
from numbers import Integral
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.nn import functional as F

Arrays = tuple[Tensor, Tensor, Tensor]
"""The `num_children` [I], `row_of_node` [I] and `row_of_word` [N] of a `ClassTree`."""


def two_level(
    word_class: Tensor | Collection[int] | None,
    shortlist: int,
    counts: Tensor | Collection[int] | None,
    num_words: int | None,
) -> Arrays:
    """The shape of `ClassTree.two_level`."""
    if word_class is None and num_words is not None:
        num_words = check_size("num_words", num_words, 1)
        word_class = torch.arange(num_words) * round(num_words**0.5) // num_words
    elif word_class is None or num_words is not None:
        raise ValueError("two_level requires either word_class or num_words")
    word_class = _integers("word_class", word_class)
    return from_levels(word_class[None], shortlist, counts)


def from_levels(
    levels: Tensor | Sequence[Tensor | Collection[int]],
    shortlist: int,
    counts: Tensor | Collection[int] | None,
) -> Arrays:
    """The shape of `ClassTree.from_levels`."""
    rows = [_integers(f"level {i}", level, least=-1) for i, level in enumerate(levels)]
    num_words = rows[0].numel() if rows else 0
    if not rows or any(row.numel() != num_words for row in rows):
        raise ValueError(
            "levels must be [levels, N] with the same N ≥ 1 on all, at least one, got"
            f" {[row.numel() for row in rows]} words"
        )
    for number, (above, below) in enumerate(pairwise(rows)):
        if bool((gap := (above < 0) & (below >= 0)).any()):
            word = int(gap.nonzero()[0])
            raise ValueError(f"word {word} has a class on level {number + 1}, none on {number}")
    shortlist = check_size("shortlist", shortlist, 0)
    if shortlist > num_words:
        raise ValueError(f"shortlist must be within 0 … {num_words} words, got {shortlist}")
    by_count = torch.arange(num_words)
    if counts is not None:
        counts = _integers("counts", counts)
        if counts.numel() != num_words:
            raise ValueError(f"counts must have {num_words} entries, got {counts.numel()}")
        by_count = torch.argsort(counts, descending=True, stable=True)
    parent, label = _nodes_of_prefixes(rows, by_count[shortlist:])
    node_rank = num_words + torch.arange(label.numel())  # after the words
    return _number_breadth_first(parent, torch.cat([node_rank, torch.arange(num_words)]), num_words)


def from_clusters(clusters: Sequence[Any]) -> Arrays:
    """The shape of `ClassTree.from_clusters`."""
    nodes, words = [(clusters, list[int]())], list[tuple[int, list[int]]]()
    for children, path in nodes:  # which grows meanwhile
        if not isinstance(children, Sequence) or isinstance(children, str) or not children:
            raise ValueError(
                "a cluster must be a non-empty sequence of words (integers) and clusters, got"
                f" {children!r}"
            )
        for place, child in enumerate(children):
            if isinstance(child, Integral):
                words.append((int(child), [*path, place]))
            else:
                nodes.append((child, [*path, place]))
    words.sort()
    if any(word != i for i, (word, *_) in enumerate(words)):
        raise ValueError(
            f"clusters of {len(words)} words must have each of 0 … {len(words) - 1} once, got the"
            f" words {[word for word, *_ in words][:20]}"
        )
    return from_paths([path for _, path in words])


def balanced(vocab_size: int, branching: int) -> Arrays:
    """The shape of `ClassTree.balanced`."""
    vocab_size = check_size("vocab_size", vocab_size, 1)
    branching = check_size("branching", branching, 2)
    sizes = [vocab_size]  # items on each level, from the words up to the root
    while sizes[-1] > 1 or len(sizes) == 1:
        sizes.append(-(-sizes[-1] // branching))
    parents, first_node = [], 0
    for num_parents, size in pairwise(reversed(sizes)):
        parents.append(first_node + torch.arange(size) * num_parents // size)
        first_node += num_parents
    parent = torch.cat(parents)
    return _number_breadth_first(parent, torch.arange(parent.numel()), vocab_size)


def huffman(counts: Tensor | Collection[int], arity: int) -> Arrays:
    """The shape of `ClassTree.huffman`."""
    counts = _integers("counts", counts)
    arity = check_size("arity", arity, 2)
    order, num_words = counts.argsort(stable=True), counts.numel()
    sorted_words, count_of_word = order.tolist(), [*counts[order].tolist(), math.inf]
    sums, merge_of_item = list[int](), [0] * num_words  # of words, and then of merges
    word = merge = 0  # next ones: sums do not decrease either
    num_items = (num_words - 2) % (arity - 1) + 2  # so that every later merge has `arity` items
    while num_words - word + len(sums) - merge > 1:  # merge the smallest; of equal ones, words
        total = 0
        for _ in range(num_items):
            if merge < len(sums) and sums[merge] < count_of_word[word]:
                total, item, merge = total + sums[merge], num_words + merge, merge + 1
            else:
                total, item, word = total + count_of_word[word], sorted_words[word], word + 1
            merge_of_item[item] = len(sums)
        sums.append(total)
        merge_of_item.append(-1)
        num_items = arity
    num_nodes = max(1, len(merge_of_item) - num_words)
    items = torch.tensor(merge_of_item[: num_words + num_nodes - 1])
    words, merges = torch.split(items, [num_words, num_nodes - 1])
    parent = num_nodes - 1 - torch.cat([merges.flip(0), words])
    rank = torch.cat([torch.arange(1, num_nodes), torch.arange(num_words)])
    return _number_breadth_first(parent, rank, num_words)


def from_paths(paths: Iterable[Sequence[int]], words: Sequence[str] = ()) -> Arrays:
    """The shape of `ClassTree.from_paths`; errors name words by `words`, or their numbers."""
    word_paths = list(paths)
    check_size("number of paths", len(word_paths), 1)
    length = torch.tensor(list(map(len, word_paths)))
    if bool((length == 0).any()):
        first = int(length.argmin())
        raise ValueError(f"path of word {first} must be integers ≥ 0, at least one, got []")
    child = _integers("child numbers", list(chain.from_iterable(word_paths)))
    word = torch.repeat_interleave(torch.arange(len(word_paths)), length)
    step = torch.arange(child.numel()) - (length.cumsum(0) - length)[word]
    levels = torch.full((int(length.max()), len(word_paths)), -1)
    is_last = step == length[word] - 1
    levels[step[~is_last], word[~is_last]] = child[~is_last]
    parent, label = _nodes_of_prefixes(levels.unbind(), torch.arange(len(word_paths)))
    rank = torch.cat([label, child[is_last]])
    number = torch.unique(rank, return_inverse=True)[1]
    _, owner, uses = torch.unique(
        parent * rank.numel() + number, return_inverse=True, return_counts=True
    )
    shared = (uses[owner] > 1)[label.numel() :]
    if bool(shared.any()):
        first = int(shared.nonzero()[0])
        name = repr(words[first]) if words else first
        raise ValueError(
            f"path of word {name} ({list(word_paths[first])}) equals or begins the path of another"
            " word"
        )
    return _number_breadth_first(parent, rank, len(word_paths))


def _nodes_of_prefixes(levels: Sequence[Tensor], words: Tensor) -> tuple[Tensor, Tensor]:
    """One node for each distinct prefix of the words' labels, from the first level on.

    A word's labels [levels] end before the first -1. Words outside of `words` have none. Returns
    the parents of nodes 1 … I - 1 and then of all words, and the last label of each node.
    """
    parents, labels, num_nodes = [], [torch.tensor([], dtype=torch.int64)], 1
    lowest = torch.zeros_like(levels[0])  # node of each word
    for level in levels:
        words = words[level[words] >= 0]
        if words.numel() == 0:
            break
        values, label = torch.unique(level[words], return_inverse=True)
        key, index = torch.unique(lowest[words] * values.numel() + label, return_inverse=True)
        parents.append(key // values.numel())
        labels.append(values[key % values.numel()])
        lowest[words] = num_nodes + index
        num_nodes += key.numel()
    return torch.cat([*parents, lowest]), torch.cat(labels)


def read_paths(path: str | Path, words: Sequence[str]) -> list[list[int]]:
    """Reads the child numbers of each word from a file that `ClassTree.from_file` describes."""
    word_id = {word: i for i, word in enumerate(words)}
    paths: dict[int, list[int]] = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            word, *children = line.split() or [""]
            if not word:
                continue
            if word not in word_id:
                raise ValueError(f"{path}:{number}: {word!r} is not in the vocabulary")
            if not children or not all(c.isdecimal() for c in children):
                raise ValueError(f"{path}:{number}: expected child numbers, integers ≥ 0")
            if word_id[word] in paths:
                raise ValueError(f"{path}:{number}: {word} has a path already")
            paths[word_id[word]] = [int(c) for c in children]
    missing = [word for i, word in enumerate(words) if i not in paths]
    if missing:
        raise ValueError(
            f"{path}: no path for {len(missing)} words, the first of them {missing[0]!r}"
        )
    return [paths[i] for i in range(len(words))]


def _number_breadth_first(parent: Tensor, rank: Tensor, num_words: int) -> Arrays:
    """The tree, given the parent of nodes 1 … I - 1, in any order, and then of words 0 … N - 1.

    The children of a node (0 is the root) are sorted by `rank`, equal ranks by item.
    """
    num_nodes = parent.numel() + 1 - num_words
    below_root = (torch.arange(num_nodes) > 0).to(torch.int64)
    level = sum_over_ancestors(F.pad(parent[: num_nodes - 1], (1, 0)), below_root)[parent]
    by_level = torch.argsort(level, stable=True)
    number = torch.zeros(num_nodes, dtype=torch.int64)  # breadth-first number of each node
    rows, num_numbered = [], 1
    for items in torch.split(by_level, torch.bincount(level).tolist()):
        items = items[torch.argsort(rank[items], stable=True)]
        items = items[torch.argsort(number[parent[items]], stable=True)]
        rows.append(items)
        nodes = items[items < num_nodes - 1] + 1
        number[nodes] = torch.arange(num_numbered, num_numbered + nodes.numel())
        num_numbered += nodes.numel()
    item_of_row = torch.cat(rows)
    row_of_item = torch.empty_like(item_of_row)
    row_of_item[item_of_row] = torch.arange(item_of_row.numel())
    row_of_node = torch.full((num_nodes,), -1)
    row_of_node[number[1:]] = row_of_item[: num_nodes - 1]
    num_children = torch.bincount(number[parent], minlength=num_nodes)
    return num_children, row_of_node, row_of_item[num_nodes - 1 :]


def sum_over_ancestors(parent: Tensor, value: Tensor) -> Tensor:
    """Sums `value` [I] over each node and its ancestors, in log(depth) passes of pointer jumping.

    `parent` [I] and `value` are 0 for the root.
    """
    while bool(parent.any()):
        value = value + value[parent]
        parent = parent[parent]
    return value


def check_size(name: str, value: SupportsIndex, least: int) -> int:
    """The value of a size; raises a ValueError unless it is an integer of at least `least`."""
    try:
        size = index(value)
    except TypeError:
        size = None
    if size is None or size < least:
        raise ValueError(f"{name} must be an integer ≥ {least}, got {value!r}")
    return size


def _integers(name: str, array: Tensor | Collection[int], least: int = 0) -> Tensor:
    """Integers of at least `least`, checked, as int64 on the CPU."""
    try:
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be integers: {error}") from error
    inexact = tensor.is_floating_point() or tensor.is_complex()
    if tensor.dim() != 1 or tensor.numel() == 0 or inexact:
        found = f"{tensor.dtype} {list(tensor.shape)}" if tensor.dim() else f"{array!r}"
        raise ValueError(f"{name} must be integers, one-dimensional and non-empty, got {found}")
    tensor = tensor.to("cpu", torch.int64)
    if bool((tensor < least).any()):
        raise ValueError(f"{name} must be ≥ {least}, got {int(tensor.min())}")
    return tensor
