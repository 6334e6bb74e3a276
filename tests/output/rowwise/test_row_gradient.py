"""RowGradient: equal to the dense gradient, and only of the rows visited."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output import HierarchicalSoftmax
from lm.output.backends import nodes
from lm.output.backends.compiled import passes
from lm.output.functional import BackendName
from lm.output.rowwise import RowAdagrad, RowGradient, lookup

from ..definition import nll
from .tables import SHORTLIST, TREES, H, W, accumulate, table

TWO_LEVEL = TREES["two levels"]
N = TWO_LEVEL.vocab_size


def row_wise(batches: int = 1) -> RowGradient:
    """The gradient of a weight that is read at the input too, in some batches."""
    params = table(SHORTLIST)
    for number in range(batches):
        accumulate(params, SHORTLIST, number, order="loss first")
    assert isinstance(params[0].grad, RowGradient)
    return params[0].grad


@pytest.mark.usefixtures("backend")
def test_only_children_of_visited_nodes_and_input_words_have_values() -> None:
    weight, bias = table(TWO_LEVEL)
    row, target = torch.tensor([3, 3, 40]), torch.tensor([0, 7, 7, 30])
    torch.autograd.backward(lookup(weight, row).sum())
    hidden = torch.randn(len(target), H, dtype=weight.dtype)
    torch.autograd.backward(nll([hidden, weight, bias, target], TWO_LEVEL, row_wise=True).sum())
    visited = TWO_LEVEL.node_of_row[TWO_LEVEL.row_of_word[target]]
    expected = torch.isin(TWO_LEVEL.node_of_row, torch.cat([visited, torch.tensor([0])]))
    expected[row] = True
    num_blocks = torch.zeros(TWO_LEVEL.num_rows, dtype=torch.int64)
    assert isinstance(weight.grad, RowGradient)
    for block in weight.grad.factors.blocks(weight):
        num_blocks[block.rows] += 1
    assert num_blocks.tolist() == expected.long().tolist()
    assert not expected.all()


def test_the_sparse_tensor_is_coalesced_and_the_same() -> None:
    grad = row_wise(batches=2)
    made = grad.to_sparse()
    index = made.indices()[0]
    assert index.tolist() == sorted(set(index.tolist()))
    assert torch.equal(made.to_dense(), grad.to_dense())
    empty = RowGradient(grad).to_sparse()
    assert (empty._nnz(), empty.shape) == (0, grad.shape)


READING: list[Callable[[Tensor], Tensor]] = [
    torch.exp,
    lambda grad: grad + torch.ones(grad.shape, dtype=grad.dtype),
    lambda grad: torch.ones(grad.shape, dtype=grad.dtype) + grad,
    lambda grad: torch.ones(grad.shape, dtype=grad.dtype).add_(grad),
    lambda grad: torch.ones(grad.shape).copy_(grad),
    lambda grad: grad.isfinite().all(),
    lambda grad: grad.abs().max(),
    lambda grad: grad.flatten()[:20].histc(5),
    lambda grad: grad * torch.arange(W),
    lambda grad: grad / 3,
    lambda grad: grad / 0,
    lambda grad: torch.tensor(2.0) / grad,
    lambda grad: torch.linalg.vector_norm(grad),
    lambda grad: torch.linalg.vector_norm(grad, torch.inf),
    lambda grad: torch.linalg.vector_norm(grad, 2, keepdim=True),
    lambda grad: torch.linalg.vector_norm(grad, 2, 1),
    lambda grad: torch.linalg.vector_norm(grad, dtype=torch.float64),
    lambda grad: torch.stack([grad, grad]).std(1),
    lambda grad: grad.new_empty_strided((3,), (1,), dtype=torch.float64).fill_(2),
]


@pytest.mark.parametrize("operation", READING)
def test_operations_that_read_a_gradient_are_those_of_the_dense_one(
    operation: Callable[[Tensor], Tensor],
) -> None:
    grad = row_wise()
    actual, expected = operation(grad), operation(grad.to_dense())
    actual = actual.to_dense() if isinstance(actual, RowGradient) else actual
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15, equal_nan=True)


CHANGING: list[Callable[[Tensor], Tensor]] = [
    lambda grad: grad.mul_(0.5),
    lambda grad: grad.data.mul_(0.5),
    lambda grad: grad.detach().mul_(0.5),
    lambda grad: grad.data.zero_(),
    lambda grad: grad.detach().data.add_(grad),
    lambda grad: grad.clone().mul_(0.5),
    lambda grad: grad.copy_(grad.detach()),
    lambda grad: grad.add_(torch.ones(grad.shape), alpha=2),
    lambda grad: grad.data.add_(1),
    lambda grad: grad.add_(torch.ones(grad.shape).to_sparse()),
    lambda grad: grad.div_(0),
]


@pytest.mark.parametrize("operation", CHANGING)
def test_operations_that_change_a_gradient_or_a_tensor_that_shares_it_change_it(
    operation: Callable[[Tensor], Tensor],
) -> None:
    grad = row_wise()
    dense = grad.to_dense()
    assert isinstance(operation(grad), RowGradient)
    operation(dense)
    torch.testing.assert_close(grad.to_dense(), dense, rtol=1e-12, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize("dense_first", [False, True])
@pytest.mark.usefixtures("backend")
def test_dense_and_row_wise_gradients_are_added_in_either_order(dense_first: bool) -> None:
    """Clipped, and used by an optimizer."""
    results = []
    for row_wise in (False, True):
        torch.manual_seed(0)
        layer = HierarchicalSoftmax(H, SHORTLIST, row_wise=row_wise, dtype=torch.float64)
        hidden, target = torch.randn(9, H, dtype=torch.float64), torch.arange(9)
        for number in range(4):
            is_dense = (number % 2 == 0) == dense_first
            terms = layer.log_prob(hidden).square() if is_dense else layer.loss(hidden, target)
            torch.autograd.backward(terms.mean())
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
        grads = [cast(Tensor, param.grad).to_dense() for param in layer.parameters()]
        RowAdagrad(layer.parameters(), lr=0.1).step()
        results.append([norm, *grads, *(param.detach() for param in layer.parameters())])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_hooks_and_anomaly_detection_see_the_gradient() -> None:
    found: list[list[Tensor]] = []
    for backend in ("dense", "reference"):
        params, kept = table(SHORTLIST), list[Tensor]()
        params[0].register_hook(kept.append)  # type: ignore[no-untyped-call]
        with torch.autograd.set_detect_anomaly(True):
            accumulate(params, SHORTLIST, 0, backend, order="loss first")
        assert isinstance(params[0].grad, RowGradient) == (backend == "reference")
        found.append([*kept, cast(Tensor, params[0].grad).div_(2)])
    for one, other in zip(*found, strict=True):
        other = other.to_dense() if isinstance(other, RowGradient) else other
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda grad: grad.exp_(), r"to_dense\(\) converts it"),
        (lambda grad: grad.to("meta"), r"zero_grad\(\) before moving a layer"),
        (lambda grad: grad.mul_(torch.ones(W)), "does not support aten.mul_"),
        (lambda grad: grad.add_(torch.ones(2, *grad.shape)), "does not support aten.add_"),
        (lambda grad: torch.tensor(2.0).mul_(grad), "does not support aten.mul_"),
        (lambda grad: grad.copy_(torch.ones(grad.shape)), "does not support aten.copy_"),
        (lambda grad: grad.clamp_(-1, 1), "clipped by clip_grad_norm_"),
        (lambda grad: torch._foreach_mul_([grad], grad[0, 0]), "not with foreach=True"),
        (lambda grad: torch.mul(grad, grad, out=torch.ones(())), "DDP and FSDP require row_wise=F"),
        (lambda grad: torch.zeros(grad.shape).lerp_(grad, 0.5), "does not support aten.lerp_"),
    ],
)
def test_operations_that_change_a_tensor_raise(
    operation: Callable[[Tensor], Tensor], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        operation(row_wise())


@pytest.mark.usefixtures("backend")
def test_the_gradient_is_not_differentiable_again() -> None:
    layer = HierarchicalSoftmax(H, SHORTLIST, row_wise=True)
    hidden = torch.randn(6, H, requires_grad=True)
    for read in (hidden, lookup(layer.weight, torch.arange(6))[:, :H]):
        loss = layer.loss(read, torch.arange(6))
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(loss, [layer.weight], create_graph=True)


def test_lookup_of_repeated_rows_adds_their_gradients_up_and_of_none_has_no_gradient() -> None:
    weight = torch.randn(9, H, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[2, 2, 7], [0, 2, 7]])
    vectors = lookup(weight, torch.tensor([3, -1]))
    assert torch.equal(vectors, torch.stack([weight[3], torch.zeros_like(weight[3])]))
    (grad,) = torch.autograd.grad(vectors.sum(), weight)
    assert grad.to_sparse().indices().tolist() == [[3]]
    (grad,) = torch.autograd.grad(lookup(weight, index[:, :0]).sum(), weight)
    assert grad.to_sparse().indices().tolist() == [[]]
    grads = []
    for look in (lookup, lambda rows, index: F.embedding(index, rows)):
        (grad,) = torch.autograd.grad(look(weight, index).square().sum(), weight)
        grads.append(grad.to_dense())
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler accesses all of them
def test_the_rest_of_a_model_compiles_around_a_layer_with_row_wise_gradients() -> None:
    layer = HierarchicalSoftmax(H, SHORTLIST, row_wise=True).double()
    hidden, target = torch.randn(9, H, dtype=torch.float64), torch.arange(9)

    def loss(hidden: Tensor) -> Tensor:
        return layer.loss((hidden * 2).tanh(), target) * 3

    found = torch.compile(loss, backend="eager")(hidden)
    torch.testing.assert_close(found, loss(hidden))
    found.backward()  # type: ignore[no-untyped-call]
    assert isinstance(layer.weight.grad, RowGradient)


@pytest.mark.parametrize("backend", ["reference", "compiled"])
def test_gradients_of_nodes_with_few_visits_are_products(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As rows they would be larger: W numbers for each child instead of one for each visit.

    Except for narrow nodes in the compiled backend.
    """
    monkeypatch.setattr(nodes, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(passes, "NARROW", 0)
    monkeypatch.setattr(passes, "FORMED_VISITS", W)
    weight, bias = table(TWO_LEVEL)
    hidden, target = torch.randn(W - 1, H, dtype=torch.float64), torch.randint(0, N, (W - 1,))
    each = nll([hidden, weight, bias, target], TWO_LEVEL, row_wise=True, backend=backend)
    (d_weight,) = torch.autograd.grad(each.sum(), weight)
    assert isinstance(d_weight, RowGradient)
    visited_classes = torch.unique(TWO_LEVEL.node_of_row[TWO_LEVEL.row_of_word[target]])
    (visited,) = d_weight.factors.visited
    assert len(visited.nodes) == 1 + len(visited_classes)
    assert not len(visited.formed)
