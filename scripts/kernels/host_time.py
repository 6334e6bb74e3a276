"""The time that the host takes for a step of the output layer, measured on this computer's CPU.

In eager mode the host launches one kernel after another; a GPU that is done sooner waits for it.
The Python path is the public function and its backward, where launches are made and not executed.
What Triton does for a launch is measured up to the call of the driver, whose time is an assumption.

  python -m scripts.kernels.host_time --json host_time.jsonl

prints both, and their sum, for fp32 and bf16; and how many arguments the kernels have: parameters
as they are written, where a group counts as one, and the pointers and numbers that a step hands to
Triton's launcher, where each field of a group counts and constants and None do not.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends.base import Problem
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import Launch, instrumented
from scripts.benchmarks.measure import DTYPES
from scripts.benchmarks.reporting import Row, Table, benchmark_parser
from scripts.kernels.compilation import compiled_launch, values

Seconds = NDArray[np.float64]
"""The least and the most."""
DRIVER_LAUNCH = np.array([2e-6, 5e-6])
"""Seconds of a launch in the driver. An assumption."""
_POSITIONS, _SIZE, _WORDS = 64, 64, 300
"""Small: the operations of torch on the CPU take no time of their own."""


def host_seconds(
    capability: int, rounds: int, dtype: torch.dtype
) -> tuple[Seconds, dict[str, Seconds], list[Launch]]:
    """Seconds of the Python path and of each launch by name, see `timed`; and the launches.

    What the path asks of a device is asked, but for its compute capability, which is given; of the
    checks of targets, that of a GPU is made.
    """
    tree = ClassTree.two_level(num_words=_WORDS)
    options: dict[str, Any] = {"dtype": dtype, "requires_grad": True}
    hidden = torch.zeros(_POSITIONS, _SIZE, **options)
    weight = torch.zeros(tree.num_rows, _SIZE, **options)
    target = torch.arange(_POSITIONS)
    found: list[Launch] = []

    def step() -> None:
        hidden.grad = weight.grad = None
        loss = hierarchical_cross_entropy(hidden, weight, target, tree, backend="triton")
        torch.autograd.backward(loss)

    device, obstacle = torch.device("cuda", 0), TritonBackend.obstacle
    valid = torch.ones((), dtype=torch.int32)

    def obstacle_on_a_gpu(backend: TritonBackend, problem: Problem, _: torch.device) -> str | None:
        return obstacle(backend, problem, device)

    def check_words(*of: Any) -> None:
        torch._assert_async(valid)

    with (
        mock.patch.object(TritonBackend, "obstacle", obstacle_on_a_gpu),
        mock.patch("lm.output.backends.triton.backend.check_words", check_words),
        instrumented(run=lambda launch: None, capability=capability),
    ):
        with instrumented(run=found.append):
            step()
        python = timed(step, rounds)
    launching = {}
    for launch in found:
        compiled_launch(launch, capability)
        path = partial(
            launch.kernel.run, grid=(1,), warmup=True, **launch.arguments, **launch.options
        )  # what Triton does for the launch of a kernel that is compiled, without the driver
        launching[launch.kernel.__name__] = timed(path, rounds) + DRIVER_LAUNCH
    return python, launching, found


def timed(step: Callable[[], object], rounds: int) -> Seconds:
    """The fastest tenth and the median of the processor seconds of a step.

    Not of a clock on the wall: other programs may run on this computer.
    """
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
    return np.array([statistics.quantiles(seconds, n=10)[0], statistics.median(seconds)])


def row(capability: int, rounds: int, dtype: torch.dtype) -> Row:
    """The Python path, all launches and their sum in µs, each in seconds; counts of arguments."""
    python, launching, found = host_seconds(capability, rounds, dtype)
    launches = np.sum([*launching.values()], axis=0)
    sums = {"python": python, "launching": launches, "host": python + launches}
    return {
        "launches": len(found),
        "parameters": sum(len(launch.kernel.params) for launch in found),
        "values": sum(x is not None for launch in found for x in values(launch).values()),
        **{f"{name}_low_us": 1e6 * low for name, (low, _) in sums.items()},
        **{f"{name}_high_us": 1e6 * high for name, (_, high) in sums.items()},
        "seconds": {name: [*each] for name, each in {"Python": python, **launching}.items()},
    }


def main() -> None:
    """Print the table, and write a log if asked."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--sm", type=int, default=90, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=300, help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = {name: f"{{{name}}}" for name in ("dtype", "parameters", "values")}
    for name in ("python", "launching", "host"):
        columns[f"{name} µs"] = f"{{{name}_low_us:.0f}} – {{{name}_high_us:.0f}}"
    table = Table(columns, log=options.json)
    for name in ("fp32", "bf16"):
        dtype = DTYPES.get(name, torch.float32)
        table.add({"dtype": name, **row(options.sm, options.rounds, dtype)})


if __name__ == "__main__":
    main()
