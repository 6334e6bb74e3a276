"""From independent sequences to batches.

Their order is a pure function of (seed, epoch, index) and does not depend on the number of devices.

A sequence is cut into windows of up to `seq_len` items. Each item is in one window per epoch and is
predicted from those before it there, the first one from the item before the window, or from `<eos>`
at the beginning of the sequence. Windows of similar length are in one batch.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from data_prep.errors import UserError
from data_prep.sequences import Ints, Sequences
from lm.training.batches import Batch, Batches

IGNORED = -100
"""Target of positions without an item; see `hierarchical_cross_entropy`."""
SORTED_BATCHES = 32
"""Windows of so many batches are sorted by length."""


@dataclass(eq=False)
class SequenceBatches(Batches):
    """The batches of an endless training run on independent sequences, numbered from 0.

    A batch is as long as its longest window; other columns end in `IGNORED` targets. The last batch
    of an epoch may have columns without any item.

    Example:
        >>> sequences = Sequences(np.array([3, 4, 5, 6, 7]), *np.array([[0, 4], [4, 5], [0] * 2]), 0)
        >>> settings = {"batch_size": 3, "seq_len": 4, "shuffle": True, "seed": 1}
        >>> batch = SequenceBatches(sequences.tokens, sequences=sequences, eos_id=0, **settings)[0]
        >>> sorted(batch.targets.T.tolist())
        [[-100, -100, -100, -100], [3, 4, 5, 6], [7, -100, -100, -100]]
    """

    sequences: Sequences

    def __post_init__(self) -> None:
        length = self.sequences.end - self.sequences.begin
        self._num_windows = -(-length // self.seq_len)
        num_windows = int(self._num_windows.sum())
        if num_windows == 0:
            raise UserError("the training split has no item")
        self.per_epoch = -(-num_windows // self.batch_size)
        self._set_num_steps()

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`, counted from the start of the first epoch."""
        epoch, index = divmod(number, self.per_epoch)
        first, begin, end = (each[index] for each in _windows(self, epoch))  # [B]
        tokens = np.full(((end - begin).max() + 1, len(begin)), IGNORED, np.int64)
        for column, (start, a, b) in enumerate(zip(first, begin, end, strict=True)):
            tokens[0, column] = self.sequences.tokens[a - 1] if a > start else self.eos_id
            tokens[1 : b - a + 1, column] = self.sequences.tokens[a:b]
        tokens = tokens[:, self.rank :: self.world_size]
        inputs = np.where(tokens[:-1] == IGNORED, self.eos_id, tokens[:-1])
        return Batch(torch.from_numpy(inputs), torch.tensor(tokens[1:]), continues=False)


@lru_cache(maxsize=1)  # all batches of an epoch need the same
def _windows(batches: SequenceBatches, epoch: int) -> tuple[Ints, Ints, Ints]:
    """Of each window [per_epoch, B]: the start of its sequence, its own start and its end.

    The first window of a sequence that is cut is shorter by a number that differs between epochs,
    so that their number does not.
    """
    rng = np.random.default_rng([batches.seed, epoch])
    start, end, num_windows = (
        np.repeat(each, batches._num_windows)
        for each in (batches.sequences.begin, batches.sequences.end, batches._num_windows)
    )
    seq_len, slack = batches.seq_len, batches._num_windows * batches.seq_len
    slack -= batches.sequences.end - batches.sequences.begin
    slack[batches._num_windows < 2] = 0
    shift = np.repeat(rng.integers(slack + 1), batches._num_windows)
    number = np.arange(len(start)) - np.repeat(
        np.cumsum(batches._num_windows) - batches._num_windows, batches._num_windows
    )
    begin = np.maximum(start, start + number * seq_len - shift)
    end = np.minimum(end, start + (number + 1) * seq_len - shift)
    num_empty = batches.per_epoch * batches.batch_size - len(start)
    start, begin, end = (np.append(each, np.zeros(num_empty, np.int64)) for each in (start, begin, end))
    order = rng.permutation(len(start))
    group = np.arange(len(start)) // (SORTED_BATCHES * batches.batch_size)
    order = order[np.lexsort(((end - begin)[order], group))].reshape(-1, batches.batch_size)
    order = order[rng.permutation(len(order))]
    return start[order], begin[order], end[order]
