"""Tile shapes of the fused kernels, and how they are compiled.

Those for half precision on sm_90 are the best of the shapes timed on an H100; the others are chosen
by what the compiler reports. To change one, try it with `launch.instrumented(tiles=...)`, write it
into `_TILES` or where `tiles` replaces it, and see `python -m scripts.kernels.compilation --help`.
"""

import importlib
import importlib.util
import re
import sys
from functools import cache
from typing import NamedTuple

import torch

from lm.output.tracing import constant_when_compiled

MAX_REGISTERS = 255
"""Registers of a thread; without it the assembler spills to fit more programs on a processor."""

SPILLS_LESS = (3, 9, 0)
"""The first version of Triton that needs at most 128 registers of a thread for norms in bf16 on
sm_90.
"""


class Tile(NamedTuple):
    """What a program of one kernel works on at a time; 0 for a dimension that it does not have."""

    v: int  # visits
    c: int  # children
    h: int  # columns of H
    warps: int
    stages: int  # loads in flight ahead of the product
    step: int = 0  # visits or children added at a time, where that is not v or c
    flatten: bool = False  # of the forward: one loop over blocks of children and of H
    registers: int = MAX_REGISTERS


class Tiles(NamedTuple):
    """Tile shapes of the kernels."""

    forward: Tile
    errors: Tile  # with `c` of the forward, see `Plan.errors_tile`
    heavy: Tile  # `v` x `h` of d_hidden, `step` children at a time, and `c` x `h` of d_weight
    light: Tile  # its `v` is the most visits of a light node
    chunk: int = 512  # least number of visits per program where several share the rows of a node
    norm: Tile = Tile(16, 64, 64, 4, 3, 16)  # of `_update`, whose `step` visits are few
    update: Tile = Tile(16, 32, 64, 4, 3, 16)
    adam: Tile = Tile(16, 32, 32, 4, 3, 16)
    bias: Tile = Tile(16, 128, 16, 4, 1, 16)


_ERRORS = Tile(16, 0, 0, 4, 1)
NARROW, WIDE = 256, 2048
"""Children of a node, on average. In half precision on sm_90, up to the first number tiles of fewer
children are the fastest in the forward and of fewer columns for light nodes, and beyond the second
more loads in flight for these.
"""
_NARROW_FORWARD = Tile(128, 64, 64, 8, 3)
_LIGHT = Tile(64, 64, 64, 4, 3)
_FEW_FORWARD, _FEW_HEAVY = Tile(128, 128, 32, 8, 3), Tile(128, 128, 64, 4, 3, 64)
"""Forward and heavy tiles for half precision on sm_90, where 8 does not divide the columns of the
weight, or 2 those of d_hidden, 4 in fp16: addresses of so few columns at a time take registers.
Rows in fp32, which pass through registers, also need such heavy tiles.
"""
_SINGLE_UPDATE, _EXACT_UPDATE = Tile(16, 32, 32, 4, 3, 16), Tile(16, 32, 32, 4, 1, 16)
_TILES = {
    # Without wgmma all operands pass through registers.
    ("half", 80): Tiles(
        Tile(64, 128, 32, 8, 3), _ERRORS, Tile(128, 128, 64, 8, 3, 32), Tile(64, 32, 64, 8, 2)
    ),
    # The best on an H100 for 33k to 10M words, or level with it: several programs of 4 warps on a
    # processor hide each other's waits.
    ("half", 90): Tiles(
        Tile(64, 128, 64, 4, 4, flatten=True), _ERRORS, Tile(128, 128, 128, 4, 4, 32),
        _LIGHT._replace(registers=168), norm=Tile(16, 64, 64, 4, 3, 16, registers=128),
        update=Tile(16, 16, 64, 1, 3, 16, registers=224),
    ),
    # The logits of a block pass from tensor memory through registers.
    ("half", 100): Tiles(
        _NARROW_FORWARD, _ERRORS, Tile(128, 128, 128, 8, 3, 64), Tile(64, 64, 128, 8, 3)
    ),
    # Twice the bytes.
    ("single", 80): Tiles(
        Tile(64, 64, 32, 8, 2), _ERRORS, Tile(64, 64, 64, 8, 2, 32), Tile(64, 32, 32, 8, 2),
        norm=_SINGLE_UPDATE, update=_SINGLE_UPDATE,
    ),
    # With a second stage, the light loop loads into the operands of a wgmma that still runs.
    ("single", 90): Tiles(
        Tile(64, 64, 32, 8, 2), _ERRORS, Tile(64, 64, 64, 8, 2, 32), Tile(64, 32, 32, 8, 1),
        norm=_SINGLE_UPDATE, update=_SINGLE_UPDATE,
    ),
    # No tensor cores: products by threads, so that positions without a visit cost as much as
    # others.
    ("exact", 80): Tiles(
        Tile(32, 32, 32, 8, 2), _ERRORS, Tile(32, 32, 32, 8, 2, 32),
        Tile(16, 32, 16, 8, 3), norm=_EXACT_UPDATE, update=_EXACT_UPDATE, adam=_EXACT_UPDATE,
    ),
}  # fmt: skip
"""By kind of product and least architecture; the largest tried that spill no register."""


@cache
def tiles(
    dtypes: tuple[torch.dtype, torch.dtype],
    capability: int,
    align: tuple[int, int],
    width: int,
    *,
    tensor_cores: bool,
) -> Tiles:
    """The tile shapes for the dtypes of hidden vectors and rows.

    `align` are powers of two that divide H and the columns of the weight; `width` is how many
    children a node has on average. The architecture is given as compute capability x 10: 80, 90,
    100.
    """
    (dtype, rows), (hidden_align, weight_align) = dtypes, align
    kind = "half" if dtype.itemsize == 2 else "single" if tensor_cores else "exact"
    fitting = [sm for of, sm in _TILES if of == kind and sm <= max(capability, 80)]
    found = _TILES[kind, max(fitting)]
    spills = (triton_version() or SPILLS_LESS) < SPILLS_LESS or dtype == torch.float16
    if spills and found.norm.registers < 168:
        found = found._replace(norm=found.norm._replace(registers=168))
    if kind == "half" and 90 <= capability < 100:
        if dtype == torch.float16:  # spills where bf16 does not
            update = found.update._replace(registers=MAX_REGISTERS)
            found = found._replace(light=_LIGHT, update=update)
        found = _for_width(found, width)
        if hidden_align < (4 if dtype == torch.float16 else 2) or rows.itemsize > 2:
            found = found._replace(heavy=_FEW_HEAVY)
    if kind == "half" and 90 <= capability < 100 and rows.itemsize > 2:  # twice the bytes
        light = _LIGHT._replace(c=32 if hidden_align <= 2 else 64)
        found = found._replace(forward=found.forward._replace(stages=3), light=light)
    if kind == "half" and capability >= 100 and hidden_align <= 2 and rows.itemsize > 2:
        found = found._replace(heavy=found.heavy._replace(step=32))  # addresses take registers
    if kind == "half" and (weight_align < 8 or rows.itemsize > 2):
        found = found._replace(update=found.update._replace(h=32))
    if kind == "half" and weight_align < 8:
        if capability >= 100:
            narrow = _NARROW_FORWARD._replace(h=64 if weight_align == 4 else 32)
            found = found._replace(forward=narrow)
        elif capability >= 90:
            found = found._replace(forward=_FEW_FORWARD, heavy=_FEW_HEAVY)
        light = _LIGHT._replace(c=found.light.c) if 90 <= capability < 100 else found.light
        if capability >= 90 and weight_align <= 2:
            light = light._replace(h=4 * light.warps * weight_align)
        found = found._replace(light=light)
    return found


def _for_width(found: Tiles, width: int) -> Tiles:
    """The tiles for half precision on sm_90, for nodes of a width."""
    if width <= NARROW:
        light = found.light._replace(h=32, registers=128)
        return found._replace(forward=Tile(128, 64, 64, 4, 4, flatten=True), light=light)
    if width > WIDE:
        return found._replace(light=found.light._replace(stages=4, registers=MAX_REGISTERS))
    return found


def tf32() -> bool:
    """Whether products of fp32 numbers may round them to tf32, as those of torch on CUDA.

    `torch.get_float32_matmul_precision` raises where the precision was set for a single backend.
    """
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32"


@constant_when_compiled
def triton_version() -> tuple[int, int, int] | None:
    """Version of the installed Triton, without a suffix; None if there is none."""
    if "triton" not in sys.modules:
        if importlib.util.find_spec("triton") is None:
            return None
        importlib.import_module("triton")
    return _parsed(sys.modules["triton"].__version__)


@cache
def _parsed(version: str) -> tuple[int, int, int]:
    parts = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    assert parts is not None
    return int(parts[1]), int(parts[2]), int(parts[3])


@cache
def compiler_options(tile: Tile) -> dict[str, int]:
    """Options of the compiler for the kernel of a tile."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    return options if torch.version.hip else options | {"maxnreg": tile.registers}
