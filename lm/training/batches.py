"""From a token file to batches.

Their order is a pure function of (seed, epoch, index) and does not depend on the number of devices.

Each token of the split is a target; its input is the token before it, `<eos>` for the first one.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.errors import UserError
from data_prep.prepared import Prepared
from lm.config import Config


class Batch(NamedTuple):
    """Sequences of tokens that are trained on together."""

    inputs: Tensor  # [T, B] int64
    targets: Tensor  # [T, B] int64, one step ahead of `inputs`
    continues: bool  # whether each column continues the same column of the previous batch


@dataclass(eq=False)
class Batches:
    """The batches of an endless training run, numbered from 0; each device has its own columns.

    Streams (`shuffle=False`): the text is cut into `batch_size` contiguous streams, which are read
    in parallel, so that a state can be carried; up to B - 1 tokens at the end are left out. Windows
    (`shuffle=True`): the text is cut into windows of `seq_len` tokens from an offset that differs
    between epochs, and the windows are shuffled; up to a batch of windows per epoch is left out.

    Raises:
        UserError: if the text is too short for B sequences, B is not a multiple of the devices, or
            `max_epochs` has fewer batches than a step accumulates.

    Example:
        >>> tokens = np.arange(1, 10, dtype=np.uint16)
        >>> batches = Batches(tokens, eos_id=0, batch_size=2, seq_len=3, shuffle=False, seed=1)
        >>> batches[0].targets.T.tolist()
        [[1, 2, 3], [5, 6, 7]]
        >>> batches[1].inputs.T.tolist(), batches[1].continues
        ([[3], [7]], True)
    """

    tokens: NDArray[Any]  # [n] unsigned integers, may be memory-mapped
    _: KW_ONLY
    eos_id: int  # input of the first token
    batch_size: int  # B, over all devices
    seq_len: int  # T; the last batch of the streams may be shorter
    shuffle: bool
    seed: int  # of the offset and the order of windows
    rank: int = 0  # this device takes the columns rank, rank + world_size, …
    world_size: int = 1
    max_epochs: int | None = None
    max_steps: int | None = None
    accumulate: int = 1  # batches of an optimizer step

    def __post_init__(self) -> None:
        num_tokens, batch_size, seq_len = len(self.tokens), self.batch_size, self.seq_len
        shortest = batch_size * (seq_len + 1 if self.shuffle else 1)
        if num_tokens < shortest:
            raise UserError(
                f"the training split has {num_tokens} tokens; train.batch_size = {batch_size} and"
                f" train.seq_len = {seq_len} require at least {shortest}"
            )
        self.stream_len = num_tokens // batch_size
        windows_per_epoch = (num_tokens - 1) // seq_len // batch_size
        self.per_epoch = windows_per_epoch if self.shuffle else -(-self.stream_len // seq_len)
        self._set_num_steps()
        # What all batches read by; a plain array is indexed faster than a mapped one.
        self._text = np.asarray(self.tokens) if isinstance(self.tokens, np.ndarray) else self.tokens
        self._streams = np.arange(batch_size) * self.stream_len
        self._places = np.arange(-1, seq_len)[:, None]

    def _set_num_steps(self) -> None:
        """The optimizer steps of the run; None: as many as the time allows."""
        if self.batch_size % self.world_size:
            raise UserError(
                f"train.batch_size = {self.batch_size} must be a multiple of {self.world_size}"
                " devices"
            )
        limits = [] if self.max_steps is None else [self.max_steps]
        if self.max_epochs is not None:
            limits.append(self.max_epochs * self.per_epoch // self.accumulate)
        if 0 in limits:
            raise UserError(
                f"train.max_epochs = {self.max_epochs} has fewer batches than"
                f" train.accumulate = {self.accumulate}"
            )
        self.num_steps: int | None = min(limits, default=None)

    def __getitem__(self, number: int) -> Batch:
        """Batch `number`, counted from the start of the first epoch."""
        epoch, index = divmod(number, self.per_epoch)
        length = self.seq_len
        if self.shuffle:
            starts = _window_starts(self.seed, epoch, len(self.tokens), length)
            starts = starts[index * self.batch_size : (index + 1) * self.batch_size]
        else:
            begin = index * length
            starts = self._streams + begin
            length = min(length, self.stream_len - begin)
        # The input of the first target comes before the text, and is replaced.
        places = starts[self.rank :: self.world_size] + self._places[: length + 1]
        words = self._text[places].astype(np.int64)
        words[0, places[0] < 0] = self.eos_id
        tokens = torch.from_numpy(words)
        return Batch(tokens[:-1], tokens[1:], continues=index > 0 and not self.shuffle)


class InputBuffers:
    """The batches of an optimizer step on a device, at the same addresses in every step.

    On a GPU the host writes pinned memory and goes on while it is copied. It waits only before it
    writes memory that is still being copied, so that it is at most two steps ahead of the device.

    Args:
        num_batches: those of a step.
        shape: T and B of a batch on this device.
        device: where the model is.
    """

    def __init__(self, num_batches: int, shape: tuple[int, int], device: torch.device) -> None:
        self.shape = shape
        self.tokens = torch.empty((num_batches, 2, *shape), dtype=torch.int64, device=device)
        self._pinned: list[tuple[Tensor, torch.cuda.Event]] = []
        if device.type == "cuda":
            for _ in range(2):
                host = torch.empty(self.tokens.shape, dtype=torch.int64, pin_memory=True)
                self._pinned.append((host, torch.cuda.Event()))  # type: ignore[no-untyped-call]

    def load(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches, with their tokens in the buffers."""
        host = self.tokens
        if self._pinned:
            host, copied = self._pinned.pop(0)
            copied.synchronize()  # at once, unless the device is two steps behind
        for tokens, batch in zip(host, batches, strict=True):
            tokens[0].copy_(batch.inputs)
            tokens[1].copy_(batch.targets)
        if host is not self.tokens:
            self.tokens.copy_(host, non_blocking=True)
            copied.record()
            self._pinned.append((host, copied))
        return [
            Batch(tokens[0], tokens[1], batch.continues)
            for tokens, batch in zip(self.tokens, batches, strict=True)
        ]


@lru_cache(maxsize=1)  # all batches of an epoch need the same
def _window_starts(seed: int, epoch: int, num_tokens: int, seq_len: int) -> NDArray[np.int64]:
    """Where the windows of an epoch begin, in the order in which they are read."""
    rng = np.random.default_rng([seed, epoch])
    num_windows = (num_tokens - 1) // seq_len
    slack = num_tokens - num_windows * seq_len
    return rng.permutation(num_windows) * seq_len + rng.integers(slack + 1)


def training_batches(
    config: Config, prepared: Prepared, *, rank: int = 0, world_size: int = 1
) -> Batches:
    """The batches of a configuration.

    Those of a text are streams for an LSTM, which carries a state, else windows.
    """
    make: Callable[..., Batches] = Batches
    if prepared.is_independent:
        from lm.training.sequence_batches import SequenceBatches

        make = partial(SequenceBatches, sequences=prepared.sequences("train"))
    return make(
        prepared.tokens("train"),
        eos_id=prepared.eos_id,
        batch_size=config.train.batch_size,
        seq_len=config.train.seq_len,
        shuffle=config.model.backbone != "lstm",
        seed=config.seed,
        rank=rank,
        world_size=world_size,
        max_epochs=config.train.max_epochs,
        max_steps=config.train.max_steps,
        accumulate=config.train.accumulate,
    )
