"""Report of trees of any depth."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lm.cli import main
from lm.output import ClassTree
from lm.tree_report import top_words_below, tree_report
from tests.conftest import corpus_of

from .output.decoding.truth import TREES


@pytest.mark.parametrize("shape", TREES)
def test_figures_are_sums_over_the_paths_of_tokens(shape: str) -> None:
    tree = TREES[shape](23)
    counts = torch.arange(23) ** 2 + 1
    report = tree_report(tree, counts, num_nodes=10**6, num_top_words=2)
    share = counts.double() / counts.sum()
    paths = [[node for node, _ in tree.path(word)] for word in range(23)]
    columns = [int(tree.num_children[path].sum()) for path in paths]
    for found, each in (
        (report.visits_per_token, [len(path) for path in paths]),
        (report.columns_per_token, columns),
    ):
        assert found == pytest.approx(float(share @ torch.tensor(each).double()))
    assert sum(level.num_words for level in report.levels) == 23
    assert sum(level.num_nodes for level in report.levels) == len(report.nodes) == tree.num_nodes
    for node in report.nodes:
        below = [word for word in range(23) if node.node in paths[word]]
        assert node.words == len(below)
        above = paths[below[0]][: node.level]
        assert node.parent == (above[-1] if above else None)
        assert node.token_mass == pytest.approx(float(share[below].sum()))
        assert node.top_words == tuple(sorted(below, reverse=True)[:2])
    assert top_words_below(tree, counts, [0], 23) == [tuple(reversed(range(23)))]


def test_a_deep_tree_is_trained_used_and_reported(
    tiny: Path, tmp_path: Path, printed: Callable[..., str]
) -> None:
    options = ["--output.tree=multi_level", "--classes.depth=4", f"--run_dir={tmp_path / 'run'}"]
    assert main(["train", str(tiny), *options, "--train.max_steps=3", "--no-progress"]) == 0
    run = str(tmp_path / "run")
    for verb in (["evaluate"], ["generate", "--tokens=3"], ["generate", "--beams=2"], ["info"]):
        assert printed(*verb, run)
    report = json.loads(printed("classes", run, "--json", "--nodes=7"))
    assert report["depth"] == len(report["levels"]) == 4
    assert len(report["nodes"]) == 7
    more = f"({report['num_nodes'] - 5:,} further nodes: --nodes)"
    assert more in printed("classes", run, "--nodes=5")


def test_a_taxonomy_is_a_tree(tiny: Path, tmp_path: Path, printed: Callable[..., str]) -> None:
    (tmp_path / "shop").write_text("tea\tfood/drinks\nmilk\tfood/drinks/cold\nsaw\ttools\n")
    options = corpus_of(tmp_path, "tea milk tea saw tea\n" * 5)
    options += ["--output.tree=multi_level", "--classes.file=shop"]
    options += ["--classes.file_format=taxonomy"]
    assert main(["prepare", str(tiny), *options]) == 0
    report = json.loads(printed("classes", tiny, *options, "--json"))
    found = {tuple(node["top_words"]) for node in report["nodes"]}
    assert {("tea", "milk"), ("milk",), ("saw",)} < found
    assert report["depth"] == 4
    tree = ClassTree.from_levels([[0, 0, 1, 2, 2], [0, 0, -1, -1, -1], [-1, 0, -1, -1, -1]])
    assert report["num_nodes"] == tree.num_nodes
