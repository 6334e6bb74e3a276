"""Search and draws on a CPU in compiled loops, one position after another.

They find what the operations of PyTorch in `search` find, up to the rounding of log-probabilities,
and draw from the same distributions, but open few nodes.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lm.output.backends.compiled.backend import DTYPES, failures, has_numba
from lm.output.backends.compiled.memory import Array, as_array, own
from lm.output.backends.verify import Kind, is_right
from lm.output.decoding import draws, search
from lm.output.decoding.positions import LEAST, Positions
from lm.output.decoding.search import TopK
from lm.output.tree.class_tree import ClassTree

if TYPE_CHECKING:
    from lm.output.decoding.loops.expansion_loops import LayerArrays

FEW = 4
"""Up to this many positions of a block are searched one by one, without a limit on rows read."""
MOST_ROWS = 1 / 4
"""Share of the table opened for each of more positions; beyond it one product takes less time."""
NODE_COST = 4096
"""Numbers of the table for each node that is opened in the order of probability: reading them takes
ten times as long as finding the node."""
NO_RATIO = 5e-324
"""The smallest number: as `ratio` to the largest weight, it excludes only words of weight 0."""
NUM_DRAWS = 64
"""Words drawn at most in search of one in a nucleus; for p ≥ 1/10, all are outside with a
probability of 0.12 % or less."""
BLOCK_ELEMENTS = 1 << 23
"""Most words that memory is reserved for at once; only those found take it."""

_of_tree: "WeakKeyDictionary[ClassTree, tuple[Array, ...]]" = WeakKeyDictionary()
"""Arrays of trees, which never change."""


def is_usable(positions: Positions) -> bool:
    """Whether loops can be compiled for some positions, and are right."""
    device, kind = positions.hidden.device, positions.kind
    return (
        device.type == "cpu"
        and has_numba()
        and positions.weight.stride(1) == 1
        and DTYPES.issuperset(kind[:3])
        and is_right("search and draws in compiled loops", device, kind, _difference, failures)
    )


def topk(positions: Positions, k: int) -> TopK:
    """See `search.topk`."""
    log_prob = positions.hidden.new_empty(len(positions.hidden), k)
    word = torch.empty_like(log_prob, dtype=torch.int64)
    for position, found, unfinished in _sets(positions, k, 1.0, 1.0):
        if len(position):
            log_prob[position], word[position] = found
        for block, words in search.topk_of(positions, unfinished, k):
            log_prob[block], word[block] = words
    return TopK(log_prob, word)


def nuclei(positions: Positions, power: float, top_p: float) -> Iterator[tuple[Tensor, TopK]]:
    """See `search.nuclei`.

    Where Z is known to be 1, the least probable word of a nucleus has at least the N-th part of
    1 - p, and only such words are found; else all are.
    """
    is_exact, floor = power == 1 and positions.is_plain, -math.inf
    rest = 1 - max(top_p, 0.5) * (1 + 1e-5)  # rounding changes Z by less, and P ≥ 1 / N too
    if is_exact and rest > 0:
        floor = math.log(rest / positions.tree.vocab_size)
    total = 1.0 if is_exact else None
    for position, words, _ in _sets(positions, 0, power, NO_RATIO, floor):
        yield position, search.nucleus(words, power, top_p, total)


def within_ratio(positions: Positions, power: float, min_p: float) -> Iterator[tuple[Tensor, TopK]]:
    """See `search.within_ratio`."""
    for position, found, _ in _sets(positions, 0, power, min_p):
        yield position, found


def _sets(
    positions: Positions, k: int, power: float, ratio: float, floor: float = -math.inf
) -> Iterator[tuple[Tensor, TopK, Tensor]]:
    """Sets of the most probable words of blocks of positions, see `search_loops.SearchGoal`.

    Yields positions [A], their words in order, padded with log_prob -∞, and positions that are left
    to an evaluation of all words.
    """
    from lm.output.decoding.loops import search_loops

    tree, num_positions = positions.tree, len(positions.hidden)
    block = max(1, BLOCK_ELEMENTS // tree.vocab_size)
    many = k > 0 and min(num_positions, block) > FEW
    most_rows = int(MOST_ROWS * tree.num_rows) if many else tree.num_rows
    most_nodes = positions.weight.numel() // NODE_COST
    limits = float(power), float(ratio), float(floor)
    goal = search_loops.SearchGoal(k, *limits, most_rows, most_nodes)
    is_double = positions.hidden.dtype == torch.float64
    bits = own(positions.hidden.new_empty(0, dtype=torch.int64 if is_double else torch.int32))
    for start in range(0, num_positions, block):
        position = torch.arange(start, min(start + block, num_positions), device="cpu")
        log_prob = positions.hidden.new_empty(len(position), tree.vocab_size + 1)
        word = position.new_empty(log_prob.shape)
        size = torch.empty_like(position)
        layer = _layer(positions, start, len(position))
        found = map(own, (log_prob, word, size))
        wrong, num_opened, largest, is_done = search_loops.search(
            layer, goal, bits, tree.max_path_columns, *found
        )
        if wrong >= 0:
            positions.refuse(start + wrong)
        positions.num_opened += num_opened
        words = TopK(log_prob[:, :largest], word[:, :largest])
        if is_done:
            yield position, words, position[:0]
        else:
            is_found = size >= 0
            of_found = TopK(*(each[is_found] for each in words))
            yield position[is_found], of_found, position[~is_found]


def draw_words(positions: Positions, seeds: Tensor, power: float, top_p: float = 1.0) -> Tensor:
    """See `draws.draw_words`; the first word that is in the nucleus, if one of `NUM_DRAWS` is."""
    from lm.output.decoding.loops import draw_loops

    word = torch.empty_like(seeds)
    is_plain = power == 1 and positions.penalty is None
    layer, width = _layer(positions, 0, len(word)), positions.tree.max_path_columns
    goal = draw_loops.DrawGoal(power, is_plain, float(top_p), NUM_DRAWS if top_p < 1 else 1)
    wrong, num_opened = draw_loops.draw_words(
        layer, own(seeds.contiguous()), goal, width, own(word)
    )
    if wrong >= 0:
        positions.refuse(wrong)
    positions.num_opened += num_opened
    left = (word < 0).nonzero().squeeze(1) if top_p < 1 else word[:0]
    if len(left):
        rest = positions.select(left)
        sets = nuclei(rest, power, top_p)
        word[left] = draws.draw_from_sets(sets, draws.derive_seeds(seeds[left], -1), power)
        positions.num_opened += rest.num_opened
    return word


def _layer(positions: Positions, start: int, num: int) -> "LayerArrays":
    """The arrays of some positions."""
    from lm.output.decoding.loops.expansion_loops import LayerArrays

    tree, bias, penalty = positions.tree, positions.bias, positions.penalty
    hidden = positions.hidden.detach()
    if (arrays := _of_tree.get(tree)) is None:
        first_row, num_children = tree.arrays.first_row, tree.arrays.num_children
        tensors = first_row, num_children, tree.item_of_row, tree.num_words_below
        arrays = _of_tree[tree] = tuple(map(as_array, tensors))
    excluded = penalized = arrays[0][None, :0]
    if penalty is not None:
        penalized = own(penalty.row[start:][:num].sort().values.contiguous())
    if (rows := positions.excluded) is not None:
        rows = rows[start:][:num] if rows.dim() > 1 else rows[None]
        excluded = own(rows.sort().values.contiguous())
    if num < len(hidden):
        hidden = hidden[start:][:num]
    return LayerArrays(
        own(hidden.contiguous()),
        as_array(positions.weight),
        as_array(hidden[:0, 0] if bias is None else bias.contiguous()),
        first_row=arrays[0],
        num_children=arrays[1],
        item_of_row=arrays[2],
        num_words_below=arrays[3],
        num_node_rows=tree.num_node_rows,
        excluded=excluded,
        penalized=penalized,
        factor=1.0 if penalty is None else float(penalty.factor),
        least=LEAST,
    )


def _difference(device: torch.device, kind: Kind) -> str | None:
    """What is wrong with the log-probabilities of all words, or with drawn words, or None."""
    positions = draws.tiny_positions(16, device, kind)
    some = positions.select(torch.arange(2))
    expected = some.all_words(search.every(some))
    log_prob, word = topk(some, positions.tree.vocab_size)
    error = float((log_prob - expected.gather(1, word)).abs().max())
    if not error <= 64 * torch.finfo(log_prob.dtype).eps * float(expected.abs().max()):
        return f"log-probabilities are off by {error:.2g}"
    return draws.wrong_words(draw_words, positions)
