"""The search over a lattice finds the best path of all."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import lm
from lm.loaded import LoadedModel
from scripts.lattice_search import Arc, search

pytestmark = pytest.mark.filterwarnings("ignore:'zebra' is given")
ARCS: dict[int, list[Arc]] = {
    0: [("the", 1, -1.0), ("a", 1, -0.8), ("the", 2, -2.5)],
    1: [("old", 2, -1.0), ("cat", 3, -1.5), ("zebra", 3, -0.5)],
    2: [("dog", 3, -1.0), ("horse", 3, -0.9), ("nowhere", 6, 0.0)],
    3: [("sees", 4, -0.5), ("hears", 4, -0.6), ("today", 5, -1.45)],
    4: [("now", 5, -1.0), ("again", 5, -1.1)],
    6: [],
}


def paths(node: int = 0) -> Iterator[tuple[list[str], float]]:
    """All paths to node 5 and their acoustic log-probabilities."""
    if node == 5:
        yield [], 0.0
    for word, target, acoustic in ARCS.get(node, []):
        for words, rest in paths(target):
            yield [word, *words], acoustic + rest


def total(model: LoadedModel, words: list[str], acoustic: float, lm_weight: float) -> float:
    (score,) = model.score([" ".join(words)])
    return acoustic + lm_weight * float(score.log_prob.sum())


@pytest.mark.parametrize("name", ["lstm_run", "transformer_run"])
@pytest.mark.parametrize("lm_weight", [0.0, 0.4, 3.0])
def test_the_path_is_the_best_of_all_paths(
    name: str, lm_weight: float, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    model = lm.load(folder, vocabulary_size=1000)
    found = {tuple(words): total(model, words, each, lm_weight) for words, each in paths()}
    assert len(found) > 20
    words, score = search(model, ARCS, start=0, final=5, lm_weight=lm_weight, num_beams=99)
    best = max(found, key=lambda each: found[each])
    assert tuple(words) == best
    assert score == pytest.approx(found[best], abs=1e-4)
    words, score = search(model, ARCS, start=0, final=5, lm_weight=lm_weight, num_beams=1)
    assert score == pytest.approx(found[tuple(words)], abs=1e-4)  # a path, if not the best


def test_a_lattice_without_a_path_is_refused(lstm_run: Path) -> None:
    with pytest.raises(ValueError, match="no path leads from node 0 to node 9"):
        search(lm.load(lstm_run), ARCS, start=0, final=9, lm_weight=1.0)
