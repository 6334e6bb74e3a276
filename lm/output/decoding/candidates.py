"""Log-probabilities of given words, from the softmaxes on their paths alone.

K candidates of one position often share nodes, at least the root. Each distinct (position, node)
pair is evaluated once, in one matrix product per distinct node.
"""

import torch
from torch import Tensor

from lm.output.backends.nodes import node_log_softmax, rows_of, visited_nodes
from lm.output.backends.visits import check_words
from lm.output.decoding.expansion import checked_hidden
from lm.output.tree.class_tree import ClassTree


def candidate_log_prob(
    hidden: Tensor, weight: Tensor, word: Tensor, tree: ClassTree, bias: Tensor | None = None
) -> Tensor:
    """Log-probabilities [..., K] of candidate words [..., K], as `log_prob` has them."""
    flat = checked_hidden(hidden, weight, tree, bias)
    if word.dim() < 1 or word.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            "hidden must be [..., H] and candidates [..., K],"
            f" got {list(hidden.shape)} and {list(word.shape)}"
        )
    if word.dtype != torch.int64 or word.device != hidden.device:
        raise ValueError(
            f"candidates must be int64 on {hidden.device}, got {word.dtype} on {word.device}"
        )
    check_words("candidate", word, tree.vocab_size)
    words = word.reshape(len(flat), word.shape[-1])
    rows = tree.rows_on_path(words)
    term = (rows >= 0).flatten().nonzero().squeeze(1)  # of [P, K, D]: nodes on a path
    row = rows.flatten()[term]
    position, node = term // max(1, words.shape[1] * tree.depth), tree.node_of_row[row]
    order = (node * len(flat) + position).argsort()
    term, row, position, node = (values[order] for values in (term, row, position, node))
    nodes = visited_nodes(node[None], tree)
    biases = [None] * len(nodes) if bias is None else rows_of(nodes, bias)
    by_level = flat.new_zeros(rows.numel())
    log_q = []
    with torch.autocast(hidden.device.type, enabled=False):
        for each, node_rows, node_bias in zip(nodes, rows_of(nodes, weight), biases, strict=True):
            visited, visit = torch.unique_consecutive(position[each.visits], return_inverse=True)
            node_log_q = node_log_softmax(flat[visited], node_rows, node_bias)
            log_q.append(node_log_q[visit, row[each.visits] - each.rows.start])
    if log_q:
        by_level = by_level.index_copy(0, term, torch.cat(log_q))
    return by_level.view(*word.shape, tree.depth).sum(-1)
