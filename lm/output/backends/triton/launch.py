"""Launches of the fused kernels: what a launch is, how it is made, and who executes it.

`instrumented` is the public hook for counting, timing or compiling launches and for trying tile
shapes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Problem
from lm.output.backends.triton.schedule import LIGHT, Schedule, splits_per_tile
from lm.output.backends.triton.tile_shapes import Tile, Tiles, compiler_options, tiles
from lm.output.backends.visits import Visits


class Saved(NamedTuple):
    """What the forward saves: the batch, and the results of (7) and (8) of `forward_kernel`.

    Without a backward there are no blocks. Values [D, P] are undefined where there is no visit.
    """

    visits: Visits
    schedule: Schedule
    exp_logits: Tensor  # [P, blocks, block_c] in the dtype of hidden, k of every visit's blocks
    block_max: Tensor  # [P, blocks], m
    lse: Tensor  # [D, P]
    target_logit: Tensor  # [D, P]


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: Any  # the jit function, whose name is `kernel.__name__`
    num_programs: int  # size of the grid, which has one axis
    tile: Tile  # what a program works on, and how the kernel is compiled
    arguments: dict[str, Any]  # of the kernel, by name


class _Instruments(NamedTuple):
    run: Callable[[Launch], None] | None = None
    tiles: Tiles | None = None
    capability: int | None = None
    num_splits: int | None = None


_instruments = _Instruments()  # not a context variable: autograd runs backwards in other threads


@contextmanager
def instrumented(
    *,
    run: Callable[[Launch], None] | None = None,
    tiles: Tiles | None = None,
    capability: int | None = None,
    num_splits: int | None = None,
) -> Iterator[None]:
    """Replace how the kernels are launched while the context is active, in all threads.

    Contexts nest; an argument that is None leaves the setting of the outer context.

    Args:
        run: called with every launch instead of executing it; may call `execute`.
        tiles: the tile shapes of all kernels.
        capability: the compute capability x 10 that the device is taken to have.
        num_splits: programs that share a tile in the forward.
    """
    global _instruments
    outer, inner = _instruments, _Instruments(run, tiles, capability, num_splits)
    given = {name: value for name, value in inner._asdict().items() if value is not None}
    _instruments = outer._replace(**given)
    try:
        yield
    finally:
        _instruments = outer


def execute(launch: Launch) -> None:
    """Run a launch on the device of its arguments, or interpret it on a CPU."""
    if not launch.num_programs:
        return
    device = launch.arguments["position"].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        grid = (launch.num_programs,)
        launch.kernel[grid](**launch.arguments, **compiler_options(launch.tile))


def launch(
    kernel: Any, num_programs: int, tile: Tile, problem: Problem, saved: Saved, **special: Any
) -> None:
    """Make a launch and run it, or hand it to `instrumented`.

    A kernel takes its arguments by name: from the problem (hidden, bias and rows of the weight are
    contiguous), its tree, and what the forward saved; their sizes and strides; the constants of the
    arithmetic and the tile; and `special`, which has priority.
    """
    import triton.language as tl

    hidden, align = problem.hidden, alignment(problem)
    fast = torch.get_float32_matmul_precision() != "highest"
    known = {
        **problem._asdict(),
        **problem.tree._asdict(),
        **saved._asdict(),
        **saved.visits._asdict(),
        **saved.schedule._asdict(),
        "P": problem.num_positions,
        "D": problem.depth,
        "num_blocks": saved.exp_logits.shape[1],
        "LIGHT": LIGHT,
        "ACC": tl.float64 if hidden.dtype == torch.float64 else tl.float32,
        "PRECISION": "tf32" if fast and hidden.dtype == torch.float32 else "ieee",
        "ALIGN": align,
        "h_units": hidden.shape[1] // align,
        "hidden_stride": hidden.stride(0) // align,
        "weight_stride": problem.weight.stride(0) // align,
        "BLOCK_V": tile.v,
        "BLOCK_C": tiles_for(problem).block_c,
        "BLOCK_H": tile.h,
        **special,
    }
    arguments = {name: known[name] for name in kernel.arg_names}
    (_instruments.run or execute)(Launch(kernel, num_programs, tile, arguments))


def capability(device: torch.device) -> int:
    """Compute capability x 10 of a device; that of an H100 for the interpreter."""
    if _instruments.capability is not None:
        return _instruments.capability
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def tiles_for(problem: Problem) -> Tiles:
    """The tile shapes for a problem on its device."""
    if _instruments.tiles is not None:
        return _instruments.tiles
    hidden = problem.hidden
    return tiles(hidden.dtype, capability(hidden.device), alignment(problem))


def splits_for(problem: Problem) -> int:
    """Programs that share a tile of a problem in the forward."""
    if _instruments.num_splits is not None:
        return _instruments.num_splits
    return splits_per_tile(problem.max_path_columns, problem.depth, tiles_for(problem).block_c)


def alignment(problem: Problem) -> int:
    """The largest power of two up to 16 that divides H and the strides of hidden and weight.

    Kernels take H and the strides in units of so many elements, so that the compiler knows what
    divides them: rows of 300 halves are not multiples of 16, but of 4.
    """
    hidden, weight = problem.hidden, problem.weight
    return math.gcd(hidden.shape[1], hidden.stride(0), weight.stride(0), 16)
