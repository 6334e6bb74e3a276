"""ClassTree: every shape is a partition of the words; laws of the layer for random trees."""

import heapq
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.decoding.distribution import candidate_log_prob, log_prob, topk

from ..decoding.truth import TREES, draw_many, word_class, word_log_prob
from ..definition import problem
from ..laws import Case, Way, equals_the_definition, problem_of

SHAPES: dict[str, Callable[[int], ClassTree]] = TREES | {
    "all in the shortlist": lambda n: ClassTree.two_level(word_class(n), shortlist=n),
    "balanced 2": lambda n: ClassTree.balanced(n, 2),
    "balanced 5": lambda n: ClassTree.balanced(n, 5),
}


@pytest.fixture(params=product(SHAPES, [1, 2, 3, 12, 97]), ids=str)
def tree(request: pytest.FixtureRequest) -> ClassTree:
    shape, num_words = request.param
    return SHAPES[shape](num_words)


def test_arrays_and_sizes_match_a_depth_first_walk(tree: ClassTree) -> None:
    node_of_row = {row: node for node, row in enumerate(tree.row_of_node.tolist())}
    words = set(tree.row_of_word.tolist())
    walked: list[tuple[int, int]] = []
    owned: list[int] = []
    stack = [(0, 0)]
    while stack:
        node, level = stack.pop()
        walked.append((node, level))
        first = int(tree.first_row[node])
        rows = range(first, first + int(tree.num_children[node]))
        assert (tree.node_of_row[first : rows.stop] == node).all()
        assert all((row in words) != (row in node_of_row) for row in rows)
        owned += rows
        stack += [(node_of_row[row], level + 1) for row in reversed(rows) if row in node_of_row]
    assert sorted(owned) == list(range(tree.vocab_size + tree.num_nodes - 1))
    assert [node for node, _ in walked] == tree.preorder.argsort().tolist()
    assert [level for _, level in walked] == tree.level[tree.preorder.argsort()].tolist()
    for node, rank in enumerate(tree.preorder.tolist()):
        subtree = [other for other in range(tree.num_nodes) if node in ancestors(tree, other)]
        ranks = sorted(tree.preorder[subtree].tolist())
        assert ranks == list(range(rank, int(tree.preorder_stop[node])))
        columns = sum(int(tree.num_children[other]) for other in ancestors(tree, node)[1:])
        assert int(tree.column[node]) == columns
    paths = [tree.path(word) for word in range(tree.vocab_size)]
    assert tree.depth == max(map(len, paths))
    widths = [sum(int(tree.num_children[node]) for node, _ in path) for path in paths]
    assert tree.max_path_columns == max(widths)


def ancestors(tree: ClassTree, node: int) -> list[int]:
    """The node, then its ancestors from its parent up."""
    return [node] + (ancestors(tree, int(tree.node_of_row[tree.row_of_node[node]])) if node else [])


def test_paths_of_a_tree_rebuild_it(tree: ClassTree, tmp_path: Path) -> None:
    ids = range(tree.vocab_size)
    paths = [[row - int(tree.first_row[node]) for node, row in tree.path(id)] for id in ids]
    words = [f"w{id}" for id in ids]
    lines = [" ".join([word, *map(str, path)]) for word, path in zip(words, paths, strict=True)]
    (tmp_path / "paths").write_text("\n".join(reversed(lines)) + "\n\n")
    others = ClassTree.from_paths(paths), ClassTree.from_file(tmp_path / "paths", words)
    for other in (*others, ClassTree.from_state(tree.state_dict())):
        for name, value in tree.named_buffers():
            assert torch.equal(value, other.get_buffer(name)), name


def test_two_level_rows_are_the_shortlist_then_classes_then_words_of_each_class() -> None:
    tree = ClassTree.two_level([1, 0, 1, 9, 0])  # class numbers may have gaps
    assert tree.num_children.tolist() == [3, 2, 2, 1]
    assert tree.row_of_node.tolist() == [-1, 0, 1, 2]
    assert tree.row_of_word.tolist() == [5, 3, 6, 7, 4]
    word_class = [0, 0, 0, 1, 1, 0]
    tree = ClassTree.two_level(word_class, shortlist=2)
    assert tree.num_children.tolist() == [4, 2, 2]
    assert tree.row_of_word.tolist() == [0, 1, 4, 6, 7, 5]
    # With counts, the shortlist has the words with the largest ones.
    tree = ClassTree.two_level(word_class, shortlist=2, counts=[1, 9, 1, 3, 9, 2])
    assert tree.num_children.tolist() == [4, 3, 1]
    assert tree.row_of_word.tolist() == [4, 0, 5, 7, 1, 6]


def test_classes_of_classes_nested_lists_and_paths_make_the_same_tree() -> None:
    levels = [[1, 0, 1, -1, 0, 1, 0], [0, 1, 2, -1, -1, 0, 1]]
    paths = [[2, 0, 0], [1, 1, 0], [2, 1, 0], [0], [1, 0], [2, 0, 1], [1, 1, 1]]
    tree = ClassTree.from_levels(levels)
    assert tree.num_children.tolist() == [3, 2, 2, 2, 2, 1]
    same = [ClassTree.from_clusters([3, [4, [1, 6]], [[0, 5], [2]]]), ClassTree.from_paths(paths)]
    # The numbers of a class may start anew in every class of the level above.
    same.append(ClassTree.from_levels([levels[0], [0, 5, 1, -1, -1, 0, 5]]))
    for other in same:
        for array, expected in zip(other.arrays, tree.arrays, strict=True):
            assert torch.equal(array, expected)
    # The most frequent word is below the root.
    tree = ClassTree.from_levels([[1, 0, 1, 0], [0, 1, 2, 1]], shortlist=1, counts=[1, 9, 1, 1])
    assert [len(tree.path(word)) for word in range(4)] == [3, 1, 3, 3]


@pytest.mark.parametrize(("num_words", "branching"), [(1, 2), (8, 2), (9, 2), (100, 10), (97, 4)])
def test_balanced_trees_are_as_shallow_as_branching_allows(num_words: int, branching: int) -> None:
    tree = ClassTree.balanced(num_words, branching)
    depth = 1
    while branching**depth < num_words:
        depth += 1
    assert tree.depth == depth
    assert int(tree.num_children.max()) <= branching
    assert {len(tree.path(word)) for word in range(num_words)} == {depth}
    assert all(a < b for a, b in pairwise(tree.row_of_word.tolist()))


@pytest.mark.parametrize("arity", [2, 3, 5])
def test_huffman_trees_have_the_least_expected_depth(arity: int) -> None:
    counts = torch.randint(0, 1000, (97,), generator=torch.Generator().manual_seed(0))
    tree = ClassTree.huffman(counts, arity) if arity > 2 else ClassTree.huffman(counts)
    heap = counts.tolist() + [0] * (-(97 - 1) % (arity - 1))  # padding by words that never occur
    heapq.heapify(heap)
    least = 0
    while len(heap) > 1:
        merged = sum(heapq.heappop(heap) for _ in range(arity))
        least += merged
        heapq.heappush(heap, merged)
    assert sum(int(counts[word]) * len(tree.path(word)) for word in range(97)) == least
    assert sorted(tree.num_children.tolist())[1:] == [arity] * (tree.num_nodes - 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClassTree.full(0), "vocab_size must be an integer ≥ 1, got 0"),
        (lambda: ClassTree.full(torch.tensor(2.5)), "an integer ≥ 1, got tensor"),  # type: ignore[arg-type]
        (lambda: ClassTree.full(2.5), "vocab_size must be an integer ≥ 1, got 2.5"),  # type: ignore[arg-type]
        (lambda: ClassTree.two_level([]), "non-empty"),
        (lambda: ClassTree.two_level(), "requires either word_class or num_words"),
        (lambda: ClassTree.two_level([0, -1]), "word_class must be ≥ 0, got -1"),
        (lambda: ClassTree.two_level(torch.zeros(3)), "integers"),
        (lambda: ClassTree.two_level([0, 0], 3), "shortlist must be within 0 … 2 words, got 3"),
        (lambda: ClassTree.two_level([0, 0], 1.5), "shortlist must be an integer ≥ 0, got 1.5"),  # type: ignore[arg-type]
        (lambda: ClassTree.two_level([0, 0], 1, [1]), "counts must have 2 entries, got 1"),
        (lambda: ClassTree.balanced(5, 1), "branching must be an integer ≥ 2, got 1"),
        (lambda: ClassTree.huffman([1, 2], arity=1), "arity must be an integer ≥ 2, got 1"),
        (lambda: ClassTree.huffman([1, -2]), "counts must be ≥ 0, got -2"),
        (lambda: ClassTree.from_paths([[0], []]), "path of word 1 must be integers"),
        (lambda: ClassTree.from_paths([["noun"]]), "child numbers must be integers: "),  # type: ignore[list-item]
        (lambda: ClassTree.from_paths([[0], [0]]), "path of word 0"),
        (lambda: ClassTree.from_paths([[0], [0, 1]]), "path of word 0"),
        (lambda: ClassTree.from_state({}), "not a saved tree"),
        (lambda: ClassTree.from_levels([]), "at least one, got .. words"),
        (lambda: ClassTree.from_levels([[0, 1], [0]]), "got .2, 1. words"),
        (lambda: ClassTree.from_levels([[0, -2]]), "level 0 must be ≥ -1, got -2"),
        (lambda: ClassTree.from_levels([[0, -1], [0, 0]]), "word 1 has a class on level 1, none"),
        (lambda: ClassTree.from_clusters([0, []]), "non-empty sequence"),
        (lambda: ClassTree.from_clusters([0, "ab"]), "non-empty sequence"),
        (lambda: ClassTree.from_clusters([0, [2, 3]]), "each of 0 … 2 once"),
        (lambda: ClassTree.from_clusters([0, [1, 0]]), "each of 0 … 2 once"),
        (lambda: ClassTree.full(5).path(-1), "word -1 is out of bounds for 5 words"),
        (lambda: ClassTree.full(5).path(5), "word 5 is out of bounds for 5 words"),
        *(
            (partial(ClassTree, *map(torch.tensor, arrays)), "not a tree")
            for arrays in (  # num_children, row_of_node, row_of_word
                ([3], [-1], [0, 1, 1]),  # a row with two owners
                ([2, 2], [-1, 2], [0, 1, 3]),  # a node that is its own child
                ([2, 1], [-1, 0], [1, 2, 3]),  # one row too few
                ([3], [-1], [0, 1, 3]),  # a row out of range
                ([3], [0], [0, 1, 2]),  # a root with a row
                ([1], [-1], []),  # no words
                # not breadth first
                ([2] * 7, [-1, 0, 1, 2, 4, 3, 5], [6, 7, 10, 11, 8, 9, 12, 13]),
            )
        ),
    ],
)
def test_invalid_arguments_raise(make: Callable[[], object], message: str) -> None:
    with pytest.raises(IndexError if "out of bounds" in message else ValueError, match=message):
        make()


@pytest.mark.parametrize("size", [torch.tensor(10), np.uint8(10)])
def test_sizes_are_any_integers(size: Any) -> None:
    two = size - 8
    for tree, same in (
        (ClassTree.full(size), ClassTree.full(10)),
        (ClassTree.two_level(num_words=size), ClassTree.two_level(num_words=10)),
        (ClassTree.two_level([0] * 10, two), ClassTree.two_level([0] * 10, 2)),
        (ClassTree.balanced(size, two), ClassTree.balanced(10, 2)),
        (ClassTree.huffman([1] * 10, two), ClassTree.huffman([1] * 10, 2)),
    ):
        assert all(map(torch.equal, tree.arrays, same.arrays))
        assert type(tree.vocab_size) is int
    assert type(HierarchicalSoftmax(size, tree).hidden_size) is int


def test_loading_weights_of_another_tree_raises() -> None:
    layer = HierarchicalSoftmax(4, ClassTree.two_level([0, 0, 1, 1]))
    other = HierarchicalSoftmax(4, ClassTree.two_level([0, 1, 0, 1]))
    before = other.weight.clone()
    with pytest.raises(ValueError, match=r"another tree: tree\.row_of_word"):
        other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, before)


def test_a_tree_that_was_used_moves_to_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ClassTree.two_level(num_words=100)
    expected = tree.path(7)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_: tensor.clone())  # as to a GPU
    tree._apply(lambda _: SimpleNamespace(device=torch.device("cuda")))  # type: ignore[arg-type, return-value]
    assert tree.path(7) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_are_built_on_the_cpu_under_any_default_device(shape: str) -> None:
    expected = SHAPES[shape](12).preorder.tolist()
    with torch.device("meta"):
        tree = SHAPES[shape](12)
        again = ClassTree.from_state(tree.state_dict())
    assert tree.preorder.tolist() == again.preorder.tolist() == expected


Law = Callable[[ClassTree], None]
few_and_many = pytest.mark.parametrize("examples", [4, pytest.param(200, marks=pytest.mark.long)])


@st.composite
def trees(draw: st.DrawFn) -> ClassTree:
    """Trees of 1 to 12 words and up to 5 levels of classes; words and classes share parents."""
    num_words = draw(st.integers(1, 12))
    label = st.lists(st.integers(-1, 2), min_size=num_words, max_size=num_words)
    levels = draw(st.lists(label, min_size=1, max_size=5))
    for above, below in pairwise(levels):
        below[:] = [b if a >= 0 else -1 for a, b in zip(above, below, strict=True)]
    return ClassTree.from_levels(levels, draw(st.integers(0, min(2, num_words))))


def holds(law: Law, examples: int) -> None:

    @settings(max_examples=examples)
    @given(trees())
    def check(tree: ClassTree) -> None:
        torch.manual_seed(0)
        law(tree)

    check()


def distribution_law(tree: ClassTree) -> None:
    hidden, weight, bias, _ = (tensor.detach() for tensor in problem(tree, 3))
    layer = hidden, weight, tree, bias
    expected = word_log_prob(*layer)
    assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
    assert_close(expected.exp().sum(1), torch.ones(3, dtype=torch.float64))
    assert_close(log_prob(hidden, weight, tree, bias), expected)
    words = torch.arange(tree.vocab_size).flip(0).expand(3, -1)
    assert_close(candidate_log_prob(hidden, weight, words, tree, bias), expected.flip(1))
    best = topk(*layer, k=tree.vocab_size)
    assert torch.equal(best.word, expected.sort(dim=1, descending=True, stable=True).indices)
    share = torch.stack([row.bincount(minlength=tree.vocab_size) for row in draw_many(layer, 400)])
    deviation = (share / 400 - expected.exp()) / (expected.exp() / 400).sqrt().clamp(min=1e-3)
    assert float(deviation.abs().max()) < 6


@few_and_many
@pytest.mark.parametrize("form", ["dense", "row-wise"])
@pytest.mark.parametrize("backend", ["reference", "compiled"])
def test_loss_and_gradients_equal_the_definition(backend: str, form: str, examples: int) -> None:
    def law(tree: ClassTree) -> None:
        case = Case(tree, 5)
        equals_the_definition(Way(backend, form), case, *problem_of(case))

    holds(law, examples)


@few_and_many
def test_decoding_is_exact(examples: int) -> None:
    """All words sum to 1; candidates, top-k; draws are as frequent as they are probable."""
    holds(distribution_law, examples)
