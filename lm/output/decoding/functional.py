"""From hidden vectors to words: all log-probabilities, the most probable words, and samples.

Decides the contract: shapes, checks, the meaning of the options. How nodes are evaluated is
decided in `opening`, which of them in `search`, how random numbers become words in `sampling`.
"""

import math

import torch
from torch import Tensor

from lm.output.decoding.expansion import Opener, logits
from lm.output.decoding.sampling import RejectionSampler, Uniforms, sample_nucleus, sample_topk
from lm.output.decoding.search import TopK
from lm.output.decoding.search import topk as search_topk
from lm.output.tree.class_tree import ClassTree

__all__ = ["TopK", "log_prob", "sample", "topk"]

_BLOCK_ELEMENTS = 1 << 23
"""Most columns met at once, summed over positions, on one path of the tree."""
_COLDEST = 1e-200
"""Lower temperatures are 0: log-probabilities divided by them would leave the range of fp64."""


def log_prob(hidden: Tensor, weight: Tensor, bias: Tensor | None, tree: ClassTree) -> Tensor:
    """Log-probabilities of all words: the sums of log-softmaxes along their paths. Differentiable.

    Args:
        hidden: [..., H] floating point.
        weight: [R, H].
        bias: [R] or None.
        tree: the softmaxes.

    Returns:
        [..., N] in at least fp32, in nats.

    Raises:
        ValueError: if shapes or devices do not fit together.
    """
    _check(hidden, weight, bias, tree)
    with torch.autocast(hidden.device.type, enabled=False):
        of_rows = logits(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    of_nodes = torch.split(of_rows, tree.num_children.tolist(), dim=1)
    above_root = of_rows.new_zeros(of_rows.shape[0], 1)  # what row -1 refers to
    log_q = torch.cat([*(node.log_softmax(dim=1) for node in of_nodes), above_root], dim=1)
    row_above = torch.cat([tree.row_of_node[tree.node_of_row], tree.row_of_node[:1]])
    row = tree.row_of_word
    total = log_q[:, row]
    for _ in range(tree.depth - 1):
        row = row_above[row]
        total = total + log_q[:, row]
    return total.view(*hidden.shape[:-1], tree.vocab_size)


@torch.no_grad()
def topk(hidden: Tensor, weight: Tensor, bias: Tensor | None, tree: ClassTree, k: int) -> TopK:
    """The k most probable words, exact with respect to the full distribution.

    A node is opened only while it is at least as probable as the k-th best word found.

    Args:
        hidden: [..., H] floating point.
        weight: [R, H].
        bias: [R] or None.
        tree: the softmaxes.
        k: 1 … N.

    Returns:
        log_prob and word [..., k], in descending order, ties by the lowest word.

    Raises:
        ValueError: if shapes, devices or k do not fit together, or a log-probability is not finite.
    """
    _check(hidden, weight, bias, tree)
    if not 1 <= k <= tree.vocab_size:
        raise ValueError(f"k must be within 1 … {tree.vocab_size} words, got {k}")
    shape = (*hidden.shape[:-1], k)
    with torch.autocast(hidden.device.type, enabled=False):
        found = [search_topk(opener, k) for opener in _openers(hidden, weight, bias, tree)]
    log_prob, word = (torch.cat(parts).view(shape) for parts in zip(*found, strict=True))
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
    """A word for each position, exact with respect to the full distribution.

    The weights of all words are P(w)^(1/T) at temperature T. Of the words the `top_k` most probable
    are kept; of these, the smallest set of most probable ones whose share of the weight reaches
    `top_p`. Without a cut, nodes are opened along the path drawn (`sampling` tells how that is
    exact for T ≠ 1); with one, nodes that can hold a word that is kept. Each position consumes its
    own random numbers, so that its word does not depend on what stands at the others.

    Args:
        hidden: [..., H] floating point.
        weight: [R, H].
        bias: [R] or None.
        tree: the softmaxes.
        temperature: T ≥ 0; 0 gives the most probable word.
        top_k: at least 1; more than N is N.
        top_p: within (0, 1].
        generator: of the random numbers; on its own device.

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
    if temperature < _COLDEST:
        return topk(hidden, weight, bias, tree, 1).word.squeeze(-1)
    words, uniforms = [], Uniforms(num_positions, hidden.device, generator)
    with torch.autocast(hidden.device.type, enabled=False):
        for opener in _openers(hidden, weight, bias, tree):
            words.append(_sample(opener, uniforms, 1 / temperature, top_k, top_p or 1.0))
    return torch.cat(words).view(hidden.shape[:-1])


def _sample(
    opener: Opener, uniforms: Uniforms, power: float, top_k: int | None, top_p: float
) -> Tensor:
    """A word [P] for each of the opener's positions."""
    if top_k is not None and top_k < opener.tree.vocab_size:
        return sample_topk(opener, uniforms, power, top_k, top_p)
    if top_p < 1:
        return sample_nucleus(opener, uniforms, power, top_p)
    return RejectionSampler(opener, uniforms, power).sample()


def _openers(hidden: Tensor, weight: Tensor, bias: Tensor | None, tree: ClassTree) -> list[Opener]:
    """Blocks of positions, at least one, few enough for the softmaxes of a whole path."""
    step = max(1, _BLOCK_ELEMENTS // tree.max_path_columns)
    blocks = torch.split(hidden.reshape(-1, hidden.shape[-1]), step)
    return [Opener(block, weight, bias, tree, i * step) for i, block in enumerate(blocks)]


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
