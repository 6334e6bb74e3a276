"""The distribution over all words, computed word by word in fp64, for random layers."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, Sampling
from lm.output.decoding import distribution, draws
from lm.output.decoding.draws import Uniforms

from ..definition import definition

N, H, P = 23, 5, 6

Layer = tuple[Tensor, Tensor, ClassTree, Tensor]
"""hidden [P, H], weight [R, H], the tree and bias [R], as decoding takes them."""
Options = dict[str, Any]
OPTIONS: list[Options] = [
    {}, {"temperature": 1.5}, {"temperature": 0.6}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1},
    {"repetition_penalty": 1.4, "previous": [3, 0, 3]},
]  # fmt: skip


def random_paths(num_words: int) -> list[list[int]]:
    """Paths of different lengths; some nodes have a single child."""
    generator = torch.Generator().manual_seed(3)
    leaves = [[0]]
    while len(leaves) < num_words:
        path = leaves.pop(int(torch.randint(len(leaves), (), generator=generator, device="cpu")))
        width = int(torch.randint(1, 4, (), generator=generator, device="cpu"))
        leaves += [[*path, child] for child in range(min(width, num_words - len(leaves)))]
    return leaves


def zipf(num_words: int) -> list[int]:
    return [1000 // rank for rank in range(1, num_words + 1)]


def word_class(num_words: int) -> list[int]:
    """Six shuffled classes of different sizes, the last with a single word."""
    generator = torch.Generator().manual_seed(5)
    classes: list[int] = torch.randint(5, (num_words,), generator=generator, device="cpu").tolist()
    classes[num_words // 2] = 5
    return classes


TREES: dict[str, Callable[[int], ClassTree]] = {
    "full": ClassTree.full,
    "two_level": lambda n: ClassTree.two_level(word_class(n)),
    "shortlist": lambda n: ClassTree.two_level(word_class(n), shortlist=min(n, 4)),
    "one word per class": lambda n: ClassTree.two_level(range(n)),
    "balanced": lambda n: ClassTree.balanced(n, 3),
    "huffman 2": lambda n: ClassTree.huffman(zipf(n)),
    "huffman 3": lambda n: ClassTree.huffman(zipf(n), 3),
    "paths": lambda n: ClassTree.from_paths(random_paths(n)),
}
SIGNIFICANCE = 1e-5
"""Significance of one test of about 500: one of them fails for half a percent of seeds."""
all_shapes = pytest.mark.parametrize("shape", TREES)
ways = pytest.mark.usefixtures("way")


def random_layer(shape: str, num_words: int = N, num_positions: int = P, scale: float = 1) -> Layer:
    """Standard normal hidden vectors, rows and biases, the last two times `scale`."""
    tree = TREES[shape](num_words)
    sizes = ((num_positions, H), (tree.num_rows, H), (tree.num_rows,))
    options: Any = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    hidden, weight, bias = (torch.randn(size, **options) for size in sizes)
    return hidden, weight * scale, tree, bias * scale


def flat_layer(tree: ClassTree, num: int, bias_of: Mapping[int, float] | None = None) -> Layer:
    """Equally probable children of each node, but for the biases of some rows."""
    sizes = ((num, H), (tree.num_rows, H), (tree.num_rows,))
    hidden, weight, bias = (torch.zeros(size, dtype=torch.float64) for size in sizes)
    for row, value in (bias_of or {}).items():
        bias[row] = value
    return hidden, weight, tree, bias


def converted(layer: Layer, dtype: torch.dtype) -> Layer:
    hidden, weight, tree, bias = layer
    return hidden.to(dtype), weight.to(dtype), tree, bias.to(dtype)


def word_log_prob(hidden: Tensor, weight: Tensor, tree: ClassTree, bias: Tensor) -> Tensor:
    """Log-probabilities [P, N]: for each word the sum over its path, as defined."""
    word = torch.arange(tree.vocab_size).expand(len(hidden), -1)
    return -definition(hidden[:, None].expand(*word.shape, -1), weight, bias, word, tree)


def node_log_prob(hidden: Tensor, weight: Tensor, tree: ClassTree, bias: Tensor) -> Tensor:
    """Log-probabilities of the nodes [P, I], summed over the words below them."""
    log_prob = word_log_prob(hidden, weight, tree, bias)
    paths = [dict(tree.path(word)) for word in range(tree.vocab_size)]
    below = [[w for w, path in enumerate(paths) if n in path] for n in range(tree.num_nodes)]
    return torch.stack([log_prob[:, words].logsumexp(1) for words in below], dim=1)


def restricted(
    log_prob: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    previous: Sequence[int] = (),
    excluded: Collection[int] = (),
) -> Tensor:
    """The distribution [N] to draw from: exclusion, penalty, temperature, top-k, top-p, min-p."""
    log_prob = log_prob.clone()
    log_prob[list(excluded)] = -torch.inf
    known = sorted(set(previous) - {-1})
    log_prob[known] = (repetition_penalty * log_prob)[known]
    order = log_prob.argsort(descending=True, stable=True)
    probs = (log_prob[order] / temperature).softmax(0)
    if top_k is not None:
        probs[top_k:] = 0
        probs /= probs.sum()
    if top_p is not None:
        probs[probs.cumsum(0) - probs >= top_p] = 0
    if min_p is not None:
        probs[probs < min_p * probs[0]] = 0
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


def sample(
    *layer: Any, seeds: Any = None, generator: Any = None, previous: Any = None, **options: Any
) -> Tensor:
    """`distribution.sample` with the fields of `Sampling` as options.

    Previous words in a sequence are those of every position; `own_excluded` are of each.
    """
    hidden, weight, tree, bias = layer
    if isinstance(previous, Sequence):
        previous = torch.tensor(previous).expand(*hidden.shape[:-1], -1)
    given = {"previous": previous, "seeds": seeds, "generator": generator}
    given["excluded"] = options.pop("own_excluded", None)
    return distribution.sample(hidden, weight, tree, bias, Sampling(**options), **given)


def draw_many(layer: Layer, num_draws: int, **options: Any) -> Tensor:
    """Draws [P, num_draws], in one call."""
    hidden, *others = layer
    repeated = hidden[:, None].expand(-1, num_draws, -1)
    return sample(repeated, *others, generator=torch.Generator().manual_seed(1), **options)


def assert_distributed(words: Tensor, probs: Tensor) -> None:
    """Pearson's test of draws [D] from probs [N]; words expected less than 5 times count as one."""
    counts = torch.bincount(words, minlength=probs.numel()).double()
    assert counts[probs == 0].sum() == 0
    expected = probs * words.numel()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    possible = expected > 0
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    degrees = max(1, int(possible.sum()) - 1)
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    significance = float(torch.special.gammaincc(*halves))  # of the chi-square distribution
    assert significance > SIGNIFICANCE, f"{statistic:.1f}, {degrees} degrees"


def trials(layer: Layer, seed: int, power: float, excluded: Tensor, num_trials: int) -> int:
    """The word of one position, by the trials that `loops.draw_loops` defines, or -1."""
    hidden, weight, tree, bias = layer
    uniforms, items = Uniforms(torch.tensor([seed])), tree.item_of_row.tolist()

    def bound(item: int) -> float:
        return 0.0 if item >= 0 else max(0, 1 - power) * math.log(tree.num_words_below[~item])

    def opened(node: int) -> tuple[int, Tensor]:
        first, num = int(tree.first_row[node]), int(tree.num_children[node])
        rows = slice(first, first + num)
        log_q = (hidden @ weight[rows].T + bias[rows]).log_softmax(1)
        log_weight = power * log_q + torch.tensor([[bound(item) for item in items[rows]]])
        for row in set(excluded.tolist()) & {*range(first, first + num)}:
            log_weight[0, row - first] = -torch.inf
        return first, log_weight

    for _ in range(num_trials):
        item, is_on, is_root = ~0, True, True
        while item < 0 and is_on:
            first, log_weight = opened(~item)
            point = uniforms.draw(torch.zeros(1, dtype=torch.int64))
            if not is_root:
                share = min(1, math.exp(float(log_weight.logsumexp(1)) - bound(item)))
                is_on, point = bool(point < share), point / share
            if is_on:
                item, is_root = items[first + int(draws.draw(log_weight, point))], False
        if is_on:
            return item
    return -1
