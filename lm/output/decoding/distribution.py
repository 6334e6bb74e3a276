"""Decoding as functions: all log-probabilities, exact top-k, exact sampling.

The methods of `HierarchicalSoftmax` with the same names document arguments, results and errors.
"""

import torch
from torch import Tensor

from lm.output.backends.nodes import node_log_softmax
from lm.output.decoding import search
from lm.output.decoding.draws import Sampling, sample_words
from lm.output.decoding.expansion import Expander, Penalty, checked_hidden
from lm.output.decoding.uniforms import Uniforms
from lm.output.tree.class_tree import ClassTree

_BLOCK_ELEMENTS = 1 << 23
"""Largest number of logits on one path of the tree, summed over the positions of a block."""


def log_prob(hidden: Tensor, weight: Tensor, tree: ClassTree, bias: Tensor | None = None) -> Tensor:
    """Log-probabilities of all words [..., N]: log-softmaxes summed over their paths."""
    flat, widths = checked_hidden(hidden, weight, tree, bias), tree.num_children.tolist()
    weights = torch.split(weight, widths)
    biases = [None] * len(widths) if bias is None else torch.split(bias, widths)
    with torch.autocast(hidden.device.type, enabled=False):
        nodes = [node_log_softmax(flat, *rows) for rows in zip(weights, biases, strict=True)]
    zero = flat.new_zeros(len(flat), 1)  # row -1 is the root, which adds 0
    log_q = torch.cat([*nodes, zero], dim=1)
    row, *above = tree.rows_on_path(torch.arange(tree.vocab_size, device=hidden.device)).T
    total = log_q[:, row]
    for row in above:
        total = total + log_q[:, row]
    return total.view(*hidden.shape[:-1], tree.vocab_size)


@torch.no_grad()
def topk(
    hidden: Tensor, weight: Tensor, tree: ClassTree, bias: Tensor | None = None, *, k: int
) -> search.TopK:
    """The k most probable words of each position, log_prob and word [..., k]."""
    expanders = _expanders(hidden, weight, tree, bias)
    if not 1 <= k <= tree.vocab_size:
        raise ValueError(f"k must be within 1 … {tree.vocab_size} words, got {k}")
    shape = (*hidden.shape[:-1], k)
    with torch.autocast(hidden.device.type, enabled=False):
        blocks = [search.topk(expander, k) for expander in expanders]
    log_prob, word = (torch.cat(tensors).view(shape) for tensors in zip(*blocks, strict=True))
    return search.TopK(log_prob, word)


@torch.no_grad()
def sample(
    hidden: Tensor,
    weight: Tensor,
    tree: ClassTree,
    bias: Tensor | None = None,
    *,
    sampling: Sampling,
    previous: Tensor | None = None,
    seeds: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One word per position [...], drawn exactly from the distribution that `sampling` defines."""
    expanders = _expanders(hidden, weight, tree, bias)
    shape, device = hidden.shape[:-1], hidden.device
    rows = _penalised_rows(previous, hidden, tree) if sampling.repetition_penalty > 1 else None
    if seeds is None:
        source = device if generator is None else generator.device
        seeds = torch.empty(shape, dtype=torch.int64, device=source).random_(generator=generator)
    elif seeds.shape != shape or seeds.dtype != torch.int64:
        found = f"{list(seeds.shape)} {seeds.dtype}"
        raise ValueError(f"seeds must be {list(shape)} int64, got {found}")
    words, seeds = [seeds.new_empty(0, device=device)], seeds.to(device).flatten()
    with torch.autocast(device.type, enabled=False):
        for expander in expanders:
            block = slice(expander.first_position, expander.first_position + expander.num_positions)
            if rows is not None:
                expander.penalty = Penalty(sampling.repetition_penalty, rows[block])
            if expander.num_positions:
                words.append(sample_words(expander, Uniforms(seeds[block]), sampling))
    return torch.cat(words).view(shape)


def _penalised_rows(previous: Tensor | None, hidden: Tensor, tree: ClassTree) -> Tensor:
    """The rows [P, L] of the words [..., L] that the repetition penalty applies to, or -1."""
    if previous is None:
        raise ValueError("repetition_penalty requires the previous words")
    if previous.shape[:-1] != hidden.shape[:-1] or previous.dtype != torch.int64:
        found = f"{list(previous.shape)} {previous.dtype}"
        raise ValueError(f"previous must be {[*hidden.shape[:-1], 'L']} int64, got {found}")
    if previous.numel() and not -1 <= int(previous.min()) <= int(previous.max()) < tree.vocab_size:
        raise ValueError(f"previous must be words 0 … {tree.vocab_size - 1}, or -1")
    previous = previous.reshape(hidden.shape[:-1].numel(), previous.shape[-1]).to(hidden.device)
    return tree.row_of_word[previous.clamp(min=0)].masked_fill(previous < 0, -1)


def _expanders(
    hidden: Tensor, weight: Tensor, tree: ClassTree, bias: Tensor | None
) -> list[Expander]:
    """Blocks of positions, at least one, small enough for the logits of a whole path."""
    step = max(1, _BLOCK_ELEMENTS // tree.max_path_columns)
    blocks = torch.split(checked_hidden(hidden, weight, tree, bias), step)
    return [Expander(block, weight, tree, bias, i * step) for i, block in enumerate(blocks)]
