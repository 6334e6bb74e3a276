"""States of a loaded model and steps between them; checks and warnings of its methods."""

import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_prep.tokenizer.punctuation import UNK


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """A model after some words. It never changes: a fork is a second reference to it.

    An LSTM's state has (2 layers + 1) H numbers. A Transformer's holds the keys and values of up to
    context - 1 tokens, 2 layers · context · H numbers (4 layers of H = 256, context 128, fp32: 1
    MB), and a step writes a new copy of them. The states of one call of `step_many` share
    memory, which is released with the last of them.
    """

    num_tokens: int  # read since the start
    num_unknown: int  # how many of them are `<unk>`
    hidden: Tensor = field(repr=False)  # [H], from which the next word is predicted
    backbone: tuple[Tensor, ...] = field(repr=False)  # the state of the backbone, of one sequence
    model_sha256: str = field(repr=False)  # other models do not accept the state
    ngram: int | None = field(default=None, repr=False)  # the context of the n-gram model, if any


Prefix = str | Sequence[str | int] | State
"""What comes before a word: text, whose lines are separated by `<eos>`; token ids, or items in
a model of independent sequences; or a state."""


class Step(NamedTuple):
    """A word and what follows from it."""

    log_prob: float  # log-probability of the word in nats
    state: State  # the state after the word


def listed(what: str, values: object) -> list[Any]:
    """The elements of an iterable; ValueError for a text, a state or a table."""
    is_item = isinstance(values, str | bytes | State) or getattr(values, "ndim", 1) != 1
    if is_item or not isinstance(values, Iterable):
        raise ValueError(f"expected a list of {what}, got {values!r:.60}")
    return list(values)


def checked_ids(tokens: Sequence[Any], vocab_size: int) -> list[int]:
    """Token ids; ValueError if they are no integers, such as a mask, or not in a vocabulary."""
    try:
        ids = [index(token) for token in tokens]
    except TypeError as error:
        raise ValueError(f"expected text or token ids, got {tokens!r:.60}") from error
    for token, id in zip(tokens, ids, strict=True):
        if isinstance(token, bool) or getattr(token, "dtype", None) == torch.bool:
            raise ValueError(f"expected text or token ids, got {token!r}")
        if not 0 <= id < vocab_size:
            raise ValueError(f"token id {id} is outside the vocabulary of {vocab_size}")
    return ids


def warn_of(word: str | int, *, is_left_out: bool) -> None:
    """Warn of the probability that an unknown word is given."""
    problem = "is not in the catalogue: its probability is 0"
    if not is_left_out:
        problem = (
            "is given the probability of all unknown words together, which may exceed that of a"
            " known one: as text, it has its own with open_vocabulary or vocabulary_size of lm.load"
        )
    warn_caller(f"{word if isinstance(word, str) else UNK!r} {problem}")


def warn_caller(text: str) -> None:
    """Warn where this package was called from."""
    call, level = sys._getframe(), 1
    while call.f_back and call.f_globals.get("__name__", "").startswith(("lm.", "torch.")):
        call, level = call.f_back, level + 1
    warnings.warn(text, stacklevel=level)
