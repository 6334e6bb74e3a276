"""`output.tree: best` becomes a tree when the run begins, and stays that tree."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from lm.cli import main
from lm.config import load_config
from lm.model.best_tree import child_numbers, with_best_tree
from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.cost.best import Classes
from lm.run import Run

BEST = "--output.tree=best"


@pytest.fixture
def _classes_are_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a few words, the full softmax is."""
    monkeypatch.setattr("lm.model.best_tree.best_classes", lambda *_, **__: Classes(5, 3))


@pytest.mark.usefixtures("_classes_are_fastest")
def test_a_run_takes_the_best_classes_and_continues_with_them(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    train = ["train", str(tiny), "--no-progress", BEST, f"--run_dir={folder}"]
    assert main([*train, "--train.max_steps=2"]) == 0
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["output"]["tree"] == "two_level"
    assert written["classes"]["num_word_classes"] == 5
    assert written["classes"]["shortlist"] == 3
    tree = Run.read(folder).tree
    assert tree is not None
    assert int(tree.num_children[0]) == 3 + 5
    monkeypatch.setattr("lm.model.best_tree.best_classes", lambda *_, **__: Classes(2, 0))
    assert main([*train, "--train.max_steps=4", "--resume=auto"]) == 0
    output = Run.open(folder).model.output
    assert isinstance(output, HierarchicalSoftmax)
    again = output.tree
    assert torch.equal(again.num_children, tree.num_children)
    assert torch.equal(again.row_of_word, tree.row_of_word)


def test_with_frequency_the_tree_is_in_a_file(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--classes.method=frequency", BEST, f"--run_dir={folder}"]
    run = Run.read(tiny, options)
    run.prepare(progress=False)
    counts = torch.tensor(run.prepared.counts())
    config = load_config(tiny, options)
    tree = ClassTree.huffman(counts, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.model.best_tree.best_tree", lambda *_, **__: tree)
        config = with_best_tree(config, run.prepared, 1, on_gpu=False)
    assert config.output.tree == str(folder / "tree.txt")
    reopened = Run(folder, config).tree
    assert reopened is not None
    assert torch.equal(reopened.num_children, tree.num_children)
    assert torch.equal(reopened.row_of_word, tree.row_of_word)


def test_child_numbers_are_the_paths() -> None:
    paths = [[0], [1, 0], [1, 1, 0], [1, 1, 1], [2, 0], [2, 1]]
    found = child_numbers(ClassTree.from_paths(paths)).tolist()
    assert [[child for child in path if child >= 0] for path in found] == paths


def test_best_chooses_what_it_is_not_told(tiny: Path) -> None:
    for option in ("classes.num_word_classes=4", "classes.shortlist=2", "classes.method=file"):
        assert main(["info", str(tiny), BEST, f"--{option}"]) == 2


@pytest.mark.parametrize("method", ["exchange", "frequency"])
def test_trees_are_ranked_by_predicted_time(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    options = [f"--classes.method={method}", f"--run_dir={tmp_path / 'run'}"]
    assert main(["prepare", str(tiny), "--no-progress", *options]) == 0
    capsys.readouterr()
    assert main(["info", str(tiny), *options, "--trees", "--json"]) == 0
    trees = json.loads(capsys.readouterr().out)["trees"]
    times = [tree["step_ms"] for tree in trees]
    assert times == sorted(times)
    assert times[0] > 0
    by_name = {tree["tree"]: tree for tree in trees}
    assert by_name["full"]["columns"] == Run.read(tiny, options).prepared.vocab_size
    assert by_name["best by frequency"]["step_ms"] <= 1.01 * by_name["full"]["step_ms"]
    assert main(["info", str(tiny), *options, "--trees"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(trees)
    assert lines[2].endswith(trees[0]["tree"])
