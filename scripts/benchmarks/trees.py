"""Time and memory of the output layer by the shape of its tree: depth, branching, shortlist.

All trees of a size are measured in turn in one process, on the same hidden vectors and targets
(Zipf: P(w) ∝ 1 / rank); figures are medians over rounds, and ratios are to the tree of two levels
that a layer has by default: √N classes of neighbouring words. *Clustered* trees have words of
neighbouring frequency ranks in one node; *random* ones have shuffled words, so that a batch visits
nearly as many nodes as with classes by meaning.

  memory    of a step with dense gradients at its peak, in addition to the table
  dense     forward and backward of `hierarchical_cross_entropy`
  row_wise  the same with row-wise gradients, and the update by `RowSGD`
  sample    a word, for one position; the layer's P(w) is about the frequency of w
  topk      the ten most probable words, for one position
"""

import argparse
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain

import torch
from torch import Tensor

from lm.device import keep_freed_memory
from lm.output import ClassTree, Sampling, hierarchical_cross_entropy
from lm.output.backends.base import row_size
from lm.output.backends.reference.gradient_memory import release
from lm.output.decoding import compiled
from lm.output.decoding.distribution import sample, topk
from lm.output.rowwise import RowSGD
from scripts import run
from scripts.benchmarks import measure
from scripts.benchmarks.methods import Layer, Method, Problem, split_rows, zipf
from scripts.benchmarks.reporting import (
    Row,
    Table,
    benchmark_parser,
    problem_size,
    require_positive,
)

BASELINE = "two_level"
"""The tree that a layer has by default: √N classes of neighbouring words."""
TOP_K = 10
KINDS = ("memory", "dense", "row_wise")
DECODED = 17
"""Positions that are decoded one after another."""
MOST_SECONDS = 2
"""Longest decoding with one tree, after three positions."""
COLUMNS = {
    "tree": "{tree}",
    "depth": "{depth}",
    "kind": "{kind}",
    "milliseconds": "{seconds:.3f/1e-3}",
    "÷ two_level": "{ratio:.2f}",
    "peak MiB": "{peak_bytes:.1f/1048576}",
}


def even_tree(order: Tensor, splits: Sequence[int], shortlist: int = 0) -> ClassTree:
    """A tree whose nodes split their words evenly, below a shortlist.

    Example:
        >>> even_tree(torch.arange(9), [2], shortlist=1).num_children.tolist()
        [3, 4, 4]

    Args:
        order: [N], every word once; its first words are the shortlist.
        splits: numbers of children, root first; the last nodes have the words as children.
        shortlist: number of words that are children of the root.
    """
    place = torch.arange(len(order) - shortlist)
    levels = torch.full((len(splits), len(order)), -1)
    for level, num_parts in zip(levels, accumulate(splits, operator.mul), strict=True):
        level[order[shortlist:]] = place * num_parts // len(place)
    return ClassTree.from_levels(levels)


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


class TreeMethod(Method):
    """A step of this project's layer with a tree; row-wise with the update."""

    def __init__(self, problem: Problem, name: str, kind: str) -> None:
        tree = problem.trees[name]
        slow = name == "full"
        super().__init__(name, problem, self._build, tree=tree, backend="auto", slow=slow)
        self.kind = kind

    def _build(self) -> Layer:
        tree = self.problem.trees[self.name]
        table = split_rows(self.problem.rows, self.problem.bias, 0, tree.num_rows)
        ((weight, bias),) = table
        self._optimizer = RowSGD([weight, bias], lr=1e-6) if self.kind == "row_wise" else None

        def loss(hidden: Tensor, target: Tensor) -> Tensor:
            row_wise = self._optimizer is not None
            return hierarchical_cross_entropy(hidden, weight, target, tree, bias, row_wise=row_wise)

        return loss, [weight, bias]

    def step(self) -> None:
        """Forward and backward, and the update of row-wise gradients."""
        super().step()
        if self._optimizer is not None:
            self._optimizer.step()


def time_step(method: TreeMethod) -> None:
    """Time one step.

    The third one: as in training, all memory has been touched before. The full softmax: the first.
    """
    for _ in range(0 if method.slow else 2):
        method.step()
        method.free()
    method.timings.append(measure.cpu_clock(method.step))
    method.free()


def memory_row(method: TreeMethod) -> Row:
    """What a step with dense gradients holds at its peak, in addition to the table."""
    release()
    peak_bytes = measure.peak_bytes(method)
    method.free()
    return {"tree": method.name, "kind": method.kind, "peak_bytes": peak_bytes}


def make_problem(size: tuple[int, int], found: dict[str, ClassTree], num_positions: int) -> Problem:
    """Hidden vectors, targets and a table large enough for every tree."""
    torch.manual_seed(0)
    vocab_size, hidden_size = size
    target, _ = zipf(vocab_size, num_positions)
    num_rows = max(tree.num_rows for tree in found.values())
    return Problem(
        hidden=torch.randn(num_positions, hidden_size),
        target=target,
        trees={**found, "tree_full": ClassTree.full(vocab_size)},
        rows=torch.randn(num_rows, row_size(hidden_size)).mul_(0.05),
        bias=torch.zeros(num_rows),
        cutoffs=[],
    )


def training_rows(
    size: tuple[int, int], found: dict[str, ClassTree], options: argparse.Namespace
) -> Iterator[Row]:
    """The memory of a step with each tree, and its seconds."""
    problem = make_problem(size, found, options.positions)
    for kind in options.kinds:
        names = [name for name in found if kind != "row_wise" or name != "full"]
        methods = [TreeMethod(problem, name, kind) for name in names]
        for method in methods:
            method.prepare()
        methods[0].step()  # compiles, in memory that is no tree's
        methods[0].free()
        if kind == "memory":
            yield from map(memory_row, methods)
            continue
        for turn in range(options.rounds):
            for method in methods:
                if not (method.slow and turn % 3):
                    time_step(method)
        medians = {method.name: statistics.median(method.seconds()) for method in methods}
        for method in methods:
            yield {
                "tree": method.name,
                "kind": kind,
                "seconds": medians[method.name],
                "ratio": medians[method.name] / medians[BASELINE],
                "rounds": len(method.timings),
            }


def frequency_bias(tree: ClassTree, counts: Tensor) -> Tensor:
    """Biases [R] of a layer that predicts the frequencies of words for a hidden vector of 0."""
    mass = torch.empty(tree.num_rows, dtype=torch.float64)
    mass[tree.row_of_word] = counts.double()
    mass[tree.row_of_node[1:]] = tree.sum_below(counts.double())[1:]
    return mass.log().float()


def decoding_rows(size: tuple[int, int], found: dict[str, ClassTree]) -> Iterator[Row]:
    """The seconds of sampling and of finding the best words of one position, with each tree."""
    vocab_size, hidden_size = size
    torch.manual_seed(1)
    counts = 1 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    hidden = torch.randn(DECODED, hidden_size) / 4
    num_rows = max(tree.num_rows for tree in found.values())
    table = torch.randn(num_rows, row_size(hidden_size)).mul_(0.02)
    layers = {
        name: (table[: tree.num_rows], tree, frequency_bias(tree, counts))
        for name, tree in found.items()
    }
    kinds: dict[str, Callable[..., object]] = {
        "sample": partial(sample, sampling=Sampling()),
        "topk": partial(topk, k=TOP_K),
    }
    for kind, find in kinds.items():
        seconds: dict[str, list[float]] = {name: [] for name in found}
        for vector in hidden:
            for name, layer in layers.items():
                if len(seconds[name]) < 3 or sum(seconds[name]) < MOST_SECONDS:
                    start = time.perf_counter()
                    find(vector, *layer)
                    seconds[name].append(time.perf_counter() - start)
        means = {name: statistics.mean(sorted(each[1:])[:-1]) for name, each in seconds.items()}
        for name in found:
            ratio = means[name] / means[BASELINE]
            yield {"tree": name, "kind": kind, "seconds": means[name], "ratio": ratio}


def main() -> None:
    """Print a table for each size, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=problem_size, nargs="+", metavar="N:H", help="words, hidden size")
    add("--positions", type=int, default=2048)
    add("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    add("--few", action="store_true", help="fewer trees")
    add("--no-decoding", action="store_true", help="training steps alone")
    add("--role", default="fit", help="noted in the log, for tables: fit or check")
    add("--rounds", type=int, default=9)
    add("--threads", type=int, default=1)
    options = parser.parse_args()
    compiled.FREE_SECONDS = 0.0  # the loops are loaded at once
    require_positive(parser, options, ["positions", "rounds", "threads"])
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as in training
    for size in options.rows or [(10_000, 300), (33_278, 300), (267_735, 300)]:
        print(f"\nN = {size[0]:,}, H = {size[1]}, {options.positions:,} positions")
        found, table = trees(size[0], few=options.few), Table(COLUMNS, options.json)
        of = {"vocab_size": size[0], "hidden_size": size[1], "role": options.role}
        of |= {"positions": options.positions}
        decoding = [] if options.no_decoding else decoding_rows(size, found)
        for row in chain(training_rows(size, found, options), decoding):
            tree = found[row["tree"]]
            sizes = {"depth": tree.depth, "nodes": tree.num_nodes, "rows": tree.num_rows}
            table.add({**of, **row, **sizes})


if __name__ == "__main__":
    run(main)
