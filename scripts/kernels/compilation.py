"""The launches of the fused kernels, and their compilation without a GPU.

Triton specialises a kernel by its constants, the dtypes of its tensors, and which numbers are 1 or
divisible by 16. What is compiled here has the same key in Triton's cache as on a GPU of that
architecture, so that

  python -m scripts.kernels.compilation --rows 33278:650 --sm 90

fills the cache in parallel for a process that would otherwise compile one kernel after another. The
exit code is 1 if a kernel does not compile, spills registers, or multiplies without tensor cores.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import Launch, instrumented
from lm.output.backends.triton.tile_shapes import Tiles
from lm.output.decoding.fused import launch_draws
from lm.output.decoding.positions import Positions
from lm.output.rowwise import RowAdagrad, RowAdam, RowGradient, RowSGD
from scripts.benchmarks.measure import DTYPES
from scripts.benchmarks.reporting import benchmark_parser, problem_size

TENSOR_CORES = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)")

_jobs: list[tuple[Launch, int]] = []  # of the worker processes, which inherit it


def obstacle(capability: int) -> str | None:
    """Why the backend refuses this version of Triton on an architecture; None if it does not."""
    problem = Problem.without_values(1, 64, ClassTree.full(9), torch.bfloat16)
    with instrumented(capability=capability):
        return TritonBackend().obstacle(problem, torch.device("cuda"))


def launches(
    problem: Problem,
    capability: int,
    tiles: Tiles | None = None,
    *,
    row_wise: Sequence[bool] = (False,),
) -> list[Launch]:
    """The launches of a forward, and of a backward for each kind of gradients; none is executed.

    After row-wise gradients, those that use them: the norm, a step of every optimizer, and rows in
    memory. Without tiles, they have those of the capability.
    """
    found = list[Launch]()
    needs = Needs(hidden=True, weight=True, bias=problem.bias is not None)
    target = problem.hidden.new_zeros(problem.num_positions, dtype=torch.int64)
    with instrumented(run=found.append, capability=capability, tiles=tiles):
        nll, _, saved = TritonBackend().nll(target, problem, needs)
        for kind in row_wise:
            of = needs._replace(row_wise=kind)
            _, *rows = TritonBackend().backward(nll, problem, saved, of)
            for table, gradient in zip((problem.weight, problem.bias), rows, strict=True):
                if table is not None and isinstance(gradient, RowGradient):
                    _use(table, gradient)
    return found


def draws(dtype: torch.dtype, columns: int) -> list[Launch]:
    """The launches that draw words, at temperature 1 and, without some words, at another."""
    tree, found = ClassTree.two_level(num_words=1000), list[Launch]()
    weight = torch.empty(tree.num_rows, columns, dtype=dtype)
    hidden, seeds = torch.empty(2, columns), torch.zeros(2, dtype=torch.int64)
    positions = Positions(hidden, weight, tree, weight[:, 0].contiguous())
    with instrumented(run=found.append):
        launch_draws(positions, seeds, 1.0)
        positions.excluded = seeds[:1]
        launch_draws(positions, seeds, 0.7)
    return found


def _use(table: Tensor, gradient: RowGradient) -> None:
    """A step of every optimizer, of Adagrad also after the norm, and the rows in memory."""
    for i, optimizer in enumerate((RowSGD, RowAdagrad, RowAdagrad, RowAdam)):
        if i == 2:
            gradient.norm()
        parameter = table.detach().requires_grad_()
        parameter.grad = gradient
        optimizer([parameter], lr=0.1).step()
    if not table.is_meta:
        gradient.to_sparse()


def compiled(launch: Launch, capability: int) -> Any:
    """The compiled kernel of a launch, without a GPU; this process can launch none afterwards."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    def mocked(value: Any) -> Any:
        if isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
            return type(value)(*map(mocked, value))
        return MockTensor(value.dtype) if isinstance(value, Tensor) else value

    device = SimpleNamespace(  # the part of a driver of Triton that compiling needs
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,  # a number by which kernels are kept
        get_current_stream=lambda device: 0,
    )
    driver.set_active(device)
    arguments = {name: mocked(value) for name, value in launch.arguments.items()}
    return launch.kernel.warmup(grid=(1,), **arguments, **launch.options)


def compile_all(jobs: Sequence[tuple[Launch, int]]) -> list[str]:
    """Compile launches for their architectures in parallel, for Triton's cache on disk.

    Errors of the compiler are not raised: a process that needs such a kernel meets them again.

    Returns:
        What is wrong with a launch, "" if nothing.
    """
    from triton.errors import TritonError

    global _jobs
    _jobs = list(jobs)
    found = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        for future in [pool.submit(_compile, i) for i in range(len(_jobs))]:
            error = future.exception()
            if error is not None and not isinstance(error, (TritonError, RuntimeError)):
                raise error
            found.append(future.result() if error is None else str(error))
    return found


def _compile(i: int) -> str:
    """Compile a launch; returns what is wrong with its code, "" if nothing."""
    from triton import knobs

    binary = compiled(*_jobs[i])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if stack := int(re.findall(r"STACK:(\d+)", printed)[-1]):
        return f"spills {stack} bytes"
    exact = "inputPrecision = ieee" in binary.asm["ttir"]
    multiplies = "tt.dot" in binary.asm["ttir"] and not exact
    return "no tensor cores" * (multiplies and not TENSOR_CORES.search(binary.asm["ptx"]))


def main() -> None:
    """Compile the kernels of the benchmark's problems."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=problem_size, nargs="+", required=True, metavar="N:H")
    add("--positions", type=int, default=16_384)
    add("--dtype", choices=[*DTYPES, "tf32"], default="bf16")
    add("--sm", type=int, default=90, help="compute capability x 10")
    add("--all", action="store_true", help="also row-wise gradients, their use, and draws of words")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("compilation: TRITON_INTERPRET must not be 1")
    dtype = DTYPES.get(options.dtype, torch.float32)
    torch.set_float32_matmul_precision("high" if options.dtype == "tf32" else "highest")
    begin, found = time.monotonic(), list[Launch]()
    for n, h in options.rows:
        sizes, device = (options.positions, h), "cpu" if options.all else "meta"
        problem = Problem.without_values(*sizes, ClassTree.two_level(num_words=n), dtype, device)
        if options.all:
            found += launches(problem, options.sm, row_wise=(False, True)) + draws(dtype, h)
        else:
            found += launches(problem, options.sm)
    wrong = compile_all([(launch, options.sm) for launch in found])
    names = [launch.kernel.__name__ for launch in found]
    for name, each in zip(names, wrong, strict=True):
        if each:
            print(f"{name}: {each}", file=sys.stderr)
    seconds = time.monotonic() - begin
    print(
        f"{len(found)} launches for sm_{options.sm} compiled in {seconds:.1f} s:", *sorted({*names})
    )
    sys.exit(any(wrong))


if __name__ == "__main__":
    main()
