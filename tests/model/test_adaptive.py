"""The adaptive softmax as an output layer: torch's own figures, for words in any order."""

from typing import Any

import pytest
import torch
from torch import nn

from lm.model.adaptive import AdaptiveSoftmax
from lm.output import ClassTree

N, H = 30, 16
COUNTS = torch.randperm(N, generator=torch.Generator().manual_seed(3)) + 1


def layer() -> AdaptiveSoftmax:
    """Shortlist of 5 words, clusters of 10 and 15, words not in order of frequency."""
    rank = torch.empty(N, dtype=torch.int64)
    rank[COUNTS.argsort(descending=True)] = torch.arange(N)
    tree = ClassTree.two_level((rank >= 15).long(), 5, COUNTS)
    return AdaptiveSoftmax(H, tree).double()


def test_shortlist_and_clusters_are_those_of_the_tree() -> None:
    adaptive = layer()
    assert adaptive.softmax.cutoffs == [5, 15, 30]
    assert adaptive.rank.sort().values.tolist() == list(range(N))
    assert (COUNTS[adaptive.rank < 5] > 25).all()
    assert (COUNTS[adaptive.rank >= 15] <= 15).all()


def test_probabilities_of_all_words_sum_to_one() -> None:
    adaptive = layer()
    hidden = torch.randn(H, dtype=torch.float64).expand(N, H)
    nll = adaptive.loss(hidden, torch.arange(N), "none")
    torch.testing.assert_close(nll.neg().exp().sum(), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(adaptive.loss(hidden, torch.arange(N)), nll.mean())
    torch.testing.assert_close(adaptive.log_prob(hidden)[0], -nll)


def test_the_head_pays_all_for_its_words_and_the_cluster_for_others() -> None:
    adaptive, target = layer(), torch.arange(N).view(6, 5)
    hidden = torch.randn(6, 5, H, dtype=torch.float64)
    whole, head = adaptive.loss(hidden, target, "none"), adaptive.class_loss(hidden, target, "none")
    in_head = adaptive.rank[target] < 5
    torch.testing.assert_close(head[in_head], whole[in_head])
    assert (head < whole)[~in_head].all()


def test_it_computes_in_single_precision_under_autocast() -> None:
    adaptive = layer().float()
    hidden, target = torch.randn(4, H), torch.tensor([0, 7, 20, 29])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lower = adaptive.loss(hidden.bfloat16(), target, "none")
    torch.testing.assert_close(lower, adaptive.loss(hidden.bfloat16().float(), target, "none"))


@pytest.mark.parametrize(
    "tree", [ClassTree.full(N), ClassTree.balanced(N, 2), ClassTree.two_level(torch.arange(N) % 3)]
)
def test_trees_of_another_shape_are_refused(tree: ClassTree) -> None:
    with pytest.raises(ValueError, match="an adaptive softmax has"):
        AdaptiveSoftmax(H, tree)


def test_it_is_a_module_whose_tree_is_saved() -> None:
    adaptive: nn.Module = layer()
    assert any(name.startswith("tree.") for name in adaptive.state_dict())
    with pytest.raises(ValueError, match="trains and evaluates only"):
        layer().sample(torch.randn(1, H))


@pytest.mark.parametrize(
    ("hidden_size", "num_clusters", "width"), [(64, 3, 1), (63, 3, 2), (200, 2, 12), (2, 2, 2)]
)
def test_projections_narrow_as_far_as_the_last_has_a_dimension(
    hidden_size: int, num_clusters: int, width: int
) -> None:
    tree = ClassTree.two_level(torch.arange(20) % num_clusters, head=4)
    last: Any = AdaptiveSoftmax(hidden_size, tree).softmax.tail[-1]
    assert last[0].out_features == width
