"""The tree report: sizes of a tree's levels, what a token costs, and its heaviest nodes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.sharded.placement import visits_of_nodes


def tree_report(
    tree: ClassTree, counts: Tensor, *, num_nodes: int = 60, num_top_words: int = 8
) -> dict[str, Any]:
    """Describe a tree of softmaxes and the frequency of its words, in figures for JSON.

    `visits_per_token` is the average number of nodes on a token's path, and `columns_per_token` of
    logits that are computed for a token; those of a level, of nodes with as many ancestors, are its
    parts of these. `nodes` are those with the most tokens, each after its parent.

    Args:
        tree: over N words.
        counts: [N], occurrences of each word.
        num_nodes: maximum number of `nodes`.
        num_top_words: maximum number of ids in each of their `top_words`.

    Example:
        >>> tree = ClassTree.from_clusters([0, [1, [2, 3]]])
        >>> report = tree_report(tree, torch.tensor([5, 3, 1, 1]))
        >>> report["visits_per_token"], report["columns_per_token"]
        (1.7, 3.4)
        >>> [(node["node"], node["parent"], node["top_words"]) for node in report["nodes"]]
        [(0, None, [0, 1, 2, 3]), (1, 0, [1, 2, 3]), (2, 1, [2, 3])]
    """
    tree = tree.copy().to("cpu")
    of_node = visits_of_nodes(tree, counts) / counts.sum()
    columns = of_node * tree.num_children
    heaviest = torch.argsort(of_node, descending=True, stable=True)[:num_nodes]
    shown = heaviest[tree.preorder[heaviest].argsort()]
    top_words = top_words_below(tree, counts, shown.tolist(), num_top_words)
    nodes = [
        {
            "node": node,
            "parent": int(tree.node_of_row[tree.row_of_node[node]]) if node else None,
            "level": int(tree.level[node]),
            "children": int(tree.num_children[node]),
            "words": int(tree.num_words_below[node]),
            "token_mass": float(of_node[node]),  # share of the tokens that are words below it
            "top_words": words,
        }
        for node, words in zip(shown.tolist(), top_words, strict=True)
    ]
    return {
        "vocab_size": tree.vocab_size,
        "num_nodes": tree.num_nodes,
        "depth": tree.depth,
        "visits_per_token": float(of_node.sum()),
        "columns_per_token": float(columns.sum()),
        "levels": [_level(tree, level, of_node, columns) for level in range(tree.depth)],
        "nodes": nodes,
    }


def top_words_below(
    tree: ClassTree, counts: Tensor, nodes: Sequence[int], num: int
) -> list[list[int]]:
    """Up to `num` words below each of the nodes, most frequent first; ties by id."""
    place = tree.preorder[tree.node_of_row[tree.row_of_word]]  # of each word's node, depth first
    order = torch.argsort(place)
    intervals = torch.stack([tree.preorder[nodes], tree.preorder_stop[nodes]], 1)
    found = []
    for start, stop in torch.searchsorted(place[order], intervals).tolist():
        below = order[start:stop].sort().values
        best = counts[below].argsort(descending=True, stable=True)[:num]
        found.append(below[best].tolist())
    return found


def _level(tree: ClassTree, level: int, mass: Tensor, columns: Tensor) -> dict[str, Any]:
    here = tree.level == level
    children = tree.num_children[here]
    return {
        "num_nodes": children.numel(),
        "num_words": int(here[tree.node_of_row[tree.row_of_word]].sum()),  # among their children
        "min_children": int(children.min()),
        "median_children": float(children.double().quantile(0.5)),
        "max_children": int(children.max()),
        "visits_per_token": float(mass[here].sum()),
        "columns_per_token": float(columns[here].sum()),
    }
