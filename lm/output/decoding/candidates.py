"""Log-probabilities of given words, from the softmaxes on their paths alone.

K candidates of one position often share nodes, at least the root. Each distinct (position, node)
pair is evaluated once, in one matrix product per distinct node: at most the columns of the K
paths for each position, and never more than R. The loss, in contrast, has one target for each
position.
"""

import torch
from torch import Tensor

from lm.output.decoding.expansion import logits
from lm.output.functional import check_parameters
from lm.output.tree.class_tree import ClassTree


def candidate_log_prob(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tree: ClassTree, word: Tensor
) -> Tensor:
    """Log-probabilities [..., K] of candidate words [..., K], as `log_prob` has them.

    Raises:
        ValueError: if shapes, dtypes or devices do not match.
        IndexError: if a candidate is not a word.
    """
    check_parameters(hidden, weight, bias, tree)
    _check_words(hidden, word, tree.vocab_size)
    flat = hidden.reshape(-1, hidden.shape[-1])
    words = word.reshape(len(flat), word.shape[-1])
    rows = torch.cat([tree.row_of_word[words].unsqueeze(-1), tree.rows_above(words)], -1)
    term = (rows >= 0).flatten().nonzero().squeeze(1)  # of [P, K, D]: nodes on a path
    row = rows.flatten()[term]
    position, node = term // max(1, words.shape[1] * tree.depth), tree.node_of_row[row]
    order = (node * len(flat) + position).argsort()
    term, row, position, node = (values[order] for values in (term, row, position, node))
    log_q = _log_softmax_terms(flat, weight, bias, tree, row, position, node)
    by_level = log_q.new_zeros(rows.numel()).index_copy(0, term, log_q)
    return by_level.view(*word.shape, tree.depth).sum(-1)


def _log_softmax_terms(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tree: ClassTree,
    row: Tensor,
    position: Tensor,
    node: Tensor,
) -> Tensor:
    """Terms [M] of the sum: log softmax(W_n h_p + b_n)[row - first row of n].

    They are sorted by node and then by position.
    """
    nodes, num_terms = torch.unique_consecutive(node, return_counts=True)
    child = row - tree.first_row[node]
    sizes = num_terms.tolist()
    log_q = []
    with torch.autocast(hidden.device.type, enabled=False):
        parts = zip(
            _node_rows(weight, nodes, tree),
            [None] * len(sizes) if bias is None else _node_rows(bias, nodes, tree),
            torch.split(position, sizes),
            torch.split(child, sizes),
            strict=True,
        )
        for node_weight, node_bias, positions, children in parts:
            visited, visit = torch.unique_consecutive(positions, return_inverse=True)
            node_log_q = logits(hidden[visited], node_weight, node_bias).log_softmax(1)
            log_q.append(node_log_q[visit, children])
        empty = logits(hidden[:0], weight[:1], None).flatten()
    return torch.cat(log_q) if log_q else empty


def _node_rows(table: Tensor, nodes: Tensor, tree: ClassTree) -> list[Tensor]:
    """The rows of each node [V] in ascending order, as views of one split.

    One split writes the gradient of the table once; slices would write it once per node.
    """
    firsts, widths = tree.first_row[nodes].tolist(), tree.num_children[nodes].tolist()
    sizes, end = [], 0
    for first, width in zip(firsts, widths, strict=True):
        sizes += [first - end, width]
        end = first + width
    return list(torch.split(table, [*sizes, len(table) - end]))[1::2]


def _check_words(hidden: Tensor, word: Tensor, vocab_size: int) -> None:
    if word.dim() < 1 or word.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            "hidden must be [..., H] and candidates [..., K],"
            f" got {list(hidden.shape)} and {list(word.shape)}"
        )
    if word.dtype != torch.int64 or word.device != hidden.device:
        raise ValueError(
            f"candidates must be int64 on {hidden.device}, got {word.dtype} on {word.device}"
        )
    wrong = (word < 0) | (word >= vocab_size)
    if bool(wrong.any()):
        raise IndexError(f"candidate {int(word[wrong][0])} is out of bounds for {vocab_size} words")
