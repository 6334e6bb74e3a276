"""hierarchical_cross_entropy: its definition in fp64, and the laws that a softmax obeys."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends.base import Problem
from lm.output.backends.nodes import lse_by_level
from lm.output.functional import BackendName

from .definition import (
    TREES,
    TWO_LEVEL,
    H,
    N,
    assert_errors_are_small,
    both_backends,
    definition,
    definition_by_level,
    layer_of,
    nll,
    problem,
)  # fmt: skip


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("tree", "with_bias"),
    [*((tree, True) for tree in TREES), ("shortlist", False), ("paths", False)],
    indirect=["tree"],
)
def test_values_and_gradients_are_those_of_the_definition(tree: ClassTree, with_bias: bool) -> None:
    hidden, weight, bias, target = problem(tree, 4, 9)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    ours = nll([*inputs, target], tree)
    truth = definition(hidden, weight, bias if with_bias else None, target, tree)
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(truth)
    grads = [torch.autograd.grad(each, inputs, upstream) for each in (ours, truth)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("backend")
def test_the_nll_by_level_is_that_of_each_softmax_on_the_path(tree: ClassTree) -> None:
    hidden, weight, bias, target = problem(tree, 4, 9)
    by_level = layer_of(weight, tree, bias).nll_by_level(hidden, target)
    assert by_level.shape == (tree.depth, 4, 9)
    assert not by_level.requires_grad
    truth = definition_by_level(hidden, weight, bias, target, tree).detach()
    torch.testing.assert_close(by_level, truth, rtol=1e-12, atol=1e-12)
    layer = layer_of(weight, tree)
    assert layer.nll_by_level(hidden[:0], target[:0]).shape == (tree.depth, 0, 9)
    assert not layer.nll_by_level(hidden, torch.full_like(target, -100)).any()
    with pytest.raises(IndexError, match="target 23 is out of bounds for 23 words"):
        layer.nll_by_level(hidden, torch.full_like(target, N))


def test_the_lse_by_level_is_that_of_each_softmax_and_differentiable_twice(tree: ClassTree) -> None:
    *inputs, target = problem(tree, 3, 2)

    def lse(*inputs: Tensor) -> Tensor:
        hidden, weight, bias = inputs
        problem = Problem.of(hidden, weight, target, tree, bias)
        return lse_by_level(problem).view(tree.depth, *target.shape)

    found = lse(*inputs)
    hidden, weight, bias = inputs
    layer = layer_of(weight, tree, bias)
    assert torch.equal(layer.lse_by_level(hidden, target), found)

    def term(logits: Tensor, child: int) -> Tensor:
        return logits.logsumexp(0) * (len(logits) > 1)

    expected = definition_by_level(hidden, weight, bias, target, tree, term)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lse, inputs)
    assert torch.autograd.gradgradcheck(lse, inputs, fast_mode=True)
    empty = layer_of(weight, tree).lse_by_level(hidden[:0], target[:0])
    assert empty.shape == (tree.depth, 0, 2)


@both_backends
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [0, 1, 4])
def test_depth_one_is_cross_entropy(reduction: str, ignored: int) -> None:
    tree = ClassTree.full(N)
    hidden, weight, bias, target = problem(tree, 4)
    target = target.clamp(min=0)
    target[:ignored] = -7
    ours = nll([hidden, weight, bias, target], tree, reduction=reduction, ignore_index=-7)
    truth = F.cross_entropy(hidden @ weight.T + bias, target, reduction=reduction, ignore_index=-7)
    if ignored == 4 and reduction == "mean":
        truth = torch.zeros_like(truth)  # 0 instead of 0 / 0
    torch.testing.assert_close(ours, truth)


@both_backends
def test_nothing_to_predict_costs_nothing(tree: ClassTree) -> None:
    hidden, weight, bias, _ = problem(tree, 3)
    for count, target in ((3, torch.full((3,), -100)), (0, torch.zeros(0).long())):
        loss = hierarchical_cross_entropy(hidden[:count], weight, target, tree, bias)
        assert loss.item() == 0
        grads = torch.autograd.grad(loss, (hidden, weight, bias))
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # in expm1's series, then not used
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_huge_logits_stay_finite(scale: float) -> None:
    hidden, weight, bias, target = problem(TWO_LEVEL, 6, dtype=torch.float32)
    ours = nll([hidden * scale, weight, bias, target], TWO_LEVEL)
    truth = definition(hidden.double() * scale, weight.double(), bias.double(), target, TWO_LEVEL)
    torch.testing.assert_close(ours, truth.float(), rtol=1e-5, atol=0.2)
    grads = torch.autograd.grad(ours.sum(), (hidden, weight, bias))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("least", "dtype"), [(0, torch.bfloat16), (100, torch.float32)])
def test_confident_predictions_keep_their_gradient(
    least: float, dtype: torch.dtype, backend: BackendName
) -> None:
    """Here q - 1 is -1e-6: 0 for a probability in bf16, and less than fp32 rounds an lse of 114."""
    tree = ClassTree.full(2)
    weight = torch.tensor([[least + 13.8125], [least]], dtype=dtype, requires_grad=True)
    hidden, target = torch.ones(1, 1, dtype=dtype), torch.zeros(1).long()
    loss = hierarchical_cross_entropy(hidden, weight, target, tree, backend=backend)
    (d_weight,) = torch.autograd.grad(loss, weight)
    truth = torch.sigmoid(torch.tensor(-13.8125, dtype=torch.float64))
    torch.testing.assert_close(d_weight[0, 0].double(), -truth, rtol=0.1, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_within_twice_those_of_plain_torch(
    tree: ClassTree, dtype: torch.dtype, backend: str
) -> None:
    if backend == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bf16 wrongly")
    *inputs, target = problem(tree, 40)
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    upstream = torch.randn(40)
    results: list[list[Tensor]] = []
    for kind, tensors in {"ours": inputs, "plain": inputs, "truth": exact}.items():
        hidden, weight, bias = tensors
        each = definition(hidden, weight, bias, target, tree)
        if kind == "ours":
            each = nll([*tensors, target], tree)
        grads = torch.autograd.grad(each, tensors, upstream.to(each.dtype))
        results.append([each, *grads])
    assert results[0][0].dtype == torch.float32
    assert_errors_are_small(results, 4 * torch.finfo(dtype).eps)


def test_strides_of_the_inputs_do_not_matter() -> None:
    hidden, weight, bias, target = problem(TWO_LEVEL, 4, 3)
    plain = hierarchical_cross_entropy(hidden, weight, target, TWO_LEVEL, bias)
    strided = hierarchical_cross_entropy(
        hidden.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0),
        torch.cat([weight, weight], dim=1)[:, :H],
        target.T.contiguous().T,
        TWO_LEVEL,
        torch.stack([bias, bias], dim=1)[:, 0],
    )
    torch.testing.assert_close(strided, plain, rtol=1e-13, atol=1e-13)
    by_column = weight.T.contiguous().T
    with pytest.warns(
        UserWarning, match=f"slowly on cpu.*gaps, got strides \\(1, {len(weight)}\\)"
    ):
        strided = hierarchical_cross_entropy(hidden, by_column, target, TWO_LEVEL, bias)
    torch.testing.assert_close(strided, plain, rtol=1e-13, atol=1e-13)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of lanes that store nothing
@both_backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_gradient_of_an_ignored_position_is_not_used(dtype: torch.dtype) -> None:
    *inputs, target = problem(TWO_LEVEL, 9, dtype=dtype)
    upstream = torch.randn(9).to(torch.promote_types(dtype, torch.float32))
    grads = []
    for value in (0.0, torch.inf, torch.nan):
        upstream[1] = value
        each = nll([*inputs, target], TWO_LEVEL)
        grads.append(torch.autograd.grad(each, inputs, upstream))
    assert target[1] == -100
    assert all(
        torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True)
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(5, H)}, ValueError, "hidden must be .* got .5, 6. and .6."),
        ({"hidden": torch.zeros(6, H).long()}, ValueError, "floating point, got torch.int64"),
        ({"hidden": torch.zeros(6, 0)}, ValueError, r"H ≥ 1, .* got torch.float32 \[6, 0\]"),
        ({"weight": torch.zeros(28, H).long()}, ValueError, "floating point, got torch.int64"),
        ({"bias": torch.zeros(28).int()}, ValueError, "floating point, got .* torch.int32"),
        ({"weight": torch.zeros(3, H)}, ValueError, r"weight must be .* got \[3, 6\]"),
        ({"bias": torch.zeros(3)}, ValueError, r"bias must be .* got \[3\]"),
        (
            {"weight": torch.zeros(28, H).double()},
            ValueError,
            "outside of autocast.*convert hidden",
        ),
        ({"hidden": [[0.0]]}, ValueError, "hidden must be a tensor, got list"),
        ({"target": [0] * 6}, ValueError, "target must be a tensor, got list"),
        ({"tree": None}, ValueError, "tree must be a ClassTree, .* got None"),
        ({"target": torch.zeros(6)}, ValueError, "target must be int64, got torch.float32"),
        ({"target": torch.full((6,), N)}, IndexError, "target 23 is out of bounds for 23 words"),
        ({"target": torch.full((6,), -1)}, IndexError, "target -1 is out of bounds for 23 words"),
        ({"reduction": "max"}, ValueError, "reduction must be mean, sum or none, got 'max'"),
        (
            {"backend": "cuda"},
            ValueError,
            "must be auto or one of compiled, reference, triton, got 'cuda'",
        ),
    ],
)
def test_invalid_arguments_are_named(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    arguments: dict[str, object] = {
        "hidden": torch.zeros(6, H),
        "weight": torch.zeros(TWO_LEVEL.num_rows, H),
        "target": torch.zeros(6).long(),
        "tree": TWO_LEVEL,
        "bias": torch.zeros(TWO_LEVEL.num_rows),
    }
    with pytest.raises(error, match=message):
        hierarchical_cross_entropy(**(arguments | change))  # type: ignore[arg-type]
