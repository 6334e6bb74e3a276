"""`lm extend`: classes, rows and biases of new items by their definition, and what is refused."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lm
from lm.cli import main
from lm.extension.rows import PENALTY
from lm.loaded import LoadedModel
from tests.conftest import Printed, contents, recipes

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
Lines = list[list[str]]
SHAPES = recipes("""\
tied | word_table.tied=true model.input_embedding=path_sum
untied | model.input_embedding=path_sum
words | model.embedding=5
class within a class | output.tree=multi_level classes.file=classes.txt \
classes.file_format=taxonomy classes.num_word_classes=null
""")


@pytest.fixture(autouse=True)
def sequences(current_folder: None, monkeypatch: pytest.MonkeyPatch) -> Lines:
    """The items of users, with new ones; `new.csv` has all, `old.csv` lacks the new ones."""
    Path("shop.yaml").write_text(RECIPE)
    monkeypatch.setattr("lm.extension.contexts.LINES", 2)  # some parts have no new item
    monkeypatch.setattr("lm.extension.words.WORDS_AT_ONCE", 4)
    monkeypatch.setattr("lm.extension.words.MAX_SCORES", 1)  # the data is read for each new item
    rng = np.random.default_rng(0)
    items = np.array([*OLD, *NEW])
    users = [rng.choice(items, size=rng.integers(3, 9)).tolist() for _ in range(30)]
    users[0] = [NEW[0], NEW[0], *OLD]
    for name, left_out in (("new", ()), ("old", NEW)):
        lines = [[item for item in line if item not in left_out] for line in users]
        rows = [f"{user},{item}" for user, line in enumerate(lines) for item in line]
        Path(f"{name}.csv").write_text("\n".join(["user,item", *rows]) + "\n")
    names = zip(OLD, ("a/b", "a", "a", "a", "a", "a/b", "a/b", "a/b", "c"), strict=True)
    Path("classes.txt").write_text("".join(f"{item}\t{name}\n" for item, name in names))
    return users


def extended(*options: str) -> tuple[LoadedModel, LoadedModel]:
    assert main(["train", "shop.yaml", "--no-progress", *options]) == 0
    assert main(["extend", "runs/shop", "--run_dir=both", "--data.files.train=new.csv"]) == 0
    models = lm.load("runs/shop", threads=1), lm.load("both", threads=1)
    for model in models:
        model.model.requires_grad_(False)
    return models


def class_of(model: LoadedModel, items: list[str]) -> list[int]:
    tree = model.model.tree_softmax.tree
    return [tree.path(model.id(item))[-1][0] for item in items]


def mean_of_class(
    model: LoadedModel, node: int, training: Lines, table: Tensor, *, by_word: bool = False
) -> Tensor:
    """The mean of the rows of a class's words, weighted by one more than their events."""
    tree = model.model.tree_softmax.tree
    ids = torch.arange(model.vocab_size)[tree.node_of_row[tree.row_of_word] == node]
    events = Counter(model.id(item) for line in training for item in line if item in OLD)
    weights = torch.tensor([1.0 + events[id] for id in ids.tolist()])
    return weights @ table[ids if by_word else tree.row_of_word[ids]] / weights.sum()


def gradient(
    model: LoadedModel, node: int, rows: list[int], lines: Lines, mean: Tensor, of_new: Tensor
) -> Tensor:
    """The gradient of the objective in the rows and biases [m, 9] of new items of a class."""
    layer: Any = model.model.tree_softmax
    of_new = of_new.clone().requires_grad_()
    first, num_children = int(layer.tree.first_row[node]), int(layer.tree.num_children[node])
    table = torch.cat([layer.weight[:, :8], layer.bias[:, None]], dim=1)
    table = table.index_copy(0, torch.tensor(rows), of_new)[first : first + num_children]
    total = PENALTY / 2 * (of_new[:, :8] - mean).square().sum()
    for line in lines:
        for place, item in enumerate(line):
            child = dict(layer.tree.path(model.id(item))).get(node)
            if child is not None:
                hidden = torch.cat([model.start(line[:place]).hidden, torch.ones(1)])
                total = total - (table @ hidden).log_softmax(0)[child - first]
    return torch.autograd.grad(total, of_new)[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_new_items_have_the_likeliest_class_and_rows_and_old_ones_keep_their_ratios(
    shape: str, sequences: Lines
) -> None:
    before, after = extended(*SHAPES[shape])
    assert [after.id(item) for item in OLD] == [before.id(item) for item in OLD]
    training = [line[:-2] for line in sequences]
    old: Any = before.model.tree_softmax
    new: Any = after.model.tree_softmax
    node = old.tree.node_of_row[old.tree.row_of_word]
    for item in NEW:
        score = torch.zeros(old.tree.num_nodes - 1)
        for line in training:
            for place in [place for place, each in enumerate(line) if each == item]:
                known = [each for each in line[:place] if each in OLD]
                log_prob = old.log_prob(before.start(known).hidden)
                of_words = [log_prob[node == 1 + each].logsumexp(0) for each in range(len(score))]
                score += torch.stack(of_words)
        (chosen,) = class_of(after, [item])
        assert chosen == 1 + int(score.argmax())
        if before.model.embedding is not None and after.model.embedding is not None:
            vectors, by_word = before.model.embedding.weight, not before.model.path_sum
            place = after.id(item) if by_word else int(new.tree.row_of_word[after.id(item)])
            expected = mean_of_class(before, chosen, training, vectors, by_word=by_word)
            torch.testing.assert_close(after.model.embedding.weight[place], expected)
    for chosen in set(class_of(after, NEW)):
        rows = [int(new.tree.row_of_word[after.id(item)]) for item in NEW]
        rows = sorted(row for row in rows if new.tree.node_of_row[row] == chosen)
        found = torch.cat([new.weight[rows, :8], new.bias[rows, None]], dim=1)
        mean = mean_of_class(before, chosen, training, old.weight[:, :8])
        prior = torch.cat([mean.expand(len(rows), -1), found[:, 8:]], dim=1)
        of_class = after, chosen, rows, training, mean
        sizes = [gradient(*of_class, each).norm() for each in (found, prior)]
        assert sizes[0] < 0.01 * sizes[1]
    was, now = (model.log_prob(OLD[:3]) for model in (before, after))
    assert now.exp().sum().item() == pytest.approx(1, abs=1e-5)
    among = class_of(before, OLD)
    for chosen in set(among):  # old items of a class keep their ratios
        ids = [before.id(item) for item, each in zip(OLD, among, strict=True) if each == chosen]
        ratios = [log_prob[ids] - log_prob[ids[0]] for log_prob in (was, now)]
        torch.testing.assert_close(*ratios, rtol=0, atol=1e-4)


def test_an_extended_run_is_a_run(
    printed: Printed, complaint: Printed, sequences: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["train", "shop.yaml", "--no-progress"]) == 0
    before = contents(Path("runs/shop"))
    extend = ("extend", "runs/shop", "--name=next", "--data.files.train=new.csv")
    assert printed(*extend) == "runs/next\n"
    assert contents(Path("runs/shop")) == before
    assert "all so far should be in it" not in caplog.text
    assert "new items (new " in caplog.text
    header, *rows = Path("new.csv").read_text().splitlines(keepends=True)
    Path("newest.csv").write_text("".join([header, *rows[len(rows) // 2 :]]))
    assert main(["extend", "runs/shop", "--name=half", "--data.files.train=newest.csv"]) == 0
    assert "events, that of runs/shop had" in caplog.text
    histories = [json.dumps(line) for line in sequences]
    Path("histories").write_text("\n".join(histories))
    assert "no checkpoint that" in complaint("train", "runs/next", "--resume=auto")
    options = ("recommend", "runs/next", "--k=4", "--json")
    by_line = printed(*options, "--history=histories").splitlines()
    by_user = printed(*options, "--events=new.csv").splitlines()
    assert [json.loads(each) for each in by_user] == [
        {"user": str(user)} | json.loads(line) for user, line in enumerate(by_line)
    ]
    report = printed("evaluate", "runs/next", "--ranking", "--no-progress")
    assert "among all 11 items of the training split" in report
    assert "0 not in the catalogue" in report
    Path("history").write_text('["new 1", "old 3"]\n')
    found = printed("recommend", "runs/next", "--history=history", "--k=11")
    assert {each.split(" (")[0] for each in found.strip().split("\t")} == {*OLD, *NEW}
    assert '"new 1"' in printed("classes", "runs/next")
    generate = ("generate", "runs/next", '--prompt=["new 1", "old 3"]', "--tokens=4", "--samples=3")
    drawn = [json.loads(line) for line in printed(*generate).splitlines()]
    assert all(line[:2] == ["new 1", "old 3"] and len(line) == 6 for line in drawn)
    assert {item for line in drawn for item in line} <= {*OLD, *NEW}
    found = json.loads(printed(*generate, "--json"))
    assert found == {"prompt": ["new 1", "old 3"], "samples": [line[2:] for line in drawn]}


@pytest.mark.parametrize(
    ("limit", "precision"), [("vocab_size=9", "32-true"), ("min_count=12", "64-true")]
)
def test_items_outside_the_catalogue_are_no_events_and_all_others_are_counted(
    limit: str, precision: str, sequences: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    extended(f"--tokenizer.{limit}", f"--train.precision={precision}")
    assert "all so far should be in it" not in caplog.text
    counts = Counter(item for line in sequences for item in line[:-2])
    rows = [line.split("\t") for line in Path("both/vocab.txt").read_text().splitlines()]
    items = {word.replace("%20", " "): int(count) for word, count in rows if word[0] != "<"}
    assert {*items} & {*NEW}
    assert len(items) < len(counts)
    assert items == {item: counts[item] for item in items}


def test_an_adaptive_softmax_is_not_extended(complaint: Printed) -> None:
    assert main(["train", "shop.yaml", "--no-progress", "--output.tree=adaptive"]) == 0
    message = "output.tree: full, two_level or multi_lev"
    assert message in complaint("extend", "runs/shop", "--run_dir=x")
    assert not Path("x").exists()
