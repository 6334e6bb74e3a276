"""Gradients of visited rows and the optimizers that take them: equal to dense ones, row by row."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output import ClassTree, HierarchicalSoftmax, functional, hierarchical_cross_entropy
from lm.output.backends.reference import backend as reference
from lm.output.backends.triton import backend as fused
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from lm.output.rowwise import optimizers as sparse
from lm.output.rowwise import row_gradient
from lm.output.rowwise.optimizers import RowAdagrad, RowAdam, RowOptimizer, RowSGD
from lm.output.rowwise.row_gradient import Product, RowGradient, Rows, lookup

N, H, P = 41, 6, 15
TREES = {
    "two_level": ClassTree.two_level((torch.arange(N) * 7) % 9),
    "head": ClassTree.two_level((torch.arange(N) * 7) % 9, head=4),
    "balanced": ClassTree.balanced(N, 3),
    "full": ClassTree.full(N),
}
SMALL = Tile(v=16, h=16, warps=4, stages=1)
Table = list[Tensor]
Make = Callable[[Table], torch.optim.Optimizer]
Kind = Callable[..., RowOptimizer]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.fixture(params=["kept", "formed again", "fused"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "formed again":
        monkeypatch.setattr(reference, "_KEPT_ELEMENTS", 0)
        monkeypatch.setattr(reference, "_KEPT_OF_ONE_NODE", 0)
        monkeypatch.setattr(reference, "_CAST_ELEMENTS", 37)
        monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 37)
    if request.param == "fused":
        pytest.importorskip("triton")
        monkeypatch.setattr(functional, "_choose", lambda *_: "triton")
        monkeypatch.setattr(fused, "tiles", lambda *_: Tiles(16, *[SMALL] * 4))
    return str(request.param)


@pytest.fixture(params=[1 << 19, 12], ids=["whole nodes", "two rows at a time"])
def _portion(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_gradient, "_PORTION", request.param)
    monkeypatch.setattr(row_gradient, "_ROWS_PORTION", request.param)


def table(tree: ClassTree, dtype: torch.dtype = torch.float64) -> Table:
    """Weight and bias, the same each time."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(tree.num_rows, H, dtype=torch.float64, generator=generator)
    bias = torch.randn(tree.num_rows, dtype=torch.float64, generator=generator)
    return [part.to(dtype).requires_grad_() for part in (weight, bias)]


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [P, H], input words [P] and targets [P], one of them ignored."""
    generator = torch.Generator().manual_seed(number)
    hidden = torch.randn(P, H, dtype=torch.float64, generator=generator)
    words, target = torch.randint(0, N // 2, (2, P), generator=generator)
    target[3] = -100
    return hidden, words, target


def accumulate(tree: ClassTree, params: Table, number: int, rows: bool) -> None:
    """Add the gradients of a batch whose input vectors are the output rows."""
    weight, bias = params
    hidden, words, target = batch(number)
    index = tree.row_of_word[words]
    own = lookup(weight, index) if rows else F.embedding(index, weight)
    hidden = hidden + own.to(hidden.dtype).tanh()
    nll = hierarchical_cross_entropy(
        hidden, weight, target, tree, bias, reduction="none", sparse=rows
    )
    (nll * torch.linspace(-1, 2, P, dtype=nll.dtype)).sum().backward()  # type: ignore[no-untyped-call]


def dense_and_sparse(tree: ClassTree, batches: int = 1) -> tuple[Table, Table]:
    params = table(tree), table(tree)
    for number in range(batches):
        accumulate(tree, params[0], number, rows=False)
        accumulate(tree, params[1], number, rows=True)
    return params


def gradients(params: Table) -> list[Tensor]:
    found = [param.grad for param in params]
    return [grad.to_dense() for grad in found if grad is not None]


@pytest.mark.usefixtures("_portion")
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_sparse_gradient_is_the_dense_one(backend: str, tree: ClassTree, batches: int) -> None:
    dense, rows = dense_and_sparse(tree, batches)
    assert all(isinstance(param.grad, RowGradient) for param in rows)
    torch.testing.assert_close(gradients(rows), gradients(dense), rtol=1e-12, atol=1e-13)


def test_hidden_has_the_same_gradient(backend: str) -> None:
    tree = TREES["head"]
    weight, bias = table(tree)
    grads = []
    for rows in (False, True):
        hidden, _, target = batch(0)
        hidden.requires_grad_()
        hierarchical_cross_entropy(hidden, weight, target, tree, bias, sparse=rows).backward()  # type: ignore[no-untyped-call]
        grads.append(hidden.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


def test_only_children_of_visited_nodes_and_input_words_have_values(backend: str) -> None:
    tree = TREES["two_level"]
    _, rows = dense_and_sparse(tree)
    _, words, target = batch(0)
    visited = tree.node_of_row[tree.row_of_word[target[target >= 0]]]
    expected = torch.isin(tree.node_of_row, torch.cat([visited, torch.tensor([0])]))
    expected[tree.row_of_word[words]] = True
    held = torch.zeros(tree.num_rows, dtype=torch.int64)
    assert isinstance(rows[0].grad, RowGradient)
    for block in rows[0].grad.blocks():
        held[block.rows] += 1
    assert held.tolist() == expected.long().tolist()
    assert not expected.all()


def test_without_gradients_wanted_there_are_none(backend: str) -> None:
    tree = TREES["head"]
    weight, bias = table(tree)
    hidden, _, target = batch(0)
    hidden.requires_grad_()
    frozen = weight.detach()
    hierarchical_cross_entropy(hidden, frozen, target, tree, bias, sparse=True).backward()  # type: ignore[no-untyped-call]
    assert frozen.grad is None
    assert hidden.grad is not None
    assert isinstance(bias.grad, RowGradient)
    with torch.no_grad():
        nll = hierarchical_cross_entropy(hidden, weight, target, tree, bias, sparse=True)
    assert not nll.requires_grad


def test_no_position_no_gradient(backend: str) -> None:
    tree = TREES["head"]
    weight, bias = table(tree)
    hidden = torch.zeros(4, H, dtype=torch.float64)
    target = torch.full((4,), -100)
    hierarchical_cross_entropy(hidden, weight, target, tree, bias, sparse=True).backward()  # type: ignore[no-untyped-call]
    assert isinstance(weight.grad, RowGradient)
    assert list(weight.grad.blocks()) == []
    assert weight.grad.to_dense().abs().sum() == 0
    assert float(weight.grad.square_norm()) == 0
    before = weight.detach().clone()
    RowAdagrad([weight, bias], lr=1.0).step()
    assert torch.equal(weight, before)


@pytest.mark.usefixtures("_portion")
@pytest.mark.parametrize("most", [1e-3, 1e3])
def test_clipping_is_that_of_the_dense_gradient(backend: str, most: float) -> None:
    dense, rows = dense_and_sparse(TREES["head"], batches=2)
    norms = [torch.nn.utils.clip_grad_norm_(params, most) for params in (dense, rows)]
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(rows), gradients(dense), rtol=1e-12, atol=1e-15)


def test_the_sparse_tensor_is_coalesced_and_the_same() -> None:
    _, rows = dense_and_sparse(TREES["head"], batches=2)
    for param in rows:
        assert isinstance(param.grad, RowGradient)
        made = param.grad.to_sparse()
        index = made.indices()[0]
        assert index.tolist() == sorted(set(index.tolist()))
        assert torch.equal(made.to_dense(), param.grad.to_dense())
    empty = RowGradient(rows[0], []).to_sparse()
    assert (empty._nnz(), empty.shape) == (0, rows[0].shape)


def test_a_dense_gradient_may_be_added() -> None:
    _, rows = dense_and_sparse(TREES["head"])
    grad = rows[0].grad
    assert isinstance(grad, RowGradient)
    ones = torch.ones(grad.shape, dtype=grad.dtype)
    assert torch.equal(grad + ones, grad.to_dense() + 1)
    assert torch.equal(ones + grad, grad.to_dense() + 1)


def test_other_operations_are_refused() -> None:
    _, rows = dense_and_sparse(TREES["head"])
    grad = rows[0].grad
    assert isinstance(grad, RowGradient)
    with pytest.raises(NotImplementedError, match=r"to_dense\(\) makes an ordinary tensor"):
        grad.exp()
    with pytest.raises(NotImplementedError, match=r"zero_grad\(\) lets a layer be moved"):
        grad.to("meta")
    with pytest.raises(NotImplementedError, match="numbers only"):
        grad * torch.ones(H, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="2-norm over all of it"):
        torch.linalg.vector_norm(grad, 1)
    with pytest.raises(NotImplementedError, match="in place"):
        grad.add_(torch.ones(grad.shape, dtype=torch.float64))


def trained(make: Make, rows: bool, coo: bool = False) -> Table:
    """The table after four steps, of two batches each; `coo`: by torch's sparse gradients."""
    tree = TREES["head"]
    params = table(tree)
    optimizer = make(params)
    for step in range(4):
        optimizer.zero_grad()
        accumulate(tree, params, 2 * step, rows)
        accumulate(tree, params, 2 * step + 1, rows)
        for param in params if coo else ():
            assert isinstance(param.grad, RowGradient)
            param.grad = param.grad.to_sparse()
        optimizer.step()
    return [param.detach() for param in params]


class Rowwise(torch.optim.Optimizer):
    """Row-wise Adagrad as its formula says it, of dense gradients."""

    def __init__(self, params: Table) -> None:
        super().__init__(params, {})
        self.sums = [torch.zeros(len(param), 1, dtype=param.dtype) for param in params]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for param, total in zip(self.param_groups[0]["params"], self.sums, strict=True):
            grad = param.grad.view(len(param), -1)
            total += (grad**2).mean(1, keepdim=True)
            param -= (0.3 * grad / (total.sqrt() + 1e-8)).view(param.shape)


@pytest.mark.usefixtures("_portion")
@pytest.mark.parametrize(
    ("ours", "dense"),
    [
        (lambda params: RowSGD(params, 0.3), lambda params: torch.optim.SGD(params, 0.3)),
        (lambda params: RowAdagrad(params, 0.3), Rowwise),
    ],
    ids=["sgd", "adagrad"],
)
def test_steps_are_those_of_the_dense_optimizer(backend: str, ours: Make, dense: Make) -> None:
    """Rows without a gradient are moved by neither."""
    found, expected = trained(ours, rows=True), trained(dense, rows=False)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("_portion")
def test_adam_is_torchs_sparse_adam(backend: str) -> None:
    """But for eps, which torch adds elsewhere."""
    found = trained(lambda params: RowAdam(params, 0.05, eps=1e-30), rows=True)
    expected = trained(
        lambda params: torch.optim.SparseAdam(params, 0.05, eps=1e-30),
        rows=True,
        coo=True,
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", [RowSGD, RowAdagrad, RowAdam])
def test_ordinary_gradients_are_taken_too(kind: Kind) -> None:
    def make(params: Table) -> torch.optim.Optimizer:
        return kind(params, lr=0.2)

    tree = TREES["full"]  # every row is visited, so that Adam's moments move alike
    params = table(tree), table(tree)
    for own, rows in zip(params, (False, True), strict=True):
        optimizer = make(own)
        for step in range(3):
            optimizer.zero_grad()
            accumulate(tree, own, step, rows)
            optimizer.step()
    torch.testing.assert_close(params[1], params[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [RowAdagrad, RowAdam])
def test_rows_without_a_gradient_keep_values_and_state(kind: Kind) -> None:
    tree = TREES["two_level"]
    params = table(tree)
    optimizer = kind(params, lr=0.2)
    accumulate(tree, params, 0, rows=True)
    optimizer.step()
    weight = params[0]
    before, state = (
        weight.detach().clone(),
        {
            name: value.clone()
            for name, value in optimizer.state[weight].items()
            if isinstance(value, Tensor)
        },
    )
    optimizer.zero_grad()
    accumulate(tree, params, 1, rows=True)
    assert weight.grad is not None
    still = (weight.grad.to_dense() == 0).all(1)
    optimizer.step()
    assert 0 < still.sum() < len(still)
    assert torch.equal(weight[still], before[still])
    assert not torch.equal(weight[~still], before[~still])
    for name, value in state.items():
        assert torch.equal(optimizer.state[weight][name][still], value[still])


@pytest.mark.parametrize("kind", [RowAdagrad, RowAdam])
def test_a_restored_optimizer_goes_on_alike_with_fp32_state_of_bf16_rows(
    kind: Kind,
) -> None:
    tree = TREES["head"]
    params = table(tree, torch.bfloat16)
    optimizer = kind(params, lr=0.1)
    accumulate(tree, params, 0, rows=True)
    optimizer.step()
    copies = [param.detach().clone().requires_grad_() for param in params]
    other = kind(copies, lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own, optim in ((params, optimizer), (copies, other)):
        optim.zero_grad()
        accumulate(tree, own, 1, rows=True)
        torch.manual_seed(9)  # what the rounding draws
        optim.step()
    assert all(torch.equal(*pair) for pair in zip(params, copies, strict=True))
    kept = [v for v in other.state[copies[0]].values() if isinstance(v, Tensor)]
    assert {value.dtype for value in kept} == {torch.float32}


def test_updates_below_the_last_place_of_bf16_arrive_on_average() -> None:
    weight = torch.ones(4000, H, dtype=torch.bfloat16, requires_grad=True)
    optimizer = RowSGD([weight], lr=1.0)
    left, right = torch.full((1, 4000), 1e-4), torch.ones(1, H)
    for _ in range(50):
        weight.grad = RowGradient(weight, [Product(0, left, right)])
        optimizer.step()
    assert float(weight.detach().float().mean()) == pytest.approx(1 - 50e-4, abs=2e-4)


def at_random(rows: Tensor) -> Tensor:
    """Rounded to bf16."""
    out = torch.empty_like(rows, dtype=torch.bfloat16)
    sparse._Noise(rows).round_into(out, rows)
    return out


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf])
def test_what_bf16_can_hold_is_not_rounded(value: float) -> None:
    rounded = at_random(torch.full((300, 7), value))
    assert torch.equal(rounded, torch.full((300, 7), value, dtype=torch.bfloat16))


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -0x400000, -1])
def test_what_is_no_number_stays_none(bits: int) -> None:
    """Whoever computed it: 0x7FFFFFFF is a GPU's, 0xFFC00000 a CPU's."""
    number = torch.full((300, 7), bits, dtype=torch.int32).view(torch.float32)
    assert at_random(number).isnan().all()


def test_rounding_goes_to_both_neighbours_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_NOISE", 1 << 16)
    rounded = at_random(torch.full((500, 300), -1 - 1 / 512))
    values, counts = torch.unique(rounded.float(), return_counts=True)
    assert values.tolist() == [-1 - 1 / 128, -1]
    assert float(counts[0] / counts.sum()) == pytest.approx(0.25, abs=0.01)


@pytest.mark.usefixtures("backend")
def test_the_gradient_is_not_differentiable_again() -> None:
    layer = HierarchicalSoftmax(H, TREES["head"], sparse=True)
    hidden = torch.randn(6, H, requires_grad=True)
    for read in (hidden, lookup(layer.weight, torch.arange(6))):
        loss = layer.loss(read, torch.arange(6))
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(loss, [layer.weight], create_graph=True)


@pytest.mark.parametrize("kind", [RowSGD, RowAdagrad, RowAdam])
def test_rows_in_fp16_are_updated_in_fp32_and_rounded_once(kind: Kind) -> None:
    hidden, target = torch.randn(6, H).half(), torch.arange(6)
    layer = HierarchicalSoftmax(H, TREES["head"], sparse=True, dtype=torch.float16)
    truth = HierarchicalSoftmax(H, TREES["head"], sparse=True)
    truth.load_state_dict(layer.state_dict())
    for each, own in ((layer, hidden), (truth, hidden.float())):
        torch.autograd.backward(each.loss(own, target))
        kind(each.parameters(), lr=0.1).step()
    torch.testing.assert_close(layer.weight.float(), truth.weight, rtol=2e-3, atol=2e-3)


def test_lookup_of_repeated_rows_adds_their_gradients_up() -> None:
    weight = torch.randn(9, H, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[2, 2, 7], [0, 2, 7]])
    grads = []
    for look in (lookup, lambda rows, index: F.embedding(index, rows)):
        (grad,) = torch.autograd.grad(look(weight, index).square().sum(), weight)
        grads.append(grad.to_dense())
    torch.testing.assert_close(*grads)


def test_rows_in_less_precision_are_read_as_they_are(backend: str) -> None:
    tree = TREES["head"]
    weight, bias = table(tree, torch.bfloat16)
    hidden, _, target = batch(0)
    nll = [
        hierarchical_cross_entropy(hidden.float(), rows, target, tree, biases)
        for rows, biases in ((weight, bias), (weight.float(), bias.float()))
    ]
    torch.testing.assert_close(nll[0], nll[1], rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at all of them
def test_the_rest_of_a_model_compiles_around_a_sparse_layer() -> None:
    tree = TREES["head"]
    layer = HierarchicalSoftmax(H, tree, sparse=True).double()
    hidden, _, target = batch(0)

    def loss(hidden: Tensor) -> Tensor:
        return layer.loss((hidden * 2).tanh(), target) * 3

    found = torch.compile(loss, backend="eager")(hidden)
    torch.testing.assert_close(found, loss(hidden))
    found.backward()  # type: ignore[no-untyped-call]
    assert isinstance(layer.weight.grad, RowGradient)


def test_a_gradient_tells_what_it_holds() -> None:
    weight = torch.zeros(9, H)
    parts: list[Product | Rows] = [Product(2, torch.ones(1, 3), torch.ones(1, H))]
    parts.append(Rows(torch.tensor([8]), weight[:1]))
    shown = repr(RowGradient(weight, parts))
    assert shown == "RowGradient([9, 6], 3 rows in products, 1 single rows)"


def test_a_learning_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="lr must be positive, got 0"):
        RowSGD(table(TREES["head"]), lr=0.0)


@pytest.mark.parametrize("name", ["head", "full"])
@pytest.mark.parametrize("rows", [False, True])
def test_kept_probabilities_of_bf16_rows_cast_a_few_at_a_time_give_the_same(
    name: str, rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = TREES[name]
    hidden, target = torch.randn(P, H), torch.randint(0, N, (P,))
    results = []
    for most in (reference._CAST_ELEMENTS, 2 * H):  # all rows of a node, two of them
        monkeypatch.setattr(reference, "_CAST_ELEMENTS", most)
        weight, bias = table(tree, torch.bfloat16)
        own = hidden.clone().requires_grad_()
        nll = hierarchical_cross_entropy(own, weight, target, tree, bias, sparse=rows)
        nll.backward()  # type: ignore[no-untyped-call]
        grads = [part.grad for part in (own, weight, bias) if part.grad is not None]
        results.append([nll.detach(), *(grad.to_dense().float() for grad in grads)])
    for whole, portions in zip(*results, strict=True):
        torch.testing.assert_close(portions, whole, rtol=1e-2, atol=1e-5)


def test_sparse_gradients_stay_factors_however_many_columns_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As rows they would be larger than what they are the gradient of."""
    monkeypatch.setattr(reference, "_KEPT_ELEMENTS", 0)
    tree = TREES["two_level"]
    weight, bias = table(tree)
    hidden, target = torch.randn(P, H, dtype=torch.float64), torch.randint(0, N, (P,))
    nll = hierarchical_cross_entropy(hidden, weight, target, tree, bias, sparse=True)
    nll.backward()  # type: ignore[no-untyped-call]
    assert isinstance(weight.grad, RowGradient)
    assert " 0 single rows" in repr(weight.grad)
