"""HierarchicalSoftmax and its function: interface, long rows, what is refused and warned of."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, HierarchicalSoftmax, hierarchical_cross_entropy
from lm.output.backends.base import Problem
from lm.output.backends.nodes import lse_by_level
from lm.output.decoding import compiled, distribution
from lm.output.decoding.draws import Sampling
from lm.output.rowwise import RowAdagrad, RowAdam, RowSGD
from tests.conftest import python

from .definition import METHODS, TREES, TWO_LEVEL, H, N, definition_by_level, layer_of, problem

TREE = TREES["shortlist"]


def test_forward_gives_log_probabilities_and_the_mean_loss() -> None:
    layer, hidden = HierarchicalSoftmax(H, TREE), torch.randn(4, 5, H)
    target = torch.randint(0, N, (4, 5))
    target[0, 0] = -100
    output, loss = layer(hidden, target)
    args = (hidden, layer.weight, target, layer.tree, layer.bias)
    nll = hierarchical_cross_entropy(*args, reduction="none")
    torch.testing.assert_close(output, -nll)
    torch.testing.assert_close(loss, nll.sum() / 19)
    torch.testing.assert_close(loss, layer.loss(hidden, target))


def test_layers_of_one_tree_move_independently() -> None:
    layer, other = HierarchicalSoftmax(H, TREE), HierarchicalSoftmax(H, TREE)
    before = layer.state_dict()
    other.tree.row_of_word.data = torch.zeros(N).long()  # as FSDP moves buffers
    assert torch.equal(layer.tree.row_of_word, TREE.row_of_word)
    assert torch.equal(before["tree.row_of_word"], TREE.row_of_word)
    assert len({id(tree) for tree in (TREE, layer.tree, other.tree)}) == 3


def test_a_layer_on_the_meta_device_computes_shapes() -> None:
    with torch.device("meta"):
        layer = HierarchicalSoftmax(H, TREE)
    loss = layer.loss(torch.empty(2, 3, H, device="meta"), torch.empty(2, 3, device="meta").long())
    assert (loss.device.type, loss.shape) == ("meta", ())


@pytest.mark.parametrize("backend", ["reference", "compiled"], indirect=True)
def test_default_device_and_dtype_are_unused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods; a step of training with dense gradients, and one with those of rows."""
    if backend == "reference":
        monkeypatch.setattr(compiled, "has_numba", lambda: False)
    found: list[list[Any]] = []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.float64)):
        torch.manual_seed(0)
        layers = [HierarchicalSoftmax(H, TREE, row_wise=each) for each in (False, True)]
        hidden, word, before = torch.randn(9, H), torch.arange(9), torch.get_default_dtype()
        layers += [HierarchicalSoftmax(H, TREE, row_wise=True, dtype=torch.bfloat16)]
        try:
            torch.set_default_dtype(dtype)
            with torch.device(device):
                found.append([method(layers[0], hidden, word) for method in METHODS.values()])
                for layer in layers:
                    kind: Any = RowAdagrad if layer.row_wise else torch.optim.SGD
                    optimizer = kind(layer.parameters(), lr=0.1)
                    layer.loss(hidden, word).backward()  # type: ignore[no-untyped-call]
                    torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1)
                    optimizer.step()
        finally:
            torch.set_default_dtype(before)
        found[-1] += [parameter for layer in layers for parameter in layer.parameters()]
    torch.testing.assert_close(*found, rtol=0, atol=0)


softmax: Any = HierarchicalSoftmax
candidates: Any = HierarchicalSoftmax(H, TREE).candidate_log_prob
sample: Any = partial(HierarchicalSoftmax(H, TREE).sample, repetition_penalty=2.0)
two_level: Any = ClassTree.two_level


def nll(**changed: Any) -> Tensor:
    arguments: dict[str, Any] = {
        "hidden": torch.zeros(6, H),
        "weight": torch.zeros(TWO_LEVEL.num_rows, H),
        "target": torch.zeros(6).long(),
        "tree": TWO_LEVEL,
        "bias": torch.zeros(TWO_LEVEL.num_rows),
    }
    return hierarchical_cross_entropy(**arguments | changed)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (partial(softmax, size, TREE), f"hidden_size must be .* got {re.escape(repr(size))}")
            for size in (0, -3, 3.5, "8", torch.tensor(8.9))
        ),
        (partial(softmax, H, 100_000), "tree must be a ClassTree, .* got 100000"),
        (partial(two_level, 100_000), "word_class must be integers, .* got 100000"),
        (partial(softmax, H, TREE, backend="cuda"), "reference, triton, got 'cuda'"),
        (lambda: softmax(H, TREE).sample(torch.zeros(2, H), "top"), "a Sampling, got"),
        (lambda: sample(torch.zeros(H), temprature=2), "sample has no argument temprature; its"),
        (lambda: softmax(H, TREE).loss([[0.0] * H], None), "a tensor, got list"),
        (lambda: candidates(torch.zeros(1, H), [[3]]), "candidates must be a tensor, got list"),
        (lambda: sample(torch.zeros(H), previous=[3]), "previous must be a tensor, got list"),
        (lambda: sample(torch.zeros(H), previous=torch.tensor(3)), r"\[L\] int64, got \[\]"),
        (lambda: softmax(H, TREE).sample(torch.zeros(H), seeds=3), "seeds must be a tensor"),
        (lambda: softmax(H, TREE).embed(torch.zeros(2)), "words must be int64 or int32, got torch"),
        (partial(nll, hidden=torch.zeros(5, H)), "hidden must be .* got .5, 6. and .6."),
        (partial(nll, hidden=torch.zeros(6, H).long()), "floating point, got torch.int64"),
        (partial(nll, hidden=torch.zeros(6, 0)), r"H ≥ 1, .* got torch.float32 \[6, 0\]"),
        (partial(nll, weight=torch.zeros(28, H).long()), "floating point, got torch.int64"),
        (partial(nll, bias=torch.zeros(28).int()), "floating point, got .* torch.int32"),
        (partial(nll, weight=torch.zeros(3, H)), r"weight must be .* got \[3, 6\]"),
        (partial(nll, bias=torch.zeros(3)), r"bias must be .* got \[3\]"),
        (partial(nll, weight=torch.zeros(28, H).double()), "outside of autocast.*convert hidden"),
        (partial(nll, hidden=[[0.0]]), "hidden must be a tensor, got list"),
        (partial(nll, target=[0] * 6), "target must be a tensor, got list"),
        (partial(nll, tree=None), "tree must be a ClassTree, .* got None"),
        (partial(nll, target=torch.zeros(6)), "target must be int64, got torch.float32"),
        (partial(nll, target=torch.full((6,), N)), "target 23 is out of bounds for 23 words"),
        (partial(nll, target=torch.full((6,), -1)), "target -1 is out of bounds for 23 words"),
        (partial(nll, reduction="max"), "reduction must be mean, sum or none, got 'max'"),
        (
            partial(nll, backend="cuda"),
            "must be auto or one of compiled, reference, triton, got 'cuda'",
        ),
    ],
)
def test_mistakes_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(IndexError if "out of bounds" in message else ValueError, match=message):
        call()


def test_layer_imports_no_library_but_torch() -> None:
    blocked = ["lightning", "datasets", "pydantic", "wandb", "yaml", "sentencepiece", "scipy"]
    code = (
        f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
        "import torch\nfrom lm.output import ClassTree, HierarchicalSoftmax\n"
        "layer = HierarchicalSoftmax(4, ClassTree.full(3))\n"
        "print(layer.sample(torch.zeros(2, 4)).shape[0], 'triton' in sys.modules)"
    )
    result = python("-c", code)
    assert result.stdout.split() == ["2", "False"], result.stderr


def test_the_lse_by_level_is_that_of_each_softmax_and_differentiable_twice(tree: ClassTree) -> None:
    *inputs, target = problem(tree, 3, 2)

    def lse(*inputs: Tensor) -> Tensor:
        hidden, weight, bias = inputs
        problem = Problem.of(hidden, weight, tree, bias)
        return lse_by_level(target.flatten(), problem).view(tree.depth, *target.shape)

    found = lse(*inputs)
    hidden, weight, bias = inputs
    assert torch.equal(layer_of(weight, tree, bias).lse_by_level(hidden, target), found)

    def term(logits: Tensor, row: Tensor) -> Tensor:
        return torch.where(logits.isfinite().sum(1) > 1, logits.logsumexp(1), 0)[:, None]

    expected = definition_by_level(hidden, weight, bias, target, tree, term)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lse, inputs)
    assert torch.autograd.gradgradcheck(lse, inputs, fast_mode=True)
    for size in (0, 3):  # nothing is visited
        empty = layer_of(weight, tree).lse_by_level(hidden[:size], target[:size].fill_(-100))
        assert (empty.shape, empty.requires_grad) == ((tree.depth, size, 2), True)


def test_rows_by_column_are_read_slowly_with_a_warning() -> None:
    hidden, weight, bias, target = problem(TWO_LEVEL, 4, 3)
    plain = hierarchical_cross_entropy(hidden, weight, target, TWO_LEVEL, bias)
    by_column = weight.T.contiguous().T
    with pytest.warns(UserWarning, match=rf"slowly on cpu.*gaps, got strides \(1, {len(weight)}\)"):
        strided = hierarchical_cross_entropy(hidden, by_column, target, TWO_LEVEL, bias)
    torch.testing.assert_close(strided, plain, rtol=1e-13, atol=1e-13)


def test_decoding_of_long_rows_is_that_of_their_first_numbers() -> None:
    """Arbitrary numbers follow the H of each row."""
    inputs = problem(TREE, 9)
    long = torch.cat([inputs[1], torch.randn(TREE.num_rows, 5, dtype=torch.float64)], 1)
    others = [inputs[0], long.detach().requires_grad_(), *inputs[2:]]
    results: list[list[Tensor]] = []
    for hidden, weight, bias, target in (inputs, others):
        layer = (hidden, weight, TREE, bias)
        log_prob, word = distribution.topk(*layer, k=4)
        draws = [Sampling(), Sampling(top_p=0.7), Sampling(temperature=0.7, top_k=5)]
        found = [
            distribution.log_prob(*layer),
            distribution.candidate_log_prob(hidden, weight, word, TREE, bias),
            layer_of(weight, TREE, bias).nll_by_level(hidden, target),
            *(log_prob, word),
            *(distribution.sample(*layer, sampling=each, seeds=torch.arange(9)) for each in draws),
        ]
        total = found[0].square().sum() + found[1].exp().sum()
        d_hidden, d_weight = torch.autograd.grad(total, (hidden, weight))
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
