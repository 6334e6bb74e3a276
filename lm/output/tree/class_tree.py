"""ClassTree: the shape of a softmax. Decides which row belongs to which node or word; holds no
weights and computes nothing.

An internal *node* is a softmax over its children; a child is another node or a word. Every node but
the root, and every word, owns one *row* of the weight, and the children of a node own contiguous
rows. With N words and I nodes there are R = N + I - 1 rows. Nodes and rows are numbered breadth
first, parents before children:

    rows:  | children of node 0 (the root) | children of node 1 | children of node 2 | ...

so that three flat arrays say everything: `num_children` [I], `row_of_node` [I] (-1 for the root)
    and `row_of_word` [N].
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lm.output.tree import shapes


class TreeArrays(NamedTuple):
    """A tree as flat integer arrays: what the backends see of it, in the order in which the custom
    op takes it.

    Attributes:
        num_children: [I] int64, children of each node.
        first_row: [I] int64, row of each node's first child.
        row_of_node: [I] int64, row that stands for the node in its parent; -1 for the root.
        node_of_row: [R] int64, node whose child the row is.
        row_of_word: [N] int64.
        level: [I] int64, nodes above the node; 0 for the root.
        preorder: [I] int64, rank of the node depth first, parents before children: the nodes below
            a node follow it without a gap.
        preorder_stop: [I] int64, rank after the last node below it.
        column: [I] int64, children of the nodes above the node, together.
    """

    num_children: Tensor
    first_row: Tensor
    row_of_node: Tensor
    node_of_row: Tensor
    row_of_word: Tensor
    level: Tensor
    preorder: Tensor
    preorder_stop: Tensor
    column: Tensor


_SAVED = ("num_children", "row_of_node", "row_of_word")


class ClassTree(nn.Module):
    """A tree of softmaxes over N words, as flat integer arrays.

    A module, because its arrays are the buffers of the layer that uses it: they move with the layer
    and are saved with it. Build one with `full`, `two_level`, `balanced`, `huffman` or
    `from_paths`.

    Attributes:
        vocab_size: N, number of words.
        num_rows: R = N + I - 1, number of weight rows.
        num_nodes: I, number of internal nodes, the root included.
        depth: largest number of nodes on the path of a word (1 for the full softmax).
        max_path_columns: largest number of children met on the path of a word, summed over its
            nodes.
        num_children, first_row, row_of_node, node_of_row, row_of_word, level, preorder,
            preorder_stop, column: the buffers; see `TreeArrays`.
    """

    num_children: Tensor
    first_row: Tensor
    row_of_node: Tensor
    node_of_row: Tensor
    row_of_word: Tensor
    level: Tensor
    preorder: Tensor
    preorder_stop: Tensor
    column: Tensor

    def __init__(self, num_children: Tensor, row_of_node: Tensor, row_of_word: Tensor) -> None:
        """Make the tree of three arrays as they are saved, and check that they are one.

        Raises:
            ValueError: if the arrays do not describe a tree in which each row has exactly one
                owner, its nodes numbered breadth first.
        """
        super().__init__()
        with torch.device("cpu"):  # whatever the default device is
            arrays = (num_children, row_of_node, row_of_word)
            self._lay_out(*(torch.as_tensor(array).to(torch.int64) for array in arrays))

    def _lay_out(self, num_children: Tensor, row_of_node: Tensor, row_of_word: Tensor) -> None:
        _check(num_children, row_of_node, row_of_word)
        self.vocab_size = row_of_word.numel()
        self.num_nodes = num_children.numel()
        self.num_rows = self.vocab_size + self.num_nodes - 1
        self.register_buffer("num_children", num_children)
        self.register_buffer("row_of_node", row_of_node)
        self.register_buffer("row_of_word", row_of_word)
        first_row = num_children.cumsum(0) - num_children
        node_of_row = torch.repeat_interleave(torch.arange(self.num_nodes), num_children)
        self.register_buffer("first_row", first_row, persistent=False)
        self.register_buffer("node_of_row", node_of_row, persistent=False)
        above = torch.cat([torch.tensor([0]), node_of_row[row_of_node[1:]]])
        level, column = _levels(num_children, above)
        self.register_buffer("level", level, persistent=False)
        preorder, num_below = _depth_first(level, above)
        self.register_buffer("preorder", preorder, persistent=False)
        self.register_buffer("preorder_stop", preorder + num_below, persistent=False)
        self.register_buffer("column", column, persistent=False)
        self.max_path_columns = int((column + num_children).max())
        self.depth = int(level[-1]) + 1

    @classmethod
    def full(cls, vocab_size: int) -> "ClassTree":
        """The ordinary softmax: one node, whose children are the N words in the order of their
        ids.
        """
        shapes.check_size("vocab_size", vocab_size, 1)
        with torch.device("cpu"):
            return cls(torch.tensor([vocab_size]), torch.tensor([-1]), torch.arange(vocab_size))

    @classmethod
    def two_level(
        cls,
        word_class: Tensor | Sequence[int],
        head: int = 0,
        counts: Tensor | Sequence[int] | None = None,
    ) -> "ClassTree":
        """The class-based softmax: the root's children are the classes, a class's children its
        words.

        Args:
            word_class: [N] integers ≥ 0, the class of each word. Class numbers without words are
                skipped.
            head: this many words hang on the root, before the classes; their class is ignored.
            counts: [N] integers ≥ 0, of which the largest tell the head's words; None takes the
                words 0 … head - 1, as is right for ids by falling frequency.

        Raises:
            ValueError: if `word_class` or `counts` is not N integers ≥ 0, or `head` is not within
                0 … N.

        Source: Goodman 2001; words at the root: Grave et al. 2017, section 4.
        """
        return cls._of(shapes.two_level, word_class, head, counts)

    @classmethod
    def balanced(cls, vocab_size: int, branching: int) -> "ClassTree":
        """The shallowest tree of even depth in which no node has more than `branching` children,
        words in the order of their ids.

        Raises:
            ValueError: if `vocab_size` < 1 or `branching` < 2.
        """
        return cls._of(shapes.balanced, vocab_size, branching)

    @classmethod
    def huffman(cls, counts: Tensor | Sequence[int], arity: int = 2) -> "ClassTree":
        """The tree of least expected depth under `counts` in which every node but one has exactly
        `arity` children.

        Args:
            counts: [N] integers ≥ 0, how often each word occurs.
            arity: children of a node.

        Raises:
            ValueError: if `counts` is not one-dimensional integers ≥ 0, or `arity` < 2.

        Source: Huffman 1952; as an output layer: Mikolov et al. 2013.
        """
        return cls._of(shapes.huffman, counts, arity)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "ClassTree":
        """The tree in which word w is found by following the child numbers `paths[w]` from the
        root.

        Args:
            paths: for each word in the order of ids, its child numbers (integers ≥ 0), outermost
                first. Children of a node are ordered by number; numbers may have gaps.

        Raises:
            ValueError: if a path is empty or negative, if two words share a path, or if one path
                begins another.
        """
        return cls._of(shapes.from_paths, paths)

    @classmethod
    def from_file(cls, path: str | Path, words: Sequence[str]) -> "ClassTree":
        """The tree of a text file: one line a word, the word and its child numbers separated by
        blanks, in any order.

        Raises:
            ValueError: if a line does not parse, or the file's words are not exactly `words`,
                naming the line or word.
        """
        return cls.from_paths(shapes.read_paths(path, words))

    @classmethod
    def _of(cls, shape: Callable[..., shapes.Parents], *arguments: Any) -> "ClassTree":
        with torch.device("cpu"):
            return cls(*shapes.number_breadth_first(shape(*arguments)))

    def save(self, path: str | Path) -> None:
        """Write the three defining arrays; `load` reads them."""
        torch.save(self.state_dict(), path)

    @classmethod
    def load(cls, path: str | Path) -> "ClassTree":
        """Read what `save` wrote.

        Raises:
            ValueError: if the file does not hold a tree.
        """
        return cls.from_state(torch.load(path, map_location="cpu", weights_only=True))

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> "ClassTree":
        """The tree whose `state_dict()` is `state`.

        Raises:
            ValueError: if an array is missing or the arrays do not describe a tree.
        """
        missing = [name for name in _SAVED if name not in state]
        if missing:
            raise ValueError(f"not a saved tree: {', '.join(missing)} missing")
        return cls(*(state[name] for name in _SAVED))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Refuse the weights of another tree: rows would silently belong to other words."""
        for name in _SAVED:
            value, own = state_dict.get(prefix + name), getattr(self, name)
            if value is not None and not torch.equal(value.to(own.device), own):
                raise ValueError(f"the weights belong to another tree: {prefix}{name} differs")
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def arrays(self) -> TreeArrays:
        """What the backends see."""
        return TreeArrays(*(getattr(self, name) for name in TreeArrays._fields))

    def extra_repr(self) -> str:
        return (
            f"vocab_size={self.vocab_size}, num_nodes={self.num_nodes}, depth={self.depth}, "
            f"max_path_columns={self.max_path_columns}"
        )

    def root_child(self, word: Tensor) -> Tensor:
        """Which child of the root each word hangs below, [...] int64 for words [...]: its class, in
        a tree of two levels.
        """
        row = self.row_of_word[word]
        for _ in range(self.depth - 1):
            above = self.row_of_node[self.node_of_row[row]]
            row = torch.where(above >= 0, above, row)
        return row

    def rows_above(self, word: Tensor) -> Tensor:
        """Rows of the nodes on each word's path, the nearest first: [..., depth - 1] int64 for
        words [...]; -1 from the root on, which has none.
        """
        row, rows = self.row_of_word[word], []
        for _ in range(self.depth - 1):
            above = self.row_of_node[self.node_of_row[row.clamp(min=0)]]
            row = torch.where(row >= 0, above, row)
            rows.append(row)
        return torch.stack(rows, -1) if rows else row.new_empty(*word.shape, 0)

    def path(self, word: int) -> list[tuple[int, int]]:
        """The (node, row) pairs of a word from the root down."""
        visits: list[tuple[int, int]] = []
        row = int(self.row_of_word[word])
        while row >= 0:
            node = int(self.node_of_row[row])
            visits.append((node, row))
            row = int(self.row_of_node[node])
        return visits[::-1]


def _check(num_children: Tensor, row_of_node: Tensor, row_of_word: Tensor) -> None:
    """Each row is owned by one node or word, and nodes are numbered as their rows are."""
    num_nodes, num_words = num_children.numel(), row_of_word.numel()
    num_rows = num_words + num_nodes - 1
    if num_words < 1 or num_nodes < 1 or row_of_node.numel() != num_nodes:
        raise ValueError(
            f"not a tree: {num_words} words, {num_nodes} nodes, {row_of_node.numel()} rows of nodes"
        )
    if bool((num_children < 1).any()) or int(num_children.sum()) != num_rows:
        raise ValueError(f"not a tree: {int(num_children.sum())} children in all, {num_rows} rows")
    owned = torch.cat([row_of_node[1:], row_of_word])
    if int(row_of_node[0]) != -1 or bool((owned < 0).any()) or bool((owned >= num_rows).any()):
        raise ValueError("not a tree: rows out of range")
    if not bool((torch.bincount(owned, minlength=num_rows) == 1).all()):
        raise ValueError("not a tree: a row has several owners")
    first_row = num_children.cumsum(0) - num_children
    if bool((row_of_node[1:] >= first_row[1:]).any()):
        raise ValueError("not a tree: a node does not lie below an earlier one")
    if bool((row_of_node[1:].diff() <= 0).any()):
        raise ValueError("not a tree of ours: its nodes are not numbered breadth first")


def _levels(num_children: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """Level of each node, and the columns above it. Parents come first, so sums run down by
    pointer jumping.

    Args:
        num_children: [I].
        above: [I], parent of each node; 0 for the root.
    """
    level, column = torch.ones_like(above), num_children[above]
    level[0], column[0] = 0, 0
    while bool(above.any()):
        level, column = level + level[above], column + column[above]
        above = above[above]
    return level, column


def _depth_first(level: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """Rank [I] of each node depth first: its parent's, and the nodes at and below the siblings
    before it. And how many nodes are at and below each [I].
    """
    bounds = [0, *torch.bincount(level).cumsum(0).tolist()]
    size = torch.ones_like(above)
    for first, last in reversed(list(pairwise(bounds))[1:]):
        size.index_add_(0, above[first:last], size[first:last].clone())
    rank = torch.zeros_like(above)
    for first, last in list(pairwise(bounds))[1:]:
        parent = above[first:last]
        before = size[first:last].cumsum(0) - size[first:last]
        eldest = torch.searchsorted(parent, parent)
        rank[first:last] = rank[parent] + 1 + before - before[eldest]
    return rank, size
