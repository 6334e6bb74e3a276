"""ClassTree: which row of the weight belongs to which word or node. It holds no weights.

An internal *node* is a softmax over its children; a child is another node or a word. Every word and
every node but the root owns one *row* of the weight; the children of a node own contiguous rows. N
words and I nodes have R = N + I - 1 rows. Nodes and rows are numbered breadth first, parents before
children:

    rows:  | children of node 0 (the root) | children of node 1 | children of node 2 | ...

Three flat arrays therefore define a tree of any depth: `num_children` [I], `row_of_node` [I] (-1
for the root) and `row_of_word` [N].
"""

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lm.output.tracing import constant_when_compiled
from lm.output.tree import shapes
from lm.output.tree.arrays import TreeArrays, check_arrays, tree_arrays

Stamp = tuple[object, list[int]]
DEFINING = ("num_children", "row_of_node", "row_of_word")
"""The arrays that define a tree."""


def _array(name: str) -> Any:
    """A property: one of the arrays that are no buffers."""
    return property(lambda tree: getattr(tree._arrays, name), doc=f"See `TreeArrays.{name}`.")


class ClassTree(nn.Module):
    """A tree of softmaxes over N words.

    Rows first_row[n] to first_row[n] + num_children[n] - 1 of the weight belong to the children of
    node n; row_of_word[w] is that of word w, and row_of_node[n] that of node n, -1 for the root.

    It is a module that moves with the layer that uses it. The three arrays that define it are
    buffers, which are saved with the layer and compared with those of the constructor, which are
    what is computed with: whatever a loader or an average of models writes into buffers, the tree
    remains the same, and another tree's weights are refused. Build one with `full`, `two_level`,
    `from_levels`, `from_clusters`, `balanced`, `huffman`, `from_paths` or `from_file`; sizes and
    arrays that make no tree raise a ValueError.

    Example:
        >>> tree = ClassTree.two_level([0, 1, 0, 1, 1])
        >>> tree
        ClassTree(vocab_size=5, num_nodes=3, depth=2, max_path_columns=5)
        >>> tree.path(4)  # the (node, row) pairs of word 4: its class, then the word
        [(0, 1), (2, 6)]

    Attributes:
        vocab_size: N, number of words.
        num_rows: R = N + I - 1, number of weight rows.
        num_nodes: I, number of internal nodes, including the root.
        depth: largest number of nodes on a word's path (1 for the full softmax).
        max_path_columns: largest number of children of the nodes on a word's path, summed.
        arrays: the `TreeArrays`, as backends take them. Each is also an attribute; read
            `arrays.row_of_word`, `row_of_node` and `num_children` here where an average of models
            may have written to the buffers.
    """

    num_children: Tensor
    row_of_node: Tensor
    row_of_word: Tensor
    first_row: Tensor = _array("first_row")
    node_of_row: Tensor = _array("node_of_row")
    level: Tensor = _array("level")
    preorder: Tensor = _array("preorder")
    preorder_stop: Tensor = _array("preorder_stop")
    column: Tensor = _array("column")

    def __init__(self, num_children: Tensor, row_of_node: Tensor, row_of_word: Tensor) -> None:
        """Builds a tree from the three arrays that define it, see `TreeArrays`."""
        super().__init__()
        with torch.device("cpu"):  # under any default device
            given = (num_children, row_of_node, row_of_word)
            num_children, row_of_node, row_of_word = (x.to(torch.int64).clone() for x in given)
            self._arrays = arrays = tree_arrays(num_children, row_of_node, row_of_word)
            self.vocab_size = row_of_word.numel()
            self.num_nodes = num_children.numel()
            self.num_rows = self.vocab_size + self.num_nodes - 1
            self.max_path_columns = int((arrays.column + num_children).max())
            self.depth = int(arrays.level[-1]) + 1
            self._stamp: Stamp | None = None  # when the buffers were compared with the arrays
            for name in DEFINING:
                self.register_buffer(name, None)
            self._set_buffers()

    @classmethod
    def full(cls, vocab_size: int) -> "ClassTree":
        """The ordinary softmax: the root's children are the N words, in the order of their ids.

        Example:
            >>> ClassTree.full(5).num_children.tolist()
            [5]
        """
        vocab_size = shapes.check_size("vocab_size", vocab_size, 1)
        with torch.device("cpu"):
            return cls(torch.tensor([vocab_size]), torch.tensor([-1]), torch.arange(vocab_size))

    @classmethod
    def two_level(
        cls,
        word_class: Tensor | Collection[int] | None = None,
        shortlist: int = 0,
        counts: Tensor | Collection[int] | None = None,
        *,
        num_words: int | None = None,
    ) -> "ClassTree":
        """The class-based softmax: the root's children are classes, a class's children its words.

        P(w | h) = P(class of w | h) · P(w | class of w, h)

        Example:
            >>> tree = ClassTree.two_level([0, 1, 0, 1, 1], shortlist=1)
            >>> tree.num_children.tolist()  # word 0 and two classes, then the words of each class
            [3, 1, 3]
            >>> ClassTree.two_level(num_words=10_000)
            ClassTree(vocab_size=10000, num_nodes=101, depth=2, max_path_columns=200)

        Args:
            word_class: [N] integers ≥ 0, the class of each word. Numbers of empty classes are
                skipped. `data_prep.word_classes` makes classes that suit a text.
            shortlist: number of words that are children of the root, before the classes; their
                class is ignored.
            counts: [N] integers ≥ 0; the shortlist holds the words with the largest counts. None:
                words 0 … shortlist - 1, the right choice if ids are sorted by falling frequency.
            num_words: N, in place of `word_class`: √N classes of neighbouring words, of equal size.

        Source: Goodman 2001; shortlist: Grave et al. 2017, section 4.
        """
        return cls._from_shape(shapes.two_level, word_class, shortlist, counts, num_words)

    @classmethod
    def from_levels(
        cls,
        levels: Tensor | Sequence[Tensor | Collection[int]],
        shortlist: int = 0,
        counts: Tensor | Collection[int] | None = None,
    ) -> "ClassTree":
        """Classes of classes of words: `levels[0]` is the class below the root, and so on.

        P(w | h) = P(w's class on level 0 | h) · P(that on level 1 | that on level 0, h) · …

        Example:
            >>> tree = ClassTree.from_levels([[0, 0, 0, 1, 1, -1], [0, 0, 1, 2, 3, -1]])
            >>> tree.num_children.tolist()  # word 5 and two classes; their classes; the words
            [3, 2, 2, 2, 1, 1, 1]
            >>> tree.depth
            3

        Args:
            levels: [levels, N] integers ≥ -1, the class of each word on each level, from the root
                down, as `data_prep.class_levels` returns them. Only words with equal classes on all
                levels above can share one: numbers may start at 0 in every class. -1: the word is a
                child of its class on the level above, or of the root.
            shortlist: number of words that are children of the root, see `two_level`.
            counts: [N], see `two_level`.
        """
        return cls._from_shape(shapes.from_levels, levels, shortlist, counts)

    @classmethod
    def from_clusters(cls, clusters: Sequence[Any]) -> "ClassTree":
        """The tree of nested lists: the root's children, each a word or the list of a node's.

        Example:
            >>> tree = ClassTree.from_clusters([0, [1, 3], [[2, 4], 5]])
            >>> tree.num_children.tolist(), tree.depth
            ([3, 2, 2, 2], 3)

        Args:
            clusters: sequence of words (integers) and such sequences, none empty. Each of the words
                0 … N - 1 is in it once.
        """
        return cls._from_shape(shapes.from_clusters, clusters)

    @classmethod
    def balanced(cls, vocab_size: int, branching: int) -> "ClassTree":
        """The shallowest tree, all words at one depth, whose nodes have ≤ `branching` children.

        Words are in the order of their ids.

        Example:
            >>> ClassTree.balanced(8, branching=2).depth
            3
        """
        return cls._from_shape(shapes.balanced, vocab_size, branching)

    @classmethod
    def huffman(cls, counts: Tensor | Collection[int], arity: int = 2) -> "ClassTree":
        """The tree with the least expected depth: frequent words have short paths.

        Minimises Σ_w counts[w] · depth(w).

        Example:
            >>> tree = ClassTree.huffman([8, 1, 1, 2])
            >>> [len(tree.path(word)) for word in range(4)]
            [1, 3, 3, 2]

        Args:
            counts: [N] integers ≥ 0, number of occurrences of each word.
            arity: number of children of every node but one, which may have fewer.

        Source: Huffman 1952; as an output layer: Mikolov et al. 2013.
        """
        return cls._from_shape(shapes.huffman, counts, arity)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> "ClassTree":
        """The tree in which `paths[w]` leads from the root to word w.

        Example:
            >>> ClassTree.from_paths([[0], [1, 0], [1, 1]]).num_children.tolist()
            [2, 2]

        Args:
            paths: for each word in the order of ids its child numbers (integers ≥ 0), from the root
                down. Children of a node are sorted by number; numbers may have gaps. No path equals
                or begins another one.
        """
        return cls._from_shape(shapes.from_paths, paths)

    @classmethod
    def from_file(cls, path: str | Path, words: Sequence[str]) -> "ClassTree":
        """The tree described by a text file: on each line a word and its path, see `from_paths`.

        Args:
            path: UTF-8 text; word and child numbers separated by white space, lines in any order.
            words: the N words in the order of ids, exactly those of the file.
        """
        return cls._from_shape(shapes.from_paths, shapes.read_paths(path, words), words)

    @classmethod
    def _from_shape(cls, shape: Callable[..., shapes.Arrays], *args: Any) -> "ClassTree":
        with torch.device("cpu"):
            return cls(*shape(*args))

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> "ClassTree":
        """The tree whose `state_dict()` is `state`."""
        missing = [name for name in DEFINING if name not in state]
        if missing:
            raise ValueError(f"not a saved tree: {', '.join(missing)} missing")
        return cls(*(state[name] for name in DEFINING))

    def copy(self) -> "ClassTree":
        """Another module with this tree, which moves by itself. What both compute with is shared.

        The buffers are not, so that each module can be saved.
        """
        return copy.deepcopy(self, {id(self._arrays): self._arrays})

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or to pickle, whose arrays are compared anew."""
        return vars(self) | {"_stamp": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ClassTree":
        """Moves the arrays to the device that `fn` takes tensors to; never takes values from it."""
        (device,) = {fn(buffer).device for buffer in self.buffers()}
        if device not in (self.num_children.device, torch.device("meta")):
            self._move(device)
            self._set_buffers()
        return self

    def _move(self, device: torch.device) -> None:
        """Moves what is computed with."""
        if device != self._arrays.row_of_word.device:
            self._arrays = TreeArrays(*(array.to(device) for array in self._arrays))
            self._stamp = None
            for name in ("item_of_row", "num_words_below"):
                vars(self).pop(name, None)

    def _set_buffers(self) -> None:
        for name in DEFINING:
            setattr(self, name, getattr(self._arrays, name).clone())

    def _save_to_state_dict(self, *args: Any) -> None:
        with suppress(ValueError):  # another tree: the next computation says so
            self._compare()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.check_saved(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def check_saved(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Raise a ValueError for another tree, whose rows would silently belong to other words."""
        if differing := self._differing([state_dict.get(prefix + name) for name in DEFINING]):
            raise ValueError(f"the weights belong to another tree: {prefix}{differing} differs")

    def _differing(self, saved: Iterable[Tensor | None]) -> str | None:
        """The first of the saved arrays, if they are there, that differs from the tree's own."""
        for name, array in zip(DEFINING, saved, strict=True):
            own = getattr(self._arrays, name)
            if array is not None and not torch.equal(array.to(own), own):
                return name
        return None

    @property
    def arrays(self) -> TreeArrays:
        """The arrays, as backends take them.

        Raises:
            ValueError: if another tree was loaded into the buffers, or an array was written to.
        """
        is_traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
        if torch.compiler.is_dynamo_compiling() or not is_traced:
            self._compare()
        return self._arrays

    @constant_when_compiled
    def _compare(self) -> None:
        """Compares the buffers with the arrays, once after every change of either.

        Loaders that do not call `load_state_dict` replace buffers or write into them. Another tree
        is refused; what is no tree, such as uninitialised memory for arrays that were not saved, is
        replaced. Writing into a buffer on CUDA is not noticed.
        """
        before, stamp = self._stamp, self._current_stamp()
        if before == stamp or self.num_children.is_meta:
            return
        if before is not None and before[1] != stamp[1]:
            raise ValueError("an array of a tree was written to: build the tree again")
        saved = list(self.buffers())
        self._move(saved[0].device)
        if differing := self._differing(saved):
            try:
                check_arrays(*saved)
            except ValueError:
                self._set_buffers()
            else:
                raise ValueError(f"the weights belong to another tree: {differing} differs")
        self._stamp = self._current_stamp()

    def _current_stamp(self) -> Stamp:
        """The memory of the buffers and the numbers of writes: equal as long as nothing changes."""
        buffers = [x for x in self._buffers.values() if x is not None]
        written = [0 if x.is_inference() else x._version for x in (*buffers, *self._arrays)]
        num_writes = 0 if buffers[0].is_cuda else written[:3]
        return ([x.data_ptr() for x in buffers], num_writes), written[3:]

    @cached_property
    def item_of_row(self) -> Tensor:
        """The word w, or ~n for a node n, that owns each row, [R]."""
        arrays = self.arrays
        item = torch.empty_like(arrays.node_of_row)
        item[arrays.row_of_word] = torch.arange(self.vocab_size, device=item.device)
        item[arrays.row_of_node[1:]] = ~torch.arange(1, self.num_nodes, device=item.device)
        return item

    @cached_property
    def num_node_rows(self) -> int:
        """The number of rows up to the last one of a node: words own all that follow."""
        return int(self.arrays.row_of_node.max()) + 1

    @cached_property
    def num_words_below(self) -> Tensor:
        """The number of words below each node, [I]."""
        return self.sum_below(torch.ones_like(self.row_of_word))

    def sum_below(self, value: Tensor) -> Tensor:
        """The sum of the values [N] of the words below each node, [I]."""
        own = value.new_zeros(self.num_nodes)
        own.index_add_(0, self.node_of_row[self.arrays.row_of_word], value)
        before = F.pad(own[self.preorder.argsort()].cumsum(0), (1, 0))
        return before[self.preorder_stop] - before[self.preorder]

    def extra_repr(self) -> str:
        """The sizes, for `print(tree)`."""
        return (
            f"vocab_size={self.vocab_size}, num_nodes={self.num_nodes}, depth={self.depth}, "
            f"max_path_columns={self.max_path_columns}"
        )

    def rows_on_path(self, word: Tensor) -> Tensor:
        """Rows [..., depth] on the paths of words [...]: a word's own, its parent's and so on.

        They are -1 from the root on, which has no row.
        """
        arrays = self.arrays
        rows = [arrays.row_of_word[word]]
        for _ in range(self.depth - 1):
            parent_row = arrays.row_of_node[arrays.node_of_row[rows[-1].clamp(min=0)]]
            rows.append(torch.where(rows[-1] >= 0, parent_row, -1))
        return torch.stack(rows, -1)

    def path(self, word: int) -> list[tuple[int, int]]:
        """The (node, row) pairs on a word's path, from the root down."""
        if not 0 <= word < self.vocab_size:
            raise IndexError(f"word {word} is out of bounds for {self.vocab_size} words")
        rows = self.rows_on_path(self.row_of_word.new_tensor(word)).tolist()
        return [(int(self.node_of_row[row]), row) for row in reversed(rows) if row >= 0]
