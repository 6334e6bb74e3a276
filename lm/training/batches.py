"""From a token file to batches. Their order is a pure function of (seed, epoch, index), whatever
the number of devices.

Each token of the split is a target; the token before it is its input, `<eos>` before the first.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.errors import UserError


class Batch(NamedTuple):
    """One portion of text.

    Attributes:
        inputs: [T, B] int64.
        targets: [T, B] int64, one step ahead of `inputs`.
        continues: whether it goes on where the batch before it ended, column by column.
    """

    inputs: Tensor
    targets: Tensor
    continues: bool


class Batches:
    """The batches of an endless training, numbered from 0; a slice of the columns of each for one
    of several devices.

    Streams (`shuffle` False): the text is cut into `batch_size` contiguous streams read side by
    side, so that a state can be carried; up to B - 1 tokens at the very end are left out. Windows
    (`shuffle` True): the text is cut into windows of `seq_len` from an offset that differs between
    epochs, and these are shuffled; up to a batch of windows is left out of an epoch.

    Args:
        tokens: [n] unsigned integers, may be memory-mapped.
        eos_id: what the first token is predicted from.
        batch_size: B, over all devices.
        seq_len: T; the last batch of a stream may be shorter.
        shuffle: windows instead of streams.
        seed: of offset and order.
        rank, world_size: this device takes columns rank, rank + world_size, …

    Raises:
        UserError: if the text is too short for B sequences.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        *,
        eos_id: int,
        batch_size: int,
        seq_len: int,
        shuffle: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        shortest = batch_size * (seq_len + 1 if shuffle else 1)
        if len(tokens) < shortest:
            raise UserError(
                f"the training split has {len(tokens)} tokens; train.batch_size = {batch_size} and "
                f"train.seq_len = {seq_len} want {shortest} at least"
            )
        if batch_size % world_size:
            raise UserError(
                f"train.batch_size = {batch_size} must be a multiple of {world_size} devices"
            )
        self.tokens = tokens
        self.eos_id = eos_id
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.shuffle = shuffle
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        self._windows: tuple[int, NDArray[np.int64]] | None = None
        if shuffle:
            self.num_windows = (len(tokens) - 1) // seq_len
            self.per_epoch = self.num_windows // batch_size
        else:
            self.stream_len = len(tokens) // batch_size
            self.per_epoch = -(-self.stream_len // seq_len)

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`, counted from the beginning of the first epoch."""
        epoch, index = divmod(number, self.per_epoch)
        if self.shuffle:
            chosen = slice(index * self.batch_size, (index + 1) * self.batch_size)
            starts, length = self._window_starts(epoch)[chosen], self.seq_len
        else:
            begin = index * self.seq_len
            starts = np.arange(self.batch_size) * self.stream_len + begin
            length = min(self.seq_len, self.stream_len - begin)
        places = starts[self.rank :: self.world_size][None, :] + np.arange(length)[:, None]
        targets = self.tokens[places].astype(np.int64)
        inputs = self.tokens[places - 1].astype(np.int64)
        inputs[places == 0] = self.eos_id
        continues = index > 0 and not self.shuffle
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), continues)

    def _window_starts(self, epoch: int) -> NDArray[np.int64]:
        if self._windows is None or self._windows[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            slack = len(self.tokens) - self.num_windows * self.seq_len
            starts = rng.permutation(self.num_windows) * self.seq_len + rng.integers(slack + 1)
            self._windows = epoch, starts
        return self._windows[1]


class BatchLoader:
    """An endless pass over `batches` for Lightning, from batch `start()` on.

    Epochs are `Batches`' matter and the end is Lightning's `max_steps`, so that a continuation is
    nothing but another start.
    """

    def __init__(self, batches: Batches, start: Callable[[], int]) -> None:
        self.batches = batches
        self.start = start

    def __iter__(self) -> Iterator[Batch]:
        for number in count(self.start()):
            yield self.batches[number]
