"""The sampled softmax: its loss while training, and that it is a full softmax otherwise."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lm.model.sampled import SampledSoftmax
from lm.output import ClassTree
from lm.output.rowwise import RowGradient

N, H, S, P = 50, 6, 20, 12
COUNTS = torch.arange(N) ** 2


def make(*, row_wise: bool = False) -> Any:
    torch.manual_seed(0)
    options: Any = {"counts": COUNTS, "num_samples": S, "row_wise": row_wise}
    layer: Any = SampledSoftmax(H, ClassTree.full(N), **options).double()
    torch.nn.init.normal_(layer.weight)
    layer.zero_padding()
    torch.nn.init.normal_(layer.bias)
    return layer


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(P, H, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.randint(N, (P,), generator=generator)
    target[3] = -100
    return hidden, target


def test_the_loss_is_that_of_its_definition() -> None:
    layer, (hidden, target) = make(), inputs()
    share = (1 + COUNTS.double()) / (1 + COUNTS.double()).sum()
    torch.manual_seed(5)
    sample = [int((share.cumsum(0) < place).sum()) for place in torch.rand(S, dtype=torch.float64)]
    logits = F.linear(hidden, layer.weight[:, :H], layer.bias)
    expected = []
    for row, other, word in zip(logits, logits - (S * share).log(), target.tolist(), strict=True):
        if word >= 0:
            others = [other[each] for each in sample if each != word]
            expected.append(torch.stack([row[word], *others]).logsumexp(0) - row[word])
    torch.manual_seed(5)
    nll = layer.loss(hidden, target, "none")
    assert nll[3] == 0
    torch.testing.assert_close(nll[target >= 0], torch.stack(expected), rtol=1e-5, atol=1e-5)
    torch.manual_seed(5)
    mean = layer.loss(hidden, target)
    torch.testing.assert_close(mean, torch.stack(expected).mean(), rtol=1e-5, atol=1e-5)


def test_mistakes_are_named_while_training_too() -> None:
    with pytest.raises(ValueError, match=r"expected a full tree and counts \[N\], got"):
        SampledSoftmax(H, ClassTree.two_level(num_words=N), counts=COUNTS, num_samples=S)
    layer, (hidden, target) = make(), inputs()
    for wrong in (-1, N):
        with pytest.raises(IndexError, match=f"target {wrong} is out of bounds for {N} words"):
            layer.loss(hidden, torch.full_like(target, wrong))
    shapes = rf"hidden must be \[..., {H}\], got \[{P // 2}, {2 * H}\]"
    with pytest.raises(ValueError, match=shapes):
        layer.loss(hidden.view(P // 2, 2 * H), target)


def test_row_wise_gradients_are_the_dense_ones() -> None:
    dense, row_wise, (hidden, target) = make(), make(row_wise=True), inputs()
    for layer in (dense, row_wise):
        torch.manual_seed(3)
        torch.autograd.backward(layer.loss(hidden, target))
    for one, other in zip(dense.parameters(), row_wise.parameters(), strict=True):
        assert isinstance(other.grad, RowGradient)
        assert other.grad.to_dense().count_nonzero(0).min() < N
        torch.testing.assert_close(one.grad, other.grad.to_dense(), rtol=1e-6, atol=1e-9)


def test_bf16_rounds_neither_the_sample_nor_its_correction() -> None:
    target, losses = torch.arange(1000), []
    for dtype in (torch.float32, torch.bfloat16):
        layer = SampledSoftmax(H, ClassTree.full(1000), counts=target**2, num_samples=100)
        torch.nn.init.zeros_(layer.to(dtype).weight)
        torch.manual_seed(2)
        losses.append(layer.loss(torch.zeros(1000, H, dtype=dtype), target, "none"))
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_in_evaluation_it_is_a_full_softmax(reduction: str) -> None:
    layer, (hidden, target) = make().eval(), inputs()
    logits = F.linear(hidden, layer.weight[:, :H], layer.bias)
    expected = F.cross_entropy(logits, target, reduction=reduction)
    torch.testing.assert_close(layer.loss(hidden, target, reduction), expected)
