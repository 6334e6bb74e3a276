"""The ways to rank items that only the comparison has, and how it chooses a point."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lm.output import ClassTree
from scripts.benchmarks.items import CONFIDENCE, GeneralizedBCE, item_knn, main
from tests.data_prep.conftest import write_table

N, H, S, P = 40, 6, 15, 9


def test_generalized_bce_is_that_of_its_definition() -> None:
    torch.manual_seed(0)
    layer = GeneralizedBCE(H, ClassTree.full(N), counts=torch.arange(N), num_samples=S).double()
    assert layer.bias is not None
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    hidden, target = torch.randn(P, H, dtype=torch.float64), torch.randint(N, (P,))
    target[2] = -100
    torch.manual_seed(5)
    sample = (torch.rand(S, dtype=torch.float64) * N).long()  # uniform, whatever the counts are
    assert len(set(sample.tolist()) & set(target.tolist())) > 0
    prob = (hidden @ layer.weight[:, :H].T + layer.bias).sigmoid()
    share = S / (N - 1)
    beta = share * (CONFIDENCE * (1 - 1 / share) + 1 / share)
    assert share < beta < 1
    expected = [
        -beta * prob[i, word].log()
        - sum((1 - prob[i, other]).log() for other in sample.tolist() if other != word)
        for i, word in enumerate(target.tolist())
        if word >= 0
    ]
    torch.manual_seed(5)
    found = layer.loss(hidden, target, "none")
    assert found[2] == 0
    torch.testing.assert_close(found[target >= 0], torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_item_knn_sums_cosines_of_the_users_of_items() -> None:
    users = [[2, 3, 3], [2, 4], [4], [3, 2, 5]]  # of items 2 … 5; <eos> is 0
    tokens = np.concatenate([[*items, 0] for items in users])
    prepared = SimpleNamespace(tokens=lambda split: tokens, eos_id=0, vocab_size=6)
    run: Any = SimpleNamespace(prepared=prepared)
    has = np.array([[item in items for item in range(6)] for items in users], float)
    length = np.maximum(np.linalg.norm(has, axis=0), 1)
    cosine = (has.T @ has) / np.outer(length, length) * (1 - np.eye(6))
    histories = [np.array(each, np.int64) for each in ([4, 2, 3], [], [5, 5])]
    expected = [sum((cosine[j] for j in each[-2:]), np.zeros(6)) for each in histories]
    found = item_knn(run, 2)(torch.zeros(3, 1), histories)
    assert found.numpy() == pytest.approx(np.array(expected), abs=1e-6)
    assert found[0, 2] > 0  # the item itself, by others


def test_the_point_of_the_best_validation_is_measured_on_the_test_split(tmp_path: Path) -> None:
    events = [{"user": n % 30, "item": (n % 30 + n // 30) % 15, "time": n} for n in range(300)]
    write_table(tmp_path / "toy.csv", events)
    config = tmp_path / "toy.yaml"
    config.write_text(
        "name: toy\ntrain: {max_epochs: 2, batch_size: 4, seq_len: 8}\n"
        "data: {sequences: independent, user_field: user, split: leave_one_out, format: csv,"
        f" files: {{train: {tmp_path / 'toy.csv'}}}}}\nmodel: {{hidden: 8, layers: 1,"
        " input_embedding: path_sum}\nword_table: {tied: true}\n"
    )
    log = tmp_path / "log.jsonl"
    options = [str(config), f"--runs={tmp_path / 'runs'}", f"--json={log}", "--seeds=2"]
    main([*options, "--ways", "gbce", "untrained"])
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert {row["corpus"] for row in rows} == {"toy"}
    for way, choices in (("gbce", 2), ("item-knn", 3)):
        mine = [row for row in rows if row["way"] == way]
        valid = [row for row in mine if row["split"] == "valid" and row["seed"] == 1]
        assert len({row["point"] for row in valid}) == choices
        best = max(valid, key=lambda row: row["ndcg"])["point"]
        test = [row for row in mine if row["split"] == "test"]
        seeds = [1, 2] if way == "gbce" else [1]
        assert [(row["point"], row["seed"]) for row in test] == [(best, seed) for seed in seeds]
    popular = [row for row in rows if row["way"] == "popularity"]
    assert [row["split"] for row in popular] == ["test"]
    lines = len(rows)
    main([*options, "--ways", "gbce"])  # trains nothing again: equal figures
    again = [json.loads(line) for line in log.read_text().splitlines()][lines:]
    figures = [
        [(row["seed"], row["ndcg"], row["cpu_seconds"]) for row in part]
        for part in (rows[:5], again)
    ]
    assert figures[0] == figures[1]
