"""Draws on a GPU by a Triton kernel: the class, then the word, in one launch for many positions."""

import os
from typing import NamedTuple

import torch
from torch import Tensor

from lm.output.backends.triton.backend import failures
from lm.output.backends.triton.launch import launch
from lm.output.backends.triton.tile_shapes import Tile, triton_version
from lm.output.backends.verify import Kind, is_right
from lm.output.decoding import draws
from lm.output.decoding.draws import derive_seeds
from lm.output.decoding.positions import Positions
from lm.output.decoding.search import BLOCK_ELEMENTS, every

DEVICES = {"cuda"}
"""Types of devices whose words the kernel draws; a CPU's in the interpreter is for tests."""
TILE = Tile(1, 64, 128, 8, 1)
NUM_TRIALS = 16
"""Trials after which a position is left to an evaluation of all words."""
LEAST_POWER, MOST_POWER = 1 / 8, 8.0
"""Powers between which most trials are expected to succeed."""
UNFINISHED, WRONG = -1, -2
"""Words of positions that are left, and of those with log-probabilities that are not finite."""


class LayerTensors(NamedTuple):
    """The layer at some positions; `excluded` [R] bool is which rows are never found."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    excluded: Tensor | None


class Nodes(NamedTuple):
    """From a node to its children, see `ClassTree`."""

    first_row: Tensor
    num_children: Tensor
    item_of_row: Tensor
    num_words_below: Tensor


def is_usable(positions: Positions) -> bool:
    """Whether the kernel can draw words at some positions, and is right on their device."""
    hidden, is_interpreted = positions.hidden, os.environ.get("TRITON_INTERPRET") == "1"
    return (
        hidden.device.type in DEVICES
        and triton_version() is not None
        and (hidden.dtype == torch.float32 or is_interpreted)
        and positions.weight.is_contiguous()
        and is_right("draws by a kernel", hidden.device, positions.kind, _difference, failures)
    )


def draw_words(positions: Positions, seeds: Tensor, power: float, top_p: float = 1.0) -> Tensor:
    """See `draws.draw_words`. The host waits once, unless operations of PyTorch draw words."""
    excluded = positions.excluded
    varies = positions.penalty is not None or (excluded is not None and excluded.dim() > 1)
    if varies or top_p < 1 or not LEAST_POWER <= power <= MOST_POWER:
        return draws.draw_words(positions, seeds, power, top_p)
    word = launch_draws(positions, seeds, power)
    if int(word.min()) >= 0:
        return word
    positions.check_finite(word != WRONG, every(positions))
    left = (word == UNFINISHED).nonzero().squeeze(1)
    word[left] = draws.draw_words(positions.select(left), derive_seeds(seeds[left], -1), power)
    return word


def launch_draws(positions: Positions, seeds: Tensor, power: float) -> Tensor:
    """The words [P] of at least one position, `UNFINISHED` or `WRONG`; seeds [P] int64."""
    import triton.language as tl

    hidden, tree, bias, excluded = positions.hidden, positions.tree, positions.bias, None
    width = tree.max_path_columns
    if positions.excluded is not None:
        excluded = torch.zeros(tree.num_rows, dtype=torch.bool, device=hidden.device)
        excluded[positions.excluded] = True
    word, bias = torch.empty_like(seeds), None if bias is None else bias.contiguous()
    step = max(1, BLOCK_ELEMENTS // width)
    parts = (torch.split(each, step) for each in (hidden.contiguous(), seeds.contiguous(), word))
    for of_hidden, of_seeds, of_word in zip(*parts, strict=True):
        launch(
            "_draw", len(of_seeds), TILE,
            layer=LayerTensors(of_hidden, positions.weight, bias, excluded),
            tree=Nodes(tree.first_row, tree.num_children, tree.item_of_row, tree.num_words_below),
            seeds=of_seeds, log_weight=hidden.new_empty(len(of_seeds), 2 * width), word=of_word,
            power=hidden.new_full((), power), width=width, num_trials=NUM_TRIALS,
            W=hidden.shape[1], EXACT=power == 1 and positions.excluded is None,
            ACC=tl.float64 if hidden.dtype == torch.float64 else tl.float32, TILE=TILE,
        )  # fmt: skip
    return word


def _difference(device: torch.device, kind: Kind) -> str | None:
    """What is wrong with words drawn at temperature 1, or with frequencies at another, or None."""
    positions = draws.tiny_positions(64, device, kind)
    if problem := draws.wrong_words(launch_draws, positions):
        return problem
    seeds, tree, power = torch.arange(4096, device=device), positions.tree, 0.75
    positions.excluded = tree.row_of_word[:9]
    words = launch_draws(positions.select(torch.zeros_like(seeds)), seeds, power)
    expected = (power * positions.all_words(seeds[:1])[0]).softmax(dim=0)
    found = torch.bincount(words[words >= 0], minlength=tree.vocab_size) / len(seeds)
    distance = float((found - expected).abs().sum() / 2)  # nearly all are drawn
    return None if distance < 0.06 else f"frequencies are off by {distance:.2g}"
