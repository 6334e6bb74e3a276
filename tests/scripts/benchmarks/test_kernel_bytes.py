"""The bytes that the kernels move: the formula equals a count, and the cache lies between its
extremes.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lm.output import ClassTree
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import Launch, execute, instrumented
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from scripts.benchmarks.kernel_bytes import counts, row, through_cache, zero_bytes
from scripts.benchmarks.kernel_traces import Batch, Launches
from scripts.benchmarks.methods import zipf

SHAPES = Tiles(16, Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1))


class Counter:
    """Loads and stores of the interpreter by launch and tensor."""

    def __init__(self) -> None:
        self.kernel = ""
        self.tensors: dict[str, tuple[int, int]] = {}
        self.all: dict[tuple[str, str], int] = defaultdict(int)
        self.seen: dict[tuple[str, str], list[Any]] = defaultdict(list)

    def run(self, launch: Launch) -> None:
        """Execute a launch and count what it touches."""
        self.kernel = launch.kernel.__name__
        self.tensors = {
            name: (value.data_ptr(), value.data_ptr() + value.numel() * value.element_size())
            for name, value in launch.arguments.items()
            if isinstance(value, torch.Tensor) and value.numel()
        }
        execute(launch)

    def count(self, pointers: Any, mask: Any, size: int) -> None:
        """Count one load or store of elements of `size` bytes."""
        addresses = np.broadcast_to(pointers, mask.shape)[mask.astype(bool)]
        if addresses.size:
            for name, (begin, end) in self.tensors.items():
                if begin <= addresses.min() < end:
                    self.all[self.kernel, name] += addresses.size * size
                    self.seen[self.kernel, name].append(addresses)

    def memory(self, key: tuple[str, str], size: int) -> int:
        """Bytes of a tensor in a launch, every element once."""
        return int(np.unique(np.concatenate(self.seen[key])).size) * size


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Counts the launches of the test."""
    from triton.runtime import interpreter

    found = Counter()
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        result = load(self, pointers, mask, *rest)
        found.count(pointers.data, mask.data, result.data.itemsize)
        return result

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found.count(pointers.data, mask.data, value.data.itemsize)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", counted_load)
    monkeypatch.setattr(builder, "create_masked_store", counted_store)
    with instrumented(run=found.run, tiles=SHAPES):
        yield found


@pytest.mark.parametrize(
    ("tree", "positions", "size"),
    [
        (ClassTree.two_level(torch.arange(90) // 9), 100, 20),
        (ClassTree.two_level(torch.arange(400) // 25), 70, 40),
        (ClassTree.balanced(150, 5), 60, 16),
        (ClassTree.full(50), 30, 16),
    ],
)
def test_the_formula_counts_what_the_interpreter_loads_and_stores(
    tree: ClassTree, positions: int, size: int, counter: Counter
) -> None:
    hidden, weight = torch.randn(positions, size), torch.randn(tree.num_rows, size)
    target, _ = zipf(tree.vocab_size, positions)
    problem = Problem.of(hidden, weight, None, target, tree)
    backend, needs = TritonBackend(), Needs(hidden=True, weight=True, bias=False)
    nll, saved = backend.forward(problem, needs)
    backend.backward(torch.ones_like(nll), problem, saved, needs)
    batch = Batch(target, tree, size, 4, SHAPES)
    counted = counts(batch)
    assert sum(count.all for count in counted) > 0
    for count in counted:
        key = (count.kernel, count.tensor)
        item = 8 if count.tensor == "node_of_row" else 4
        assert counter.all[key] == count.all, key
        assert (counter.memory(key, item) if count.all else 0) == count.memory, key
    named = {(count.kernel, count.tensor) for count in counted}
    others = sum(value for key, value in counter.all.items() if key not in named)
    num_visits = int(batch.visited.sum())
    assert others < 400 * num_visits * (tree.max_path_columns // 16 + tree.depth)


@pytest.mark.parametrize(("vocab_size", "size"), [(33_278, 650), (267_735, 1024)])
def test_bytes_stay_near_the_floor(vocab_size: int, size: int) -> None:
    found = row(vocab_size, size, 16_384, 90, "random")
    assert found["rows_visited"] > 0.99 * vocab_size
    assert found["floor_mb"] < found["memory_mb"] < found["cache_mb"] < found["half_cache_mb"]
    assert found["half_cache_mb"] < found["all_mb"]
    assert found["cache_mb"] < 1.3 * found["floor_mb"]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("tree", "positions"),
    [(ClassTree.two_level(torch.arange(400) // 25), 300), (ClassTree.balanced(150, 5), 200)],
)
def test_a_cache_of_any_size_lies_between_every_load_and_each_element_once(
    tree: ClassTree, positions: int, splits: int
) -> None:
    target, _ = zipf(tree.vocab_size, positions)
    batch = Batch(target, tree, 40, 4, SHAPES)
    counted, launches = counts(batch), Launches(batch, splits)
    assert any(count.all and count.kernel == "_d_light" for count in counted)

    def behind(capacity: int) -> int:
        return zero_bytes(batch) + through_cache(launches, counted, capacity, granule=1)

    assert behind(0) == sum(count.all for count in counted)
    assert behind(1 << 40) == sum(count.memory for count in counted)
    assert behind(0) > behind(20_000) > behind(100_000) >= behind(1 << 40)
