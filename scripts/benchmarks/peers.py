"""The peers that `output_layer` compares with this project's layer.

A peer is written as its users write it, with one exception for fairness: where autograd would fill
a full gradient with zeros for every slice of a parameter, each slice is a parameter. All peers have
biases except `adaptive`, which has none by default.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scripts.benchmarks import methods
from scripts.benchmarks.methods import Layer, Method, Problem

GROUPS = 1023
"""Most matrices that one call of `grouped_mm` accepts on a GPU."""
CUTOFFS = {
    10_000: [2_000],
    33_278: [2_800, 10_000],
    267_735: [20_000, 40_000, 200_000],
    800_000: [60_000, 100_000, 640_000],
    10_000_000: [60_000, 600_000, 3_000_000],
}
"""Cutoffs of `adaptive`: published (WikiText-103, One Billion Word), and similar elsewhere."""

CrossEntropy = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Computes the mean loss of hidden [P, H], weight [N, H], bias [N] and target [P]."""


def full_softmax(
    problem: Problem, name: str, load: Callable[[], CrossEntropy], *, exact: bool = True
) -> Method:
    """A full softmax by the function that `load` returns."""
    refused = None
    if name in PACKAGES and not (problem.hidden.is_cuda and installed(name)):
        refused = "not installed" if problem.hidden.is_cuda else "CUDA only"

    def build() -> Layer:
        table = problem.weight, problem.bias
        ((weight, bias),) = methods.split_rows(*table, 0, problem.vocab_size)
        cross_entropy = load()
        return lambda hidden, target: cross_entropy(hidden, weight, bias, target), [weight, bias]

    tree = problem.trees["tree_full"]
    return Method(name, problem, build, tree=tree, exact=exact, slow=True, refused=refused)


def cce(problem: Problem) -> Method:
    """Apple's cut-cross-entropy: the full softmax without logits in memory.

    A version that takes no bias, as 25.1.1, has another loss.
    """
    takes_bias = True
    if problem.hidden.is_cuda and installed("cce"):
        function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        takes_bias = "bias" in inspect.signature(function).parameters

    def load() -> CrossEntropy:
        def loss(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
            found: Tensor = function(hidden, weight, target, **{"bias": bias} if takes_bias else {})
            return found

        return loss

    return full_softmax(problem, "cce", load, exact=takes_bias)


def liger() -> CrossEntropy:
    """Liger's fused linear cross-entropy: the full softmax in chunks of positions."""
    layer = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, bias, target: layer(weight, hidden, target, bias)


def adaptive(problem: Problem) -> Method:
    """AdaptiveLogSoftmaxWithLoss of torch; each cluster's projection is 4 times narrower."""
    size, cutoffs = problem.hidden_size, problem.cutoffs
    divisor = min(4, int(size ** (1 / len(cutoffs))))

    def build() -> Layer:
        like: dict[str, Any] = {"device": problem.hidden.device, "dtype": problem.rows.dtype}
        layer = nn.AdaptiveLogSoftmaxWithLoss(size, problem.vocab_size, cutoffs, divisor, **like)
        return lambda hidden, target: layer(hidden, target).loss, list(layer.parameters())

    return Method("adaptive", problem, build)


def grouped(problem: Problem) -> Method:
    """Two levels with the products of all classes by grouped_mm.

    Positions are sorted by class, classes padded to one size and to 16 bytes, logits in memory.
    """
    tree, unit = problem.trees["random"], 16 // problem.hidden.element_size()
    num_classes, widest = int(tree.num_children[0]), int(tree.num_children[1:].max())
    width, size = (-(-n // unit) * unit for n in (widest, problem.hidden_size))

    def build() -> Layer:
        (root,) = methods.split_rows(problem.weight, problem.bias, 0, num_classes)
        last = tree.num_children[1:, None] - 1
        place = torch.arange(width, device=last.device)
        inside = place <= last  # [C, width], whether a word is there
        rows = tree.first_row[1:, None] + torch.minimum(place, last)
        bias = methods.parameter(torch.where(inside, problem.bias[rows], -torch.inf))
        padded = problem.weight.new_zeros(num_classes, width, size)
        padded[:, :, : problem.hidden_size][inside] = problem.weight[rows[inside]]
        matrices = [methods.parameter(some) for some in torch.split(padded, GROUPS)]

        def loss(hidden: Tensor, target: Tensor) -> Tensor:
            row = tree.row_of_word[target]
            node = tree.node_of_row[row]
            place = row - tree.first_row[node]
            word_class, order = (node - 1).sort()
            hidden = hidden.index_select(0, order)
            class_nll = methods.full_loss(hidden, *root, word_class)
            every_class = torch.arange(num_classes, device=hidden.device)
            ends = torch.searchsorted(word_class, every_class, right=True)
            logits = _grouped_products(F.pad(hidden, (0, size - hidden.shape[1])), matrices, ends)
            logits = logits + F.embedding(word_class, bias)
            return class_nll + F.cross_entropy(logits, place[order])

        return loss, [*root, *matrices, bias]

    needs_bf16 = problem.hidden.is_cuda and problem.hidden.dtype != torch.bfloat16
    refused = "grouped_mm requires bf16 on CUDA" if needs_bf16 else None
    return Method("grouped", problem, build, tree=tree, refused=refused)


def _grouped_products(hidden: Tensor, matrices: list[Tensor], ends: Tensor) -> Tensor:
    """Products [P, width] of each position with the matrix of its class.

    hidden [P, size] is sorted by class, whose positions end at ends [C]; the classes' matrices are
    in groups [≤ GROUPS, width, size].
    """
    if len(matrices) == 1:
        return F.grouped_mm(hidden, matrices[0].transpose(1, 2), offs=ends.to(torch.int32))
    ends_of_group = torch.split(ends, GROUPS)
    bounds = [0, *torch.stack([group[-1] for group in ends_of_group]).tolist()]
    products = []
    for group, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            offsets = (ends_of_group[group] - start).to(torch.int32)
            matrix = matrices[group].transpose(1, 2)
            products.append(F.grouped_mm(hidden[start:stop], matrix, offs=offsets))
    return torch.cat(products)


PEERS: dict[str, Callable[[Problem], Method]] = {
    "full": partial(full_softmax, name="full", load=lambda: methods.full_loss),
    "cce": cce,
    "liger": partial(full_softmax, name="liger", load=liger),
    "adaptive": adaptive,
    "grouped": grouped,
}
"""Peers by name in `--methods`."""
PACKAGES = {"cce": "cut_cross_entropy", "liger": "liger_kernel"}
"""Packages of peers that run on CUDA only."""


def installed(name: str) -> bool:
    """Whether a peer belongs to a package, which is installed."""
    return name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is not None
