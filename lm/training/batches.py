"""From a token file to batches.

Their order is a pure function of (seed, epoch, index) and does not depend on the number of devices.

Each token of the split is a target; its input is the token before it, `<eos>` for the first one.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.errors import UserError
from lm.config import TrainConfig


class Batch(NamedTuple):
    """Sequences of tokens that are trained on together.

    Attributes:
        inputs: [T, B] int64.
        targets: [T, B] int64, one step ahead of `inputs`.
        continues: whether each column continues the same column of the previous batch.
    """

    inputs: Tensor
    targets: Tensor
    continues: bool


class Batches:
    """The batches of an endless training run, numbered from 0; each device has its own columns.

    Streams (`shuffle=False`): the text is cut into `batch_size` contiguous streams, which are read
    in parallel, so that a state can be carried; up to B - 1 tokens at the end are left out. Windows
    (`shuffle=True`): the text is cut into windows of `seq_len` tokens from an offset that differs
    between epochs, and the windows are shuffled; up to a batch of windows per epoch is left out.

    Args:
        tokens: [n] unsigned integers, may be memory-mapped.
        eos_id: input of the first token.
        batch_size: B, over all devices.
        seq_len: T; the last batch of the streams may be shorter.
        shuffle: whether to read windows instead of streams.
        seed: seed of the offset and the order of windows.
        rank: number of this device, which takes the columns rank, rank + world_size, ….
        world_size: number of devices.

    Attributes:
        per_epoch: number of batches in one epoch.

    Raises:
        UserError: if the text is too short for B sequences, or B is not a multiple of the devices.

    Example:
        >>> tokens = np.arange(1, 10, dtype=np.uint16)
        >>> batches = Batches(tokens, eos_id=0, batch_size=2, seq_len=3, shuffle=False, seed=1)
        >>> batches[0].targets.T.tolist()
        [[1, 2, 3], [5, 6, 7]]
        >>> batches[1].inputs.T.tolist(), batches[1].continues
        ([[3], [7]], True)
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
                f"the training split has {len(tokens)} tokens; train.batch_size = {batch_size} and"
                f" train.seq_len = {seq_len} require at least {shortest}"
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
        """Batch `number`, counted from the start of the first epoch."""
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


def num_steps(config: TrainConfig, batches: Batches) -> int:
    """The number of optimizer steps of a run: `max_epochs` or `max_steps`, whichever comes first.

    Args:
        config: the section `train`.
        batches: the training batches.

    Returns:
        At least 1.

    Raises:
        UserError: if `max_epochs` has fewer batches than a step accumulates.
    """
    limits = []
    if config.max_epochs is not None:
        limits.append(config.max_epochs * batches.per_epoch // config.accumulate)
    if config.max_steps is not None:
        limits.append(config.max_steps)
    if min(limits) == 0:
        raise UserError(
            f"train.max_epochs = {config.max_epochs} has fewer batches than"
            f" train.accumulate = {config.accumulate}"
        )
    return min(limits)
