"""The routing of the fused kernels: that of the reference, in lists of work."""

from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton import backend
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import execute, instrumented
from lm.output.backends.triton.routing import Routing, chunk_size, sizes
from lm.output.backends.visits import route

from ...definition import SMALL_TILES, two_level, zipf_targets

pytest.importorskip("triton")
TILE, LIGHT, BLOCK = SMALL_TILES.forward.v, SMALL_TILES.light.v, SMALL_TILES.heavy.c
ROUTING = ("_sort", "_merge", "_plan")


def routed(tree: ClassTree, num_positions: int) -> tuple[Problem, Routing, Tensor]:
    """A problem of no columns of H, its routing, and which nodes have visits."""
    target = zipf_targets(tree, num_positions)
    hidden, weight = torch.zeros(num_positions, 1), torch.zeros(tree.num_rows, 1)
    problem = Problem.of(hidden, weight, target, tree)
    with instrumented(run=lambda each: execute(each) if each.kernel.__name__ in ROUTING else None):
        _, saved = TritonBackend().forward(problem, Needs(True, True, False))
    found = Routing.of(saved[0], num_positions, tree.depth)
    by_level = {name: getattr(found, name).view(tree.depth, -1) for name in ("node", "child")}
    return problem, found._replace(**by_level), saved[1]


@pytest.mark.parametrize(
    ("num_positions", "most_runs"),
    [(1, 64), (17, 0), (300, 64), (600, 64), pytest.param(1100, 64, marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    "tree",
    [two_level(200, 14), ClassTree.balanced(200, 3), ClassTree.huffman(torch.arange(40))],
)
def test_every_visit_and_every_row_has_one_program(
    tree: ClassTree, num_positions: int, most_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MOST_RUNS", most_runs)
    with instrumented(tiles=SMALL_TILES):
        problem, found, visited = routed(tree, num_positions)
        chunk = chunk_size(problem, SMALL_TILES)
    truth = route(problem.target, problem.tree, tree.depth, -100)
    for name in ("position", "node", "child"):
        assert torch.equal(getattr(found, name).long(), getattr(truth, name))
    node = truth.node.flatten()
    counts = Counter(node[node >= 0].tolist())
    assert visited.nonzero().flatten().tolist() == sorted(counts)
    tiles, light, groups, rows, chunks, split = found.num_entries[:6].tolist()
    covered = torch.zeros_like(node)

    def cover(flat: int, most: int) -> None:
        level, begin = divmod(flat, num_positions)
        same = truth.node[level, begin : begin + most] == node[flat]
        covered[flat : flat + int(same.sum())] += 1

    for flat in found.heavy_tiles[:tiles].tolist():
        assert counts[int(node[flat])] > LIGHT
        cover(flat, TILE)
    for flat in found.light_nodes[:light].tolist():
        assert counts[int(node[flat])] <= LIGHT
        cover(flat, LIGHT)
    assert torch.equal(covered, (node >= 0).long())
    is_light = torch.tensor([counts[int(n)] <= LIGHT for n in node]).view(truth.node.shape)
    is_light &= truth.node >= 0
    first_light = torch.where(is_light, torch.arange(tree.depth)[:, None], tree.depth).amin(0)
    assert torch.equal(found.light_level.long(), first_light)
    in_groups = torch.zeros(num_positions)
    for flat in found.light_groups[:groups].tolist():
        level, begin = divmod(flat, num_positions)
        in_groups[begin : begin + counts[int(node[flat])]] += 1
        assert int(first_light[begin]) == level
    assert torch.equal(in_groups, (first_light < tree.depth).float())
    sums: Counter[tuple[int, int]] = Counter()
    for entries, is_split in ((found.row_tiles[:rows], False), (found.chunk_tiles[:chunks], True)):
        for flat, stop, block, _ in entries.tolist():
            size, n = stop - flat % num_positions, int(node[flat])
            assert 0 < size <= chunk
            assert is_split == (counts[n] > chunk)
            sums[n, block * BLOCK] += size
    expected = {
        (n, c0): count
        for n, count in counts.items()
        for c0 in range(0, int(tree.num_children[n]), BLOCK)
        if count > LIGHT
    }
    assert sums == expected
    assert split == sum(count > chunk for count in expected.values())


def test_lists_are_long_enough() -> None:
    """The number of entries is not checked where they are written."""
    trees = (two_level(200, 14), ClassTree.balanced(300, 3), ClassTree.full(100))
    problems = list(product(trees, (LIGHT + 1, SMALL_TILES.chunk + 1, 150)))
    for tree, num_positions in [*problems, (trees[0], 260)]:
        with instrumented(tiles=SMALL_TILES):
            problem, found, _ = routed(tree, num_positions)
            most = sizes(problem, SMALL_TILES)
        used = found.num_entries[: len(most)].tolist()
        assert all(a <= b for a, b in zip(used, most, strict=True)), (used, most)
