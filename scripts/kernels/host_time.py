"""The time that the host takes for a step of the output layer, measured on this computer's CPU.

In eager mode the host launches one kernel after another; a GPU that is done sooner waits for it.
The Python path is the public function and its backward, where launches are made and not executed.
What Triton does for a launch is measured up to the call of the driver, whose time is an assumption.
"""

import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import Launch, instrumented
from scripts.kernels.compilation import compiled_launch
from scripts.kernels.rates import DRIVER_LAUNCH, Range

PYTHON = "Python"
"""Name of the path without its launches."""
_POSITIONS, _SIZE, _WORDS = 64, 64, 300
"""Small: the operations of torch on the CPU take no time of their own."""


def host_seconds(capability: int, rounds: int = 300) -> dict[str, Range]:
    """Seconds of the Python path and of each launch, by name: see `timed`."""
    tree = ClassTree.two_level(num_words=_WORDS)
    hidden = torch.zeros(_POSITIONS, _SIZE, requires_grad=True)
    weight = torch.zeros(tree.num_rows, _SIZE, requires_grad=True)
    target = torch.arange(_POSITIONS)
    found: list[Launch] = []

    def step() -> None:
        hidden.grad = weight.grad = None
        loss = hierarchical_cross_entropy(hidden, weight, target, tree, backend="triton")
        torch.autograd.backward(loss)

    with (
        mock.patch.object(TritonBackend, "obstacle", return_value=None),  # on a CPU
        instrumented(run=lambda launch: None, capability=capability),
    ):
        with instrumented(run=found.append):
            step()
        seconds = {PYTHON: timed(step, rounds)}
    for launch in found:
        compiled_launch(launch, capability)
        seconds[launch.kernel.__name__] = timed(_launching(launch), rounds).plus(DRIVER_LAUNCH)
    return seconds


def _launching(launch: Launch) -> Callable[[], object]:
    """What Triton does for the launch of a kernel that is compiled, without the driver."""
    options = launch.options
    return lambda: launch.kernel.run(grid=(1,), warmup=True, **launch.arguments, **options)


def timed(step: Callable[[], object], rounds: int) -> Range:
    """The fastest tenth and the median of the processor seconds of a step.

    Not of a clock on the wall: other programs may run on this computer.
    """
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
    return Range(statistics.quantiles(seconds, n=10)[0], statistics.median(seconds))
