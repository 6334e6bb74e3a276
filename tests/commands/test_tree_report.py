"""Reports of a run and of trees of any depth: sizes and word classes, as JSON and as text."""

import json
import re
from pathlib import Path

import pytest
import torch

from lm.cli import main
from lm.commands.tree_report import top_words_below, tree_report
from lm.output import ClassTree
from tests.conftest import Printed, Train, corpus_of

from ..output.decoding.truth import TREES


def test_info_counts_the_parameters_of_the_model(lstm_run: Path, printed: Printed) -> None:
    command = ["info", lstm_run]
    info, table = json.loads(printed(*command, "--json")), printed(*command)
    assert re.search(rf"^parameters +{info['parameters']:,}$", table, re.MULTILINE)
    vocab_size, nodes, hidden = info["vocab_size"], info["tree_nodes"], 12
    assert info["embedding_parameters"] == vocab_size * hidden
    assert info["backbone_parameters"] == 2 * 4 * (2 * hidden * hidden + 2 * hidden)
    assert info["output_parameters"] == (vocab_size + nodes - 1) * (hidden + 1)
    parts = ("embedding_parameters", "backbone_parameters", "output_parameters")
    assert info["parameters"] == sum(info[part] for part in parts)
    zeros = (vocab_size + nodes - 1) * 4  # rows of 12 numbers are followed by 4 zeros
    megabytes = (info["parameters"] + zeros) * 4 / 2**20
    sizes = [info[f"{part}_mib"] for part in ("weights", "gradients", "optimizer")]
    assert sizes == [round(times * megabytes, 1) for times in (1, 1, 2)]
    sizes += [info["batch_mib"], info["other_mib"]]
    assert info["memory_mib"] == pytest.approx(sum(sizes), abs=0.3)
    assert info["memory_available_mib"] > info["memory_mib"]
    command += ["--output.tree=adaptive", "--output.cutoffs=[9]"]
    adaptive = json.loads(printed(*command, "--json"))
    assert "tree_depth" not in adaptive
    tail = (hidden + vocab_size - 9) * (hidden // 4)  # projected to a fourth of the hidden size
    assert adaptive["output_parameters"] == (9 + 1) * (hidden + 1) + tail


@pytest.mark.parametrize("shape", TREES)
def test_figures_are_sums_over_the_paths_of_tokens(shape: str) -> None:
    tree = TREES[shape](23)
    counts = torch.arange(23) ** 2 + 1
    report = tree_report(tree, counts, num_nodes=10**6, num_top_words=2)
    share = counts.double() / counts.sum()
    paths = [[node for node, _ in tree.path(word)] for word in range(23)]
    visits, columns = [*map(len, paths)], [int(tree.num_children[path].sum()) for path in paths]
    for name, of_words in (("visits_per_token", visits), ("columns_per_token", columns)):
        expected = float(share @ torch.tensor(of_words).double())
        found = [report[name], sum(level[name] for level in report["levels"])]
        assert found == pytest.approx([expected, expected])
    assert sum(level["num_words"] for level in report["levels"]) == 23
    num_nodes = sum(level["num_nodes"] for level in report["levels"])
    assert num_nodes == len(report["nodes"]) == tree.num_nodes
    for node in report["nodes"]:
        below = [word for word in range(23) if node["node"] in paths[word]]
        assert node["words"] == len(below)
        above = paths[below[0]][: node["level"]]
        assert node["parent"] == (above[-1] if above else None)
        assert node["token_mass"] == pytest.approx(float(share[below].sum()))
        assert node["top_words"] == sorted(below, reverse=True)[:2]
    assert top_words_below(tree, counts, [0], 23) == [list(reversed(range(23)))]


def test_a_deep_tree_is_trained_used_and_reported(
    train: Train, tmp_path: Path, printed: Printed
) -> None:
    options = ["--output.tree=multi_level", "--classes.depth=4", "--train.max_steps=3"]
    run = train(tmp_path / "run", "--data.prepared_dir=null", *options)
    for verb in (["evaluate"], ["generate", "--tokens=3"], ["generate", "--beams=2"], ["info"]):
        assert printed(*verb, run)
    report = json.loads(printed("classes", run, "--json", "--nodes=7", "--words=2"))
    assert report["depth"] == len(report["levels"]) == 4
    assert len(report["nodes"]) == 7
    assert max(len(node["top_words"]) for node in report["nodes"]) == 2
    assert "the" in report["nodes"][0]["top_words"]
    table = printed("classes", run, "--nodes=5")
    assert table.startswith(f"{report['num_nodes']} nodes, depth 4\n")
    assert f"({report['num_nodes'] - 5:,} further nodes: --nodes)" in table


def test_the_tree_of_the_output_layer_is_reported_or_else_that_of_the_input(
    lstm_run: Path, printed: Printed
) -> None:
    command = ["classes", lstm_run, "--json", "--model.input_tree=two_level"]
    names = ("huffman", "full", "two_level")
    trees = [json.loads(printed(*command, f"--output.tree={name}")) for name in names]
    assert trees[0]["num_nodes"] == trees[0]["vocab_size"] - 1
    assert trees[1] == trees[2]


def test_a_taxonomy_is_a_tree(tiny: Path, tmp_path: Path, printed: Printed) -> None:
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
