"""The recipe of a tiny text, a variation and the n-gram model have the figures of `lm evaluate`."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.config import Config, ModelConfig, OptimConfig, TrainConfig
from scripts.benchmarks.recipe_variations import variations
from tests.conftest import toy_sentences

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.long
def test_a_row_is_trained_evaluated_and_mixed(tmp_path: Path, run_benchmark: Run) -> None:
    text, folder, log = tmp_path / "toy.txt", tmp_path / "runs", tmp_path / "log.jsonl"
    text.write_text("\n".join(toy_sentences(1, 200)) + "\n")
    small = "model.hidden=8,train.max_steps=9"
    arguments = [text, folder, "--title=toy", "--rows", "--also", small]
    done = run_benchmark("recipe_variations", *arguments, "--json", log)
    assert done.returncode == 0, done.stderr
    rows = {row["row"]: row for row in map(json.loads, log.read_text().splitlines())}
    assert list(rows) == ["recipe", small, "Kneser–Ney 5-gram", "prepare"]
    recipe, changed, ngram, prepared = rows.values()
    evaluated = json.loads((folder / "recipe/evaluate-test.json").read_text())
    assert recipe["perplexity"] == evaluated["perplexity"] < changed["perplexity"]
    assert recipe["ratio_to_best"] == 1
    assert changed["ratio_to_best"] == changed["perplexity"] / recipe["perplexity"]
    assert recipe["mixed_perplexity"] <= 1.02 * min(recipe["perplexity"], ngram["perplexity"])
    assert prepared["vocab_size"] == changed["vocab_size"] > 20
    for row in rows.values():
        assert row["text"] == "toy"
        assert row["peak_bytes"] > 50e6
        assert row["cpu_seconds"] > 0.1
    again = run_benchmark("recipe_variations", *arguments)
    assert again.stdout == done.stdout


def test_variations_change_one_key_each() -> None:
    config = Config(
        name="a",
        model=ModelConfig(hidden=200, dropout=0.1),
        optim=OptimConfig(lr=20),
        train=TrainConfig(max_epochs=12),
    )
    changes = [change for (change,) in variations(config).values()]
    assert changes == [
        "--model.dropout=0.2",
        "--model.dropout=0",
        "--optim.lr=10",
        "--model.hidden=300",
        "--train.max_epochs=6",
    ]
