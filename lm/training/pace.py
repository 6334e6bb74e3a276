"""How long a training run takes, before its data are prepared: some steps on random words.

The words are drawn by inverse rank, and the classes are random: a batch visits nearly every class,
as it does with classes by meaning.
"""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.prepared import Prepared
from lm.config import Config
from lm.output import ClassTree
from lm.run import Run
from lm.training.batches import training_batches
from lm.training.devices import build_fabric, launched
from lm.training.loop import train_step
from lm.training.state import TrainingState


class _Tokens:
    """An array of tokens that draws what is read."""

    def __init__(self, size: int, cumulated: NDArray[Any]) -> None:
        self._size, self._cumulated = size, cumulated
        self._random = np.random.default_rng(1)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, places: NDArray[Any]) -> NDArray[Any]:
        return np.searchsorted(self._cumulated, self._random.random(places.shape))


class _RandomText:
    """What training reads of `Prepared`, for a text of random words."""

    eos_id = 0

    def __init__(self, vocab_size: int, num_tokens: Mapping[str, float]) -> None:
        share = 1 / np.arange(1, vocab_size + 1)
        self._share = share / share.sum()
        self.splits = {
            split: SimpleNamespace(tokens=math.ceil(size)) for split, size in num_tokens.items()
        }

    def counts(self) -> NDArray[np.int64]:
        counts: NDArray[np.int64] = np.ceil(self._share * self.splits["train"].tokens).astype("i8")
        return counts

    def tokens(self, split: str) -> _Tokens:
        return _Tokens(self.splits[split].tokens, self._share.cumsum())


def training_seconds(config: Config, vocab_size: int, num_tokens: Mapping[str, float]) -> float:
    """Estimate the seconds that a run takes here, validations included, as `lm train` does.

    Args:
        config: the run's configuration, whose tree is `two_level`.
        vocab_size: N.
        num_tokens: split → its number of tokens; at least `train`.
    """
    run = Run(config.run_path, config)
    run.prepared = cast(Prepared, _RandomText(vocab_size, num_tokens))
    num_classes = config.classes.num_word_classes or round(math.sqrt(vocab_size))
    word_class = torch.randperm(vocab_size) % num_classes
    counts = torch.tensor(run.prepared.counts())
    run.tree = ClassTree.two_level(word_class, config.classes.shortlist, counts)
    if config.model.input_pieces is not None:
        run.pieces = torch.randint(config.model.input_pieces, (vocab_size, 3), dtype=torch.int32)
    fabric, batches = build_fabric(run), training_batches(config, run.prepared)
    with launched(fabric, run):
        state = TrainingState(fabric, run, batches, None)
        state.clock.start()
        while (seconds := state.clock.seconds_left(0)) is None:
            train_step(state)
            state.clock.step()
    return seconds
