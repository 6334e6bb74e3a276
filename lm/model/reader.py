"""How a model reads text: hidden vectors from which tokens are predicted, chunk by chunk.

- `read` continues sequences from a state, `read_prefix` to the end of a prefix.
- `read_text` reads one long text, as evaluation does.
- `read_lines` reads independent lines.

No probability depends on the size of a chunk or of a batch, except for rounding.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.model.language_model import LanguageModel, State

CHUNK_TOKENS = 1280
"""Positions of a text or of a prefix that are computed at once."""
BATCH_TOKENS = 2048
"""Largest number of positions of a batch of lines, and of a part of one long line."""

Ints = NDArray[np.int64]


@contextmanager
def evaluation_mode(model: LanguageModel) -> Iterator[None]:
    """A `with` block in which a model is in evaluation mode, as it may not have been before."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def read(
    model: LanguageModel, tokens: Tensor, state: State | None, at_once: int
) -> Iterator[tuple[Tensor, State | None]]:
    """Hidden vectors [T', B, H] of tokens [T, B] and the state after them, `at_once` steps each."""
    for chunk in torch.split(tokens, at_once):
        hidden, state = model(chunk, state)
        yield hidden, state


def read_prefix(model: LanguageModel, tokens: Tensor, state: State) -> tuple[Tensor, State]:
    """Hidden vectors [B, H] and state after the last of the tokens [T, B], T ≥ 1."""
    for hidden, new_state in read(model, tokens, state, CHUNK_TOKENS):
        assert new_state is not None
        last, state = hidden[-1], new_state
    return last, state


@torch.no_grad()
def read_text(
    model: LanguageModel, parts: Iterable[NDArray[Any]], eos_id: int, context: int
) -> Iterator[tuple[Tensor, Tensor, Ints]]:
    """Read a text, word ids in parts [n], each predicted once, the first one from `<eos>`.

    A backbone that carries a state (LSTM) reads the text as one stream, a part after the other:
    each token is predicted from all before it. Any other (Transformer) reads overlapping windows of
    `context` tokens of all parts, half a window apart but the last, and predicts from the second
    half of each, of the first from both, and of the last what is left.

    Yields:
        Hidden vectors [P, H] and targets [P] int64, in the order of the text, and the number of
        tokens [P] that each is predicted from, `<eos>` included.
    """
    if model.backbone.carries_state:
        yield from _read_stream(model, parts, eos_id)
        return
    tokens, *others = [*parts] or [np.zeros(0, np.int64)]
    tokens = np.concatenate([tokens, *others]) if others else tokens  # else it may be a file
    for place, num_skipped in _windows(len(tokens), context):
        inputs = tokens[np.maximum(place - 1, 0)].astype(np.int64)
        inputs[place == 0] = eos_id
        hidden, _ = model(torch.from_numpy(inputs).to(model.device))
        targets = torch.from_numpy(tokens[place].astype(np.int64)).to(model.device)
        num_before = place + 1 - place[0]
        if num_skipped and place[0, 0] == 0:
            yield hidden[:num_skipped, 0], targets[:num_skipped, 0], num_before[:num_skipped, 0]
        hidden = hidden[num_skipped:].transpose(0, 1).flatten(0, 1)
        yield hidden, targets[num_skipped:].T.flatten(), num_before[num_skipped:].T.flatten()


def _read_stream(
    model: LanguageModel, parts: Iterable[NDArray[Any]], last: int
) -> Iterator[tuple[Tensor, Tensor, Ints]]:
    """What `read_text` yields of a backbone that carries a state; `last` comes before the text."""
    state, num_before = None, 0
    for tokens in parts:
        for begin in range(0, len(tokens), CHUNK_TOKENS):
            chunk = tokens[begin : begin + CHUNK_TOKENS].astype(np.int64)
            inputs = torch.from_numpy(np.append(last, chunk[:-1]))[:, None]
            hidden, state = model(inputs.to(model.device), state)
            targets = torch.from_numpy(chunk).to(model.device)
            yield hidden[:, 0], targets, num_before + np.arange(1, len(chunk) + 1)
            last, num_before = chunk[-1], num_before + len(chunk)


def _windows(num_tokens: int, context: int) -> Iterator[tuple[Ints, int]]:
    """The places [T', B] of the tokens of windows, and how many at their beginning are skipped."""
    stride = max(1, context // 2)
    num_full = max(0, (num_tokens - context) // stride + 1)
    at_once = max(1, CHUNK_TOKENS // context)
    for first in range(0, num_full, at_once):
        begin = np.arange(first, min(first + at_once, num_full)) * stride
        yield begin + np.arange(context)[:, None], context - stride
    num_predicted = context + (num_full - 1) * stride if num_full else 0
    if num_predicted < num_tokens:
        begin_last = max(0, num_tokens - context)
        yield np.arange(begin_last, num_tokens)[:, None], num_predicted - begin_last


@torch.no_grad()
def read_lines(
    model: LanguageModel,
    lines: Sequence[Sequence[int] | NDArray[Any]],
    eos_id: int,
    num_known: Ints | None = None,
) -> Iterator[tuple[Tensor, Tensor, Ints, Ints]]:
    """Read independent lines, each from `<eos>`, in batches of similar length.

    The first num_known [L] tokens of each are not predicted; None: all are.

    Yields:
        Hidden vectors [P, H], targets [P] int64, the index [P] of the line of each and its place
        [P] there. The tokens of a line are in their order, among those of other lines.
    """
    for batch in _batches(lines):
        lengths = np.array([len(lines[index]) for index in batch])
        if not lengths.any():
            continue
        ids = np.full((lengths.max() + 1, len(batch)), eos_id)
        for column, index in enumerate(batch):
            ids[1 : lengths[column] + 1, column] = lines[index]
        tokens = torch.from_numpy(ids).to(model.device)
        place = np.arange(lengths.max())[:, None]
        is_predicted = place < lengths
        if num_known is not None:
            is_predicted &= place >= num_known[batch]
        is_token = torch.from_numpy(is_predicted).to(model.device)
        state = None if len(is_token) <= BATCH_TOKENS else model.init_state(len(batch))
        begin = 0
        for hidden, _ in read(model, tokens[:-1], state, BATCH_TOKENS):
            end = begin + len(hidden)
            present = is_token[begin:end]
            targets = tokens[1:][begin:end][present]
            steps, columns = present.nonzero().T.cpu().numpy()
            yield hidden[present], targets, np.array(batch)[columns], begin + steps
            begin = end


def _batches(lines: Sequence[Sequence[int] | NDArray[Any]]) -> Iterator[list[int]]:
    """The indices of lines of similar length, up to `BATCH_TOKENS` positions together."""
    batch: list[int] = []
    for index in sorted(range(len(lines)), key=lambda index: len(lines[index])):
        if batch and len(lines[index]) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
