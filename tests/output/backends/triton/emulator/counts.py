"""What compiled launches do, by the emulator's count and by the formulas of the model."""

from collections import Counter
from typing import NamedTuple

from lm.output.backends.triton.launch import Launch
from scripts.benchmarks.kernel_model import FLOP_RATE, launch_row
from scripts.benchmarks.kernel_work import Work, work

from .allocations import Allocations
from .cases import Case, emulated, inputs
from .execution import Emulator


class Counts(NamedTuple):
    """Of a launch."""

    kernel: str
    model: Work
    model_products: float  # multiply-adds of tensor cores
    products: int
    loaded: Counter[str]  # bytes by tensor, as counted by `GlobalMemory`
    sectors: Counter[str]
    once: Counter[str]


def counts(case: Case) -> list[Counts]:
    """Count what the launches of a forward and backward do."""
    emulator = Emulator(case.capability, Allocations(), counting=True, history=[])
    found = []

    def run(launch: Launch) -> None:
        emulator.run(launch)
        executed = (emulator.history or [])[-1]
        memory, model = executed.memory, work(launch)
        products = 0.0
        if executed.num_products:
            products = launch_row(launch, model)["tensor_us"] * 1e-6 * FLOP_RATE / 2
        found.append(
            Counts(
                launch.kernel.__name__, model._replace(loops={}), products,
                executed.num_products, memory.loaded, memory.sectors, memory.once(),
            )
        )  # fmt: skip

    emulated(case, inputs(case), emulator, run)
    return found
