"""Reports of a run: its sizes and its word classes, as JSON and as text."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Reported = Callable[..., Any]


@pytest.fixture
def reported(lstm_run: Path, printed: Callable[..., str]) -> Reported:
    """`reported(verb, *options)`: what a command prints as JSON about a run, and as text."""

    def run(verb: str, *options: str) -> tuple[dict[str, Any], str]:
        values = json.loads(printed(verb, lstm_run, "--json", *options))
        return values, printed(verb, lstm_run, *options)

    return run


def test_info_counts_the_parameters_of_the_model(reported: Reported) -> None:
    info, table = reported("info")
    assert re.search(rf"^parameters +{info['parameters']:,}$", table, re.MULTILINE)
    vocab_size, nodes, hidden = info["vocab_size"], info["tree_nodes"], 12
    assert info["embedding_parameters"] == vocab_size * hidden
    assert info["backbone_parameters"] == 2 * 4 * (2 * hidden * hidden + 2 * hidden)
    assert info["output_parameters"] == (vocab_size + nodes - 1) * (hidden + 1)
    parts = ("embedding_parameters", "backbone_parameters", "output_parameters")
    assert info["parameters"] == sum(info[part] for part in parts)
    zeros = (vocab_size + nodes - 1) * 4  # rows of 12 numbers are followed by 4 zeros
    megabytes = (info["parameters"] + zeros) * 4 / 2**20
    sizes = [info[f"{part}_mib"] for part in ("weights", "gradients", "optimizer")]
    assert sizes == [round(times * megabytes, 1) for times in (1, 1, 2)]
    sizes += [info["batch_mib"], info["other_mib"]]
    assert info["memory_mib"] == pytest.approx(sum(sizes), abs=0.3)
    assert info["memory_available_mib"] > info["memory_mib"]


def test_the_report_on_the_classes_of_a_run_has_all_tokens(
    reported: Reported, prepared_dir: Path
) -> None:
    report, table = reported("classes", "--words=2")
    root, *classes = report["nodes"]
    word_class = np.load(prepared_dir / "classes.npy")
    assert table.startswith(f"{len(classes) + 1} nodes, depth 2\n")
    assert len(classes) == len(np.unique(word_class))
    assert root["token_mass"] == 1
    assert sum(node["token_mass"] for node in classes) == pytest.approx(1, abs=1e-12)
    assert {node["words"] for node in classes} == {*np.bincount(word_class).tolist()}
    assert max(len(node["top_words"]) for node in classes) == 2
    assert "the" in {word for node in classes for word in node["top_words"]}
