"""Search and draws on a CPU in compiled loops, one position after another.

They find and draw what the operations of PyTorch in `search` and `rejection` do, up to the rounding
of log-probabilities, without a call of PyTorch per node.
"""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lm.output.backends.compiled.arrays import Array, as_array, own
from lm.output.backends.compiled.backend import DTYPES, has_numba
from lm.output.backends.verify import compiling
from lm.output.decoding.expansion import LOWEST, Expander, word_log_prob
from lm.output.decoding.rejection import RejectionSampler
from lm.output.decoding.uniforms import Uniforms
from lm.output.tree.class_tree import ClassTree

if TYPE_CHECKING:
    from lm.output.backends.compiled.expansion_loops import Layer

FREE_SECONDS = 1.0
"""Time in operations of PyTorch, by the two figures below, before loops are loaded, which takes as
long and 120 MB of memory, and ten to twenty seconds to compile once."""
SECONDS_OF_DRAW = 0.0015
"""Time of a draw for one position by operations of PyTorch."""
SECONDS_OF_ROW = 5e-7
"""Time of a search for each row by operations of PyTorch, where the distribution is flat."""
FEW = 4
"""Positions up to which each one reads the table for itself, however much of it."""
MOST_ROWS = 1 / 8
"""Share of the table opened for each of more positions; beyond it one product takes less time."""
NODE_COST = 4096
"""Numbers of the table for each node that is opened in the order of probability: reading them takes
ten times as long as finding the node."""
BLOCK_ELEMENTS = 1 << 23
"""Most words that memory is reserved for at once; only those found take it."""


_seconds_so_far = dict.fromkeys(("search", "draws"), 0.0)
_of_tree: "WeakKeyDictionary[ClassTree, tuple[tuple[Array, ...], int]]" = WeakKeyDictionary()
"""Arrays of trees and their `Expander.num_node_rows`, which never change."""


class Goal(NamedTuple):
    """What to search for: see the functions of `search`."""

    kind: Literal["top_k", "top_p", "min_p"]
    k: int = 1
    power: float = 1.0
    share: float = 1.0


def is_usable(
    expander: Expander, way: Literal["search", "draws"], *, searches: bool = False
) -> bool:
    """Whether loops can be compiled for an expander, are right, and worth it by `FREE_SECONDS`.

    `searches` tells whether operations of PyTorch would search for such draws.
    """
    weight, bias = expander.weight, expander.bias
    dtypes = (expander.hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
    return (
        expander.hidden.device.type == "cpu"
        and has_numba()
        and weight.stride(1) == 1
        and DTYPES.issuperset(dtypes)
        and _is_worth_loading(expander, way, searches or way == "search")
        and _verified(way, *dtypes)
    )


def _is_worth_loading(expander: Expander, way: str, searches: bool) -> bool:
    """Whether positions so far, these included, take `FREE_SECONDS` by operations of PyTorch."""
    if _seconds_so_far[way] < FREE_SECONDS:
        each = SECONDS_OF_ROW * expander.tree.num_rows if searches else SECONDS_OF_DRAW
        _seconds_so_far[way] += len(expander.hidden) * each
    return _seconds_so_far[way] >= FREE_SECONDS


def sets(expander: Expander, goal: Goal) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Sets of the most probable words of blocks of positions.

    Yields positions [A], log-probabilities and words [A, largest size], in order and padded with
    log_prob -∞, and positions that are left to an evaluation of all words.
    """
    from lm.output.backends.compiled import search_loops

    tree, num_positions = expander.tree, len(expander.hidden)
    many = goal.kind == "top_k" and num_positions > FEW
    most_rows = int(MOST_ROWS * tree.num_rows) if many else tree.num_rows
    most_nodes = expander.weight.numel() // NODE_COST
    is_exact = goal.power == 1 and expander.is_plain
    kind = getattr(search_loops, goal.kind.upper())
    arguments = search_loops.Goal(kind, *goal[1:], is_exact, most_rows, most_nodes)
    is_double = expander.hidden.dtype == torch.float64
    bits = own(torch.empty(0, dtype=torch.int64 if is_double else torch.int32))
    block = max(1, BLOCK_ELEMENTS // tree.vocab_size)
    for start in range(0, num_positions, block):
        position = torch.arange(start, min(start + block, num_positions))
        hidden = expander.hidden[start : start + len(position)]
        log_prob = hidden.new_empty(len(position), tree.vocab_size + 1)
        word = position.new_empty(log_prob.shape)
        size = torch.empty_like(position)
        layer = _layer(expander, start, len(position))
        found = map(own, (log_prob, word, size))
        wrong, num_opened, largest, is_done = search_loops.search(
            layer, arguments, bits, tree.max_path_columns, *found
        )
        if wrong >= 0:
            expander.refuse(start + wrong)
        expander.num_expanded += num_opened
        done, log_prob, word = position, log_prob[:, :largest], word[:, :largest]
        if not is_done:
            is_found = size >= 0
            done, log_prob, word = (each[is_found] for each in (position, log_prob, word))
        yield done, log_prob, word, position[:0] if is_done else position[~is_found]


def draw_words(
    expander: Expander, seeds: Tensor, power: float, top_p: float = 1.0, num_draws: int = 1
) -> Tensor:
    """A word for each position [P], as `RejectionSampler` draws it; seeds [P] int64.

    With `top_p`, it is the first one that is in the nucleus, or -1 if none of `num_draws` is.
    """
    from lm.output.backends.compiled import draw_loops

    word = torch.empty_like(seeds)
    is_plain = power == 1 and expander.penalty is None
    layer, width = _layer(expander, 0, len(word)), expander.tree.max_path_columns
    goal = draw_loops.Goal(power, is_plain, float(top_p), num_draws)
    wrong, num_opened = draw_loops.draw_words(
        layer, own(seeds.contiguous()), goal, width, own(word)
    )
    if wrong >= 0:
        expander.refuse(wrong)
    expander.num_expanded += num_opened
    return word


def _layer(expander: Expander, start: int, num: int) -> "Layer":
    """The arrays of some positions."""
    from lm.output.backends.compiled.expansion_loops import Layer

    tree, bias, penalty = expander.tree, expander.bias, expander.penalty
    hidden = expander.hidden.detach()
    if (of_tree := _of_tree.get(tree)) is None:
        first_row, num_children = tree.arrays.first_row, tree.arrays.num_children
        tensors = first_row, num_children, tree.item_of_row, tree.num_words_below
        of_tree = _of_tree[tree] = (tuple(map(as_array, tensors)), expander.num_node_rows)
    arrays, num_node_rows = of_tree
    no_rows, excluded, penalized = arrays[0][:0], expander.excluded, arrays[0][None, :0]
    if penalty is not None:
        penalized = own(penalty.row[start:][:num].sort().values.contiguous())
    if num < len(hidden):
        hidden = hidden[start:][:num]
    return Layer(
        hidden=own(hidden.contiguous()),
        weight=as_array(expander.weight),
        bias=as_array(hidden[:0, 0] if bias is None else bias.contiguous()),
        first_row=arrays[0],
        num_children=arrays[1],
        item_of_row=arrays[2],
        num_words_below=arrays[3],
        num_node_rows=num_node_rows,
        excluded=no_rows if excluded is None else own(excluded.sort().values),
        penalized=penalized,
        factor=1.0 if penalty is None else float(penalty.factor),
        lowest=LOWEST,
    )


@cache
def _verified(way: str, hidden: torch.dtype, weight: torch.dtype, bias: torch.dtype) -> bool:
    """Whether the loops are right for a small layer; each way is compiled when it is needed.

    It warns if not.
    """
    from numba.core.errors import NumbaError

    tree, generator = ClassTree.two_level(torch.arange(300) % 17), torch.Generator().manual_seed(0)
    shapes = ((16, 40), (tree.num_rows, 40), (tree.num_rows,))
    layer = [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes]
    tensors = [x.to(dtype) for x, dtype in zip(layer, (hidden, weight, bias), strict=True)]
    expander = Expander(tensors[0], tensors[1], tree, tensors[2])
    try:
        with compiling(f"the output layer's {way}"):
            is_search = way == "search"
            problem = _difference_of_sets(expander) if is_search else _different_draws(expander)
    except (NumbaError, RuntimeError, OSError) as failure:
        problem = f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"
    if problem:
        warnings.warn(
            f"words are found and drawn slowly, without compiled loops: {problem}", stacklevel=2
        )
    return not problem


def _difference_of_sets(expander: Expander) -> str:
    """What is wrong with the log-probabilities of all words that a search finds, or nothing."""
    hidden, tree = expander.hidden[:2], expander.tree
    expected = word_log_prob(hidden, expander.weight, tree, expander.bias)
    found = Expander(hidden, expander.weight, tree, expander.bias)
    ((_, log_prob, word, _),) = sets(found, Goal("top_k", tree.vocab_size))
    error = float((log_prob - expected.gather(1, word)).abs().max())
    limit = 64 * torch.finfo(hidden.dtype).eps * float(expected.abs().max())
    return "" if error <= limit else f"log-probabilities are off by {error:.2g}"


def _different_draws(expander: Expander) -> str:
    """What is wrong with drawn words, or nothing: rounding may change one."""
    seeds = torch.arange(len(expander.hidden))
    expected = RejectionSampler(expander, Uniforms(seeds), 1.0).sample()
    num = int((draw_words(expander, seeds, 1.0) != expected).sum())
    return "" if num <= 1 else f"{num} of {len(seeds)} words differ"
