"""The adaptive softmax as an output layer: PyTorch's figures, for words in any order."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.model.adaptive import AdaptiveSoftmax
from tests.models import new_model

N, H = 30, 16
COUNTS = torch.randperm(N, generator=torch.Generator().manual_seed(3)) + 1


def layer() -> AdaptiveSoftmax:
    """Shortlist of 5 words, clusters of 10 and 15, words not in order of frequency."""
    return AdaptiveSoftmax(H, COUNTS, [5, 15]).double()


def hidden(*shape: int) -> Tensor:
    return torch.randn(*shape, H, dtype=torch.float64)


def test_shortlist_and_clusters_are_those_of_the_cutoffs() -> None:
    adaptive = layer()
    assert adaptive.softmax.cutoffs == [5, 15, 30]
    assert adaptive.index_of_word.sort().values.tolist() == list(range(N))
    assert (COUNTS[adaptive.index_of_word < 5] > 25).all()
    assert (COUNTS[adaptive.index_of_word >= 15] <= 15).all()


def test_the_default_cutoffs_are_a_tenth_and_a_third_of_the_vocabulary() -> None:
    adaptive: Any = new_model(None, {"counts": COUNTS}, init_range=0.1).output
    assert float(adaptive.softmax.head.weight.detach().abs().max()) <= 0.1
    assert adaptive.softmax.cutoffs == [3, 10, 30]
    assert int(adaptive.index_of_word[COUNTS.argmax()]) < 3


def test_probabilities_of_all_words_sum_to_one_and_are_those_of_candidates() -> None:
    adaptive, vectors = layer(), hidden(4)
    log_prob = adaptive.log_prob(vectors)
    torch.testing.assert_close(log_prob.exp().sum(1), torch.ones(4, dtype=torch.float64))
    word = torch.randint(N, (4, 9))
    expected = log_prob.gather(1, word)
    torch.testing.assert_close(adaptive.candidate_log_prob(vectors, word), expected)
    torch.testing.assert_close(adaptive.log_prob(vectors[0]), log_prob[0])  # one position
    torch.testing.assert_close(adaptive.loss(vectors, word[:, 0]), -expected[:, 0].mean())
    torch.testing.assert_close(adaptive.loss(vectors, word[:, 0], "sum"), -expected[:, 0].sum())
    assert adaptive.log_prob(vectors[:0]).shape == (0, N)
    for wrong in (-1, N):
        with pytest.raises(IndexError, match=f"target {wrong} is out of bounds for {N} words"):
            adaptive.loss(vectors, torch.full((4,), wrong))
    with pytest.raises(IndexError, match="candidate -100 is out of bounds"):
        adaptive.candidate_log_prob(vectors, word * 0 - 100)


def test_levels_sum_to_the_loss_and_the_shortlist_pays_at_the_first_alone() -> None:
    adaptive, target, vectors = layer(), torch.arange(N).view(6, 5), hidden(6, 5)
    nll, by_level = adaptive.loss(vectors, target, "none"), adaptive.nll_by_level(vectors, target)
    assert by_level.shape == (2, 6, 5)
    assert not by_level.requires_grad
    torch.testing.assert_close(by_level.sum(0), nll, rtol=1e-12, atol=1e-14)
    in_shortlist = adaptive.index_of_word[target] < 5
    assert (by_level[1][in_shortlist] == 0).all()
    assert (by_level[1][~in_shortlist] > 0).all()
    logits = adaptive.softmax.head(vectors[0, 0])
    cluster = int(adaptive.index_of_word[0])
    child = cluster if cluster < 5 else 5 if cluster < 15 else 6
    torch.testing.assert_close(by_level[0, 0, 0], F.cross_entropy(logits, torch.tensor(child)))


def test_ignored_positions_cost_nothing() -> None:
    adaptive, vectors = layer(), hidden(4)
    target = torch.tensor([3, -100, 20, -100])
    valid = adaptive.loss(vectors[::2], target[::2], "none")
    nll = adaptive.loss(vectors, target, "none")
    torch.testing.assert_close(nll, torch.stack([valid[0], nll[1] * 0, valid[1], nll[3] * 0]))
    torch.testing.assert_close(adaptive.loss(vectors, target), valid.mean())
    assert (adaptive.nll_by_level(vectors, target)[:, 1::2] == 0).all()
    vectors.requires_grad_()
    loss = adaptive.loss(vectors, torch.full((4,), -100))
    (d_hidden,) = torch.autograd.grad(loss, vectors)
    assert float(loss.detach()) == 0
    assert (d_hidden == 0).all()


def test_the_index_is_saved_and_generation_is_an_error() -> None:
    adaptive = layer()
    other = AdaptiveSoftmax(H, torch.arange(N), [5, 15]).double()
    assert not torch.equal(other.index_of_word, adaptive.index_of_word)
    other.load_state_dict(adaptive.state_dict())
    vectors = hidden(3)
    assert torch.equal(other.log_prob(vectors), adaptive.log_prob(vectors))
    with pytest.raises(ValueError, match="does not support sampling"):
        adaptive.sample(vectors)
    with pytest.raises(ValueError, match="does not support search for the best words"):
        adaptive.topk(vectors, 1)


@pytest.mark.parametrize(
    ("hidden_size", "cutoffs", "width"),
    [(64, [4, 9, 14], 1), (63, [4, 9, 14], 2), (200, [4, 9], 12), (2, [4, 9], 2)],
)
def test_projections_narrow_as_far_as_the_last_has_a_dimension(
    hidden_size: int, cutoffs: list[int], width: int
) -> None:
    last: Any = AdaptiveSoftmax(hidden_size, COUNTS, cutoffs).softmax.tail[-1]
    assert last[0].out_features == width


def test_tail_dropout_acts_on_clusters_only_and_while_training_only() -> None:
    adaptive = AdaptiveSoftmax(H, COUNTS, [9], tail_dropout=0.5).double()
    frequent = (COUNTS.argsort(descending=True, stable=True))[:3]
    rare = (COUNTS.argsort(stable=True))[:3]
    vectors = hidden(3)
    expected = adaptive.eval().loss(vectors, frequent, "none")
    adaptive.train()
    assert torch.equal(adaptive.loss(vectors, frequent, "none"), expected)
    torch.manual_seed(0)
    dropped = adaptive.loss(vectors, rare, "none")
    torch.manual_seed(0)
    kept = F.dropout(vectors, 0.5)
    root = adaptive.nll_by_level(vectors, rare)[0]
    torch.testing.assert_close(dropped, root + adaptive.eval().nll_by_level(kept, rare)[1])
