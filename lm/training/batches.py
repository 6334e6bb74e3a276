"""From token files to batches.

Their order is a pure function of (seed, epoch, index) and does not depend on the number of devices.

Of a target, the input is the token before it, `<eos>` for the first one of a text or an independent
sequence.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.errors import UserError
from data_prep.prepared import Prepared
from data_prep.sequences import Ints
from lm.config import Config

IGNORED = -100
"""Target of positions without an item; see `hierarchical_cross_entropy`."""
SORTED_BATCHES = 32
"""Windows of this many batches of independent sequences are sorted by length."""


class Batch(NamedTuple):
    """Sequences of tokens that are trained on together."""

    inputs: Tensor  # [T, B] int64
    targets: Tensor  # [T, B] int64, one step ahead of `inputs`
    continues: bool  # whether each column continues the same column of the previous batch
    num_tokens: int  # targets on all devices that are no padding, -100
    weight: float = 1.0  # of this device's mean loss in the mean over devices


class Batches:
    """The batches of an endless training run, numbered from 0; each device has its own columns.

    For an LSTM, which carries a state, the text is cut into B contiguous streams, which are read in
    parallel; up to B - 1 tokens at the end are left out. For a Transformer it is cut into windows
    of T tokens from an offset that differs between epochs, and the windows are shuffled; up to a
    batch of windows per epoch is left out.

    Args:
        config: B is `train.batch_size`, over all devices, and T is `train.seq_len`; the last batch
            of the streams may be shorter.
        prepared: the data, with the training split.
        rank: this device takes the columns rank, rank + world_size, …
        world_size: number of devices.

    Attributes:
        per_epoch: number of batches of an epoch.
        num_steps: optimizer steps of the run; None: as many as the time allows.
        between_validations: number of steps from one validation to the next.

    Raises:
        UserError: if the text is too short for B sequences, or B is not a multiple of the devices.
    """

    def __init__(
        self, config: Config, prepared: Prepared, rank: int = 0, world_size: int = 1
    ) -> None:
        train = config.train
        self.is_stream = config.model.backbone == "lstm"
        self.seed, self.rank, self.world_size = config.seed, rank, world_size
        self.batch_size, self.seq_len = train.batch_size, train.seq_len
        self.eos_id = prepared.eos_id
        self.per_epoch = self._lay_out(prepared)
        if self.batch_size % world_size:
            raise UserError(
                f"train.batch_size = {self.batch_size} must be a multiple of {world_size} devices"
            )
        self.per_step, steps_per_epoch = train.accumulate, -(-self.per_epoch // train.accumulate)
        self.between_validations = train.val_every_steps or steps_per_epoch
        limits = [] if train.max_steps is None else [train.max_steps]
        if train.max_epochs is not None:
            limits.append(train.max_epochs * steps_per_epoch)
        self.num_steps: int | None = min(limits, default=None)

    def of_step(self, first: int) -> range:
        """Numbers of the batches of a step: `train.accumulate`, or the rest of the epoch."""
        return range(first, first + min(self.per_step, self.per_epoch - first % self.per_epoch))

    def steps(self, num_batches: int) -> int:
        """Number of steps that the first batches make."""
        epochs, rest = divmod(num_batches, self.per_epoch)
        return epochs * -(-self.per_epoch // self.per_step) + -(-rest // self.per_step)

    def _lay_out(self, prepared: Prepared) -> int:
        """Open the text, and return the number of batches of an epoch."""
        tokens, batch_size, seq_len = prepared.tokens("train"), self.batch_size, self.seq_len
        num_tokens = len(tokens)
        shortest = batch_size if self.is_stream else batch_size * seq_len + 1
        if num_tokens < shortest:
            raise UserError(
                f"the training split has {num_tokens} tokens; train.batch_size = {batch_size} and"
                f" train.seq_len = {seq_len} require at least {shortest}"
            )
        self._text = np.asarray(tokens)  # a plain array is indexed faster than a mapped one
        self._stream_len = num_tokens // batch_size
        self._streams = np.arange(batch_size) * self._stream_len
        self._places = np.arange(-1, seq_len)[:, None]
        windows_per_epoch = (num_tokens - 1) // seq_len // batch_size
        return -(-self._stream_len // seq_len) if self.is_stream else windows_per_epoch

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`, counted from the start of the first epoch."""
        epoch, index = divmod(number, self.per_epoch)
        length = self.seq_len
        if self.is_stream:
            begin = index * length
            starts = self._streams + begin
            length = min(length, self._stream_len - begin)
        else:
            starts = _window_starts(self.seed, epoch, len(self._text), length)
            starts = starts[index * self.batch_size : (index + 1) * self.batch_size]
        # The input of the first target comes before the text, and is replaced.
        places = starts[self.rank :: self.world_size] + self._places[: length + 1]
        words = self._text[places].astype(np.int64)
        words[0, places[0] < 0] = self.eos_id
        tokens = torch.from_numpy(words)
        continues = index > 0 and self.is_stream
        return Batch(tokens[:-1], tokens[1:], continues, length * self.batch_size)


@lru_cache(maxsize=1)  # all batches of an epoch need the same
def _window_starts(seed: int, epoch: int, num_tokens: int, seq_len: int) -> NDArray[np.int64]:
    """Where the windows of an epoch begin, in the order in which they are read."""
    rng = np.random.default_rng([seed, epoch])
    num_windows = (num_tokens - 1) // seq_len
    slack = num_tokens - num_windows * seq_len
    return rng.permutation(num_windows) * seq_len + rng.integers(slack + 1)


class SequenceBatches(Batches):
    """The batches of an endless training run on independent sequences, numbered from 0.

    A sequence is cut into windows of up to T items. Each item is in one window per epoch and is
    predicted from those before it there, the first one from the item before the window, or from
    `<eos>` at the beginning of the sequence. Windows of similar length are in one batch, which is
    as long as the longest; other columns end in `IGNORED` targets. The last batch of an epoch may
    have columns without any item. Arguments and errors are those of `Batches`.

    Attributes:
        sequences: those of the training split.
        num_windows: [S], windows of each.
    """

    def _lay_out(self, prepared: Prepared) -> int:
        self.sequences = prepared.sequences("train")
        length = self.sequences.end - self.sequences.begin
        self.num_windows = -(-length // self.seq_len)
        if not self.num_windows.any():
            raise UserError("the training split has no item")
        return -(-int(self.num_windows.sum()) // self.batch_size)

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`, counted from the start of the first epoch."""
        epoch, index = divmod(number, self.per_epoch)
        begin, end = _windows(self, epoch)[:, index]
        tokens = np.full(((end - begin).max() + 1, len(begin)), IGNORED, np.int64)
        for column, (a, b) in enumerate(zip(begin, end, strict=True)):
            # Before a sequence is the `<eos>` of another one, before the first that of the last.
            tokens[: b - a + 1, column] = self.sequences.tokens[np.arange(a - 1, b)]
        read = np.where(tokens[:-1] == IGNORED, self.eos_id, tokens[:-1])
        is_target, own = tokens[1:] != IGNORED, slice(self.rank, None, self.world_size)
        num_tokens = int(is_target.sum())
        weight = self.world_size * int(is_target[:, own].sum()) / num_tokens
        inputs, targets = (torch.tensor(each[:, own]) for each in (read, tokens[1:]))
        return Batch(inputs, targets, continues=False, num_tokens=num_tokens, weight=weight)


@lru_cache(maxsize=1)  # all batches of an epoch need the same
def _windows(batches: SequenceBatches, epoch: int) -> Ints:
    """The start and the end of each window [2, per_epoch, B].

    The first window of a sequence that is cut is shorter by a number that differs between epochs,
    so that their number does not.
    """
    rng = np.random.default_rng([batches.seed, epoch])
    seq_len, per_sequence = batches.seq_len, batches.num_windows
    length = batches.sequences.end - batches.sequences.begin
    slack = np.where(per_sequence > 1, per_sequence * seq_len - length, 0)

    def of_windows(values: Ints) -> Ints:
        """The values [S] of sequences, of each window of theirs."""
        return np.repeat(values, per_sequence)

    start, end = of_windows(batches.sequences.begin), of_windows(batches.sequences.end)
    shift = of_windows(rng.integers(slack + 1))
    number = np.arange(len(start)) - of_windows(np.cumsum(per_sequence) - per_sequence)
    limit = start + number * seq_len - shift
    begin, end = np.maximum(start, limit), np.minimum(end, limit + seq_len)
    num_all = batches.per_epoch * batches.batch_size
    windows = np.zeros((2, num_all), np.int64)  # the rest is empty
    windows[:, : len(start)] = begin, end
    order = rng.permutation(num_all)
    group = np.arange(num_all) // (SORTED_BATCHES * batches.batch_size)
    length = (windows[1] - windows[0])[order]
    order = order[np.lexsort((length, group))].reshape(-1, batches.batch_size)
    order = order[rng.permutation(len(order))]
    return windows[:, order]


def make_batches(config: Config, prepared: Prepared, rank: int = 0, world_size: int = 1) -> Batches:
    """The batches of a run, of a text or of independent sequences; arguments as of `Batches`."""
    kind = SequenceBatches if prepared.is_independent else Batches
    return kind(config, prepared, rank, world_size)
