"""From independent sequences to batches.

Their order is a pure function of (seed, epoch, index) and does not depend on the number of devices.

A sequence is cut into windows of up to `seq_len` items. Each item is in one window per epoch and is
predicted from those before it there, the first one from the item before the window, or from `<eos>`
at the beginning of the sequence. Windows of similar length are in one batch.
"""

from functools import lru_cache

import numpy as np
import torch

from data_prep.errors import UserError
from data_prep.prepared import Prepared
from data_prep.sequences import Ints
from lm.training.batches import Batch, Batches

IGNORED = -100
"""Target of positions without an item; see `hierarchical_cross_entropy`."""
SORTED_BATCHES = 32
"""Windows of so many batches are sorted by length."""


class SequenceBatches(Batches):
    """The batches of an endless training run on independent sequences, numbered from 0.

    A batch is as long as its longest window; other columns end in `IGNORED` targets. The last batch
    of an epoch may have columns without any item. Arguments and errors are those of `Batches`.

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
        tokens = tokens[:, self.rank :: self.world_size]
        inputs = np.where(tokens[:-1] == IGNORED, self.eos_id, tokens[:-1])
        num_ignored = int((tokens[1:] == IGNORED).sum())
        return Batch(torch.from_numpy(inputs), torch.tensor(tokens[1:]), False, num_ignored)


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
