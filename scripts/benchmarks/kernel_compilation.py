"""The fused kernels compiled without a GPU, as a launch on one compiles them.

Triton specialises a kernel by its constants, the dtypes of its tensors, and which numbers are 1 or
divisible by 16. What is compiled here has the same key in Triton's cache as on a GPU of that
architecture, so that

  python -m scripts.benchmarks.kernel_compilation --rows 33278:650 --sm 90

fills the cache in parallel for a process that would otherwise compile one kernel after another.
"""

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from lm.output import ClassTree
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import Launch, instrumented
from lm.output.backends.triton.tile_shapes import Tiles, compiler_options
from scripts.benchmarks.measure import DTYPES
from scripts.benchmarks.reporting import benchmark_parser, problem_size

ALL = Needs(hidden=True, weight=True, bias=True)
_jobs: list[tuple[Launch, int]] = []  # of the worker processes, which inherit it


class _Device:
    """The part of a driver of Triton that compiling needs: a device without hardware."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        """The architecture to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """A number; kernels are kept by it."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """A stream that nothing is launched on."""
        return 0


def compiled(launch: Launch, capability: int) -> Any:
    """The compiled kernel of a launch; this process can launch no kernel on a GPU afterwards.

    Args:
        launch: tensors may be anywhere; their memory is taken to be aligned to 16 bytes.
        capability: compute capability x 10 of the architecture.
    """
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    driver.set_active(_Device(capability))
    arguments = {
        name: MockTensor(value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in launch.arguments.items()
    }
    return launch.kernel.warmup(**arguments, grid=(1,), **compiler_options(launch.tile))


def launches(problem: Problem, capability: int, tiles: Tiles | None = None) -> list[Launch]:
    """The launches of a forward and its backward, for dense gradients; nothing is executed."""
    found: list[Launch] = []
    backend = TritonBackend()
    with instrumented(run=found.append, capability=capability, tiles=tiles):
        nll, saved = backend.forward(problem, ALL)
        backend.backward(nll, problem, saved, ALL)
    return found


def compile_all(jobs: Sequence[tuple[Launch, int]], num_processes: int) -> None:
    """Compile launches for their architectures in parallel, for Triton's cache on disk.

    Errors of the compiler are ignored: the process that needs such a kernel meets them again.
    """
    from triton.errors import TritonError

    global _jobs
    _jobs = list(jobs)
    with ProcessPoolExecutor(num_processes, mp_context=get_context("fork")) as pool:
        for future in [pool.submit(_compile, i) for i in range(len(_jobs))]:
            error = future.exception()
            if error is not None and not isinstance(error, (TritonError, RuntimeError)):
                raise error


def _compile(i: int) -> None:
    compiled(*_jobs[i])


def random_classes(vocab_size: int) -> ClassTree:
    """A tree of two levels, words assigned to √N classes of one size at random."""
    num_classes = round(vocab_size**0.5)
    return ClassTree.two_level(torch.randperm(vocab_size) % num_classes)


def main() -> None:
    """Compile the kernels of the benchmark's problems."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=problem_size, nargs="+", required=True, metavar="N:H")
    add("--positions", type=int, default=16_384)
    add("--dtype", choices=DTYPES, default="bf16")
    add("--sm", type=int, default=90, help="compute capability x 10")
    add("--jobs", type=int, default=os.cpu_count(), help="processes; default: all processors")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("kernel_compilation: TRITON_INTERPRET must not be 1")
    begin, jobs = time.monotonic(), []
    for vocab_size, size in options.rows:
        tree, dtype = random_classes(vocab_size), DTYPES[options.dtype]
        problem = Problem.without_values(options.positions, size, tree, dtype)
        jobs += [(launch, options.sm) for launch in launches(problem, options.sm)]
    compile_all(jobs, options.jobs)
    seconds = time.monotonic() - begin
    print(f"{len(jobs)} launches for sm_{options.sm} compiled in {seconds:.1f} s")


if __name__ == "__main__":
    main()
