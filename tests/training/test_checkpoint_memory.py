"""Models and checkpoints are written and read without a second copy in memory.

The figures are those of Linux for a whole process, including mapped pages. A separate process takes
them, running this file as a command, in an order in which each is the largest so far.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from lm.config import ModelConfig, OutputConfig, WordTable
from lm.device import process_bytes
from lm.evaluation import evaluate
from lm.figures import TextCounts
from lm.model.build import build_model
from lm.model.files import Description, load_model, save_model
from lm.output import ClassTree, HierarchicalSoftmax
from lm.run import Run
from lm.training.batches import Batches
from lm.training.checkpoint import save_checkpoint
from lm.training.loop import train as train_run

VOCAB_SIZE, HIDDEN = 200_000, 300
TABLE_BYTES = VOCAB_SIZE * HIDDEN * 4
LAYERS = 3
DEEP = [f"--model.layers={LAYERS}", "--model.hidden=1000", "--train.max_steps=1"]
DEEP += ["--optim.optimizer=sgd", "--optim.momentum=0.9"]
DEEP_BYTES = LAYERS * 8 * 1000**2 * 4 * 2
"""Weights and momentum."""


def save_table(folder: Path) -> None:
    """Save a model that consists almost only of one large table."""
    config, output = ModelConfig(hidden=HIDDEN, layers=1), OutputConfig()
    sections: Any = {"model": config, "output": output, "word_table": WordTable(tied=True)}
    figures: Any = {"context": 8, "eos_id": 1, "unk_id": 0, "step": 1, "valid_perplexity": None}
    tree = ClassTree.two_level(torch.arange(VOCAB_SIZE) // 500)
    model = build_model(config, output, WordTable(tied=True), tree, 8)
    save_model(folder, model.state_dict(), Description(**sections, tokenizer_sha256="", **figures))


def measure(folder: Path) -> dict[str, float]:
    """Peak memory of evaluating the model on a few tokens and of saving it, as multiples of the
    table; and of continuing a run as far as its first batch, as a multiple of its checkpoint.
    """
    layer = HierarchicalSoftmax(HIDDEN, ClassTree.two_level(num_words=100))
    layer.loss(torch.zeros(1, HIDDEN), torch.zeros(1, dtype=torch.int64))  # imports libraries
    start = process_bytes("VmRSS")
    model, description = load_model(folder)
    tokens = np.arange(0, VOCAB_SIZE, VOCAB_SIZE // 16)
    counts = TextCounts(words=16, lines=1, utf8_bytes=16)
    evaluate(model, tokens, counts, eos_id=description.eos_id, unk_id=1, context=8)
    figures = {"evaluate": (process_bytes("VmHWM") - start) / TABLE_BYTES}
    before = process_bytes("VmRSS")
    opened = Run.read(folder / "run" / "config.yaml", ["--train.max_steps=2"])
    reached = patch.object(Batches, "__getitem__", side_effect=KeyError("the first batch"))
    with reached, pytest.raises(KeyError, match="the first batch"):
        train_run(opened, resume="auto", progress=False)
    figures["resume"] = (process_bytes("VmHWM") - before) / DEEP_BYTES
    save_model(folder, model.state_dict(), description)
    figures["save"] = (process_bytes("VmHWM") - start) / TABLE_BYTES
    save_checkpoint({"model": model.state_dict()}, folder / "table.ckpt")
    figures["checkpoint"] = (process_bytes("VmHWM") - start) / TABLE_BYTES
    return figures


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files are deleted after the test."""
    yield tmp_path
    rmtree(tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_no_second_copy_is_held_and_a_page_takes_memory_once_it_is_used(
    large: Path, train: Callable[..., Path]
) -> None:
    from tests.conftest import python  # the process runs this file without `tests`

    run = train(large / "run", *DEEP)
    assert (run / "checkpoints" / "last.ckpt").stat().st_size == pytest.approx(DEEP_BYTES, rel=0.05)
    save_table(large)
    result = python(__file__, str(large), env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    times = json.loads(result.stdout.splitlines()[-1])
    assert 0 < times["evaluate"] < 0.5
    assert 0 < times["resume"] < 0.3
    assert 0.95 < times["save"] < 1.3
    assert 0.95 < times["checkpoint"] < 1.3


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
