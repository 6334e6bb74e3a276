"""Tile shapes of the fused kernels, and how they are compiled.

Chosen by what the compiler reports for sm_80, sm_90 and sm_100; not yet timed on a GPU.
"""

import importlib
import importlib.util
from typing import NamedTuple

import torch

from lm.output.rowwise.eager import constant_when_compiled

MAX_REGISTERS = 255
"""Of a thread; without it the assembler spills to fit more programs on a processor."""


class Tile(NamedTuple):
    """What a program of one kernel works on at a time."""

    v: int  # positions
    h: int  # columns of H
    warps: int
    stages: int  # loads in flight ahead of the product


class Tiles(NamedTuple):
    """Tile shapes of the kernels."""

    block_c: int  # children in a block, the same for all kernels, as in `Saved.exp_logits`
    forward: Tile
    d_hidden: Tile
    d_weight: Tile
    d_light: Tile  # its `v` is `schedule.LIGHT`


_TILES = {
    # Without wgmma all operands pass through registers: 32 columns, or the kernels spill.
    ("half", 80): Tiles(
        64, Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 4, 2), Tile(16, 32, 4, 3)
    ),
    # 64 positions and 64 children fill a warp group's wgmma. d_hidden computes errors along with
    # its product and needs eight warps for the registers; d_light holds a block of W, of h and of
    # d_weight at a time: a third stage spills.
    ("half", 90): Tiles(
        64, Tile(64, 64, 4, 3), Tile(64, 64, 8, 3), Tile(64, 64, 4, 3), Tile(16, 64, 4, 2)
    ),
    # The same, but accumulators live in tensor memory: four warps have enough registers.
    ("half", 100): Tiles(
        64, Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(16, 64, 4, 2)
    ),
    # Twice the bytes, and without tf32 no tensor cores: products by threads, whose operands take
    # all registers of eight warps at 32 x 32.
    ("single", 80): Tiles(
        32, Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 16, 4, 3)
    ),
}
"""By size of a number and least architecture; the largest tried that spill no register."""
_WIDE_D_HIDDEN = Tile(64, 128, 8, 3)
"""For half precision from sm_90 on, where 4 divides H: `Saved.exp_logits` is read half as often.
Columns that are loaded one by one or in pairs take the registers that this needs.
"""


def tiles(dtype: torch.dtype, capability: int, align: int) -> Tiles:
    """The tile shapes for hidden vectors of a dtype, and strides that a power of two divides.

    The architecture is given as compute capability x 10: 80, 90, 100.
    """
    size = "half" if dtype.itemsize == 2 else "single"
    fitting = [sm for kind, sm in _TILES if kind == size and sm <= max(capability, 80)]
    found = _TILES[size, max(fitting)]
    if size == "half" and capability >= 90 and align >= 4:
        found = found._replace(d_hidden=_WIDE_D_HIDDEN)
    return clean_stages(found, capability)


@constant_when_compiled
def triton_version() -> tuple[int, int] | None:
    """Major and minor version of the installed Triton; None if there is none."""
    if importlib.util.find_spec("triton") is None:
        return None
    major, minor, *_ = importlib.import_module("triton").__version__.split(".")
    return int(major), int(minor)


def clean_stages(found: Tiles, capability: int) -> Tiles:
    """Tiles whose kernels have no hazard, where products with an operand in registers have some.

    Before Triton 3.9 registers are overwritten that an asynchronous product of sm_90 still reads;
    with one stage each product is waited for. See `scripts.benchmarks.sass`.
    """
    version = triton_version()
    if version is None or version >= (3, 9) or capability // 10 != 9:
        return found
    single = {n: getattr(found, n)._replace(stages=1) for n in ("d_hidden", "d_weight", "d_light")}
    return found._replace(**single)


def compiler_options(tile: Tile) -> dict[str, int]:
    """Options of the compiler for the kernel of a tile."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    return options if torch.version.hip else options | {"maxnreg": MAX_REGISTERS}
