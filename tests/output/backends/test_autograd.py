"""The backends as differentiable functions: gradients, registered ops, compilation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, HierarchicalSoftmax, hierarchical_cross_entropy
from lm.output.backends import OPS
from lm.output.backends.base import Needs

from ..definition import TREES, TWO_LEVEL, H, both_backends, nll, on, problem

PAIRS = [*(("reference", tree) for tree in TREES), ("triton", "shortlist")]
"""The interpreter is slow; the gradients of every tree are compared with those of the definition in
`test_functional.py`.
"""


@pytest.mark.parametrize(("backend", "tree"), PAIRS, indirect=True)
def test_gradients_pass_gradcheck(backend: str, tree: ClassTree) -> None:
    """Through the kernels along random directions."""
    *inputs, target = problem(tree, 5)
    assert torch.autograd.gradcheck(
        lambda *inputs: nll([*inputs, target], tree), inputs, fast_mode=backend == "triton"
    )


@pytest.mark.parametrize(("name", "tree"), PAIRS, indirect=["tree"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")  # by opcheck
def test_registered_ops_pass_opcheck(
    name: str, tree: ClassTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that an op returns is compared, so memory that it does not write must be equal too."""
    monkeypatch.setattr(Tensor, "new_empty", Tensor.new_zeros)
    sizes = (tree.depth, tree.max_path_columns, -100)
    needs = list(Needs(hidden=True, weight=True, bias=True))
    hidden, weight, bias, target = problem(tree, 5)
    arguments = (hidden, weight, target, list(tree.arrays), bias, *sizes, needs)
    results = torch.library.opcheck(OPS[name], arguments)  # type: ignore[arg-type]
    assert set(results.values()) == {"SUCCESS"}


@both_backends
@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("subset", range(8))
def test_any_subset_of_the_gradients_may_be_asked_for(subset: int, row_wise: bool) -> None:
    *inputs, target = problem(TWO_LEVEL, 6)
    loss = nll([*inputs, target], TWO_LEVEL, reduction="mean")
    truth = torch.autograd.grad(loss, inputs)
    chosen = [
        tensor.detach().requires_grad_(bool(subset >> i & 1)) for i, tensor in enumerate(inputs)
    ]
    loss = nll([*chosen, target], TWO_LEVEL, reduction="mean", row_wise=row_wise)
    assert loss.requires_grad == bool(subset)
    if subset:
        torch.autograd.backward(loss)
    for tensor, true in zip(chosen, truth, strict=True):
        found = None if tensor.grad is None else tensor.grad.to_dense()
        torch.testing.assert_close(found, true if tensor.requires_grad else None)


@both_backends
def test_compiled_with_fullgraph_equals_eager() -> None:
    layer = HierarchicalSoftmax(H, TWO_LEVEL, dtype=torch.float64)
    inputs = list(layer.parameters())

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return layer.loss(hidden.tanh(), target) * 2

    for positions in (5, 9):
        hidden, _, _, target = problem(TWO_LEVEL, positions)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        losses = [make(hidden, target) for make in (loss, compiled)]
        torch.testing.assert_close(*losses)
        grads = [torch.autograd.grad(each, [hidden, *inputs]) for each in losses]
        torch.testing.assert_close(*grads)


def test_autocast_takes_half_precision_hidden_with_full_precision_weights() -> None:
    """A fused backend may round rows and errors to bf16, as tests of its own show."""
    hidden, weight, bias, target = problem(TWO_LEVEL, 30, dtype=torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = hierarchical_cross_entropy(
            half, weight, target, TWO_LEVEL, bias, backend="reference"
        )
    grads = torch.autograd.grad(loss, (half, weight, bias))
    exact = half.detach().float().requires_grad_()
    truth = hierarchical_cross_entropy(exact, weight, target, TWO_LEVEL, bias)
    true_grads = torch.autograd.grad(truth, (exact, weight, bias))
    torch.testing.assert_close(loss, truth, rtol=2.0**-19, atol=0)
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]
    for grad, true, rounding in zip(grads, true_grads, (2.0**-8, 0, 0), strict=True):
        assert (grad.float() - true).abs().max() <= (2.0**-19 + rounding) * true.abs().max()


@on("reference")
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
        loss = nll([*inputs, target], tree, reduction="mean", row_wise=row_wise)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = torch.autograd.grad(loss, inputs)
        grads.append([grad.to_dense() for grad in found])
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own rules use it
@both_backends
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


@both_backends
def test_a_second_derivative_is_refused() -> None:
    *inputs, target = problem(TWO_LEVEL, 5)
    loss = nll([*inputs, target], TWO_LEVEL, reduction="sum")
    with pytest.raises(RuntimeError, match="the loss of a tree is differentiable once"):
        torch.autograd.grad(loss, inputs[0], create_graph=True)[0].square().sum().backward()  # type: ignore[no-untyped-call]


@both_backends
def test_checkpointed_activations_give_the_same_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    hidden, weight, bias, target = problem(TWO_LEVEL, 6)

    def loss(hidden: Tensor) -> Tensor:
        return hierarchical_cross_entropy(hidden.tanh(), weight, target, TWO_LEVEL, bias)

    (plain,) = torch.autograd.grad(loss(hidden), hidden)
    (again,) = torch.autograd.grad(checkpoint(loss, hidden, use_reentrant=False), hidden)
    assert torch.equal(plain, again)
