"""The chosen tree is the cheapest one by the cost model, or within the search's tolerance of it."""

from itertools import combinations

import pytest
import torch

from lm.output import ClassTree
from lm.output.cost.best import _Search, best_classes, best_tree
from lm.output.cost.candidates import candidates, even_tree
from lm.output.cost.rates import CPU, cost_of
from lm.output.cost.work import Batch, Shape
from lm.output.tree import shapes

SIZES = [(2_000, 2048, 300), (20_000, 64, 128), (20_000, 700, 650)]


def zipf_counts(num_words: int) -> torch.Tensor:
    return (1e7 / torch.arange(1, num_words + 1)).long()


@pytest.mark.parametrize(("num_words", "num_positions", "hidden_size"), SIZES)
@pytest.mark.parametrize("row_wise", [False, True])
def test_no_usual_tree_is_cheaper(
    num_words: int, num_positions: int, hidden_size: int, row_wise: bool
) -> None:
    counts, batch = zipf_counts(num_words), Batch(num_positions, hidden_size)

    def seconds(tree: ClassTree) -> float:
        return cost_of(Shape.of(tree, counts), batch, CPU, row_wise=row_wise).seconds

    usual = {name: seconds(tree) for name, tree in candidates(counts, dealt=False).items()}
    assert seconds(best_tree(counts, batch, CPU, row_wise=row_wise)) <= 1.01 * min(usual.values())


def test_intervals_are_the_cheapest_of_all() -> None:
    counts, batch = torch.tensor([90, 30, 20, 9, 8, 3, 2, 2, 1]).double(), Batch(40, 64)
    share, num_words = counts / counts.sum(), len(counts)
    units = CPU.dense._replace(products=1e-9, nodes=2e-5, row_numbers=3e-9, columns=2e-8)
    rates, order = CPU._replace(dense=units, tile=1), torch.arange(num_words)

    def seconds(stop: torch.Tensor) -> float:
        splits = torch.ones(len(stop), 0, dtype=torch.int64)
        tree = ClassTree(*shapes.nested(order, stop, splits))
        return cost_of(Shape.of(tree, counts), batch, rates).seconds

    every = [
        torch.tensor([*ends, num_words])
        for num in range(1, num_words)
        for ends in combinations(range(1, num_words), num)
    ]
    found = _Search(share, batch, 1, units, "zeroed").intervals(1)
    least = min(map(seconds, every))
    assert 2 < len(found.stop) < num_words
    assert seconds(found.stop) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("row_wise", [False, True])
def test_no_number_of_dealt_classes_is_much_cheaper(row_wise: bool) -> None:
    counts, batch = zipf_counts(10_000), Batch(700, 200)

    def seconds(num_classes: int, shortlist: int) -> float:
        tree = even_tree(torch.arange(10_000), [num_classes], shortlist, dealt=True)
        return cost_of(Shape.of(tree, counts), batch, CPU, row_wise=row_wise).seconds

    chosen = best_classes(counts, batch, CPU, row_wise=row_wise)
    assert chosen is not None
    others = [seconds(c, s) for c in (30, 60, 100, 150, 250, 400) for s in (0, 20, 60, 200)]
    assert seconds(*chosen) <= 1.02 * min(others)


@pytest.mark.parametrize("counts", [[3], [1, 0], [0, 0, 5], [1] * 50, [10**9, *[0] * 300]], ids=str)
def test_any_vocabulary_has_a_best_tree(counts: list[int]) -> None:
    tree = best_tree(torch.tensor(counts), Batch(8, 16), CPU)
    assert tree.vocab_size == len(counts)
    best_classes(torch.tensor(counts), Batch(8, 16), CPU)
