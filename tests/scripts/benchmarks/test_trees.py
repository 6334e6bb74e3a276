"""The benchmark of trees."""

import json
import sys
from pathlib import Path

import pytest

from scripts.benchmarks import trees
from scripts.benchmarks.trees import BASELINE
from scripts.benchmarks.trees import trees as all_trees


def test_every_tree_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    sizes = ["--rows", "300:16", "--positions", "64", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["trees.py", *sizes, "--json", str(log)])
    monkeypatch.setattr(trees, "DECODED", 3)
    trees.main()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    names = set(all_trees(300))
    for kind in ("dense", "row_wise", "sample", "topk"):
        found = {row["tree"]: row for row in rows if row["kind"] == kind}
        assert set(found) == names - ({"full"} if kind == "row_wise" else set())
        assert found[BASELINE]["ratio"] == 1
        assert min(row["seconds"] for row in found.values()) > 0
    memory = {row["tree"]: row["peak_bytes"] for row in rows if row["kind"] == "memory"}
    assert set(memory) == names


def test_trees_have_the_depths_and_shortlists_of_their_names() -> None:
    trees_by_name = all_trees(1000)
    found = {name: tree.depth for name, tree in trees_by_name.items()}
    assert (found["full"], found[BASELINE]) == (1, 2)
    for order in ("clustered", "random"):
        for depth in (3, 4, 8):
            assert found[f"depth {depth}, {order}"] == depth
        assert found[f"branching 2, {order}"] == 10
        assert found[f"branching 8, {order}"] == 4
    assert int(trees_by_name["two_level, shortlist 1√N"].num_children[0]) == 32 + 32
    few = set(all_trees(1000, few=True))
    assert few == set(found) - {"full", "huffman 2"} - {
        name for name in found if name.startswith(("depth 8", "branching 2,"))
    }
