"""An n-gram model over word ids, as a tree in a few flat arrays.

    log P(w | h) = log p(h w)                   if the model has the n-gram h w,
                   log b(h) + log P(w | h')     else, where h' is h without its first word      (1)

and b(h) = 1 if the model has no h. A node is an n-gram of at most `order` words: 0 is the empty
one, 1 + w the word w. Its children are the n-grams of one word more, in the order of their last
words; the nodes of each length follow those of the length before, in the order of their parents.

A *context* is the node of the longest end of a history that has children or b(h) ≠ 1. It depends on
the history alone, and has all that equation (1) needs. A line begins in the context of `<s>`.

Source: Katz 1987; Heafield 2011, KenLM.
"""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.compiled import compiled
from data_prep.errors import UserError
from data_prep.storage import write_atomically

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NATS_PER_LOG10 = math.log(10)
NEVER = -99.0
"""log10 P of `<s>` in an ARPA file, which cannot hold 0."""
AT_ONCE = 1 << 16
"""N-grams that are written at once."""


class Arrays(NamedTuple):
    """The G nodes, of which the first M have fewer than `order` words."""

    word: NDArray[np.uint32]  # [G], the last one
    log_prob: NDArray[np.floating[Any]]  # [G] nats
    backoff: NDArray[np.floating[Any]]  # [M] nats, log b
    suffix: NDArray[np.uint32]  # [M], the longest shorter end of it that is a node
    first: NDArray[np.uint32]  # [M + 1], the first child of each

    @classmethod
    def empty(cls, num_nodes: int, num_inner: int, real: type = np.float32) -> "Arrays":
        """Arrays to be filled, in which node 0 is complete but for its children."""
        sizes = num_nodes, num_nodes, num_inner, num_inner, num_inner + 1
        arrays = cls(*(np.zeros(size, d) for size, d in zip(sizes, cls.dtypes(real), strict=True)))
        arrays.first[:2] = 1, num_nodes
        return arrays

    @classmethod
    def of(cls, values: NDArray[np.uint32], num_nodes: int, num_inner: int) -> "Arrays":
        """The parts of one array that has them one after another."""
        ends = np.cumsum([num_nodes, num_nodes, num_inner, num_inner])
        parts = np.split(values.view(np.ndarray), ends)
        return cls(*(each.view(d) for each, d in zip(parts, cls.dtypes(), strict=True)))

    @staticmethod
    def dtypes(real: type = np.float32) -> tuple[type, ...]:
        """Types of the fields, by default of 4 bytes each."""
        return np.uint32, real, real, np.uint32, np.uint32


@compiled
def _find(arrays: Arrays, node: int, word: int) -> int:
    """The child of a node with a last word; -1 if there is none."""
    if node == 0:
        return 1 + word
    low, end = np.int64(arrays.first[node]), np.int64(arrays.first[node + 1])
    high = end
    while low < high:
        middle = (low + high) >> 1
        if arrays.word[middle] < word:
            low = middle + 1
        else:
            high = middle
    return low if low < end and arrays.word[low] == word else -1  # type: ignore[return-value]


@compiled
def _extend(arrays: Arrays, node: int, word: int) -> tuple[float, int]:
    """Equation (1) of a word in a context, and the context after it."""
    log_prob = 0.0
    child = _find(arrays, node, word)
    while child < 0:
        log_prob += arrays.backoff[node]
        node = np.int64(arrays.suffix[node])  # type: ignore[assignment]
        child = _find(arrays, node, word)
    log_prob += arrays.log_prob[child]
    num_inner = len(arrays.suffix)
    while node > 0 and not 0 <= child < num_inner:
        node = np.int64(arrays.suffix[node])  # type: ignore[assignment]
        child = _find(arrays, node, word)
    after = child if child < num_inner else 0  # 0: all n-grams are single words
    while (
        after > 0 and arrays.first[after] == arrays.first[after + 1] and not arrays.backoff[after]
    ):
        after = np.int64(arrays.suffix[after])
    return log_prob, after


@compiled
def link(arrays: Arrays) -> None:
    """Fill in `suffix`, and equation (1) for nodes without a log-probability, which are NaN."""
    for parent in range(1, len(arrays.suffix)):
        for node in range(arrays.first[parent], min(arrays.first[parent + 1], len(arrays.suffix))):
            log_prob, above = arrays.backoff[parent], np.int64(arrays.suffix[parent])
            word = np.int64(arrays.word[node])
            child = _find(arrays, above, word)
            while child < 0:
                log_prob += arrays.backoff[above]
                above = np.int64(arrays.suffix[above])
                child = _find(arrays, above, word)
            arrays.suffix[node] = child
            if np.isnan(arrays.log_prob[node]):
                arrays.log_prob[node] = log_prob + arrays.log_prob[child]


@compiled
def _extend_all(arrays: Arrays, nodes: Ints, words: Ints, values: Floats, after: Ints) -> None:
    for i in range(len(words)):
        values[i], after[i] = _extend(arrays, nodes[i], words[i])


@compiled
def _read(
    arrays: Arrays, tokens: NDArray[Any], eos_id: int, start: int, values: Floats,
    nodes: Ints,
) -> None:  # fmt: skip
    """Log-probabilities of tokens of lines, and the context of each."""
    node = start
    for i in range(len(tokens)):
        nodes[i] = node
        values[i], node = _extend(arrays, node, np.int64(tokens[i]))
        if tokens[i] == eos_id:
            node = start


class NGramTree:
    """The probabilities of equation (1), in nats.

    Args:
        arrays: the nodes.
        sizes: number of n-grams of each length, from one word.
        eos_id: id of the end of a line.
        begin: id of `<s>`; None: the last word.

    Attributes:
        order: the largest n.
        start: the context at the beginning of a line.
    """

    def __init__(
        self, arrays: Arrays, sizes: list[int], eos_id: int, begin: int | None = None
    ) -> None:
        self.arrays, self.sizes, self.eos_id, self.order = arrays, sizes, eos_id, len(sizes)
        self.start = 0 if self.order == 1 else 1 + (sizes[0] - 1 if begin is None else begin)
        self._begins = np.cumsum([0, 1, *sizes])  # of the nodes of each length

    def read(self, tokens: NDArray[Any]) -> tuple[Floats, Ints]:
        """Log-probabilities [n] of a text, `eos_id` at the end of each line, and the contexts."""
        values, nodes = np.empty(len(tokens)), np.empty(len(tokens), np.int64)
        _read(self.arrays, np.asarray(tokens), self.eos_id, self.start, values, nodes)
        return values, nodes

    def context(self, tokens: Ints) -> int:
        """The context after tokens [n] of lines."""
        return int(self.read(np.append(tokens, self.eos_id))[1][-1])

    def extend(self, contexts: Ints, words: Ints) -> tuple[Floats, Ints]:
        """Log-probabilities of words [P], each in its context [P], and the contexts after them."""
        values, after = np.empty(len(words)), np.empty(len(words), np.int64)
        _extend_all(self.arrays, contexts, words, values, after)
        after[words == self.eos_id] = self.start
        return values, after

    def extend_each(self, contexts: Ints, words: Ints) -> Floats:
        """Log-probabilities [S, K] of words [K] in each of the contexts [S]."""
        pairs = np.repeat(contexts, len(words)), np.tile(words, len(contexts))
        return self.extend(*pairs)[0].reshape(len(contexts), -1)

    def log_prob(self, context: int) -> Floats:
        """Log-probabilities [N] in a context of all words but the last one, `<s>`."""
        nodes = [context]
        while nodes[-1]:
            nodes.append(int(self.arrays.suffix[nodes[-1]]))
        values = np.zeros(self.sizes[0])
        for node in reversed(nodes):
            children = slice(*self.arrays.first[node : node + 2].tolist())
            values += self.arrays.backoff[node] if node else 0.0
            values[self.arrays.word[children]] = self.arrays.log_prob[children]
        return values[:-1]

    def length(self, nodes: Ints) -> Ints:
        """Number of words of each node [P]."""
        return np.searchsorted(self._begins, nodes, "right") - 1

    def write_arpa(self, path: Path, words: list[str]) -> None:
        """Write an ARPA file; `words` [N + 1] are those of the ids, and `<s>`.

        Raises:
            UserError: if two have the same name.
        """
        if len(set(words)) < len(words):
            twice = Counter(words).most_common(1)[0][0]
            raise UserError(f"{path}: the model has a word {twice}, which means a line's end there")
        write_atomically(path, lambda file: self._write_arpa(file, np.array(words, object)))

    def _write_arpa(self, file: BinaryIO, names: NDArray[np.object_]) -> None:
        counts = "".join(f"ngram {n}={size}\n" for n, size in enumerate(self.sizes, 1))
        file.write(f"\\data\\\n{counts}".encode())
        for n in range(1, self.order + 1):
            file.write(f"\n\\{n}-grams:\n".encode())
            begin, end = self._begins[n : n + 2].tolist()
            for low in range(begin, end, AT_ONCE):
                nodes = np.arange(low, min(low + AT_ONCE, end))
                log_prob = self.arrays.log_prob[nodes] / NATS_PER_LOG10
                log_prob[nodes == self.start] = NEVER
                columns = [map("{:.7g}\t".format, log_prob), self._texts(nodes, n, names)]
                if n < self.order:
                    backoff = self.arrays.backoff[nodes] / NATS_PER_LOG10
                    columns.append(map("\t{:.7g}".format, backoff))
                rows = map("".join, zip(*columns, strict=True))
                file.write(("\n".join(rows) + "\n").encode())
        file.write(b"\n\\end\\\n")

    def _texts(self, nodes: Ints, n: int, names: NDArray[np.object_]) -> Iterable[str]:
        """The n words of each node, with spaces between."""
        columns = list[NDArray[np.object_]]()
        for _ in range(n):
            columns.insert(0, names[self.arrays.word[nodes]])
            nodes = np.searchsorted(self.arrays.first, nodes, "right") - 1
        return map(" ".join, zip(*columns, strict=True))
