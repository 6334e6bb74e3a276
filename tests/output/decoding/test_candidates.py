"""Candidates have the probabilities of the full distribution, from few nodes."""

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.backends import nodes
from lm.output.decoding import distribution
from tests.output.definition import TWO_LEVEL, H, N


def layer_of(tree: ClassTree, *, bias: bool = True) -> HierarchicalSoftmax:
    layer = HierarchicalSoftmax(H, tree, bias=bias, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("num_candidates", [0, 1, 40])
def test_candidates_equal_the_full_distribution(
    tree: ClassTree, shape: tuple[int, ...], num_candidates: int, bias: bool
) -> None:
    layer = layer_of(tree, bias=bias)
    hidden = torch.randn(*shape, H, dtype=torch.float64)
    word = torch.randint(N, (*shape, num_candidates))  # 40 of 23 words: some repeat
    actual = layer.candidate_log_prob(hidden, word)
    assert actual.shape == word.shape
    torch.testing.assert_close(actual, layer.log_prob(hidden).gather(-1, word))


def test_gradients_are_those_of_the_full_distribution(tree: ClassTree) -> None:
    layer = layer_of(tree)
    hidden = torch.randn(4, H, dtype=torch.float64, requires_grad=True)
    word = torch.randint(N, (4, 5))
    upstream = torch.randn(4, 5, dtype=torch.float64)
    inputs = [hidden, *layer.parameters()]
    actual = torch.autograd.grad(layer.candidate_log_prob(hidden, word), inputs, upstream)
    log_prob = layer.log_prob(hidden).gather(-1, word)
    torch.testing.assert_close(actual, torch.autograd.grad(log_prob, inputs, upstream))


def test_each_node_is_evaluated_once_for_a_position(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[tuple[int, int]] = []
    log_softmax = nodes.node_log_softmax

    def recorded(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        evaluated.append((len(hidden), len(weight)))
        return log_softmax(hidden, weight, bias)

    monkeypatch.setattr(distribution, "node_log_softmax", recorded)
    layer = layer_of(TWO_LEVEL)  # word w is in class 7 w mod 5: 0 and 5 are in class 0, 3 in 1
    words = torch.tensor([[0, 5, 0, 3], [3, 3, 3, 3]])
    layer.candidate_log_prob(torch.randn(2, H, dtype=torch.float64), words)
    assert evaluated == [(2, 5), (1, 5), (2, 4)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_summed_in_fp32(tree: ClassTree, dtype: torch.dtype) -> None:
    layer = layer_of(tree).to(dtype)
    hidden, word = torch.randn(3, H, dtype=dtype), torch.randint(N, (3, 8))
    actual = layer.candidate_log_prob(hidden, word)
    assert actual.dtype == torch.float32
    truth = layer.double().log_prob(hidden.double()).gather(-1, word)
    torch.testing.assert_close(actual.double(), truth, rtol=1e-5, atol=1e-5)


def test_mistakes_are_named() -> None:
    layer, hidden = layer_of(TWO_LEVEL), torch.randn(2, H, dtype=torch.float64)
    with pytest.raises(IndexError, match=r"^candidate 23 is out of bounds for 23 words$"):
        layer.candidate_log_prob(hidden, torch.tensor([[0], [N]]))
    with pytest.raises(IndexError, match=r"^candidate -100 is out of bounds for 23 words$"):
        layer.candidate_log_prob(hidden, torch.tensor([[0], [-100]]))
    with pytest.raises(ValueError, match=r"candidates \[..., K\], got \[2, 6\] and \[3, 1\]"):
        layer.candidate_log_prob(hidden, torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^candidates must be int64 on cpu, got torch.int32"):
        layer.candidate_log_prob(hidden, torch.zeros(2, 1, dtype=torch.int32))
