"""The launches of the fused kernels, and their compilation without a GPU.

Triton specialises a kernel by its constants, the dtypes of its tensors, and which numbers are 1 or
divisible by 16. What is compiled here has the same key in Triton's cache as on a GPU of that
architecture, so that

  python -m scripts.kernels.compilation --rows 33278:650 --sm 90

fills the cache in parallel for a process that would otherwise compile one kernel after another.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends.base import Needs, Problem, row_size
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import Launch, instrumented
from lm.output.backends.triton.tile_shapes import Tiles
from lm.output.decoding.fused import launch_draws
from lm.output.decoding.positions import Positions
from lm.output.rowwise import RowAdagrad, RowAdam, RowGradient, RowSGD
from lm.output.tree.arrays import TreeArrays
from scripts.benchmarks.measure import DTYPES
from scripts.benchmarks.methods import zipf
from scripts.benchmarks.reporting import benchmark_parser, problem_size
from scripts.kernels.emulator.execution import compiled

CONSTANTS = frozenset({"ACC", "EXACT", "META", "SORTED", "TILE", "W"})
"""Arguments that a kernel is compiled for and the host does not pass to it."""

_jobs: list[tuple[Launch, int]] = []  # of the worker processes, which inherit it


def make_problem(
    vocab_size: int,
    hidden_size: int,
    num_positions: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    weight_dtype: torch.dtype | None = None,
    columns: int | None = None,
    bias: bool = False,
) -> Problem:
    """Inverse-rank targets in a tree of √N classes; tensors of floating-point numbers are empty.

    By default the weight has the dtype of hidden, and rows as long as those of the layer.
    """
    torch.manual_seed(0)
    num_classes = round(vocab_size**0.5)
    word_class = torch.randperm(vocab_size) * num_classes // vocab_size
    target, _ = zipf(vocab_size, num_positions)
    tree = ClassTree.two_level(word_class)
    hidden = torch.empty(num_positions, hidden_size, dtype=dtype)
    shape = (tree.num_rows, columns or row_size(hidden_size))
    weight = torch.empty(shape, dtype=weight_dtype or dtype)
    biases = torch.empty(tree.num_rows, dtype=weight.dtype) if bias else None
    with torch.autocast("cpu", dtype, enabled=weight.dtype != dtype):
        return Problem.of(hidden, weight, target, tree, biases)


def obstacle(capability: int) -> str | None:
    """Why the backend refuses this version of Triton on an architecture; None if it does not."""
    with instrumented(capability=capability):
        return TritonBackend().obstacle(make_problem(1000, 64, 1), torch.device("cuda"))


def moved(problem: Problem, device: str) -> Problem:
    """A problem on another device."""
    hidden, weight, target = (
        x.to(device) for x in (problem.hidden, problem.weight, problem.target)
    )
    bias = None if problem.bias is None else problem.bias.to(device)
    tree = TreeArrays(*(array.to(device) for array in problem.tree))
    return problem._replace(hidden=hidden, weight=weight, bias=bias, target=target, tree=tree)


def launches(
    problem: Problem,
    capability: int | None = None,
    tiles: Tiles | None = None,
    *,
    run: Callable[[Launch], object] = lambda launch: None,
    row_wise: Sequence[bool] = (False,),
) -> list[Launch]:
    """The launches of a forward, and of a backward for each kind of gradients, as handed to `run`.

    After row-wise gradients, those that use them: the norm, a step of every optimizer, and rows in
    memory. By default nothing is executed. Without a capability and tiles, those of the problem's
    device.
    """
    found: list[Launch] = []

    def handle(launch: Launch) -> None:
        found.append(launch)
        run(launch)

    needs = Needs(hidden=True, weight=True, bias=problem.bias is not None)
    with instrumented(run=handle, capability=capability, tiles=tiles):
        nll, _, saved = TritonBackend().nll(problem, needs)
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
            gradient.square_norm()
        parameter = table.detach().requires_grad_()
        parameter.grad = gradient
        optimizer([parameter], lr=0.1).step()
    if not table.is_meta:
        gradient.to_sparse()


def values(launch: Launch) -> dict[str, Any]:
    """The arguments that are no constants, those of a group by the names of its fields."""
    found: dict[str, Any] = {}
    for name, value in launch.arguments.items():
        if name not in CONSTANTS:
            found |= value._asdict() if isinstance(value, tuple) else {name: value}  # type: ignore[attr-defined]
    return found


def compiled_launch(launch: Launch, capability: int) -> Any:
    """The compiled kernel of a launch, as `scripts.kernels.emulator.execution.compiled`."""
    return compiled(launch.kernel, capability, **launch.arguments, **launch.options)


def compile_all(jobs: Sequence[tuple[Launch, int]]) -> None:
    """Compile launches for their architectures in parallel, for Triton's cache on disk.

    Errors of the compiler are ignored: the process that needs such a kernel meets them again.
    """
    from triton.errors import TritonError

    global _jobs
    _jobs = list(jobs)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        for future in [pool.submit(_compile, i) for i in range(len(_jobs))]:
            error = future.exception()
            if error is not None and not isinstance(error, (TritonError, RuntimeError)):
                raise error


def _compile(i: int) -> None:
    compiled_launch(*_jobs[i])


def main() -> None:
    """Compile the kernels of the benchmark's problems."""
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--rows", type=problem_size, nargs="+", required=True, metavar="N:H")
    add("--positions", type=int, default=16_384)
    add("--dtype", choices=DTYPES, default="bf16")
    add("--sm", type=int, default=90, help="compute capability x 10")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("compilation: TRITON_INTERPRET must not be 1")
    begin, jobs = time.monotonic(), []
    for n, h in options.rows:
        problem = make_problem(n, h, options.positions, DTYPES[options.dtype], bias=True)
        found = launches(moved(problem, "meta"), options.sm)
        jobs += [(launch, options.sm) for launch in found]
    compile_all(jobs)
    seconds = time.monotonic() - begin
    print(f"{len(jobs)} launches for sm_{options.sm} compiled in {seconds:.1f} s")


if __name__ == "__main__":
    main()
