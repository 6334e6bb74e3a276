"""The schedule of the fused kernels: every visit has one program."""

from collections import Counter

import pytest
import torch

from lm.output import ClassTree
from lm.output.backends.triton.schedule import LIGHT, schedule
from lm.output.backends.visits import route

from ...definition import two_level, zipf_targets


@pytest.mark.parametrize("num_positions", [1, 17, 300])
@pytest.mark.parametrize(
    "tree",
    [two_level(200, 14), ClassTree.balanced(200, 3), ClassTree.huffman(torch.arange(40))],
)
def test_the_schedule_covers_every_visit_once(tree: ClassTree, num_positions: int) -> None:
    target = zipf_targets(tree, num_positions)
    visits = route(target, tree.arrays, tree.depth, -100)
    plan = schedule(visits, tree.arrays)
    counts = Counter(visits.node.flatten().tolist())
    heavy = {node for node, count in counts.items() if node >= 0 and count > LIGHT}
    listed = [flat for flat in plan.heavy_first.tolist() if flat >= 0]
    nodes = visits.node.flatten()[listed].tolist()
    assert sorted(nodes) == sorted(heavy)
    assert [counts[node] for node in nodes] == sorted((counts[n] for n in nodes), reverse=True)
    covered = torch.isin(visits.node, torch.tensor(sorted(heavy))).long()
    for first in plan.light_first.tolist():
        if first < num_positions:
            top = int(plan.light_level[first])
            stop = int(plan.stop[top, first])
            assert stop - first <= LIGHT
            covered[top:, first:stop] += (visits.node[top:, first:stop] >= 0).long()
    assert torch.equal(covered, (visits.node >= 0).long())
