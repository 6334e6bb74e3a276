"""What the kernels cost, by formula and by count; that they compile for every architecture."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lm.output import ClassTree
from lm.output.backends.triton import backend as fused
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from lm.output.backends.visits import route, schedule

Load = Callable[[str], ModuleType]
ROOT = Path(__file__).resolve().parents[2]


class Counter:
    """Loads and stores of the interpreter by launch and tensor."""

    def __init__(self) -> None:
        self.kernel = ""
        self.tensors: dict[str, tuple[int, int]] = {}
        self.all: dict[tuple[str, str], int] = defaultdict(int)
        self.seen: dict[tuple[str, str], list[Any]] = defaultdict(list)

    def begin(self, kernel: str, arguments: dict[str, Any]) -> None:
        """A launch with these arguments."""
        self.kernel = kernel
        self.tensors = {
            name: (value.data_ptr(), value.data_ptr() + value.numel() * value.element_size())
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor) and value.numel()
        }

    def note(self, pointers: Any, mask: Any, size: int) -> None:
        """One load or store."""
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
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    from triton.runtime import interpreter

    own, launch = Counter(), fused._launch
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def noted_launch(kernel: Any, *args: Any, **arguments: Any) -> None:
        own.begin(kernel.__name__, arguments)
        launch(kernel, *args, **arguments)

    def noted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        result = load(self, pointers, mask, *rest)
        own.note(pointers.data, mask.data, result.data.itemsize)
        return result

    def noted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        own.note(pointers.data, mask.data, value.data.itemsize)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(fused, "_launch", noted_launch)
    monkeypatch.setattr(builder, "create_masked_load", noted_load)
    monkeypatch.setattr(builder, "create_masked_store", noted_store)
    return own


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
    load_script: Load,
    tree: ClassTree,
    positions: int,
    size: int,
    counter: Counter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = load_script("kernel_bytes")
    shape = Tiles(
        16, Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)
    )
    monkeypatch.setattr(fused, "tiles", lambda *_: shape)
    hidden, weight = torch.randn(positions, size), torch.randn(tree.num_rows, size)
    target, _ = module.zipf(tree.vocab_size, positions)
    visits = route(target, tree.arrays, tree.depth, -100)
    plan = schedule(visits, tree.arrays)
    rest = (None, visits, plan, tree.arrays)
    nll, state = fused.forward(hidden, weight, *rest, tree.max_path_columns, True)
    fused.backward(torch.ones_like(nll), hidden, weight, *rest, state, [True, True, False])
    batch = module.Batch(visits, plan, tree, shape.block_c)
    counted = module.counts(batch, size, 4, shape)
    assert sum(count.all for count in counted) > 0
    for count in counted:
        key = (count.kernel, count.tensor)
        item = 8 if count.tensor == "node_of_row" else 4
        assert counter.all[key] == count.all, key
        assert (counter.memory(key, item) if count.all else 0) == count.memory, key
    named = {(count.kernel, count.tensor) for count in counted}
    others = sum(value for key, value in counter.all.items() if key not in named)
    visits_made = int((visits.node >= 0).sum())
    assert others < 400 * visits_made * (tree.max_path_columns // 16 + tree.depth)


@pytest.mark.parametrize(("vocab_size", "size"), [(33_278, 650), (267_735, 1024)])
def test_bytes_stay_near_the_floor(load_script: Load, vocab_size: int, size: int) -> None:
    row = load_script("kernel_bytes").row(vocab_size, size, 16_384, 90, "random")
    assert row["rows_visited"] > 0.99 * vocab_size
    assert row["floor_mb"] < row["memory_mb"] < row["cache_mb"] < row["half_cache_mb"]
    assert row["half_cache_mb"] < row["all_mb"]
    assert row["cache_mb"] < 1.3 * row["floor_mb"]


def test_tile_shapes_are_timed_one_kernel_after_another(tmp_path: Path) -> None:
    out = tmp_path / "tiles.jsonl"
    command = [sys.executable, str(ROOT / "scripts/tune_tiles"), "--dry-run", f"--json={out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["kernel"] for row in rows} == {"forward", "d_hidden", "d_weight", "d_light"}
    assert all(row["score"] > 0 for row in rows)
    assert len(rows) == 8
    assert "time ÷ the table's" in done.stdout


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("tree", "positions"),
    [(ClassTree.two_level(torch.arange(400) // 25), 300), (ClassTree.balanced(150, 5), 200)],
)
def test_a_cache_of_any_size_lies_between_every_load_and_each_element_once(
    load_script: Load, tree: ClassTree, positions: int, splits: int
) -> None:
    module = load_script("kernel_bytes")
    shape = Tiles(
        16, Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)
    )
    target, _ = module.zipf(tree.vocab_size, positions)
    visits = route(target, tree.arrays, tree.depth, -100)
    plan = schedule(visits, tree.arrays)
    launches = module.Launches(visits, plan, tree, 40, 4, shape)
    launches.splits = splits
    batch = module.Batch(visits, plan, tree, shape.block_c)
    counted = module.counts(batch, 40, 4, shape)
    zeros = (tree.num_rows - batch.rows(batch.visited)) * 40 * 4
    assert any(count.all and count.kernel == "_d_light" for count in counted)

    def behind(capacity: int) -> int:
        played: int = module.through_cache(launches, counted, capacity, granule=1)
        return int(zeros) + played

    assert behind(0) == sum(count.all for count in counted)
    assert behind(1 << 40) == sum(count.memory for count in counted)
    assert behind(0) > behind(20_000) > behind(100_000) >= behind(1 << 40)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_without_spills_and_with_tensor_cores(
    capability: int, tmp_path: Path
) -> None:
    """In a process of its own, where kernels are compiled instead of interpreted."""
    pytest.importorskip("triton.backends.nvidia")
    out = tmp_path / "report.jsonl"
    command = [sys.executable, "-W", "error", ROOT / "scripts/kernel_report", "--json", out]
    command += ["--sm", str(capability), "--sizes", "300", "650", "--dtypes", "bf16", "tf32"]
    cache = {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | cache
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = {"_forward", "_d_hidden", "_d_weight", "_d_light", "_d_light, sparse"}
    assert len(rows) == 2 * 2 * len(names)
    assert {row["kernel"] for row in rows} == names
    for row in rows:
        assert row["spilled_bytes"] == 0
        assert 0 < row["shared_bytes"] <= {80: 166_912, 90: 232_448, 100: 232_448}[capability]
        assert row["tensor_cores"] != "none"
        assert row["programs"] >= 1


def test_a_kernel_that_spills_is_reported() -> None:
    """The check can fail: tiles that no register file holds."""
    code = (
        "import sys; sys.argv = ['x', '--sm', '80', '--sizes', '300', '--dtypes', 'bf16']\n"
        "from importlib.machinery import SourceFileLoader\n"
        f"module = SourceFileLoader('r', {str(ROOT / 'scripts/kernel_report')!r}).load_module()\n"
        "from lm.output.backends.triton import backend as fused\n"
        "from lm.output.backends.triton.tile_shapes import Tile, Tiles\n"
        "good, huge = Tile(64, 32, 4, 3), Tile(128, 128, 4, 3)\n"
        "fused.tiles = lambda *_: Tiles(64, good, huge, good, Tile(16, 32, 4, 3))\n"
        "module.main()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert "5 kernels compiled, 1 of them not as they should be" in done.stdout
