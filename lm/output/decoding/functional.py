"""Decoding as functions: all log-probabilities, exact top-k, exact sampling.

They take hidden [..., H], weight [R, H], bias [R] or None, and the tree. The methods of
`HierarchicalSoftmax` with the same names document options, results and errors.
"""

import math

import torch
from torch import Tensor

from lm.output.decoding import search
from lm.output.decoding.expansion import Expander, logits
from lm.output.decoding.sampling import RejectionSampler, Uniforms, sample_nucleus, sample_topk
from lm.output.functional import check_parameters
from lm.output.tree.class_tree import ClassTree

_BLOCK_ELEMENTS = 1 << 23
"""Largest number of logits on one path of the tree, summed over the positions of a block."""
_MIN_TEMPERATURE = 1e-200
"""Lower temperatures count as 0: log-probabilities divided by them would overflow fp64."""


def log_prob(hidden: Tensor, weight: Tensor, bias: Tensor | None, tree: ClassTree) -> Tensor:
    """Log-probabilities of all words [..., N]: log-softmaxes summed over their paths."""
    check_parameters(hidden, weight, bias, tree)
    with torch.autocast(hidden.device.type, enabled=False):
        row_logits = logits(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    node_logits = torch.split(row_logits, tree.num_children.tolist(), dim=1)
    zero = row_logits.new_zeros(row_logits.shape[0], 1)  # row -1 is the root, which adds 0
    log_q = torch.cat([*(node.log_softmax(dim=1) for node in node_logits), zero], dim=1)
    parent_row = torch.cat([tree.row_of_node[tree.node_of_row], tree.row_of_node[:1]])
    row = tree.row_of_word
    total = log_q[:, row]
    for _ in range(tree.depth - 1):
        row = parent_row[row]
        total = total + log_q[:, row]
    return total.view(*hidden.shape[:-1], tree.vocab_size)


@torch.no_grad()
def topk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tree: ClassTree, k: int
) -> search.TopK:
    """The k most probable words of each position, log_prob and word [..., k]."""
    check_parameters(hidden, weight, bias, tree)
    if not 1 <= k <= tree.vocab_size:
        raise ValueError(f"k must be within 1 … {tree.vocab_size} words, got {k}")
    shape = (*hidden.shape[:-1], k)
    with torch.autocast(hidden.device.type, enabled=False):
        blocks = [search.topk(expander, k) for expander in _expanders(hidden, weight, bias, tree)]
    log_prob, word = (torch.cat(tensors).view(shape) for tensors in zip(*blocks, strict=True))
    return search.TopK(log_prob, word)


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
    """One word per position [...], drawn exactly from the full distribution."""
    check_parameters(hidden, weight, bias, tree)
    _check_options(temperature, top_k, top_p)
    num_positions = hidden.shape[:-1].numel()
    if num_positions == 0:
        return torch.empty(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    if temperature < _MIN_TEMPERATURE:
        return topk(hidden, weight, bias, tree, 1).word.squeeze(-1)
    words, power, top_p = [], 1 / temperature, top_p or 1.0
    uniforms = Uniforms(num_positions, hidden.device, generator)
    with torch.autocast(hidden.device.type, enabled=False):
        for expander in _expanders(hidden, weight, bias, tree):
            if top_k is not None and top_k < tree.vocab_size:
                words.append(sample_topk(expander, uniforms, power, top_k, top_p))
            elif top_p < 1:
                words.append(sample_nucleus(expander, uniforms, power, top_p))
            else:
                words.append(RejectionSampler(expander, uniforms, power).sample())
    return torch.cat(words).view(hidden.shape[:-1])


def _expanders(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tree: ClassTree
) -> list[Expander]:
    """Blocks of positions, at least one, small enough for the logits of a whole path."""
    step = max(1, _BLOCK_ELEMENTS // tree.max_path_columns)
    blocks = torch.split(hidden.reshape(-1, hidden.shape[-1]), step)
    return [Expander(block, weight, bias, tree, i * step) for i, block in enumerate(blocks)]


def _check_options(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be within (0, 1], got {top_p}")
