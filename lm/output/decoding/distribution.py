"""Decoding as functions: log-probabilities of all or some words, exact top-k, exact sampling.

The methods of `HierarchicalSoftmax` with the same names document arguments, results and errors.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

from lm.output.backends.nodes import node_log_softmax, visited_nodes, with_rows
from lm.output.decoding import compiled, fused, search
from lm.output.decoding.draws import Finder, Sampling, draw_words, sample_words, word_ids
from lm.output.decoding.positions import Penalty, Positions, checked_hidden, word_log_prob
from lm.output.functional import hierarchical_cross_entropy, path_log_prob
from lm.output.inputs import check_tensors, check_words
from lm.output.tracing import is_for_onnx, is_recorded, not_compiled
from lm.output.tree.class_tree import ClassTree

_LOSS_DEVICES = {"cuda"}
"""Types of devices on which the loss evaluates candidates."""
_LOSS_ELEMENTS = 1 << 28
"""Largest number of elements of the hidden vectors, one for each candidate, that the loss takes."""
_MAX_DENSE_LOGITS = 1 << 20
"""Up to this many logits, one product with all rows replaces those of single nodes if these have
over two fifths of the rows: it is faster then (one position, one thread: 1/4 to 1/2, by N).
"""
_OPERATIONS = Finder(search.topk, search.nuclei, search.within_ratio, draw_words)
_KERNEL = _OPERATIONS._replace(draw_words=fused.draw_words)
_LOOPS = Finder(compiled.topk, compiled.nuclei, compiled.within_ratio, compiled.draw_words)


def log_prob(hidden: Tensor, weight: Tensor, tree: ClassTree, bias: Tensor | None = None) -> Tensor:
    """Log-probabilities of all words [..., N]: log-softmaxes summed over their paths."""
    if is_for_onnx():
        words = torch.arange(tree.vocab_size, device=hidden.device)
        return path_log_prob(hidden, weight, words.expand(*hidden.shape[:-1], -1), tree, bias)
    flat = checked_hidden(hidden, weight, tree, bias)
    with torch.autocast(hidden.device.type, enabled=False):
        found = word_log_prob(flat, weight, tree, bias)
    return found.view(*hidden.shape[:-1], tree.vocab_size)


def candidate_log_prob(
    hidden: Tensor, weight: Tensor, word: Tensor, tree: ClassTree, bias: Tensor | None = None
) -> Tensor:
    """Log-probabilities [..., K] of candidate words [..., K], as `log_prob` has them.

    Candidates of one position often share nodes, at least the root. Each distinct (position, node)
    pair is evaluated once, in one matrix product per distinct node; without a gradient all rows at
    once if these are many of few, see `_MAX_DENSE_LOGITS`. On a GPU, which would wait for
    as many launches, candidates are targets of the loss, unless they are so many that a hidden
    vector for each would take 1 GB; so they are in a graph that is compiled, traced or exported.
    """
    if is_for_onnx():
        return path_log_prob(hidden, weight, word, tree, bias)
    in_graph = torch.compiler.is_compiling() or is_recorded()
    flat = checked_hidden(hidden, weight, tree, bias)
    check_tensors(candidates=word)
    if word.dim() < 1 or word.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            "hidden must be [..., H] and candidates [..., K],"
            f" got {list(hidden.shape)} and {list(word.shape)}"
        )
    if word.dtype != torch.int64 or word.device != hidden.device:
        raise ValueError(
            f"candidates must be int64 on {hidden.device}, got {word.dtype} on {word.device}"
        )
    words = word.reshape(flat.shape[0], word.shape[-1])
    by_loss = in_graph
    if not in_graph:
        check_words("candidate", word, tree.vocab_size)
        is_small = words.numel() * flat.shape[1] <= _LOSS_ELEMENTS
        by_loss = is_small and hidden.device.type in _LOSS_DEVICES
    # An error within a compiled graph does not leave the block; PyTorch's copies of weights in the
    # dtype of autocast would then never be renewed.
    device = hidden.device.type
    is_cast = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if is_cast else nullcontext():
        if not by_loss:
            return _by_node(flat, weight, words, tree, bias).view(word.shape)
        repeated, none = flat[:, None].expand(-1, words.shape[1], -1), torch.iinfo(words.dtype).min
        nll = hierarchical_cross_entropy(
            repeated, weight, words, tree, bias, reduction="none", ignore_index=none
        )
        return -nll.view(word.shape)


def _by_node(
    flat: Tensor, weight: Tensor, words: Tensor, tree: ClassTree, bias: Tensor | None
) -> Tensor:
    """Log-probabilities of candidates [P, K], node by node."""
    rows = tree.rows_on_path(words)
    term = (rows >= 0).flatten().nonzero().squeeze(1)  # of [P, K, D]: nodes on a path
    row = rows.flatten()[term]
    position, node = term // max(1, words.shape[1] * tree.depth), tree.node_of_row[row]
    order = (node * len(flat) + position).argsort()
    term, row, position, node = (values[order] for values in (term, row, position, node))
    has_gradient = torch.is_grad_enabled() and (flat.requires_grad or weight.requires_grad)
    if not has_gradient and (num_logits := len(flat) * tree.num_rows) <= _MAX_DENSE_LOGITS:
        visited = torch.unique_consecutive(node * len(flat) + position) // len(flat)
        if 5 * int(tree.num_children[visited].sum()) > 2 * num_logits:
            return word_log_prob(flat, weight, tree, bias).gather(1, words)
    nodes = with_rows(visited_nodes(node[None], tree), weight, bias)
    by_level = flat.new_zeros(rows.numel()) + flat[:0].sum()  # differentiable without candidates
    log_q = []
    for each, node_rows, node_bias in nodes:
        visited, visit = torch.unique_consecutive(position[each.visits], return_inverse=True)
        node_log_q = node_log_softmax(flat[visited], node_rows, node_bias)
        log_q.append(node_log_q[visit, row[each.visits] - each.rows.start])
    by_level = by_level.index_copy(0, term, torch.cat([flat.new_empty(0), *log_q]))
    return by_level.view(rows.shape).sum(-1)


@not_compiled
@torch.no_grad()
def topk(
    hidden: Tensor,
    weight: Tensor,
    tree: ClassTree,
    bias: Tensor | None = None,
    *,
    k: int,
    excluded: Sequence[int] | Tensor = (),
) -> search.TopK:
    """The k most probable words of each position, log_prob and word [..., k]."""
    if not isinstance(excluded, Tensor) or excluded.dim() < 2:
        excluded = word_ids("excluded", excluded)
    positions, num_words = _positions(hidden, weight, tree, bias, excluded)
    if not isinstance(k, SupportsIndex) or not 1 <= k <= num_words:
        raise ValueError(f"k must be within 1 … {num_words} words, got {k}")
    k = index(k)  # of a tensor or an array, which loops do not take
    with torch.autocast(hidden.device.type, enabled=False):
        best = finder(positions).topk(positions, k)
    return search.TopK(*(tensor.view(*hidden.shape[:-1], k) for tensor in best))


@not_compiled
@torch.no_grad()
def sample(
    hidden: Tensor,
    weight: Tensor,
    tree: ClassTree,
    bias: Tensor | None,
    sampling: Sampling,
    previous: Tensor | None = None,
    seeds: Tensor | None = None,
    generator: torch.Generator | None = None,
    excluded: Tensor | None = None,
) -> Tensor:
    """One word per position [...], drawn from `sampling`; `excluded` [..., L] replaces its own."""
    left_out = sampling.excluded if excluded is None else excluded
    positions, _ = _positions(hidden, weight, tree, bias, left_out)
    shape, device = hidden.shape[:-1], hidden.device
    if sampling.repetition_penalty > 1:
        if previous is None:
            raise ValueError("repetition_penalty requires the previous words")
        rows = _rows_of_positions("previous", previous, shape, tree)
        positions.penalty = Penalty(sampling.repetition_penalty, rows)
    if not isinstance(generator, torch.Generator | None):
        raise ValueError(f"generator must be a torch.Generator, got {generator!r}")
    if seeds is not None and generator is not None:
        raise ValueError("seeds and generator: expected one of the two")
    if seeds is None:
        source = device if generator is None else generator.device
        seeds = torch.empty(shape, dtype=torch.int64, device=source).random_(generator=generator)
    check_tensors(seeds=seeds)
    if seeds.shape != shape or seeds.dtype != torch.int64:
        found = f"{list(seeds.shape)} {seeds.dtype}"
        raise ValueError(f"seeds must be {list(shape)} int64, got {found}")
    flat = seeds.to(device).flatten()
    with torch.autocast(device.type, enabled=False):
        if len(flat):
            flat = sample_words(positions, flat, sampling, finder(positions))
    return flat.view(shape)


def _rows_of_positions(what: str, words: Tensor, shape: torch.Size, tree: ClassTree) -> Tensor:
    """The rows [P, L] of words [..., L] of each position, and -1, on the device of the tree."""
    check_tensors(**{what: words})
    if words.dim() < 1 or words.shape[:-1] != shape or words.dtype != torch.int64:
        expected = ", ".join(map(str, [*shape, "L"]))
        found = f"{list(words.shape)} {words.dtype}"
        raise ValueError(f"{what} must be [{expected}] int64, got {found}")
    highest = tree.vocab_size - 1
    if words.numel() and not -1 <= int(words.min()) <= int(words.max()) <= highest:
        raise ValueError(f"{what} must be words 0 … {highest}, or -1")
    words = words.reshape(shape.numel(), words.shape[-1]).to(tree.row_of_word.device)
    return tree.row_of_word[words.clamp(min=0)].masked_fill(words < 0, -1)


def finder(positions: Positions) -> Finder:
    """The functions that find and draw words: compiled loops or a kernel where they can."""
    if compiled.is_usable(positions):
        return _LOOPS
    return _KERNEL if fused.is_usable(positions) else _OPERATIONS


def _positions(
    hidden: Tensor,
    weight: Tensor,
    tree: ClassTree,
    bias: Tensor | None,
    excluded: Sequence[int] | Tensor,
) -> tuple[Positions, int]:
    """The positions, and the least number of words that are not excluded from one of them."""
    positions = Positions(checked_hidden(hidden, weight, tree, bias), weight, tree, bias)
    positions.shape, num_excluded = hidden.shape[:-1], 0
    if isinstance(excluded, Tensor):
        rows = positions.excluded = _rows_of_positions("excluded", excluded, positions.shape, tree)
        ordered = rows.sort(dim=1).values
        is_new = ordered.diff(dim=1, prepend=ordered.new_full((len(rows), 1), -1)) > 0
        num_excluded = int(is_new.sum(dim=1).max()) if is_new.numel() else 0
    elif excluded:
        words = torch.tensor(excluded, device="cpu")  # where the check waits for no device
        check_words("excluded word", words, tree.vocab_size)
        num_excluded = len(set(excluded))
        positions.excluded = tree.row_of_word[words.to(hidden.device)]
    if num_excluded == tree.vocab_size:
        raise ValueError("all words are excluded")
    return positions, tree.vocab_size - num_excluded
