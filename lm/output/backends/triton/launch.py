"""Launches of the fused kernels: what a launch is, how it is made, and who executes it.

`instrumented` is the public hook for counting, timing or compiling launches and for trying tile
shapes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from lm.output.backends.triton.tile_shapes import Tile, Tiles, compiler_options
from lm.output.tracing import constant_when_compiled

SLOT = 16
"""The children of a node begin at multiples of this number in `plan.Memory.exp_logits`."""
VARYING = [
    "P", "run_size", "steps", "chunk", "num_splits", "max_heavy",
    "chunk_programs", "row_programs", "max_groups", "max_split_tiles", "d_nll_stride", "num_shares",
]  # fmt: skip
"""Arguments that differ between batches; no kernel is compiled again for 1 or multiples of 16. They
are in no group, where Triton specialises every number.
"""
MODULES = {
    **dict.fromkeys(("_sort", "_merge", "_plan"), "routing_kernels"),
    **dict.fromkeys(("_errors", "_heavy"), "backward_kernels"),
    "_forward": "forward_kernel",
    "_rows": "row_kernel",
    "_update": "update_kernel",
    "_draw": "draw_kernel",
}
"""Where each kernel is."""


class Meta(NamedTuple):
    """The constants of a kernel."""

    tile: Tile
    light: Tile
    visits: int  # `v` of the forward's tiles: visits of an entry of `Routing.heavy_tiles`
    rows: int  # `c` of the tiles of heavy nodes: children of an entry of `Routing.row_tiles`
    precision: str  # of products of fp32
    hidden: int  # H
    columns: int  # of the weight


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: Any  # the jit function, whose name is `kernel.__name__`
    num_programs: int  # size of the grid, which has one axis
    tile: Tile  # what a program works on, and how the kernel is compiled
    arguments: dict[str, Any]  # of the kernel, by name; groups of them are NamedTuples

    @property
    def options(self) -> dict[str, Any]:
        """Options of the compiler."""
        return compiler_options(self.tile)


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


def instruments() -> _Instruments:
    """What `instrumented` has set."""
    return _instruments


def execute(launch: Launch) -> None:
    """Run a launch on the device of its arguments, or interpret it on a CPU."""
    arguments = launch.arguments
    device = arguments["routing" if "routing" in arguments else "word"].device
    if not launch.num_programs:
        return
    is_other = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if is_other else nullcontext():
        launch.kernel[(launch.num_programs,)](**arguments, **launch.options)


def launch(name: str, num_programs: int, tile: Tile, **arguments: Any) -> None:
    """Make a launch of the kernel of that name and run it, or hand it to `instrumented`."""
    (_instruments.run or execute)(Launch(_kernel(name), num_programs, tile, arguments))


@cache
def _kernel(name: str) -> Any:
    """A kernel, whose module imports Triton."""
    return getattr(import_module(f"{__package__}.{MODULES[name]}"), name)


def capability(device: torch.device) -> int:
    """Compute capability x 10 of a device; that of an H100 for the interpreter."""
    if _instruments.capability is not None:
        return _instruments.capability
    return 90 if device.type != "cuda" else _capability(device)


@constant_when_compiled
def _capability(device: torch.device) -> int:
    if device not in _capabilities:
        major, minor = torch.cuda.get_device_capability(device)
        _capabilities[device] = 10 * major + minor
    return _capabilities[device]


_capabilities: dict[torch.device, int] = {}
