"""The routing of the fused kernels is that of the reference, in lists that are long enough."""

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton import backend
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import Launch, execute, instrumented
from lm.output.backends.triton.routing import Routing, sizes
from lm.output.backends.visits import route

from ...definition import SMALL_TILES, two_level, zipf_targets

pytest.importorskip("triton")
ROUTING = ("_sort", "_merge", "_plan")


@pytest.mark.parametrize(
    ("num_positions", "most_runs"),
    [(1, 64), (17, 0), (300, 64), (600, 64), pytest.param(1100, 64, marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    "tree", [two_level(200, 14), ClassTree.balanced(200, 3), ClassTree.huffman(torch.arange(40))]
)
def test_visits_are_those_of_the_reference_in_lists_that_have_room(
    tree: ClassTree, num_positions: int, most_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of entries is not checked where they are written."""
    monkeypatch.setattr(backend, "MOST_RUNS", most_runs)
    target = zipf_targets(tree, num_positions)
    hidden, weight = torch.zeros(num_positions, 1), torch.zeros(tree.num_rows, 1)
    problem = Problem.of(hidden, weight, target, tree)

    def run(launch: Launch) -> None:
        if launch.kernel.__name__ in ROUTING:
            execute(launch)

    with instrumented(run=run, tiles=SMALL_TILES):
        _, saved = TritonBackend().forward(problem, Needs(True, True, False))
        most = sizes(problem, SMALL_TILES)
    found = Routing.of(saved[0], num_positions, tree.depth)
    truth = route(problem.target, problem.tree, tree.depth, -100)
    assert torch.equal(found.position.long(), truth.position)
    for ours, true in ((found.node, truth.node), (found.child, truth.child)):
        assert torch.equal(ours.view(tree.depth, -1).long(), true)
    visited: Tensor = saved[1]
    assert torch.equal(visited.nonzero().flatten(), torch.unique(truth.node[truth.node >= 0]))
    used = found.num_entries[: len(most)].tolist()
    assert all(a <= b for a, b in zip(used, most, strict=True)), (used, most)
