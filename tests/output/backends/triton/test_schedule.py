"""The schedule of the fused kernels: every visit has one program."""

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends.triton.schedule import LIGHT, schedule
from lm.output.backends.visits import route


def targets(tree: ClassTree, num_positions: int) -> Tensor:
    """Words of which half are drawn by inverse rank, and one is ignored."""
    target = torch.randint(0, tree.vocab_size, (num_positions,))
    frequent = (tree.vocab_size ** torch.rand(num_positions)).long().clamp(max=tree.vocab_size - 1)
    target = torch.where(torch.rand(num_positions) < 0.5, frequent, target)
    target[1:2] = -100
    return target


@pytest.mark.parametrize("num_positions", [1, 17, 300])
@pytest.mark.parametrize(
    "tree",
    [
        ClassTree.two_level(torch.arange(200) * 14 // 200),
        ClassTree.balanced(200, 3),
        ClassTree.huffman(torch.arange(40)),
    ],
)
def test_the_schedule_covers_every_visit_once(tree: ClassTree, num_positions: int) -> None:
    target = targets(tree, num_positions)
    visits = route(target, tree.arrays, tree.depth, -100)
    plan = schedule(visits, tree.arrays)
    counts: dict[int, int] = {}
    for node in visits.node.flatten().tolist():
        counts[node] = counts.get(node, 0) + 1
    heavy = {node for node, count in counts.items() if node >= 0 and count > LIGHT}
    listed = [flat for flat in plan.heavy_first.tolist() if flat >= 0]
    nodes = visits.node.flatten()[listed].tolist()
    assert set(nodes) == heavy
    assert len(nodes) == len(heavy)
    assert [counts[node] for node in nodes] == sorted((counts[n] for n in nodes), reverse=True)
    covered = torch.zeros_like(visits.node)
    for level, nodes_of_level in enumerate(visits.node):
        for place, node in enumerate(nodes_of_level.tolist()):
            covered[level, place] = node in heavy
    for first in plan.light_first.tolist():
        if first < num_positions:
            top = int(plan.light_level[first])
            stop = int(plan.stop[top, first])
            assert stop - first <= LIGHT
            covered[top:, first:stop] += (visits.node[top:, first:stop] >= 0).long()
    assert torch.equal(covered, (visits.node >= 0).long())
