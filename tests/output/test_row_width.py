"""Rows longer than hidden vectors: what follows the first H numbers of a row does not matter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lm.output import HierarchicalSoftmax
from lm.output.decoding import distribution
from lm.output.decoding.draws import Sampling
from lm.output.rowwise import RowAdagrad, RowAdam, RowSGD

from .definition import METHODS, TREES, H, N, layer_of, problem

W = 11
TREE = TREES["shortlist"]


def with_long_rows(inputs: list[Tensor]) -> list[Tensor]:
    """The problem with arbitrary numbers after the H of each row of the weight."""
    hidden, weight, *others = inputs
    weight = torch.cat([weight, torch.randn(len(weight), W - H, dtype=weight.dtype)], 1)
    return [hidden, weight.detach().requires_grad_(), *others]


def test_decoding_of_long_rows_is_that_of_their_first_numbers() -> None:
    inputs = problem(TREE, 9)
    results: list[list[Tensor]] = []
    for hidden, weight, bias, target in (inputs, with_long_rows(inputs)):
        layer = (hidden, weight, TREE, bias)
        log_prob, word = distribution.topk(*layer, k=4)
        seeds = torch.arange(9)
        draws = [Sampling(), Sampling(top_p=0.7), Sampling(temperature=0.7, top_k=5)]
        found = [
            distribution.log_prob(*layer),
            distribution.candidate_log_prob(hidden, weight, word, TREE, bias),
            layer_of(weight, TREE, bias).nll_by_level(hidden, target),
            *(log_prob, word),
            *(distribution.sample(*layer, sampling=each, seeds=seeds) for each in draws),
        ]
        d_hidden, d_weight = torch.autograd.grad(
            found[0].square().sum() + found[1].exp().sum(), (hidden, weight)
        )
        assert not d_weight[:, H:].any()
        results.append([*(each.detach() for each in found), d_hidden, d_weight[:, :H]])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 7, 8, 25, 64])
def test_rows_of_a_layer_begin_at_multiples_of_16_bytes_and_end_with_zeros(size: int) -> None:
    torch.manual_seed(1)
    weight = HierarchicalSoftmax(size, TREE, dtype=torch.bfloat16).weight
    torch.manual_seed(1)
    drawn = torch.empty_like(weight).uniform_(-(size**-0.5), size**-0.5)
    assert weight.is_contiguous()
    assert 2 * weight.stride(0) % 16 == 0
    assert 0 <= weight.shape[1] - size < 8
    assert not weight[:, size:].any()
    assert torch.equal(weight[:, :size], drawn[:, :size])


@pytest.mark.parametrize("size", [H - 1, H + 2])
def test_a_layer_refuses_hidden_vectors_of_another_size(size: int) -> None:
    layer = HierarchicalSoftmax(H, TREE)
    for method in METHODS.values():
        with pytest.raises(ValueError, match=rf"hidden must be \[\.\.\., 6\], got \[3, {size}\]"):
            method(layer, torch.randn(3, size), torch.zeros(3).long())


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda rows: torch.optim.SGD(rows, 0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda rows: torch.optim.Adam(rows, 0.1, weight_decay=0.1, amsgrad=True),
    "adamw": lambda rows: torch.optim.AdamW(rows, 0.1, weight_decay=0.1, fused=True),
    "row-wise sgd": lambda rows: RowSGD(rows, 0.1),
    "row-wise adagrad": lambda rows: RowAdagrad(rows, 0.1),
    "row-wise adam": lambda rows: RowAdam(rows, 0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_changes_the_zeros_after_a_row(name: str, dtype: torch.dtype) -> None:
    layer = HierarchicalSoftmax(H, TREE, dtype=dtype, row_wise=name.startswith("row-wise"))
    before = layer.weight.detach().clone()
    optimizer = OPTIMIZERS[name](layer.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        loss = layer.loss(torch.randn(40, H), torch.randint(0, N, (40,)))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
        optimizer.step()
    assert not layer.weight[:, H:].any()
    assert (layer.weight[:, :H] != before[:, :H]).double().mean() > 0.9
