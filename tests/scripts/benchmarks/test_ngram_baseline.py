"""Perplexities of the n-gram models."""

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.prepared import open_prepared

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_the_bigram_baseline_is_the_interpolated_model_by_hand(
    prepared_dir: Path, run_benchmark: Run
) -> None:
    done = run_benchmark("ngram_baseline", prepared_dir, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    prepared = open_prepared(prepared_dir)
    train = prepared.tokens("train").tolist()
    test = prepared.tokens("test").tolist()
    total = len(train) + prepared.vocab_size
    unigram = [(train.count(word) + 1) / total for word in range(prepared.vocab_size)]
    nll = -sum(math.log(unigram[word]) for word in test)
    assert result["tokens"] == len(test) == prepared.splits["test"].tokens
    assert result["unigram_perplexity"] == pytest.approx(math.exp(nll / len(test)))
    assert 1 < result["bigram_perplexity"] < result["unigram_perplexity"]


def test_a_folder_without_prepared_data_is_a_single_line_error(
    tmp_path: Path, run_benchmark: Run
) -> None:
    done = run_benchmark("ngram_baseline", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"ngram_baseline: {tmp_path} ")
    assert "meta.json" in done.stderr
    assert done.stderr.count("\n") == 1
