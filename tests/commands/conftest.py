"""N-best lists, and `lm rescore` on them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import toy_sentences
from tests.nbest_lists import ErrorSource


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dev and test, each with an n-best list in both layouts and its references."""
    folder = tmp_path_factory.mktemp("nbest")
    source = ErrorSource(toy_sentences(0, 300), 12.0, seed=1)
    for name, seed in (("dev", 7), ("test", 8)):
        tabs, kaldi, acoustic, references = [], [], [], []
        for number, line in enumerate(toy_sentences(seed, 60)):
            id = f"{name}{number}"
            references.append(f"{id} {line}")
            for rank, (score, words) in enumerate(source.hypotheses(line.split(), 6), 1):
                tabs.append(f"{id}\t{score:.3f}\t{' '.join(words)}")
                kaldi.append(f"{id}-{rank} {' '.join(words)}")
                acoustic.append(f"{id}-{rank} {-score:.3f}")
        for ending, rows in (("ref", references), ("nbest", tabs), ("kaldi", kaldi)):
            (folder / f"{name}.{ending}").write_text("\n".join(rows) + "\n")
        with (folder / "costs").open("a") as file:
            file.write("\n".join(acoustic) + "\n")
    return folder


Rescored = Callable[..., tuple[list[str], dict[str, Any]]]


@pytest.fixture
def rescored(printed: Callable[..., str]) -> Rescored:
    """`rescored(*arguments)`: the lines and figures of `lm rescore --json`."""

    def run(*arguments: object) -> tuple[list[str], dict[str, Any]]:
        values = json.loads(printed("rescore", *arguments, "--json"))
        return values.pop("hypotheses"), values

    return run
