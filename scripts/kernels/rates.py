"""Rates of GPUs, and the range of times that they give to a launch.

A launch uses its resources for some seconds each: `issue` and `tensor`, the instructions and the
tensor cores of the processors; `latency`, the loads that its programs wait for; `l2` and `hbm`, the
bytes of the second-level cache and of memory.

  low   the longest of them at the best rates, as if everything overlapped
  high  at the worst rates, the longest + the others ÷ stages of the pipeline; `issue` and `tensor`
        are one after the other, as in the instructions of a warp

So a kernel without a pipeline takes the sum of all at worst. A range is what these assumptions
allow, not an interval of confidence.
"""

from typing import NamedTuple


class Range(NamedTuple):
    """The least and the most of a number, mostly of seconds."""

    low: float
    high: float

    def __mul__(self, factor: object) -> "Range":
        assert isinstance(factor, (int, float))
        return Range(self.low * factor, self.high * factor)

    def plus(self, other: "Range") -> "Range":
        """The sum of two ranges."""
        return Range(self.low + other.low, self.high + other.high)

    def compared(self, other: "Range") -> str:
        """How a method that takes these seconds compares with one that takes the others."""
        if self.high < other.low:
            return "faster"
        return "slower" if self.low > other.high else "level with"


class Device(NamedTuple):
    """Peak rates of a GPU."""

    processors: int
    clock: float  # Hz, under load
    matrix_rate: float  # dense bf16 operations a second
    memory_rate: float  # bytes a second

    @property
    def cache_rate(self) -> float:
        """Bytes a second from the second-level cache."""
        return L2_BYTES * self.clock


L2_BYTES = 5120
"""Bytes a clock of the second-level cache: NVIDIA's whitepaper of the A100. Not published for the
H200, which is taken to have as many.
"""
H200 = Device(132, 1.75e9, 989e12, 4.8e12)
"""Data sheet, but for the clock: an assumption between the highest, 1.98 GHz, and lower ones at the
limit of power.
"""
A100 = Device(108, 1.41e9, 312e12, 2.039e12)
"""Data sheet of the SXM4 with 80 GB."""
REACHED_MEMORY = Range(0.75, 0.85)
"""Share of the peak of memory that kernels reach: what copies of large tensors usually measure."""
REACHED_CACHE = Range(0.45, 0.65)
"""Share of the second-level cache's rate: 4.0 to 5.8 TB/s on an H200. An assumption."""
REACHED_MATRIX = Range(0.6, 0.8)
"""Share of tensor cores' rate: 590 to 790 TFLOP/s on an H200. An assumption; the published forward
of cut-cross-entropy on an A100 reaches 0.67.
"""
SCHEDULERS = 4
"""Schedulers of a processor; each issues one instruction a clock."""
CLOCKS_PER_INSTRUCTION = Range(2, 4)
"""Time of an instruction of one warp: those of other warps fill the rest. An instruction that needs
the result of the last one waits for 4 clocks (Jia et al. 2018, of Volta).
"""
CLOCKS_PER_LOAD = Range(480, 800)
"""Until a load arrives, on an idle and on a busy device. Assumptions; microbenchmarks of an idle
H100 are near the first (Luo et al. 2024).
"""
LAUNCH, SMALL_OPERATION = Range(1.5e-6, 2.5e-6), Range(2e-6, 4e-6)
"""Seconds within a CUDA graph: between the end of a launch and the work of the next; of a torch
operation on a few numbers a position, work included. Assumptions.
"""
HOST_LAUNCH, DRIVER_LAUNCH = Range(5e-6, 10e-6), Range(2e-6, 5e-6)
"""Seconds of the host without a CUDA graph: for a torch operation, Python and autograd included;
of these, in the driver. Assumptions.
"""


class Use(NamedTuple):
    """Seconds for which a launch uses each resource."""

    issue: float = 0
    latency: float = 0
    tensor: float = 0
    l2: float = 0
    hbm: float = 0


def transferred(device: Device, flops: float, loaded: float, memory: float) -> tuple[Use, Use]:
    """The use of tensor cores and of bytes from cache and memory, at the best and worst rates."""

    def at(matrix: float, cache: float, memory_share: float) -> Use:
        return Use(
            tensor=flops / (device.matrix_rate * matrix),
            l2=loaded / (device.cache_rate * cache),
            hbm=memory / (device.memory_rate * memory_share),
        )

    reached = REACHED_MATRIX, REACHED_CACHE, REACHED_MEMORY
    return at(*(share.high for share in reached)), at(*(share.low for share in reached))


def seconds_of(best: Use, worst: Use, stages: int) -> Range:
    """The time of a launch, without its overhead."""
    parts = worst.issue + worst.tensor, worst.latency, worst.l2, worst.hbm
    longest = max(parts)
    return Range(max(best), longest + (sum(parts) - longest) / stages)
