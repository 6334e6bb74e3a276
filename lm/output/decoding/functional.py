"""Decoding as functions of (hidden, weight, bias, tree): shapes, checks, meaning of the options.

`expansion` evaluates nodes, `search` decides which nodes top-k and top-p need, `sampling` turns
random numbers into words.
"""

import math

import torch
from torch import Tensor

from lm.output.decoding.expansion import Expander, logits
from lm.output.decoding.sampling import RejectionSampler, Uniforms, sample_nucleus, sample_topk
from lm.output.decoding.search import TopK
from lm.output.decoding.search import topk as search_topk
from lm.output.tree.class_tree import ClassTree

__all__ = ["TopK", "log_prob", "sample", "topk"]

_BLOCK_ELEMENTS = 1 << 23
"""Largest number of logits on one path of the tree, summed over the positions of a block."""
_MIN_TEMPERATURE = 1e-200
"""Lower temperatures count as 0: log-probabilities divided by them would overflow fp64."""


def log_prob(hidden: Tensor, weight: Tensor, bias: Tensor | None, tree: ClassTree) -> Tensor:
    """Log-probabilities of all words: log-softmaxes summed over their paths. Differentiable.

    Args:
        hidden: [..., H] floating point.
        weight: [R, H] floating point, rows as `tree` numbers them.
        bias: [R] or None.
        tree: the tree of softmaxes; on the same device.

    Returns:
        [..., N] in at least fp32, in nats.

    Raises:
        ValueError: if shapes or devices do not fit together.
    """
    _check(hidden, weight, bias, tree)
    with torch.autocast(hidden.device.type, enabled=False):
        row_logits = logits(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    node_logits = torch.split(row_logits, tree.num_children.tolist(), dim=1)
    zero = row_logits.new_zeros(row_logits.shape[0], 1)  # row -1, the parent of the root's children
    log_q = torch.cat([*(node.log_softmax(dim=1) for node in node_logits), zero], dim=1)
    parent_row = torch.cat([tree.row_of_node[tree.node_of_row], tree.row_of_node[:1]])
    row = tree.row_of_word
    total = log_q[:, row]
    for _ in range(tree.depth - 1):
        row = parent_row[row]
        total = total + log_q[:, row]
    return total.view(*hidden.shape[:-1], tree.vocab_size)


@torch.no_grad()
def topk(hidden: Tensor, weight: Tensor, bias: Tensor | None, tree: ClassTree, k: int) -> TopK:
    """The k most probable words, exact with respect to the full distribution.

    Best-first: a node is expanded only while it is at least as probable as the k-th best word
    found. That is few nodes where the distribution is peaked, and nearly all where it is flat.

    Args:
        hidden, weight, bias, tree: as in `log_prob`.
        k: 1 … N.

    Returns:
        log_prob [..., k] and word [..., k], in descending order; ties by the lowest word.

    Raises:
        ValueError: if shapes, devices or k do not fit together, or a log-probability is not finite.
    """
    _check(hidden, weight, bias, tree)
    if not 1 <= k <= tree.vocab_size:
        raise ValueError(f"k must be within 1 … {tree.vocab_size} words, got {k}")
    shape = (*hidden.shape[:-1], k)
    with torch.autocast(hidden.device.type, enabled=False):
        blocks = [search_topk(expander, k) for expander in _expanders(hidden, weight, bias, tree)]
    log_prob, word = (torch.cat(tensors).view(shape) for tensors in zip(*blocks, strict=True))
    return TopK(log_prob, word)


@torch.no_grad()
def sample(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tree: ClassTree,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One word per position, drawn exactly from the full distribution.

    Word w has weight P(w)^(1/T) at temperature T. `top_k` restricts the draw to the most probable
    words; `top_p` to the smallest set of most probable ones among these that has this share of
    their weight. Unrestricted draws expand the nodes on the drawn path (and, for T ≠ 1, on those of
    rejected trials, see `sampling`); restricted ones search best-first, as `topk` does. Each
    position consumes its own random numbers, so its word does not depend on the others.

    Args:
        hidden, weight, bias, tree: as in `log_prob`.
        temperature: T ≥ 0; 0 gives the most probable word.
        top_k: at least 1; N or more restricts nothing.
        top_p: within (0, 1]; 1 restricts nothing.
        generator: source of the random numbers, on any device; None is torch's default.

    Returns:
        [...] int64.

    Raises:
        ValueError: if shapes or devices do not fit together, an option is out of range, or a
            log-probability is not finite.

    Source: top-k: Fan, Lewis & Dauphin 2018; top-p: Holtzman et al. 2020.
    """
    _check(hidden, weight, bias, tree)
    _check_options(temperature, top_k, top_p)
    num_positions = hidden.shape[:-1].numel()
    if num_positions == 0:
        return torch.empty(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    if temperature < _MIN_TEMPERATURE:
        return topk(hidden, weight, bias, tree, 1).word.squeeze(-1)
    words, uniforms = [], Uniforms(num_positions, hidden.device, generator)
    with torch.autocast(hidden.device.type, enabled=False):
        for expander in _expanders(hidden, weight, bias, tree):
            words.append(_sample(expander, uniforms, 1 / temperature, top_k, top_p or 1.0))
    return torch.cat(words).view(hidden.shape[:-1])


def _sample(
    expander: Expander, uniforms: Uniforms, power: float, top_k: int | None, top_p: float
) -> Tensor:
    """A word [P] for each of the expander's positions."""
    if top_k is not None and top_k < expander.tree.vocab_size:
        return sample_topk(expander, uniforms, power, top_k, top_p)
    if top_p < 1:
        return sample_nucleus(expander, uniforms, power, top_p)
    return RejectionSampler(expander, uniforms, power).sample()


def _expanders(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tree: ClassTree
) -> list[Expander]:
    """Blocks of positions, at least one, small enough for the logits of a whole path."""
    step = max(1, _BLOCK_ELEMENTS // tree.max_path_columns)
    blocks = torch.split(hidden.reshape(-1, hidden.shape[-1]), step)
    return [Expander(block, weight, bias, tree, i * step) for i, block in enumerate(blocks)]


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, tree: ClassTree) -> None:
    if hidden.dim() < 1 or not hidden.is_floating_point():
        raise ValueError(
            f"hidden must be [..., H] floating point, got {hidden.dtype} {list(hidden.shape)}"
        )
    expected = [tree.num_rows, hidden.shape[-1]]
    if list(weight.shape) != expected:
        raise ValueError(f"weight must be [R, H] = {expected}, got {list(weight.shape)}")
    if bias is not None and list(bias.shape) != expected[:1]:
        raise ValueError(f"bias must be [R] = {expected[:1]}, got {list(bias.shape)}")
    others = [weight, tree.row_of_word] if bias is None else [weight, bias, tree.row_of_word]
    if any(other.device != hidden.device for other in others):
        raise ValueError(f"weight, bias and tree must be on the device of hidden, {hidden.device}")


def _check_options(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be within (0, 1], got {top_p}")
