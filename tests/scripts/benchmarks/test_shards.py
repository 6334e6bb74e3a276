"""Loads and bytes of placements: what processes do is what the plans say."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from lm.output import ClassTree
from scripts.benchmarks import shards
from scripts.benchmarks.reporting import Table


def test_processes_compute_and_send_what_is_planned(tmp_path: Path) -> None:
    tree = ClassTree.two_level(torch.arange(600) // 30, shortlist=4)
    tokens = (600 ** torch.rand(20_000)).long()
    options = SimpleNamespace(positions=100, hidden=12)
    log = tmp_path / "rows"
    shards.in_processes(3, shards._measured, tree, tokens, options, Table(log=log))
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(rows) == 2 * 4
    for row in rows:
        assert row["load"] == row["planned_load"]
        assert row["sent_bytes"] == row["planned_bytes"]


def test_an_estimate_is_printed(
    run_benchmark: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    log = tmp_path / "rows"
    result = run_benchmark("shards", "--estimate", "10000:16", "--json", log)
    assert result.returncode == 0, result.stderr
    word, by_class = (json.loads(line) for line in log.read_text().splitlines())
    assert word["sent_mb"] > by_class["sent_mb"]
    assert word["load"] < 1.05
