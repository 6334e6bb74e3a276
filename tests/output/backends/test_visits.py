"""From targets to visits: those of the paths, sorted by node."""

import pytest
import torch

from lm.output import ClassTree
from lm.output.backends.visits import route


def test_visits_are_those_of_the_paths() -> None:
    tree = ClassTree.balanced(90, 4)
    target = torch.randint(0, 90, (50,))
    target[1] = -100
    visits = route(target, tree.arrays, tree.depth, -100)
    for place, position in enumerate(visits.position.tolist()):
        word = int(target[position])
        path = tree.path(word) if word != -100 else []
        expected = [(node, row) for node, row in path if int(tree.num_children[node]) > 1]
        found = [
            (int(node), int(tree.first_row[node]) + int(child))
            for node, child in zip(visits.node[:, place], visits.child[:, place], strict=True)
            if node >= 0
        ]
        assert found == expected
    for nodes in visits.node:  # each node's visits are an interval
        firsts = torch.unique_consecutive(nodes[nodes >= 0])
        assert firsts.numel() == firsts.unique().numel()


@pytest.mark.parametrize("num_nodes", [32_767, 32_768, 70_000])
def test_positions_are_sorted_by_node_in_trees_of_any_number_of_nodes(num_nodes: int) -> None:
    """Ranks are sorted in 16 bits while these hold them."""
    tree = ClassTree.two_level(torch.arange(2 * (num_nodes - 1)) // 2)
    assert tree.num_nodes == num_nodes
    target = torch.randint(tree.vocab_size, (400,))
    target[:2], target[2] = tree.vocab_size - 1, -100
    visits = route(target, tree.arrays, tree.depth, -100)
    leaf = tree.node_of_row[tree.row_of_word[target[visits.position[:-1]]]]
    assert (tree.preorder[leaf].diff() >= 0).all()
    assert int(visits.position[-1]) == 2  # ignored ones last
