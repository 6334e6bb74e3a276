"""`lm extend`: classes, rows and biases of new items by their definition, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lm
from lm.cli import main
from lm.loaded import LoadedModel
from lm.output import HierarchicalSoftmax

RECIPE = """\
name: shop
data: {files: {train: old.csv}, format: csv, sequences: independent, user_field: user,
  time_field: null, split: leave_one_out}
classes: {method: uniform, num_word_classes: 3}
model: {hidden: 8, layers: 1, init_range: 0.9}
optim: {lr: 0.5}
train: {max_steps: 5, batch_size: 4, seq_len: 8, threads: 1}
"""
OLD = [f"old {number}" for number in range(9)]
NEW = ["new 1", "new 2"]
SHAPES = {
    "tied": ["word_table.tied=true", "model.input_embedding=path_sum"],
    "untied": ["model.input_embedding=path_sum"],
    "words": ["model.embedding=5"],
    "full": ["output.tree=full"],
}


@pytest.fixture(autouse=True)
def sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The items of users, with new ones; `new.csv` has all, `old.csv` lacks the new ones."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    items = np.array([*OLD, *NEW])
    users = [rng.choice(items, size=rng.integers(3, 9)).tolist() for _ in range(30)]
    users[0] = [NEW[0], NEW[0], *OLD]
    for name, left_out in (("new", ()), ("old", NEW)):
        rows = [
            f"{u},{item}" for u, line in enumerate(users) for item in line if item not in left_out
        ]
        Path(f"{name}.csv").write_text("\n".join(["user,item", *rows]) + "\n")
    return users


def extended(*options: str) -> tuple[LoadedModel, LoadedModel]:
    """A run and its extension."""
    Path("shop.yaml").write_text(RECIPE)
    assert main(["train", "shop.yaml", "--no-progress", *(f"--{each}" for each in options)]) == 0
    assert main(["extend", "runs/shop", "--run_dir=both", "--data.files.train=new.csv"]) == 0
    models = lm.load("runs/shop", threads=1), lm.load("both", threads=1)
    for model in models:
        model.model.requires_grad_(False)
    return models


def softmax(model: LoadedModel) -> HierarchicalSoftmax:
    assert isinstance(model.model.output, HierarchicalSoftmax)
    return model.model.output


def class_of(model: LoadedModel, items: list[str]) -> list[int]:
    tree = softmax(model).tree
    return [tree.path(model.id(item))[-1][0] for item in items]


@pytest.mark.parametrize("shape", SHAPES)
def test_new_items_are_what_the_model_expects_where_they_occur(
    shape: str, sequences: list[list[str]]
) -> None:
    before, after = extended(*SHAPES[shape])
    ids = {item: before.id(item) for item in OLD}
    assert {item: after.id(item) for item in OLD} == ids
    old, new = softmax(before), softmax(after)
    assert old.bias is not None
    assert new.bias is not None
    tables: list[tuple[Tensor, Tensor, bool]] = [(old.weight, new.weight, True)]
    if before.model.embedding is not None and after.model.embedding is not None:
        grown = after.model.embedding.weight
        tables.append((before.model.embedding.weight, grown, shape == "untied"))
    members = torch.tensor([*range(before.vocab_size)])
    node = old.tree.node_of_row[old.tree.row_of_word]
    count = torch.ones(after.vocab_size)  # one more than the events of training
    for line in sequences:
        for token in after.encode(" ".join(item.replace(" ", "%20") for item in line[:-2])):
            count[token] += 1
    count[after.eos_id] += len(sequences)
    for item in NEW:
        log_probs: list[Tensor] = []
        for line in sequences:
            known: list[str] = []
            for each in line[:-2]:
                if each == item:
                    log_probs.append(old.log_prob(before.start([ids[k] for k in known]).hidden))
                elif each in OLD:
                    known.append(each)
        log_prob = torch.stack(log_probs)
        by_class = {int(c): log_prob[:, node == c].logsumexp(1).sum() for c in torch.unique(node)}
        chosen = max(by_class, key=lambda c: float(by_class[c]))
        assert class_of(after, [item]) == [chosen]
        among = members[node == chosen]
        prob = log_prob[:, among].softmax(1).mean(0)
        for table, grown, is_of_rows in tables:
            place = old.tree.row_of_word[among] if is_of_rows else among
            word = after.id(item)
            found = grown[new.tree.row_of_word[word] if is_of_rows else word]
            torch.testing.assert_close(found, prob @ table[place])
        relative = old.bias[old.tree.row_of_word[among]] - count[among].log()
        bias = new.bias[new.tree.row_of_word[after.id(item)]]
        torch.testing.assert_close(bias, prob @ relative + count[after.id(item)].log())


@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities_sum_to_one_and_old_items_keep_their_ratios(shape: str) -> None:
    before, after = extended(*SHAPES[shape])
    tokens = [before.id(item) for item in OLD[:3]]
    old, new = (model.log_prob(tokens) for model in (before, after))
    assert new.exp().sum().item() == pytest.approx(1, abs=1e-5)
    among = class_of(before, OLD)
    for first, second in zip(range(9), range(1, 9), strict=False):
        if among[first] == among[second]:
            ids = [before.id(OLD[each]) for each in (first, second)]
            ratios = [(each[ids[0]] - each[ids[1]]).item() for each in (old, new)]
            assert ratios[0] == pytest.approx(ratios[1], abs=1e-4)


def test_an_extended_run_is_a_run(
    printed: Callable[..., str],
    contents: Callable[[Path], dict[str, str]],
    sequences: list[list[str]],
) -> None:
    Path("shop.yaml").write_text(RECIPE)
    assert main(["train", "shop.yaml", "--no-progress"]) == 0
    before = contents(Path("runs/shop"))
    assert (
        printed("extend", "runs/shop", "--name=next", "--data.files.train=new.csv") == "runs/next\n"
    )
    assert contents(Path("runs/shop")) == before
    histories = [json.dumps(line) for line in sequences]
    Path("histories").write_text("\n".join(histories))
    options = ("recommend", "runs/next", "--k=4", "--json")
    by_line = printed(*options, "--history=histories").splitlines()
    by_user = printed(*options, "--events=new.csv").splitlines()
    assert [json.loads(each) for each in by_user] == [
        {"user": str(user)} | json.loads(line) for user, line in enumerate(by_line)
    ]
    report = printed("evaluate", "runs/next", "--ranking", "--no-progress")
    assert "among all 11 items" in report
    assert "0 not in the catalogue" in report
    Path("history").write_text('["new 1", "old 3"]\n')
    found = printed("recommend", "runs/next", "--history=history", "--k=11")
    assert {each.split(" (")[0] for each in found.strip().split("\t")} == {*OLD, *NEW}
    assert '"new 1"' in printed("classes", "runs/next")


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ({}, ["--run_dir=x", "--data.files.train=old.csv"], "has all items"),
        ({}, ["--data.files.train=new.csv"], "--run_dir=FOLDER"),
        ({}, ["--run_dir=taken", "--data.files.train=new.csv"], "taken already exists"),
        ({}, ["--run_dir=x", "--optim.lr=1"], "the data alone, not optim.lr: 0.5 → 1.0"),
        ({"output.tree": "adaptive"}, ["--run_dir=x"], "two_level or full"),
        ({"output.tree": "balanced", "output.branching": 2}, ["--run_dir=x"], "two_level or full"),
        (
            {"output.tree": "full", "model.input_tree": "two_level"},
            ["--run_dir=x"],
            "the output layer's tree",
        ),
    ],
)
def test_what_cannot_be_extended_is_refused(
    recipe: dict[str, Any], options: list[str], message: str, complaint: Callable[..., str]
) -> None:
    Path("shop.yaml").write_text(RECIPE)
    Path("taken").mkdir()
    keys = [f"--{key}={value}" for key, value in recipe.items()]
    assert main(["train", "shop.yaml", "--no-progress", *keys]) == 0
    assert message in complaint("extend", "runs/shop", *options)
    assert not Path("x").exists()
    assert not [*Path("taken").iterdir()]


def test_a_run_on_text_is_not_extended(lstm_run: Path, complaint: Callable[..., str]) -> None:
    assert "data.sequences: independent" in complaint("extend", lstm_run, "--run_dir=x")
