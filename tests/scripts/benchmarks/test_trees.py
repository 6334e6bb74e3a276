"""The benchmark of trees, and the constants of the cost model that are fitted to its log."""

import json
import statistics
import sys
from pathlib import Path

import pytest

from lm.output.cost.rates import CPU, GPU, Rates, seconds
from lm.output.cost.work import Work
from scripts.benchmarks import tree_rates, trees
from scripts.benchmarks.tree_rates import LOG, Measured, fitted, fitted_rates, measured, read
from scripts.benchmarks.tree_shapes import BASELINE, best_trees
from scripts.benchmarks.tree_shapes import trees as all_trees


def test_every_tree_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    sizes = ["--rows", "300:16", "--positions", "64", "--rounds", "2", "--best"]
    monkeypatch.setattr(sys, "argv", ["trees.py", *sizes, "--json", str(log)])
    monkeypatch.setattr(trees, "DECODED", 3)
    trees.main()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    names = {*all_trees(300), *best_trees((300, 16), 64, CPU)}
    for kind in ("dense", "row_wise", "sample", "topk"):
        found = {row["tree"]: row for row in rows if row["kind"] == kind}
        assert set(found) == names - ({"full"} if kind == "row_wise" else set())
        assert found[BASELINE]["ratio"] == 1
        assert min(row["seconds"] for row in found.values()) > 0
    memory = {row["tree"]: row["peak_bytes"] for row in rows if row["kind"] == "memory"}
    assert set(memory) == names
    monkeypatch.setattr(sys, "argv", ["tree_rates.py", "--log", str(log)])
    tree_rates.main()


def test_trees_have_the_depths_of_their_names() -> None:
    found = {name: tree.depth for name, tree in all_trees(1000).items()}
    assert (found["full"], found[BASELINE]) == (1, 2)
    for order in ("clustered", "random"):
        for depth in (3, 4, 8):
            assert found[f"depth {depth}, {order}"] == depth
        assert found[f"branching 2, {order}"] == 10
        assert found[f"branching 8, {order}"] == 4
    few = set(all_trees(1000, few=True))
    assert few == set(found) - {"full", "huffman 2"} - {
        name for name in found if name.startswith(("depth 8", "branching 2,"))
    }


def test_constants_are_recovered_from_exact_times() -> None:
    truth = Work(nodes=2e-6, columns=3e-9, products=1e-11)
    works = [
        Work(1.0, nodes=float(i), columns=float(i**2), products=float(1000 * (i % 5)))
        for i in range(1, 20)
    ]
    rows = [Measured("dense", work, float(seconds(truth, work)), {}) for work in works]
    assert fitted(rows) == pytest.approx(truth, rel=1e-2, abs=1e-12)


@pytest.mark.parametrize(("name", "most"), [("trees", 0.12), ("trees_gpu", 0.2)])
def test_shipped_constants_predict_the_logged_times(name: str, most: float) -> None:
    rates = CPU if name == "trees" else GPU
    rows = [row for row in read(LOG.with_name(f"{name}.jsonl")) if row["vocab_size"] == 10_000]
    chosen = [measured(row, rates) for row in rows if row["role"] == "fit"]
    assert len(chosen) > 10
    off = [abs(float(seconds(getattr(rates, m.kind), m.work)) / m.seconds - 1) for m in chosen]
    assert statistics.median(off) < most


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rates"), [("trees", CPU), ("trees_gpu", GPU)], ids=["cpu", "gpu"]
)
def test_shipped_constants_are_those_of_the_log(name: str, rates: Rates) -> None:
    found = fitted_rates(rates, LOG.with_name(f"{name}.jsonl"))
    for kind in ("dense", "row_wise", "blocks", "decoding"):
        if kind == "dense" or not rates.on_gpu:
            assert getattr(found, kind) == pytest.approx(getattr(rates, kind), rel=0.01)


def test_the_chosen_tree_is_nearly_the_fastest_measured_one() -> None:
    rows = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    checked = [row for row in rows if row["role"] == "check" and row["kind"] == "dense"]
    sizes = {(row["vocab_size"], row["hidden_size"]) for row in checked}
    assert len(sizes) == 3
    for size in sizes:
        times = {
            row["tree"]: row["seconds"]
            for row in checked
            if (row["vocab_size"], row["hidden_size"]) == size
        }
        assert times["best"] <= 1.1 * min(times.values())
        assert times["best"] < times[BASELINE]
