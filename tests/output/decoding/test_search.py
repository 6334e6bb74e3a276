"""Search: exact top-k and nuclei, and which nodes loops open for them."""

import math
from typing import Any

import pytest
import torch

from lm.output import ClassTree
from lm.output.decoding import compiled, search
from lm.output.decoding.distribution import finder, topk
from lm.output.decoding.positions import Penalty, Positions

from . import truth
from .truth import N, P, all_shapes, flat_layer, node_log_prob, random_layer, word_log_prob

MODES: dict[str, dict[str, float]] = {
    "operations": {},
    "node by node": {"FEW": 2, "NODE_COST": 1},
    "row by row": {"FEW": math.inf, "NODE_COST": 1 << 40},
    "all words": {"FEW": 0, "NODE_COST": 1},
}
"""Operations of PyTorch; costs with which loops open nodes by probability, in order, or leave many
to products.
"""
node_by_node = pytest.mark.parametrize("mode", ["node by node"], indirect=True)


@pytest.fixture(autouse=True, params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    mode = str(request.param)
    monkeypatch.setattr(search, "BLOCK_ELEMENTS", 2 * N)
    monkeypatch.setattr(compiled, "BLOCK_ELEMENTS", 2 * N)
    for name, cost in MODES[mode].items():
        monkeypatch.setattr(compiled, name, cost)
    if mode == "operations":
        monkeypatch.setattr(compiled, "has_numba", lambda: False)
    return mode


@all_shapes
@pytest.mark.parametrize(("num_words", "num_excluded"), [(1, 0), (2, 0), (N, 0), (N, 5)])
def test_topk_begins_the_sorted_distribution(shape: str, num_words: int, num_excluded: int) -> None:
    """But for words excluded from each position, one of which may have a probability of 1.

    Every second distribution is peaked: loops search it to the end, and may leave flat ones.
    """
    layer = random_layer(shape, num_words, scale=200.0 if num_excluded else 1.0)
    layer[0][1::2] *= 20
    log_prob = word_log_prob(*layer)
    others: Any = {}
    if num_excluded:
        assert bool((log_prob.max(dim=1).values == 0).any())
        others["excluded"] = torch.randint(-1, N, (len(log_prob), num_excluded))
        others["excluded"][:, 0] = log_prob.argmax(dim=1)
        others["excluded"][0] = -1
        for row, words in zip(log_prob, others["excluded"], strict=True):
            row[words[words >= 0]] = -math.inf
    expected = log_prob.sort(dim=1, descending=True, stable=True)
    for k in {1, min(4, num_words), num_words - num_excluded}:
        best = topk(*layer, k=k, **others)
        assert torch.equal(best.word, expected.indices[:, :k])
        torch.testing.assert_close(best.log_prob, expected.values[:, :k], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "tree",
    [
        ClassTree.full(12),
        ClassTree.two_level([2, 0, 1, 1, 0, 2, 0, 1, 2, 2, 1, 0]),
        ClassTree.from_paths([[3 - w // 3, 2 - w % 3] for w in range(12)]),
        ClassTree.two_level(torch.arange(12).flip(0)),
    ],
)
@pytest.mark.parametrize("k", [1, 5, 12])
def test_ties_go_to_the_lowest_word(tree: ClassTree, k: int) -> None:
    assert topk(*flat_layer(tree, 2), k=k).word.tolist() == [list(range(k))] * 2


@node_by_node
@all_shapes
@pytest.mark.parametrize("k", [1, 4])
def test_topk_opens_exactly_the_nodes_as_probable_as_the_last_word(shape: str, k: int) -> None:
    layer = random_layer(shape, scale=2.0)
    last = word_log_prob(*layer).topk(k).values[:, -1:]
    positions = Positions(*layer)
    finder(positions).topk(positions, k)
    assert positions.num_opened == int((node_log_prob(*layer) >= last - 1e-12).sum())


@node_by_node
def test_the_nucleus_of_a_peaked_distribution_opens_one_class() -> None:
    positions = Positions(*flat_layer(ClassTree.two_level(torch.arange(400) % 20), 3, {7: 20.0}))
    for _, nucleus in compiled.nuclei(positions, 1.0, 0.925):
        assert nucleus.word.tolist() == [[7 + 20 * i for i in range(19)]]
    assert positions.num_opened == 3 * 2


SETS: list[dict[str, Any]] = [
    {"temperature": 0.5, "top_p": 0.6}, {"temperature": 1.0, "top_p": 0.93},
    {"temperature": 1.7, "top_p": 0.9999}, {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "min_p": 0.01}, {"temperature": 1.7, "min_p": 0.3},
]  # fmt: skip
OTHERS: Any = {"excluded": (2, N - 1), "repetition_penalty": 1.4, "previous": (1, 4, 9)}


@pytest.mark.parametrize(
    ("shape", "others"),
    [
        *((shape, {}) for shape in ("full", "shortlist", "paths")),
        *((shape, OTHERS) for shape in ("shortlist", "one word per class", "huffman 3")),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", SETS, ids=str)
def test_words_to_draw_are_as_defined(shape: str, options: Any, others: Any, mode: str) -> None:
    """The smallest set that reaches top_p; words within the ratio, by the nodes within it."""
    layer = random_layer(shape)
    positions, row = Positions(*layer), layer[2].row_of_word
    if others:
        penalty = Penalty(1.4, row[list(others["previous"])].expand(P, -1))
        positions = Positions(*layer, excluded=row[list(others["excluded"])], penalty=penalty)
    power = 1 / options["temperature"]
    kind = "top_p" if "top_p" in options else "min_p"
    find = {"top_p": finder(positions).nuclei, "min_p": finder(positions).within_ratio}[kind]
    sets = find(positions, power, options[kind])
    found = {}
    for position, (log_probs, every) in sets:
        for p, log_prob, words in zip(position.tolist(), log_probs, every, strict=True):
            found[p] = words[log_prob > -torch.inf].tolist()
    log_prob = word_log_prob(*layer)
    for p, each in enumerate(log_prob):
        probs = truth.restricted(each, **options, **others)
        assert found[p] == probs.argsort(descending=True)[: int((probs > 0).sum())].tolist()
    if "min_p" in options and mode == "node by node" and not others:
        cut = log_prob.amax(1, keepdim=True) + math.log(options["min_p"]) / power
        assert positions.num_opened == int((node_log_prob(*layer) >= cut - 1e-12).sum())
