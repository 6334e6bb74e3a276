"""Problems of 23 words, and what they cost by definition."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lm.output import ClassTree, HierarchicalSoftmax, hierarchical_cross_entropy
from lm.output.backends.triton.launch import Launch, execute
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from lm.output.inputs import compute_dtype

Method = Callable[[HierarchicalSoftmax, Tensor, Tensor], Any]
N, H = 23, 6
SMALL_TILE = Tile(v=16, c=16, h=16, warps=4, stages=1, step=16)
SMALL_TILES = Tiles(
    SMALL_TILE, SMALL_TILE, SMALL_TILE._replace(h=2 * SMALL_TILE.h), SMALL_TILE, chunk=48,
    norm=SMALL_TILE, update=SMALL_TILE, adam=SMALL_TILE, bias=SMALL_TILE,
)  # fmt: skip
ROUTING = ("_sort", "_merge", "_plan")
TWO_LEVEL = ClassTree.two_level((torch.arange(N) * 7) % 5)
TREES = {
    "full": ClassTree.full(N),
    "two levels": TWO_LEVEL,
    "a class of one word": ClassTree.two_level((torch.arange(N) + 1) // N),
    "shortlist": ClassTree.two_level((torch.arange(N) * 7) % 5, 4),
    "balanced": ClassTree.balanced(N, 3),
    "huffman": ClassTree.huffman(2 ** torch.arange(N)),  # a word and a node below all but the last
    "paths": ClassTree.from_paths([[w % 2, w % 3, 3 + w // 6] for w in range(N - 1)] + [[2]]),
}
"""Trees of all shapes over 23 words."""

METHODS: dict[str, Method] = {
    "loss": lambda layer, hidden, word: layer.loss(hidden, word),
    "nll": lambda layer, hidden, word: layer.loss(hidden, word, "none"),
    "forward": lambda layer, hidden, word: tuple(layer(hidden, word)),
    "log_prob": lambda layer, hidden, word: layer.log_prob(hidden),
    "nll_by_level": lambda layer, hidden, word: layer.nll_by_level(hidden, word),
    "lse_by_level": lambda layer, hidden, word: layer.lse_by_level(hidden, word),
    "candidate_log_prob": lambda layer, hidden, word: layer.candidate_log_prob(
        hidden, word[:, None]
    ),
    "topk": lambda layer, hidden, word: layer.topk(hidden, 2),
    "predict": lambda layer, hidden, word: layer.predict(hidden),
    "sample": lambda layer, hidden, word: layer.sample(hidden),
}
"""Calls of all methods that take hidden vectors."""


def execute_routing(launch: Launch) -> None:
    """Execute a launch if it sorts the visits or plans the work of others."""
    if launch.kernel.__name__ in ROUTING:
        execute(launch)


def two_level(num_words: int, num_classes: int) -> ClassTree:
    """Classes of consecutive words."""
    return ClassTree.two_level(torch.arange(num_words) * num_classes // num_words)


def problem(
    tree: ClassTree, *shape: int, size: int = H, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """hidden, weight, bias with gradients, and targets of which one is ignored."""
    shapes = ((*shape, size), (tree.num_rows, size), (tree.num_rows,))
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    target = torch.randint(0, tree.vocab_size, shape)
    target.view(-1)[1:2] = -100
    return [*inputs, target]


def zipf_targets(tree: ClassTree, num_positions: int) -> Tensor:
    """Words of which half are drawn by inverse rank, and one is ignored."""
    target = torch.randint(0, tree.vocab_size, (num_positions,))
    frequent = (tree.vocab_size ** torch.rand(num_positions)).long().clamp(max=tree.vocab_size - 1)
    target = torch.where(torch.rand(num_positions) < 0.5, frequent, target)
    target[1:2] = -100
    return target


def nll(inputs: list[Tensor], tree: ClassTree, **options: Any) -> Tensor:
    """The nll of every position by `hierarchical_cross_entropy`, of hidden, weight, bias, target.

    Without a bias there are three inputs.
    """
    hidden, weight, *bias, target = inputs
    options = {"reduction": "none"} | options
    return hierarchical_cross_entropy(hidden, weight, target, tree, *bias, **options)


def layer_of(
    weight: Tensor, tree: ClassTree, bias: Tensor | None = None, **options: Any
) -> HierarchicalSoftmax:
    """A layer of these parameters, for hidden vectors of size H."""
    layer = HierarchicalSoftmax(H, tree, bias=bias is not None, **options)
    layer.weight = nn.Parameter(weight.detach())
    layer.bias = None if bias is None else nn.Parameter(bias.detach())
    return layer


def gradients(
    inputs: list[Tensor], target: Tensor, tree: ClassTree, upstream: Tensor, backend: str
) -> list[Tensor]:
    """nll of every position, and the gradients of the inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    each = nll([*inputs, target], tree, backend=backend)
    return [each.detach(), *torch.autograd.grad(each, inputs, upstream.to(each.dtype))]


def definition(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, tree: ClassTree
) -> Tensor:
    """Σ over the path of - log softmax(W_n h + b_n)[child]."""
    return definition_by_level(hidden, weight, bias, target, tree).sum(0)


def definition_by_level(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    tree: ClassTree,
    term: Callable[[Tensor, Tensor], Tensor] = lambda logits, row: (
        -logits.log_softmax(1).gather(1, row)
    ),
) -> Tensor:
    """Each term of the definition, [D, ...], of all logits in the dtype of hidden and weight.

    A term is a function of logits [P, R], -∞ except for the children of a node, and a row [P, 1].
    """
    logits = hidden.flatten(0, -2) @ weight[:, : hidden.shape[-1]].T
    logits = (logits if bias is None else logits + bias).to(compute_dtype(logits.dtype))
    flat = target.flatten()
    valid, place = flat != -100, torch.arange(flat.numel(), device=flat.device)
    row = tree.row_of_word[torch.where(valid, flat, 0)]
    found = logits.new_zeros(tree.depth, flat.numel())
    for _ in range(tree.depth):
        node = tree.node_of_row[row]
        others = tree.node_of_row[None, :] != node[:, None]
        values = term(logits.masked_fill(others, -torch.inf), row[:, None])[:, 0]
        at = tree.level[node], place
        found = found.index_put(at, torch.where(valid, values, 0), accumulate=True)
        row = tree.row_of_node[node]
        valid, row = valid & (row >= 0), row.clamp(min=0)
    return found.view(tree.depth, *target.shape)
