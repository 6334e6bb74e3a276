"""Launches of the fused kernels: what one consists of, who executes it, and the arguments that
several kernels share.

`instrumented` is the public hook for counting, timing or compiling launches and for trying tile
shapes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Problem
from lm.output.backends.triton.schedule import splits_per_tile
from lm.output.backends.triton.tile_shapes import Tile, Tiles, compiler_options, tiles
from lm.output.backends.visits import Visits
from lm.output.tree.class_tree import TreeArrays

INTERPRETED_CAPABILITY = 90
"""Compute capability x 10 that is assumed on other devices than CUDA: that of an H100."""


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
        kernel: the jit function, whose name is `kernel.__name__`.
        num_programs: size of the grid, which has one axis.
        tile: what a program works on, and how the kernel is compiled.
        arguments: of the kernel, by name.
    """

    kernel: Any
    num_programs: int
    tile: Tile
    arguments: dict[str, Any]


@dataclass(frozen=True)
class _Instruments:
    run: Callable[[Launch], None] | None = None
    tiles: Tiles | None = None
    capability: int | None = None
    num_splits: int | None = None


_instruments = _Instruments()  # not a context variable: autograd has threads of its own


@contextmanager
def instrumented(
    *,
    run: Callable[[Launch], None] | None = None,
    tiles: Tiles | None = None,
    capability: int | None = None,
    num_splits: int | None = None,
) -> Iterator[None]:
    """Replace how the kernels are launched while the context is active, in all threads.

    Contexts nest; what is None stays as it is outside.

    Args:
        run: gets every launch instead of the device, and may call `execute`.
        tiles: the tile shapes of all kernels.
        capability: the compute capability x 10 that the device is taken to have.
        num_splits: programs that share a tile in the forward.
    """
    global _instruments
    outer = _instruments
    given = {"run": run, "tiles": tiles, "capability": capability, "num_splits": num_splits}
    _instruments = replace(outer, **{name: x for name, x in given.items() if x is not None})
    try:
        yield
    finally:
        _instruments = outer


def execute(launch: Launch) -> None:
    """Launch the kernel on the device of its arguments, or interpret it; nothing for no programs."""
    if not launch.num_programs:
        return
    device = launch.arguments["position"].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        grid = (launch.num_programs,)
        launch.kernel[grid](**launch.arguments, **compiler_options(launch.tile))


def submit(launch: Launch) -> None:
    """Hand a launch to whatever runs launches at present: `execute`, unless `instrumented`."""
    (_instruments.run or execute)(launch)


def capability(device: torch.device) -> int:
    """Compute capability x 10 of a device."""
    if _instruments.capability is not None:
        return _instruments.capability
    if device.type != "cuda":
        return INTERPRETED_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def tiles_for(problem: Problem) -> Tiles:
    """The tile shapes for a problem on its device."""
    if _instruments.tiles is not None:
        return _instruments.tiles
    hidden = problem.hidden
    return tiles(hidden.dtype, capability(hidden.device), Units.of(problem).align)


def num_splits(problem: Problem, block_c: int) -> int:
    """Programs that share a tile of the problem in the forward."""
    if _instruments.num_splits is not None:
        return _instruments.num_splits
    return splits_per_tile(problem.max_path_columns, problem.depth, block_c)


class Units(NamedTuple):
    """H and the strides in units of `align` elements, so that the compiler knows what divides them:
    rows of 300 halves are not multiples of 16, but of 4.

    Attributes:
        align: elements of a unit, a power of two up to 16.
        size: H.
        hidden_stride: between hidden vectors.
        weight_stride: between rows of the weight.
    """

    align: int
    size: int
    hidden_stride: int
    weight_stride: int

    @classmethod
    def of(cls, problem: Problem) -> "Units":
        """The units of hidden and weight."""
        hidden, weight = problem.hidden, problem.weight
        sizes = (hidden.shape[1], hidden.stride(0), weight.stride(0))
        align = math.gcd(*sizes, 16)
        return cls(align, *(size // align for size in sizes))


def visit_arguments(visits: Visits) -> dict[str, Tensor]:
    """The visits, as all kernels take them."""
    return {"position": visits.position, "node": visits.node, "child": visits.child}


def node_arguments(tree: TreeArrays) -> dict[str, Tensor]:
    """The nodes of the tree, as all kernels take them."""
    return {
        "first_row": tree.first_row,
        "num_children": tree.num_children,
        "column": tree.column,
    }


def arithmetic_arguments(hidden: Tensor, units: Units) -> dict[str, Any]:
    """Constants of the kernels that follow from the dtype and the alignment."""
    import triton.language as tl

    fast = torch.get_float32_matmul_precision() != "highest"
    return {
        "ACC": tl.float64 if hidden.dtype == torch.float64 else tl.float32,
        "PRECISION": "tf32" if fast and hidden.dtype == torch.float32 else "ieee",
        "ALIGN": units.align,
    }


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for other devices."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
