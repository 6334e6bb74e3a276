"""The training step as a CUDA graph: the device's work, recorded once and launched as a whole.

The first `WARM_UP` steps run as they are, and allocate and compile what is kept. The next one is
recorded and from then on replayed, at the same addresses and with the same numbers from the host:

    inside    forward and backward of all batches of a step, the sum of the losses, clipping, the
              update, the copy of the carried state; gradients, which are None before and after a
              step, so that they have a place in the graph's memory, and nothing sets it to zero
    outside   before each step, on the same stream: the copy of the tokens into `InputBuffers`, the
              learning rates, zeros for the carried state where streams begin; after it, counts
    eager     steps with another shape (the short last batch of an epoch), with fewer batches or
              other numbers of targets in each, validation; all steps of runs that `why_eager`
              names, and of those that wait for the device

A number that the host reads or draws within a step would be the same in every replay. So learning
rates are tensors, as are the counts of steps of AdamW and `RowAdam`; dropout, word dropout and
the rounding of rows in bf16 draw from the device's generator, which CUDA graphs advance by as many
numbers as an eager step does: checkpoints, and steps after them, are the same.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from data_prep.errors import UserError
from lm.config import TrainConfig
from lm.training.batches import Batch

if TYPE_CHECKING:
    from lightning.fabric import Fabric  # takes seconds, and the memory estimate is without it

WARM_UP = 3
"""Steps of a process before one is recorded; the last of them is watched."""
_WAITS = "called a synchronizing CUDA operation"
_log = logging.getLogger(__name__)


def why_eager(train: TrainConfig, num_processes: int, *, on_gpu: bool) -> str | None:
    """Why no step may be recorded: None if one may be, empty if nobody expects it."""
    if not on_gpu or train.cuda_graph == "off":
        return ""
    if num_processes > 1 or train.strategy != "auto":
        return "several devices communicate"
    if train.skip_nonfinite_steps:
        return "the host reads whether gradients are finite (train.skip_nonfinite_steps)"
    if train.precision == "16-mixed":
        return "the host reads whether gradients in fp16 are finite"
    return None


class InputBuffers:
    """The batches of an optimizer step on a device, at the same addresses in every step.

    On a GPU the host writes pinned memory and continues while it is copied. It waits only before it
    writes memory that is still being copied, so that it is at most two steps ahead of the device.

    Args:
        num_batches: most of a step.
        shape: T and B of the longest batch on this device.
        device: where the model is.
    """

    def __init__(self, num_batches: int, shape: tuple[int, int], device: torch.device) -> None:
        self.tokens = torch.empty((num_batches, 2, *shape), dtype=torch.int64, device=device)
        self._pinned: list[tuple[Tensor, torch.cuda.Event]] = []
        for _ in range(2 if device.type == "cuda" else 0):
            host = torch.empty(self.tokens.shape, dtype=torch.int64, pin_memory=True)
            self._pinned.append((host, torch.cuda.Event()))  # type: ignore[no-untyped-call]

    def load(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches, with their tokens in the buffers."""
        host = self.tokens
        if self._pinned:
            host, copied = self._pinned.pop(0)
            copied.synchronize()  # at once, unless the device is two steps behind
        loaded = []
        for tokens, written, batch in zip(self.tokens, host, batches, strict=False):
            length = len(batch.inputs)
            written[0, :length] = batch.inputs
            written[1, :length] = batch.targets
            inputs, targets = tokens[:, :length]
            loaded.append(batch._replace(inputs=inputs, targets=targets))
        if host is not self.tokens:
            self.tokens.copy_(host, non_blocking=True)
            copied.record()
            self._pinned.append((host, copied))
        return loaded


class StepGraph:
    """Runs the steps of a process: as they are, and on a GPU, once warmed up, as a graph.

    Attributes:
        records: whether steps may be recorded. Then the learning rates of the optimizer are
            tensors, and a step must be a function of tensors at the same addresses.
    """

    def __init__(
        self, fabric: "Fabric", train: TrainConfig, optimizer: torch.optim.Optimizer
    ) -> None:
        self._device, self._groups = fabric.device, optimizer.param_groups
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_steps = 0
        on_gpu = self._device.type == "cuda"
        reason = why_eager(train, fabric.world_size, on_gpu=on_gpu)
        self.records = reason is None
        if self.records:
            # fused optimizers read fp32 on CUDA, and any type on a CPU
            dtype = torch.float32 if on_gpu else torch.float64
            for group in self._groups:
                group["lr"] = torch.tensor(float(group["lr"]), dtype=dtype, device=self._device)
        elif reason and fabric.is_global_zero:
            _report(reason)

    @property
    def is_recorded(self) -> bool:
        """Whether a step has been recorded."""
        return self._graph is not None

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def run(self, step: Callable[[], None], *, is_graphable: bool = True) -> None:
        """Run a step: a graphable one is, in every call, the same function of the same tensors."""
        if not (is_graphable and self.records):
            step()
        elif self._graph is not None:
            self._graph.replay()
        elif self._num_steps < WARM_UP:
            self._warm_up(step)
        else:
            self._record(step)
            self.run(step)

    def _warm_up(self, step: Callable[[], None]) -> None:
        """Run a step on the stream of the recording; in the last one, waiting is a warning."""
        self._num_steps += 1
        is_watched = self._num_steps == WARM_UP
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", message="Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("warn" if is_watched else "default")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        current.wait_stream(self._stream)
        for each in caught:
            if _WAITS not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
            elif self.records:
                self.records = False
                _report(f"the host waits for the device ({each.filename}:{each.lineno})")

    def _record(self, step: Callable[[], None]) -> None:
        """Record a step, without running it."""
        graph = torch.cuda.CUDAGraph()
        groups = [group for group in self._groups if "capturable" in group]
        for group in groups:  # what AdamW asks for, though fused steps are the same
            group["capturable"] = True
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                step()
        except RuntimeError as error:
            problem = " ".join(str(error).split())
            raise UserError(
                "the training step cannot be recorded as a CUDA graph; train.cuda_graph: off trains"
                f" without: {problem}"
            ) from error
        finally:
            for group in groups:
                group["capturable"] = False
        self._graph = graph
        _log.info(
            "training steps are launched as a CUDA graph from now on, except for those with a"
            " shorter batch; validation runs without"
        )


def _report(reason: str) -> None:
    _log.info("training steps run without a CUDA graph: %s", reason)
