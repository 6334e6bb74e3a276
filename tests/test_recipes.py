"""Every recipe and every tree trains: two steps on the tiny corpus."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_prep.prepared import open_prepared
from lm.cli import main
from lm.config import Config, load_config
from lm.model.files import load_model
from lm.output import ClassTree
from lm.run import Run
from lm.training.metrics import read_metrics
from tests.conftest import Printed, Train

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("**/*.yaml"))
SMALL = """\
data.hub=null data.hub_config=null data.format=text data.prepared_dir=null data.user_field=null
data.split=files classes.num_word_classes=null classes.max_words=null model.hidden=16
model.feedforward=null train.max_steps=2 train.max_epochs=null train.batch_size=4 train.seq_len=8
train.accelerator=cpu train.devices=1 train.strategy=auto train.val_every_steps=null train.threads=1
log.wandb=disabled
"""


def small(config: Config, corpus: Path) -> list[str]:
    """Overrides that fit a recipe to the tiny corpus and to a CPU."""
    embedding = 12 if config.model.embedding and not config.word_table.tied else None
    num_pieces = 34 + (256 if config.tokenizer.byte_fallback else 0)
    changes: dict[str, Any] = {
        "data.files": {split: str(corpus / f"{split}.txt") for split in ("train", "valid", "test")},
        "tokenizer.vocab_size": num_pieces if config.tokenizer.kind == "sentencepiece" else None,
        "classes.dimensions": 8 if config.classes.method in ("exchange", "embedding") else 100,
        "classes.shortlist": min(config.classes.shortlist, 3),
        "model.embedding": embedding,
        "model.layers": min(config.model.layers, 2),
        "model.heads": config.model.heads and 2,
        "train.accumulate": min(config.train.accumulate, 2),
    }
    if config.classes.method == "file":
        changes |= {"classes.method": "uniform", "classes.file": None}
    if config.train.precision == "16-mixed":
        changes["train.precision"] = "bf16-mixed"
    options = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    return [f"--{each}" for each in [*SMALL.split(), *options]]


def validated(printed: Printed, run: Path) -> float:
    """Perplexity of the validation split as `lm evaluate` prints it."""
    return float(json.loads(printed("evaluate", run, "--split=valid", "--json"))["perplexity"])


def assert_trained(run: Path, perplexity: float) -> None:
    """Two steps are done, and the perplexity is about that of an untrained model."""
    line = read_metrics(run / "metrics.csv")[-1]
    config = load_config(run / "config.yaml")
    vocab_size = open_prepared(config.prepared_path).vocab_size
    num_positions = 2 * config.train.accumulate * 4 * 8
    is_padded = config.data.sequences == "independent"
    assert line.step == 2
    assert 0 < line.tokens < num_positions if is_padded else line.tokens == num_positions
    assert 1 < line.train_perplexity < 3 * vocab_size
    assert line.valid_perplexity == pytest.approx(perplexity, rel=1e-2)
    assert math.isfinite(perplexity)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_trains_and_is_named_after_its_file(
    path: Path, corpus: Path, tmp_path: Path, printed: Printed
) -> None:
    config = load_config(path)
    assert config.name == path.stem
    header = path.read_text(encoding="utf-8").split("\nname:")[0]
    assert all(line.startswith("# ") for line in header.splitlines())
    overrides = [*small(config, corpus), f"--run_dir={tmp_path / 'run'}"]
    assert main(["train", str(path), "--no-progress", *overrides]) == 0
    assert_trained(tmp_path / "run", validated(printed, tmp_path / "run"))


def test_a_tree_from_a_file_trains_like_the_same_tree_from_name(
    train: Train, prepared_dir: Path, tmp_path: Path, printed: Printed
) -> None:
    steps = "--train.max_steps=2"
    from_name = train(tmp_path / "name", steps)  # makes its classes, if another test made others
    prepared = open_prepared(prepared_dir)
    tokenizer, word_class = prepared.tokenizer, prepared.word_class()
    members: dict[int, int] = {}
    with open(tmp_path / "tree.txt", "w") as file:
        for word in range(prepared.vocab_size):
            number = int(word_class[word])
            members[number] = members.get(number, -1) + 1
            file.write(f"{tokenizer.token(word)} {number} {members[number]}\n")
    from_file = train(tmp_path / "file", f"--output.tree={tmp_path / 'tree.txt'}", steps)
    assert_trained(from_file, validated(printed, from_file))
    assert [(run / "classes.npy").exists() for run in (from_name, from_file)] == [True, False]
    assert validated(printed, from_file) == pytest.approx(validated(printed, from_name), rel=1e-4)
    (tmp_path / "tree.txt").unlink()  # the run has a copy
    assert main(["classes", str(from_file), "--json"]) == 0
    more = ["--train.max_steps=4", "--resume=auto", "--no-progress"]
    assert main(["train", str(from_file), *more]) == 0
    assert read_metrics(from_file / "metrics.csv")[-1].step == 4


def test_the_tree_is_the_one_that_its_options_name(tiny: Path, prepared_dir: Path) -> None:
    prepared = open_prepared(prepared_dir)
    num_words, counts = prepared.vocab_size, torch.tensor(prepared.counts())
    word_class = torch.from_numpy(prepared.word_class().astype(np.int64))
    expected = {
        ("full",): ClassTree.full(num_words),
        ("balanced",): ClassTree.balanced(num_words, math.isqrt(num_words - 1) + 1),
        ("balanced", "--output.branching=2"): ClassTree.balanced(num_words, 2),
        ("huffman",): ClassTree.huffman(counts),
        ("huffman", "--output.arity=3"): ClassTree.huffman(counts, 3),
        ("two_level",): ClassTree.two_level(word_class),
    }
    for (name, *options), tree in expected.items():
        config = load_config(tiny, [f"--output.tree={name}", *options])
        found: Any = Run.of(config, prepared=prepared).tree
        for array, value in tree.state_dict().items():
            assert torch.equal(found.state_dict()[array], value), (name, options, array)


def test_the_shortlist_has_the_most_frequent_pieces_of_any_ids(tiny: Path, tmp_path: Path) -> None:
    tokenizer = "--tokenizer={kind: sentencepiece, vocab_size: 34}"
    options = ["--classes.shortlist=5", "--train.max_steps=1", f"--run_dir={tmp_path}"]
    assert main(["train", str(tiny), "--no-progress", tokenizer, *options]) == 0
    counts = torch.tensor(open_prepared(tmp_path / "data").counts())
    model: Any = load_model(tmp_path)[0]
    tree = model.output.tree
    in_shortlist = [word for word in range(34) if len(tree.path(word)) == 1]
    assert sorted(in_shortlist) == sorted(counts.argsort(descending=True, stable=True)[:5].tolist())
    assert sorted(in_shortlist) != list(range(5))
