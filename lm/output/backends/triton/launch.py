"""Launches of the fused kernels: what a launch is, how it is made, and who executes it.

`instrumented` is the public hook for counting, timing or compiling launches and for trying tile
shapes.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.output.backends.base import Problem
from lm.output.backends.triton.routing import MAX_SPLITS, Routing
from lm.output.backends.triton.tile_shapes import Tile, Tiles, compiler_options, tf32, tiles

SLOT = 16
"""The children of a node begin at multiples of so many in `Saved.exp_logits`."""


VARYING = [
    "P", "mean", "num_runs", "run_size", "steps", "chunk", "num_plans", "num_splits", "max_heavy",
    "row_programs", "max_groups", "max_split_tiles", "d_nll_stride",
    "max_nodes",
]  # fmt: skip
"""Arguments that differ between batches; no kernel is compiled again for 1 or multiples of 16."""
DEPENDENT = "SQRTLM_DEPENDENT_LAUNCHES"
"""The environment variable that, as "1", puts the programs of a launch on processors that become
free before the launch in front of it has ended (programmatic dependent launch), on devices of
compute capability 9.0 and above. Not run on a GPU yet.
"""
FILLING_TILES = 2048
"""Programs from which on more of them would not make the forward faster."""


class Saved(NamedTuple):
    """What the forward saves: the batch, and the results of (7) and (8) of `forward_kernel`.

    Without a backward there are no slots and blocks. Values [D, P] are undefined where there is no
    visit.
    """

    routing: Routing
    exp_logits: Tensor  # [P, slots] in the dtype of hidden, k of the children on a path
    block_max: Tensor  # [P, blocks], m
    lse: Tensor  # [D, P]
    target_logit: Tensor  # [D, P]
    sorted_hidden: Tensor  # [P, H up to a multiple of 16]: hidden by sorted position, then zeros


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: Any  # the jit function, whose name is `kernel.__name__`
    num_programs: int  # size of the grid, which has one axis
    tile: Tile  # what a program works on, and how the kernel is compiled
    arguments: dict[str, Any]  # of the kernel, by name

    @property
    def options(self) -> dict[str, Any]:
        """Options of the compiler."""
        dependent = {"launch_pdl": True} if self.arguments["DEPENDENT"] else {}
        return compiler_options(self.tile) | dependent


class _Instruments(NamedTuple):
    run: Callable[[Launch], None] | None = None
    tiles: Tiles | None = None
    capability: int | None = None
    num_splits: int | None = None
    dependent: bool | None = None


_instruments = _Instruments()  # not a context variable: autograd runs backwards in other threads


@contextmanager
def instrumented(
    *,
    run: Callable[[Launch], None] | None = None,
    tiles: Tiles | None = None,
    capability: int | None = None,
    num_splits: int | None = None,
    dependent: bool | None = None,
) -> Iterator[None]:
    """Replace how the kernels are launched while the context is active, in all threads.

    Contexts nest; an argument that is None leaves the setting of the outer context.

    Args:
        run: called with every launch instead of executing it; may call `execute`.
        tiles: the tile shapes of all kernels.
        capability: the compute capability x 10 that the device is taken to have.
        num_splits: programs that share a tile in the forward.
        dependent: in place of the environment variable `DEPENDENT`.
    """
    global _instruments
    outer, inner = _instruments, _Instruments(run, tiles, capability, num_splits, dependent)
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
    device = next(value.device for value in launch.arguments.values() if torch.is_tensor(value))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        grid = (launch.num_programs,)
        launch.kernel[grid](**launch.arguments, **launch.options)


def arguments(problem: Problem, saved: Saved) -> dict[str, Any]:
    """What the kernels of a batch take, by name.

    The problem (hidden, target, bias and rows of the weight are contiguous), its tree, and what the
    forward saved; their sizes and strides; the constants of the arithmetic.
    """
    import triton.language as tl

    hidden, routing = problem.hidden, saved.routing
    align, weight_align = alignment(problem)
    return {
        **problem._asdict(),
        **problem.tree._asdict(),
        **saved._asdict(),
        **routing._asdict(),
        "P": problem.num_positions,
        "mean": int(problem.mean),
        "D": problem.depth,
        "N": problem.vocab_size,
        "num_nodes": routing.visited.numel(),
        "path_slots": saved.exp_logits.shape[1] // SLOT,
        "path_blocks": saved.block_max.shape[1],
        "LIGHT": tiles_for(problem).light.v,
        "ACC": tl.float64 if hidden.dtype == torch.float64 else tl.float32,
        "PRECISION": "tf32" if hidden.dtype == torch.float32 and tf32() else "ieee",
        "ALIGN": align,
        "WEIGHT_ALIGN": weight_align,
        "DEPENDENT": dependent_launches(hidden.device),
        "h_units": hidden.shape[1] // align,
        "sorted_units": saved.sorted_hidden.shape[1] // SLOT,
        "weight_units": problem.weight.shape[1] // weight_align,
    }


def launch(
    kernel: Any, num_programs: int, tile: Tile, known: dict[str, Any], **special: Any
) -> None:
    """Make a launch and run it, or hand it to `instrumented`.

    Args:
        kernel: the jit function; it takes its arguments by name, and its constants from the tile.
        num_programs: size of the grid.
        tile: what a program works on.
        known: `arguments` of the batch.
        special: further ones, which have priority.
    """
    sizes = {"BLOCK_V": tile.v, "BLOCK_C": tile.c, "BLOCK_H": tile.h, "STEP": tile.step}
    sizes["FLATTEN"] = tile.flatten
    values = known | sizes | special
    given = {name: values[name] for name in kernel.arg_names}
    (_instruments.run or execute)(Launch(kernel, num_programs, tile, given))


def capability(device: torch.device) -> int:
    """Compute capability x 10 of a device; that of an H100 for the interpreter."""
    if _instruments.capability is not None:
        return _instruments.capability
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def dependent_launches(device: torch.device) -> bool:
    """Whether programs of a launch may be on processors before the launch in front of it ends."""
    asked = _instruments.dependent
    if asked is None:
        asked = device.type == "cuda" and os.environ.get(DEPENDENT) == "1"
    return asked and capability(device) >= 90


def tiles_for(problem: Problem) -> Tiles:
    """The tile shapes for a problem on its device."""
    if _instruments.tiles is not None:
        return _instruments.tiles
    dtypes, device = (problem.hidden.dtype, problem.weight.dtype), problem.hidden.device
    tensor_cores = dtypes[0] == torch.float32 and tf32()
    return tiles(dtypes, capability(device), alignment(problem), tensor_cores=tensor_cores)


def splits_for(problem: Problem) -> int:
    """Programs that share a tile of a problem in the forward.

    As many as fill a device, and at most one per block of children of a node of average width.
    """
    if _instruments.num_splits is not None:
        return _instruments.num_splits
    tile, depth = tiles_for(problem).forward, problem.depth
    visits, num_nodes = depth * problem.num_positions, problem.tree.num_children.numel()
    num_tiles = min(visits, num_nodes) + visits // tile.v
    blocks = -(-problem.max_path_columns // (depth * tile.c))
    return max(1, min(blocks, MAX_SPLITS, -(-FILLING_TILES // max(num_tiles, 1))))


def path_slots(problem: Problem) -> int:
    """Columns of `Saved.exp_logits`: each level may leave some of its last ones empty."""
    return (problem.max_path_columns // SLOT + problem.depth) * SLOT


def path_blocks(problem: Problem) -> int:
    """Columns of `Saved.block_max`: each level may leave a block of children partly empty."""
    return problem.max_path_columns // tiles_for(problem).forward.c + problem.depth


def alignment(problem: Problem) -> tuple[int, int]:
    """The largest powers of two up to 16 that divide H, and the number of columns of the weight.

    Kernels take both in units of so many elements, so that the compiler knows what divides them:
    rows of 300 halves are not multiples of 16, but of 4.
    """
    return math.gcd(problem.hidden.shape[1], 16), math.gcd(problem.weight.shape[1], 16)
