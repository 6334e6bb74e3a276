"""The kernels compile for an architecture without its GPU, and no kernel spills registers."""

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.backends.nvidia")

from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import VARYING, Launch, instrumented
from tests.conftest import python

from ...output.definition import two_level

KERNELS = "_draw _errors _forward _heavy _merge _plan _rows _sort _update"
CONSTANTS = {"ACC", "EXACT", "META", "SORTED", "TILE", "W"}
"""Arguments that a kernel is compiled for and the host does not pass to it."""
HUGE = """
import torch
from lm.output import ClassTree
from lm.output.backends.base import Problem
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from scripts.kernels.compilation import compile_all, launches
tiles = Tiles(*[Tile(32, 32, 32, 1, 1, 32, registers=32)] * 4)
problem = Problem.without_values(90, 64, ClassTree.two_level(num_words=1000), torch.bfloat16)
found = launches(problem, 80, tiles)
print(*compile_all([(each, 80) for each in found if each.kernel.__name__ == "_forward"]))
"""


def compiling(*arguments: str) -> tuple[int, str]:
    """Exit code and output of Python, in which kernels are compiled, not interpreted."""
    done = python("-W", "error", *arguments, env=os.environ | {"TRITON_INTERPRET": "0"})
    return done.returncode, done.stderr[-2000:] + done.stdout


@pytest.mark.parametrize(("capability", "dtype"), [("80", "tf32"), ("90", "bf16")])
def test_kernels_compile_without_spills_and_with_tensor_cores(capability: str, dtype: str) -> None:
    of = ["--rows", "100000:64", "--sm", capability, "--dtype", dtype, "--all"]
    code, printed = compiling("-m", "scripts.kernels.compilation", *of)
    assert (code, printed.rpartition(": ")[2]) == (0, f"{KERNELS}\n"), printed


def test_a_kernel_that_spills_is_reported() -> None:
    """With tiles that exceed the registers of their threads."""
    code, printed = compiling("-c", HUGE)
    assert code == 0, printed
    assert printed.startswith("spills ")


@pytest.mark.parametrize(("num_words", "size"), [(33_278, 300), (1_000_000, 3000)])
def test_batches_of_many_sizes_share_compiled_kernels(num_words: int, size: int) -> None:
    """The seven kernels, and the sort once more for each length of runs.

    Triton compiles a kernel for the dtypes of tensors, for constants, and for numbers that are 1 or
    multiples of 16, unless these are not to be specialised.
    """
    tree, generator = two_level(num_words, round(num_words**0.5)), random.Random(0)
    needs, found = Needs(hidden=True, weight=True, bias=True), set[object]()

    def kind(name: str, value: object) -> object:
        if isinstance(value, int) and name not in CONSTANTS:
            return value >= 2**31, name not in VARYING and (value == 1 or value % 16 == 0)
        return value.dtype if isinstance(value, Tensor) else value

    def compile_for(launch: Launch) -> None:
        given: dict[str, Any] = {}
        for name, value in launch.arguments.items():
            given |= value._asdict() if hasattr(value, "_asdict") else {name: value}
        of = [kind(*each) for each in given.items()]
        found.add((launch.kernel.__name__, str(launch.tile), str(of)))

    for _ in range(200):
        num_positions = int(2 ** generator.uniform(0, 16))
        problem = Problem.without_values(num_positions, size, tree, torch.bfloat16)
        with instrumented(run=compile_for, capability=90):
            target = torch.empty(num_positions, dtype=torch.int64, device="meta")
            nll, _, saved = TritonBackend().nll(target, problem, needs)
            TritonBackend().backward(nll, problem, saved, needs)
    assert len(found) <= 12
