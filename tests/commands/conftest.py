"""N-best lists, and `lm rescore` on them."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lm.rescoring.word_errors import word_errors
from tests.conftest import toy_sentences


def hypotheses(random: Random, line: str, number: int) -> list[tuple[float, str]]:
    """Different copies of a sentence with errors, by noisy acoustic scores, the highest first."""
    words, vocabulary = line.split(), " ".join(toy_sentences(0, 20)).split()
    copies = set()
    for _ in range(number):
        chosen = [word if random.random() > 0.12 else random.choice(vocabulary) for word in words]
        copies.add(" ".join(word for word in chosen if random.random() > 0.03))
    found = []
    for copy in sorted(copies):
        errors = sum(word_errors(words, copy.split()))
        found.append((random.gauss(-4 * errors, 12), copy))
    return sorted(found, reverse=True)


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dev and test, each with an n-best list in both layouts and its references."""
    folder = tmp_path_factory.mktemp("nbest")
    random = Random(1)
    for name, seed in (("dev", 7), ("test", 8)):
        tabs, kaldi, acoustic, references = [], [], [], []
        for number, line in enumerate(toy_sentences(seed, 60)):
            id = f"{name}{number}"
            references.append(f"{id} {line}")
            for rank, (score, text) in enumerate(hypotheses(random, line, 6), 1):
                tabs.append(f"{id}\t{score:.3f}\t{text}")
                kaldi.append(f"{id}-{rank} {text}")
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
