"""The model counts what the interpreter does, finds loops in compiled code, and adds up."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.output import ClassTree
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import Launch, execute, instrumented
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from scripts.benchmarks.kernel_model import PROCESSORS, makespan
from scripts.benchmarks.kernel_work import Work, work
from scripts.benchmarks.methods import zipf

TOP = Path(__file__).resolve().parents[3]
SHAPES = Tiles(
    Tile(v=32, c=16, h=16, warps=4, stages=1),
    Tile(v=16, c=16, h=0, warps=4, stages=1),
    Tile(v=32, c=32, h=32, warps=4, stages=1, step=16),
    Tile(v=16, c=16, h=16, warps=4, stages=1),
    chunk=48,
)
LARGE = ("sorted_hidden", "weight", "errors", "exp_logits", "partial_hidden", "partial_rows")
GRADIENTS = ("d_hidden", "d_weight")
BACKWARD = ("_heavy", "_rows")


class Counter:
    """Loads, stores, products and steps of the interpreter by launch and tensor."""

    def __init__(self) -> None:
        self.kernel = ""
        self.tensors: dict[str, tuple[int, int]] = {}
        self.loaded: dict[tuple[str, str], int] = defaultdict(int)
        self.touched: dict[tuple[str, str, str], list[Any]] = defaultdict(list)
        self.products: dict[str, int] = defaultdict(int)
        self.work: dict[str, Work] = {}

    def run(self, launch: Launch) -> None:
        """Execute a launch and count what it touches."""
        self.kernel = launch.kernel.__name__
        self.tensors = {
            name: (value.data_ptr(), value.data_ptr() + value.numel() * value.element_size())
            for name, value in launch.arguments.items()
            if isinstance(value, torch.Tensor) and value.numel()
        }
        execute(launch)
        self.work[self.kernel] = work(launch)

    def count(self, kind: str, pointers: Any, mask: Any, size: int) -> None:
        """Count one load or store of elements of `size` bytes."""
        addresses = np.broadcast_to(pointers, mask.shape)[mask.astype(bool)]
        for name, (begin, end) in self.tensors.items() if addresses.size else ():
            if begin <= addresses.min() < end:
                self.loaded[self.kernel, name] += addresses.size * size * (kind == "load")
                self.touched[self.kernel, name, kind].append(addresses)

    def once(self, kernel: str, *names: str) -> int:
        """Bytes read and bytes written of fp32 tensors, every element once."""
        found = [
            np.unique(np.concatenate(self.touched[key])).size * 4
            for key in list(self.touched)
            if key[0] == kernel and key[1] in names
        ]
        return sum(found)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Counts the launches of the test."""
    from triton.runtime import interpreter

    found, builder = Counter(), interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    dot = builder.create_dot

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        result = load(self, pointers, mask, *rest)
        found.count("load", pointers.data, mask.data, result.data.itemsize)
        return result

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found.count("store", pointers.data, mask.data, value.data.itemsize)
        return store(self, pointers, value, mask, *rest)

    def counted_dot(self: Any, *arguments: Any) -> Any:
        found.products[found.kernel] += 1
        return dot(self, *arguments)

    monkeypatch.setattr(builder, "create_masked_load", counted_load)
    monkeypatch.setattr(builder, "create_masked_store", counted_store)
    monkeypatch.setattr(builder, "create_dot", counted_dot)
    with instrumented(run=found.run, tiles=SHAPES):
        yield found


@pytest.mark.parametrize(
    ("tree", "positions", "size"),
    [
        (ClassTree.two_level(torch.arange(90) // 9), 200, 24),
        (ClassTree.two_level(torch.arange(400) // 25), 70, 40),
        (ClassTree.balanced(150, 5), 60, 16),
        (ClassTree.full(50), 130, 16),
    ],
)
def test_counts_equal_those_of_the_interpreter(
    tree: ClassTree, positions: int, size: int, counter: Counter
) -> None:
    hidden, weight = torch.randn(positions, size), torch.randn(tree.num_rows, size)
    target, _ = zipf(tree.vocab_size, positions)
    problem = Problem.of(hidden, weight, target, tree)
    backend, needs = TritonBackend(), Needs(hidden=True, weight=True, bias=False)
    nll, saved = backend.forward(problem, needs)
    backend.backward(torch.ones_like(nll), problem, saved, needs)
    found = counter.work
    assert list(found) == ["_sort", "_merge", "_plan", "_forward", "_errors", "_heavy", "_rows"]
    iterations = {
        name: sum(int(copy.sum()) for copy in copies)
        for done in found.values()
        for name, copies in done.loops.items()
    }
    assert counter.products["_forward"] == iterations["_logits:h0"]
    chunks, rows = (int(found[name].loops["_heavy_rows:v0"][0].sum()) for name in BACKWARD)
    assert counter.products["_heavy"] == chunks + 2 * iterations["_heavy_hidden:c0"]
    assert counter.products["_rows"] == rows + 2 * iterations["_light_group:c0"]
    loads = {"_rows": (*LARGE, "node_of_row")}
    for kernel in ("_forward", "_errors", *BACKWARD):
        names = loads.get(kernel, LARGE)
        loaded = sum(counter.loaded[kernel, name] for name in names)
        assert found[kernel].loaded == loaded, kernel
    memory = {kernel: counter.once(kernel, *LARGE, *GRADIENTS, "block_max") for kernel in found}
    memory["_rows"] += tree.num_rows * 8
    for kernel in ("_forward", "_errors", *BACKWARD):
        assert found[kernel].memory == memory[kernel], kernel


def test_programs_take_the_first_free_place() -> None:
    ones = np.ones(PROCESSORS * 2 + 1)
    assert makespan(ones, 1) == 3
    assert makespan(ones, 2) == 2
    assert makespan(np.array([5.0, *ones]), 1) == 5


SASS = """
import json, sys, torch
from scripts.benchmarks.kernel_report import compiled, launches
from scripts.benchmarks.sass_loops import loops
found = {}
for launch in launches(64, 64, torch.bfloat16, 90):
    if launch.kernel.__name__ in ("_forward", "_errors"):
        cubin = compiled(launch, 90).asm["cubin"]
        found[launch.kernel.__name__] = [tuple(loop) for loop in loops(cubin)]
print(json.dumps(found))
"""


def test_loops_of_compiled_kernels_are_those_of_the_source(tmp_path: Path) -> None:
    """In a cache of its own: kernels name the files that they were compiled from."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SASS],
        capture_output=True,
        text=True,
        cwd=TOP,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    names = [name for name, *_ in found["_forward"] if ":" in name]
    part = ["_forward_tile:c0", "_logits:h0", "_finish:d"]
    assert names == [*part, *part]
    inner = [loop for loop in found["_forward"] if loop[0] == "_logits:h0"]
    for _, instructions, flops, waits, innermost in inner:
        assert innermost
        assert 50 < instructions < 1000
        assert flops > 0
        assert waits == 1
    assert [name for name, *_ in found["_errors"] if ":" in name] == ["_errors:d", "_errors:c0"]
    assert all(flops == 0 for _, _, flops, *_ in found["_errors"])
