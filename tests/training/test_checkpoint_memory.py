"""Models and checkpoints are written and read without a second copy in memory.

The figures are those of Linux for a whole process, mapped pages included. They are taken in a
process of its own, this file run as a command, one after the other so that each is the largest yet.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import torch

from lm.config import ModelConfig, OutputConfig, load_config
from lm.evaluation import TextCounts, evaluate
from lm.model.language_model import build_model
from lm.output import ClassTree
from lm.training.batches import Batches
from lm.training.checkpoint import AtomicCheckpointIO, Description, load_model, save_model
from lm.training.loop import train as train_run

VOCAB_SIZE, HIDDEN = 200_000, 300
TABLE_BYTES = VOCAB_SIZE * HIDDEN * 4
LAYERS = 3
DEEP = [f"--model.layers={LAYERS}", "--model.hidden=1000", "--train.max_steps=1"]
DEEP += ["--optim.optimizer=sgd", "--optim.momentum=0.9"]
DEEP_BYTES = LAYERS * 8 * 1000**2 * 4 * 2
"""Weights and momentum."""


def save_table(folder: Path) -> None:
    """Save a model that is one large table, nearly."""
    config, output = ModelConfig(hidden=HIDDEN, layers=1, tied=True), OutputConfig(bias=False)
    description = Description(
        format_version=1,
        model=config,
        output=output,
        context=8,
        eos_id=1,
        unk_id=0,
        tokenizer_sha256="",
        weights_sha256="",
        step=1,
        valid_perplexity=None,
    )
    tree = ClassTree.two_level(torch.arange(VOCAB_SIZE) // 500)
    save_model(folder, build_model(config, output, tree, 8), description)


def resident(kind: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(kind))
    return int(line.split()[1]) * 1024


def measure(folder: Path) -> dict[str, float]:
    """Most bytes taken at each step: by evaluating the model on a few tokens and saving it again,
    as multiples of the table; by a training that goes on as far as its first batch, of its
    checkpoint.
    """
    start = resident("VmRSS")
    model, description = load_model(folder)
    tokens = np.arange(0, VOCAB_SIZE, VOCAB_SIZE // 16)
    counts = TextCounts(words=16, lines=1, utf8_bytes=16)
    evaluate(model, tokens, counts, eos_id=description.eos_id, unk_id=None, context=8)
    figures = {"evaluate": (resident("VmHWM") - start) / TABLE_BYTES}
    before = resident("VmRSS")
    go_on(folder / "run")
    figures["resume"] = (resident("VmHWM") - before) / DEEP_BYTES
    save_model(folder, model, description)
    figures["save"] = (resident("VmHWM") - start) / TABLE_BYTES
    checkpoint = {"state_dict": model.state_dict()}
    save_checkpoint(checkpoint, folder / "table.ckpt")
    figures["checkpoint"] = (resident("VmHWM") - start) / TABLE_BYTES
    return figures


def go_on(run: Path) -> None:
    """Continue a training as far as its first batch."""

    class Reached(Exception):
        pass

    def reach(self: Batches, number: int) -> Any:
        raise Reached

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Batches, "__getitem__", reach)
        config = load_config(run / "config.yaml", ["--train.max_steps=2"])
        with pytest.raises(Reached):
            train_run(config, resume="auto", progress=False)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files are gone after the test."""
    yield tmp_path
    rmtree(tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_no_second_copy_is_held_and_what_is_read_takes_memory_once_it_is_used(
    large: Path, train: Callable[..., Path]
) -> None:
    run = train(large / "run", *DEEP)
    assert (run / "checkpoints" / "last.ckpt").stat().st_size == pytest.approx(DEEP_BYTES, rel=0.05)
    save_table(large)
    result = subprocess.run(
        [sys.executable, __file__, str(large)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    times = json.loads(result.stdout.splitlines()[-1])
    assert 0 < times["evaluate"] < 0.5
    assert 0 < times["resume"] < 0.3
    assert 0.95 < times["save"] < 1.3
    assert 0.95 < times["checkpoint"] < 1.3


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
