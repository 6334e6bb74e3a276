"""hierarchical_cross_entropy: what it refuses and warns of; log-sum-exps by level."""

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends.base import Problem
from lm.output.backends.nodes import lse_by_level

from .definition import TWO_LEVEL, H, N, definition_by_level, layer_of, problem


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

    def term(logits: Tensor, row: Tensor) -> Tensor:
        return torch.where(logits.isfinite().sum(1) > 1, logits.logsumexp(1), 0)[:, None]

    expected = definition_by_level(hidden, weight, bias, target, tree, term)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lse, inputs)
    assert torch.autograd.gradgradcheck(lse, inputs, fast_mode=True)
    empty = layer_of(weight, tree).lse_by_level(hidden[:0], target[:0])
    assert empty.shape == (tree.depth, 0, 2)


def test_rows_by_column_are_read_slowly_with_a_warning() -> None:
    hidden, weight, bias, target = problem(TWO_LEVEL, 4, 3)
    plain = hierarchical_cross_entropy(hidden, weight, target, TWO_LEVEL, bias)
    by_column = weight.T.contiguous().T
    with pytest.warns(
        UserWarning, match=f"slowly on cpu.*gaps, got strides \\(1, {len(weight)}\\)"
    ):
        strided = hierarchical_cross_entropy(hidden, by_column, target, TWO_LEVEL, bias)
    torch.testing.assert_close(strided, plain, rtol=1e-13, atol=1e-13)


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
