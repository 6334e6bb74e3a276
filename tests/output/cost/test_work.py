"""Expected work is the mean over all batches, and what backends compute."""

import math
from itertools import product

import pytest
import torch

from lm.output import ClassTree
from lm.output.backends.visits import route
from lm.output.cost.candidates import even_tree, splits_of_depth
from lm.output.cost.work import (
    Batch,
    Shape,
    visits_in_tiles,
    work_of_nodes,
    work_of_sample,
    work_of_step,
    work_of_topk,
)

TREES = {
    "two levels": ClassTree.two_level([0, 0, 1, 1, 2]),
    "a class of one word": ClassTree.two_level([0, 0, 1, 1, 1], shortlist=1),
    "chain": ClassTree.from_paths([[0], [1, 0], [1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]),
    "full": ClassTree.full(5),
}
COUNTS = torch.tensor([5, 3, 1, 0, 2])
TILE = 2


@pytest.mark.parametrize("name", TREES)
def test_expected_work_is_the_mean_over_all_batches(name: str) -> None:
    tree, num_positions = TREES[name], 3
    share = COUNTS.double() / COUNTS.sum()
    nodes = visits = columns = products = rows = 0.0
    for batch in product(range(5), repeat=num_positions):
        weight = math.prod(float(share[word]) for word in batch)
        node = route(torch.tensor(batch), tree.arrays, tree.depth, -100).node
        index, count = torch.unique(node[node >= 0], return_counts=True)
        width = tree.num_children[index]
        nodes += weight * len(index)
        visits += weight * int(count.sum())
        columns += weight * int(count @ width)
        rows += weight * int(width.sum())
        whole = TILE * -(-count // TILE), TILE * -(-width // TILE)
        products += weight * int((whole[0] * (whole[1] + width) + count * whole[1]).sum())
    work = work_of_step(Shape.of(tree, COUNTS), Batch(num_positions, 8), TILE, "zeroed")
    found = (work.nodes, work.visits, work.columns, work.row_numbers, work.products)
    assert found == pytest.approx((nodes, visits, columns, 8 * rows, 8 * products), rel=1e-12)
    assert work.zero_numbers == pytest.approx(8 * (tree.num_rows - rows), rel=1e-12)
    assert (work.levels, work.vectors) == (num_positions * tree.depth, 8 * num_positions)


@pytest.mark.parametrize("tile", [1, 3, 4, 16])
def test_visits_in_tiles_are_the_sum_over_binomial_numbers(tile: int) -> None:
    num_positions = 37
    number = torch.arange(num_positions + 1.0, dtype=torch.float64)
    for share in (0.0, 1e-9, 0.02, 0.5, 0.9, 1.0):
        probability = torch.tensor(
            [
                math.comb(num_positions, v) * share**v * (1 - share) ** (num_positions - v)
                for v in range(num_positions + 1)
            ]
        ).double()
        expected = float(probability @ (tile * (number / tile).ceil()))
        found = float(visits_in_tiles(torch.tensor(share).double(), num_positions, tile))
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_a_node_of_one_child_costs_nothing() -> None:
    work = work_of_nodes(torch.ones(1).double(), torch.ones(1), Batch(7, 8), TILE, "mapped")
    assert [float(torch.as_tensor(each).sum()) for each in work] == [0.0] * len(work)


def test_a_draw_expands_the_path_of_the_word() -> None:
    tree = TREES["two levels"]
    work = work_of_sample(Shape.of(tree, COUNTS), 8)
    assert work.nodes == pytest.approx(2)
    assert work.columns == pytest.approx(3 + (8 * 2 + 1 * 2 + 2 * 1) / 11)


def test_top_k_expands_what_is_more_probable_than_the_last_word() -> None:
    counts = 1 / torch.arange(1, 1_000_001).double()
    shape = Shape.of(even_tree(torch.arange(1_000_000), [1000]), counts)
    kth_share = float(counts[4] / counts.sum())
    work = work_of_topk(shape, kth_share, 8)
    num_classes = int((shape.share[1:] > kth_share).sum())
    assert work.nodes == 1 + num_classes
    assert work.columns == 1000 * (1 + num_classes)
    assert work_of_topk(shape, 0.0, 8).nodes == 1001


@pytest.mark.parametrize("num_words", [1, 2, 3, 10, 100])
@pytest.mark.parametrize("depth", [2, 3, 8])
@pytest.mark.parametrize("shortlist", [0, 2])
def test_even_trees_have_every_word_once(num_words: int, depth: int, shortlist: int) -> None:
    order = torch.randperm(num_words)
    shortlist = min(shortlist, num_words - 1)
    splits = splits_of_depth(num_words, depth)
    for dealt in (False, True):
        tree = even_tree(order, splits, shortlist, dealt=dealt)
        assert tree.vocab_size == num_words
        assert tree.depth <= depth
        assert int((tree.node_of_row[tree.row_of_word[order[:shortlist]]] == 0).sum()) == shortlist
        if math.prod(splits) <= num_words - shortlist:
            below = tree.num_words_below[tree.num_children > 0]
            last = below[tree.level == tree.depth - 1]
            assert int(last.max() - last.min()) <= 1
