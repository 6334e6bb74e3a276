"""New words of a text: `lm extend --text`, and `lm train --init-from`, which then trains."""

import json
import math
import random
import re
import signal
from itertools import cycle
from pathlib import Path
from shutil import rmtree

import pytest
import torch

import lm
from lm.cli import main
from lm.config import validate
from lm.extension import begin, begin_from
from lm.extension.words import extended
from lm.model.files import load_model
from lm.run import Run, TrainedRun
from lm.training.checkpoint import load_checkpoint
from tests.conftest import Printed, recipes
from tests.training.tiny_runs import outcome

RECIPE = """\
name: old
data: {files: {train: old.txt, valid: valid.txt}}
classes: {num_word_classes: 4}
model: {hidden: 8, layers: 1}
optim: {lr: 0.05}
train: {max_steps: 3, batch_size: 4, seq_len: 8, threads: 1, accelerator: cpu}
"""
TIED = "word_table.tied=true model.input_embedding=path_sum"
SHAPES = recipes(f"""\
lstm, shortlist, a vector for each word | classes.shortlist=3 model.embedding=5
transformer, tied | model.backbone=transformer word_table.tied=true
path sums, row-wise | model.input_embedding=path_sum word_table.gradients=row_wise \
word_table.optimizer=adagrad classes.shortlist=2
input tree, full softmax | output.tree=full model.input_tree=two_level
input tree, tied, full softmax | output.tree=full model.input_tree=two_level {TIED}
pieces, three levels | output.tree=multi_level model.input_pieces=20
fp64, tied path sums | train.precision=64-true {TIED}
""")
PIECES = ["--tokenizer.kind=sentencepiece", "--tokenizer.vocab_size=30", "--output.tree=full"]
NOUNS = ("cat", "dog", "bird", "man", "horse", "fish", "cow")
NAMES = ("Ada", "Zoe")
VERBS = ("sees", "hears", "likes", "follows")


def sentences(seed: int, count: int, nouns: tuple[str, ...] = NOUNS) -> str:
    rng = random.Random(seed)
    lines = [[rng.choice(nouns), rng.choice(VERBS), "the", rng.choice(nouns)] for _ in range(count)]
    return "".join(f"{' '.join(line)}\n" for line in lines)


@pytest.fixture(autouse=True)
def texts(current_folder: None) -> None:
    """The old text, and a new one with names."""
    Path("old.yaml").write_text(RECIPE)
    Path("new.yaml").write_text(RECIPE.replace("old", "new"))
    Path("old.txt").write_text(sentences(0, 60))
    Path("new.txt").write_text(sentences(1, 30, NOUNS[:3] + NAMES))
    rows = [f'"{i}","{line}"' for i, line in enumerate(Path("new.txt").read_text().splitlines(), 1)]
    Path("new.csv").write_text("\n".join(['"","text"', *rows]))  # as R writes it
    Path("valid.txt").write_text(sentences(2, 10))


def train(name: str, *arguments: str) -> Path:
    """Train a recipe without a progress bar; returns the folder."""
    assert main(["train", f"{name}.yaml", "--no-progress", *arguments]) == 0
    return Path("runs", name)


@pytest.mark.parametrize(("shape", "text"), [*zip(SHAPES, cycle(["new.csv", "new.txt"]))])
def test_both_commands_give_new_words_the_same_rows_and_old_ones_keep_ratios(
    shape: str, text: str
) -> None:
    keys = SHAPES[shape]
    run = train("old", *keys)
    assert main(["extend", str(run), f"--text={text}", "--run_dir=next"]) == 0
    before, after = lm.load(run, threads=1), lm.load("next", threads=1)
    known = [before.word(id) for id in range(before.vocab_size)]
    assert [after.word(id) for id in range(after.vocab_size)] == [*known, *NAMES]
    was, now = (model.log_prob("cat sees the") for model in (before, after))
    assert now.exp().sum().item() == pytest.approx(1, abs=1e-5)
    tree, larger = before.model.tree_softmax.tree, after.model.tree_softmax.tree
    node = tree.node_of_row[tree.row_of_word]
    for each in torch.unique(node).tolist():  # the words of a class, or of the shortlist
        ids = (node == each).nonzero().flatten()
        ratios = [found[ids] - found[ids[0]] for found in (was, now)]
        torch.testing.assert_close(*ratios, rtol=0, atol=1e-4)
    assert larger.num_nodes == tree.num_nodes
    assert larger.node_of_row[larger.row_of_word[: len(known)]].tolist() == node.tolist()
    assert after.log_prob("cat sees the")[after.id("Ada")].exp() > 0.01
    assert main(["evaluate", "next", "--text=new.txt", "--open-vocabulary"]) == 0
    new = Run.read("new.yaml", keys)
    begin_from(TrainedRun.open(run), new, progress=False)
    weights = load_checkpoint(new.folder / "checkpoints/last.ckpt")["model"]
    for name, tensor in after.model.state_dict().items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", "32"), ("16-mixed", "32"), ("bf16-mixed", "32"), ("bf16-true", "bf16")],
)
def test_mixed_precisions_have_parameters_in_fp32(precision: str, dtype: str) -> None:
    config = validate({"name": "a", "train": {"max_steps": 1, "precision": precision}}, "a")
    assert begin._stored(config) == dtype


@pytest.mark.parametrize("shape", [*SHAPES, "pieces of sentencepiece"])
def test_with_the_same_words_training_begins_with_the_perplexity_of_the_run(
    shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = SHAPES.get(shape, PIECES)
    run = train("old", *keys)
    (Path("other.txt")).write_text(sentences(3, 30))
    train("new", *keys, f"--init-from={run}", "--data.files.train=other.txt")
    expected = f"{TrainedRun.open(run).description.valid_perplexity:,.2f}"
    assert re.findall(r"validation perplexity ([\d.,]+) on", caplog.text) == [expected, expected]
    assert ", 0 new" in caplog.text
    content = json.loads(Path("runs/new/init.json").read_text())
    assert content["weights_sha256"] == TrainedRun.open(run).description.weights_sha256
    tree, trained = Run.read("runs/new").tree, TrainedRun.open(run).model.tree_softmax
    assert tree is not None
    assert tree.row_of_word.tolist() == trained.tree.row_of_word.tolist()


@pytest.mark.parametrize("shape", ["lstm, shortlist, a vector for each word", "transformer, tied"])
def test_a_run_that_has_begun_from_another_continues_without_it(
    shape: str, signals_at: dict[int, list[int]], complaint: Printed
) -> None:
    keys = [*SHAPES[shape], "--train.max_steps=6", "--model.dropout=0.3"]
    run = train("old", *keys)
    whole = train("new", *keys, f"--init-from={run}")
    expected = outcome(whole)
    arguments = ["train", "new.yaml", "--no-progress", *keys, f"--init-from={run}"]
    assert "already contains a run: continue it with --resume auto" in complaint(*arguments)
    rmtree(whole)
    signals_at |= {0: [signal.SIGINT], 3: [signal.SIGINT]}
    with pytest.raises(SystemExit):
        main(arguments)
    rmtree(run)
    with pytest.raises(SystemExit):
        main(["train", "runs/new", "--no-progress", "--resume=auto"])
    assert main(["train", "runs/new", "--no-progress", "--resume=auto"]) == 0
    assert outcome(whole) == expected


def test_no_other_run_gets_the_words_of_a_run_that_began_from_another(complaint: Printed) -> None:
    run = train("old")
    new = train("new", f"--init-from={run}", "--data.files.train=new.txt")
    assert main(["train", "new.yaml", "--no-progress", "--name=anew"]) == 0
    words = [Path(folder, "vocab.txt").read_text() for folder in (new, "runs/anew")]
    assert ["horse\t" in each for each in words] == [True, False]
    assert main(["prepare", str(new)]) == 0
    assert Path(new, "data", "vocab.txt").read_text() == words[0]
    data = f"--data.prepared_dir={new}/data"
    assert "has the words of a trained run" in complaint("train", "new.yaml", "--name=x", data)


def test_rows_of_new_words_are_better_than_means_and_these_than_random_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("new.txt").write_text(sentences(1, 60, NOUNS[:3] + NAMES))
    run = train("old", "--train.max_steps=60", "--model.hidden=16")
    trained, config = TrainedRun.open(run), Run.read("new.yaml").config
    found = {"convex": extended(trained, config, progress=False)}
    monkeypatch.setattr("lm.extension.rows.MAX_NEW_LOGITS", 0)
    found["mean"] = extended(trained, config, progress=False)
    states = {name: each.state for name, each in found.items()}
    states["random"] = {name: tensor.clone() for name, tensor in states["mean"].items()}
    rows = states["random"]["output.tree.row_of_word"][-len(NAMES) :]
    weight = states["random"]["output.weight"]
    weight[rows] = torch.empty_like(weight[rows]).uniform_(-0.25, 0.25)
    states["random"]["output.bias"][rows] = 0
    tokenizer = found["mean"].given.tokenizer
    lines = sentences(9, 40, NOUNS[:3] + NAMES).splitlines()
    ids = torch.tensor([[tokenizer.eos_id, *tokenizer.encode(line)] for line in lines]).T
    is_new, nll = ids[1:] >= trained.model.vocab_size, dict[str, float]()
    for name, state in states.items():
        model, _ = load_model(run, trained.description, state)
        with torch.no_grad():
            hidden, _ = model(ids[:-1])
        nll[name] = model.output.loss(hidden, ids[1:], "none")[is_new].mean().item()
    assert nll["convex"] < nll["mean"] < nll["random"]
    assert nll["convex"] < math.log(20)
