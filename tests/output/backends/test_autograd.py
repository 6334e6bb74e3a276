"""The backends as differentiable functions: registered ops, autocast, and what is refused."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends import OPS
from lm.output.backends.base import Needs

from ..definition import TWO_LEVEL, nll, problem
from ..laws import Recorded


@pytest.mark.parametrize(
    ("name", "tree"),
    [("reference", "paths"), ("compiled", "huffman"), ("triton", "shortlist")],
    indirect=["tree"],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")  # by opcheck
def test_registered_ops_pass_opcheck(
    name: str, tree: ClassTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that an op returns is compared, so memory that it does not write must be equal too."""
    monkeypatch.setattr(Tensor, "new_empty", Tensor.new_zeros)
    sizes = (tree.depth, tree.max_path_columns, -100)
    needs = list(Needs(hidden=True, weight=True, bias=True))
    hidden, weight, bias, target = problem(tree, 5)
    arguments = (target, hidden, weight, list(tree.arrays), bias, *sizes, needs)
    results = torch.library.opcheck(OPS[name], arguments)  # type: ignore[arg-type]
    assert set(results.values()) == {"SUCCESS"}


def test_autocast_takes_half_precision_hidden_with_full_precision_weights() -> None:
    """A fused backend may round rows and errors to bf16, as tests of its own show."""
    hidden, weight, bias, target = problem(TWO_LEVEL, 30, dtype=torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nll([half, weight, bias, target], TWO_LEVEL, reduction="mean", backend="reference")
    grads = torch.autograd.grad(loss, (half, weight, bias))
    exact = half.detach().float().requires_grad_()
    truth = nll([exact, weight, bias, target], TWO_LEVEL, reduction="mean")
    true_grads = torch.autograd.grad(truth, (exact, weight, bias))
    torch.testing.assert_close(loss, truth, rtol=2.0**-19, atol=0)
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]
    for grad, true, rounding in zip(grads, true_grads, (2.0**-8, 0, 0), strict=True):
        assert (grad.float() - true).abs().max() <= (2.0**-19 + rounding) * true.abs().max()


@pytest.mark.parametrize(
    ("tree", "row_wise"), [("two levels", False), ("full", True)], indirect=["tree"]
)
def test_a_backward_within_autocast_has_the_precision_of_the_forward(
    tree: ClassTree, row_wise: bool
) -> None:
    *inputs, target = problem(tree, 30, dtype=torch.float32)
    inputs[1:] = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs[1:]]
    grads = []
    for autocast in (False, True):
        loss = nll(
            [*inputs, target], tree, reduction="mean", row_wise=row_wise, backend="reference"
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = torch.autograd.grad(loss, inputs)
        grads.append([grad.to_dense() for grad in found])
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own rules use it
@pytest.mark.parametrize(
    "transform",
    [
        lambda loss, hidden: torch.func.jvp(loss, (hidden,), (hidden,)),
        lambda loss, hidden: torch.func.grad(loss)(hidden),
        lambda loss, hidden: torch.func.vmap(loss)(hidden.expand(3, -1, -1)),
    ],
)
def test_transforms_are_refused(transform: Callable[..., object]) -> None:
    """A registered op has no rule for them: a forward-mode derivative would be 0."""
    hidden, *rest = (tensor.detach() for tensor in problem(TWO_LEVEL, 5))
    with pytest.raises(RuntimeError, match=r"does not support .* torch\.func"):
        transform(lambda hidden: nll([hidden, *rest], TWO_LEVEL).sum(), hidden)


@pytest.mark.parametrize("mode", [nullcontext, Recorded])
def test_a_second_derivative_is_refused(mode: Callable[[], Any]) -> None:
    *inputs, target = problem(TWO_LEVEL, 5)
    with mode():
        loss = nll([*inputs, target], TWO_LEVEL, reduction="sum")
    with pytest.raises(RuntimeError, match="the loss of a tree is differentiable once"):
        torch.autograd.grad(loss, inputs[0], create_graph=True)[0].square().sum().backward()  # type: ignore[no-untyped-call]
