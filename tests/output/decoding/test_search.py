"""Best-first search: exact top-k and nuclei, and which nodes are expanded for them."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.decoding import compiled, search
from lm.output.decoding.distribution import finder, topk
from lm.output.decoding.expansion import Expander, Penalty

from .truth import H, N, P, all_shapes, node_log_prob, random_layer, restricted, word_log_prob


@pytest.fixture(autouse=True)
def _node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MOST_COST", math.inf)
    monkeypatch.setattr(compiled, "FEW", math.inf)
    monkeypatch.setattr(compiled, "NODE_COST", 1)


@all_shapes
@pytest.mark.parametrize("scale", [0.1, 3.0])
@pytest.mark.parametrize("share", [0.0, 10.0])
def test_results_are_the_same_if_all_words_are_evaluated_at_once(
    shape: str, scale: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With penalties and excluded words; in several blocks.

    Compiled loops go through all nodes of a position, or leave it to a product.
    """
    monkeypatch.setattr(search, "BLOCK_ELEMENTS", 2 * N)
    layer = random_layer(shape, scale=scale)
    tree = layer[2]
    penalty = Penalty(1.4, tree.row_of_word[torch.randint(N, (len(layer[0]), 3))])
    penalty.row[1, 1] = -1
    rows = tree.row_of_word[torch.tensor([2, N - 1])]
    searches: list[Callable[[Expander], list[tuple[Tensor, search.TopK]]]] = [
        lambda expander: [(torch.arange(P), finder(expander).topk(expander, 6))],
        lambda expander: list(finder(expander).nuclei(expander, 1.3, 0.8)),
        lambda expander: list(finder(expander).within_ratio(expander, 0.7, 0.2)),
    ]
    for find in searches:
        found = []
        for most in (math.inf, share):
            monkeypatch.setattr(search, "MOST_COST", most)
            if most < math.inf:
                monkeypatch.setattr(compiled, "FEW", 0 if share else math.inf)
                monkeypatch.setattr(compiled, "NODE_COST", 1 << 40)
            expander = Expander(*layer, excluded=rows, penalty=penalty)
            sets = [
                (int(each), *(x[words.log_prob[i] > -math.inf] for x in (word, log_prob)))
                for position, words in find(expander)
                for i, (each, log_prob, word) in enumerate(zip(position, *words, strict=True))
            ]
            found.append(sorted(sets, key=lambda one: one[0]))
        for (position, word, log_prob), other in zip(*found, strict=True):
            assert position == other[0]
            assert torch.equal(word, other[1])
            torch.testing.assert_close(log_prob, other[2], rtol=0, atol=1e-12)


@all_shapes
@pytest.mark.parametrize("num_words", [1, 2, N])
def test_topk_is_the_start_of_the_sorted_distribution(shape: str, num_words: int) -> None:
    layer = random_layer(shape, num_words)
    expected = word_log_prob(*layer).sort(dim=1, descending=True, stable=True)
    for k in {1, min(5, num_words), num_words}:
        best = topk(*layer, k=k)
        assert torch.equal(best.word, expected.indices[:, :k])
        torch.testing.assert_close(best.log_prob, expected.values[:, :k], rtol=0, atol=1e-12)


@all_shapes
@pytest.mark.parametrize("share", [math.inf, 0.0, 10.0])
def test_words_excluded_from_each_position_are_left_out_of_the_sorted_distribution(
    shape: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searched node by node, and left to a product of all words; also where P of one is 1."""
    monkeypatch.setattr(search, "MOST_COST", share)
    if share < math.inf:
        monkeypatch.setattr(compiled, "FEW", 0 if share else math.inf)
        monkeypatch.setattr(compiled, "NODE_COST", 1 << 40)
    layer = random_layer(shape, scale=200.0)
    log_prob = word_log_prob(*layer)
    excluded = torch.randint(-1, N, (len(log_prob), 5))
    excluded[:, 0] = log_prob.argmax(dim=1)
    excluded[0] = -1
    assert bool((log_prob.max(dim=1).values == 0).any())
    for row, words in zip(log_prob, excluded, strict=True):
        row[words[words >= 0]] = -math.inf
    expected = log_prob.sort(dim=1, descending=True, stable=True)
    for k in (1, 4, N - 5):
        best = topk(*layer, k=k, excluded=excluded)
        torch.testing.assert_close(best.log_prob, expected.values[:, :k], rtol=1e-12, atol=1e-12)
        assert torch.equal(best.word, expected.indices[:, :k])


def test_words_excluded_from_each_position_must_fit_it() -> None:
    layer = random_layer("two_level")
    with pytest.raises(ValueError, match=rf"excluded must be \[{P}, L\] int64, got"):
        topk(*layer, k=1, excluded=torch.zeros(P + 1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"excluded must be words 0 … {N - 1}, or -1"):
        topk(*layer, k=1, excluded=torch.full((P, 1), N))
    twice = torch.tensor([[3, 3, 4, -1]]).expand(P, -1)
    with pytest.raises(ValueError, match=f"k must be within 1 … {N - 2} words, got {N - 1}"):
        topk(*layer, k=N - 1, excluded=twice)


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
    hidden, weight = torch.randn(2, H), torch.zeros(tree.num_rows, H)
    assert topk(hidden, weight, tree, k=k).word.tolist() == [list(range(k))] * 2


@all_shapes
@pytest.mark.parametrize("k", [1, 4])
def test_topk_expands_exactly_the_nodes_as_probable_as_the_last_word(shape: str, k: int) -> None:
    layer = random_layer(shape, scale=2.0)
    last = word_log_prob(*layer).topk(k).values[:, -1:]
    expander = Expander(*layer)
    finder(expander).topk(expander, k)
    assert expander.num_expanded == int((node_log_prob(*layer) >= last - 1e-12).sum())


def test_the_nucleus_of_a_peaked_distribution_opens_one_class() -> None:
    tree = ClassTree.two_level(torch.arange(400) % 20)
    bias = torch.zeros(tree.num_rows)
    bias[7] = 20.0
    expander = Expander(torch.zeros(3, H), torch.zeros(tree.num_rows, H), tree, bias)
    ((position, nucleus),) = search.nuclei(expander, 1.0, 0.925)
    assert position.tolist() == [0, 1, 2]
    assert nucleus.word.tolist() == [[7 + 20 * i for i in range(19)]] * 3
    assert expander.num_expanded == 3 * 2


@all_shapes
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [0.01, 0.6, 0.93, 0.9999])
def test_nucleus_is_the_smallest_set_that_reaches_top_p(
    shape: str, temperature: float, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "NUCLEUS_WORDS", 3)
    monkeypatch.setattr(compiled, "NUCLEUS_GROWTH", 2)
    layer = random_layer(shape)
    found: dict[int, list[int]] = {}
    expander = Expander(*layer)
    for position, nucleus in finder(expander).nuclei(expander, 1 / temperature, top_p):
        for p, words, values in zip(position.tolist(), nucleus.word, nucleus.log_prob, strict=True):
            found[p] = words[values > -torch.inf].tolist()
    assert sorted(found) == list(range(P))
    for p, log_prob in enumerate(word_log_prob(*layer)):
        admissible = restricted(log_prob, temperature, None, top_p) > 0
        order = log_prob.argsort(descending=True)
        assert found[p] == order[admissible[order]].tolist()


@all_shapes
@pytest.mark.parametrize("power", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("min_p", [1.0, 0.3, 0.01])
def test_words_within_the_ratio_are_found_with_exactly_the_nodes_within_it(
    shape: str, power: float, min_p: float
) -> None:
    layer = random_layer(shape)
    expander = Expander(*layer)
    found: dict[int, list[int]] = {}
    for position, words in finder(expander).within_ratio(expander, power, min_p):
        for p, word, log_prob in zip(position.tolist(), words.word, words.log_prob, strict=True):
            found[p] = word[log_prob > -torch.inf].tolist()
    log_prob = word_log_prob(*layer)
    cut = log_prob.amax(1) + math.log(min_p) / power
    for p, each in enumerate(log_prob):
        expected = each.argsort(descending=True)[: int((each >= cut[p]).sum())]
        assert found[p] == expected.tolist()
    num_nodes = int((node_log_prob(*layer) >= cut[:, None] - 1e-12).sum())
    assert expander.num_expanded == num_nodes
