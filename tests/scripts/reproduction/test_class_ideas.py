"""The layers that were tried are distributions over all words."""

import pytest
import torch

from lm.output import ClassTree, HierarchicalSoftmax
from scripts.reproduction.class_ideas import DropoutBelowRoot, RootMixture, TwoTrees

TREE = ClassTree.two_level([1, 0, 2, 1, 2, 2, 0], shortlist=2)


@pytest.mark.parametrize("kind", [DropoutBelowRoot, RootMixture, TwoTrees])
def test_probabilities_of_all_words_sum_to_one(kind: type[HierarchicalSoftmax]) -> None:
    TwoTrees.other_tree = ClassTree.two_level([0, 1, 1, 0, 1, 0, 1])
    torch.manual_seed(0)
    layer = kind(8, TREE).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    hidden, words = torch.randn(5, 1, 8).expand(-1, 7, -1), torch.arange(7).expand(5, -1)
    nll = layer.loss(hidden, words, "none")
    torch.testing.assert_close((-nll).exp().sum(1), torch.ones(5))
    torch.testing.assert_close(layer.nll_by_level(hidden, words).sum(0), nll)
    if kind is DropoutBelowRoot:
        plain = HierarchicalSoftmax(8, TREE)
        plain.load_state_dict(layer.state_dict())
        torch.testing.assert_close(nll, plain.loss(hidden, words, "none"))
        layer.train()
        dropped = layer.loss(hidden, words, "none") - nll
        is_child_of_root = TREE.rows_on_path(words)[..., 1] < 0
        torch.testing.assert_close(
            dropped[is_child_of_root], torch.zeros_like(dropped[is_child_of_root])
        )
        assert (dropped[~is_child_of_root] != 0).float().mean() > 0.5
