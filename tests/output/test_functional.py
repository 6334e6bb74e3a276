"""hierarchical_cross_entropy: its definition in fp64, and the laws that a softmax obeys."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output import ClassTree, functional, hierarchical_cross_entropy
from lm.output.backends.reference import backend as reference
from lm.output.backends.reference import gradient_memory as memory
from lm.output.backends.triton import backend as fused
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from lm.output.functional import fused_nll, hierarchical_nll

N, H = 23, 6
TREES = {
    "full": ClassTree.full(N),
    "two_level": ClassTree.two_level((torch.arange(N) * 7) % 5),
    "one class of one word": ClassTree.two_level((torch.arange(N) + 1) // N),
    "head": ClassTree.two_level((torch.arange(N) * 7) % 5, head=4),
    "balanced": ClassTree.balanced(N, 3),
    "huffman": ClassTree.huffman(torch.arange(N) + 1),
    "paths": ClassTree.from_paths([[w % 2, w % 3, 3 + w // 6] for w in range(N - 1)] + [[2]]),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


SMALL = Tile(v=16, h=16, warps=4, stages=1)
BOTH = pytest.mark.parametrize("backend", ["kept", "fused"], indirect=True)
"""Both backends."""
ALL = pytest.mark.parametrize("backend", ["kept", "formed again", "fused"], indirect=True)
"""Both ways of the reference's backward, the second one in blocks of few children, and the fused
kernels, in tiles so small that a node has several.
"""


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind = str(request.param)
    if kind == "formed again":
        monkeypatch.setattr(reference, "_KEPT_ELEMENTS", 0)
        monkeypatch.setattr(reference, "_KEPT_OF_ONE_NODE", 0)
        monkeypatch.setattr(reference, "_CAST_ELEMENTS", 37)
        monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 37)
    if kind == "fused":
        pytest.importorskip("triton")
        monkeypatch.setattr(functional, "_choose", lambda *_: "triton")
        monkeypatch.setattr(fused, "tiles", lambda *_: Tiles(16, *[SMALL] * 4))
    return kind


def problem(tree: ClassTree, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """hidden, weight, bias with gradients, and targets of which one is ignored."""
    hidden = torch.randn(*shape, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(tree.num_rows, H, dtype=dtype, requires_grad=True)
    bias = torch.randn(tree.num_rows, dtype=dtype, requires_grad=True)
    target = torch.randint(0, N, shape)
    target.view(-1)[1:2] = -100
    return [hidden, weight, bias, target]


def definition(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, tree: ClassTree
) -> Tensor:
    """Σ over the path of - log softmax(W_n h + b_n)[child], one position and node at a time."""
    nlls = []
    for h, word in zip(hidden.reshape(-1, H), target.reshape(-1).tolist(), strict=True):
        nll = h.new_zeros(())
        for node, row in tree.path(word) if word != -100 else []:
            first = int(tree.first_row[node])
            rows = slice(first, first + int(tree.num_children[node]))
            logits = weight[rows] @ h + (0 if bias is None else bias[rows])
            nll = nll - (logits[row - first] - logits.exp().sum().log())
        nlls.append(nll)
    return torch.stack(nlls).view(target.shape)


@ALL
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", TREES)
def test_values_and_gradients_are_those_of_the_definition(name: str, with_bias: bool) -> None:
    tree = TREES[name]
    hidden, weight, bias, target = problem(tree, 4, 9)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    ours = hierarchical_cross_entropy(
        hidden, weight, target, tree, bias if with_bias else None, reduction="none"
    )
    truth = definition(hidden, weight, bias if with_bias else None, target, tree)
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(truth)
    for own, true in zip(
        torch.autograd.grad(ours, inputs, upstream),
        torch.autograd.grad(truth, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(own, true, rtol=1e-11, atol=1e-12)


@ALL
@pytest.mark.parametrize("name", TREES)
def test_gradcheck(name: str, backend: str) -> None:
    """Through the kernels along random directions: the interpreter takes its time."""
    hidden, weight, bias, target = problem(TREES[name], 5)

    def nll(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return hierarchical_cross_entropy(
            hidden, weight, target, TREES[name], bias, reduction="none"
        )

    assert torch.autograd.gradcheck(nll, (hidden, weight, bias), fast_mode=backend == "fused")


@ALL
@pytest.mark.parametrize("name", TREES)
def test_opcheck(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares all that an op returns: where the fused one leaves memory untouched, zeros."""
    tree = TREES[name]
    *inputs, target = problem(tree, 5)
    rest = (list(tree.arrays), tree.depth, tree.max_path_columns, -100)
    op = hierarchical_nll
    if backend == "fused":
        op, rest = fused_nll, (*rest, True)  # type: ignore[assignment]
        new_state = fused.new_state
        monkeypatch.setattr(
            fused, "new_state", lambda *args: fused.State(*(x.zero_() for x in new_state(*args)))
        )
    results = torch.library.opcheck(op, (*inputs, target, *rest))
    assert set(results.values()) == {"SUCCESS"}


@BOTH
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", TREES)
def test_probabilities_sum_to_one(name: str) -> None:
    tree = TREES[name]
    hidden, weight, bias, _ = problem(tree, 3)
    each = hierarchical_cross_entropy(
        hidden.repeat_interleave(N, 0),
        weight,
        torch.arange(N).repeat(3),
        tree,
        bias,
        reduction="none",
    )
    torch.testing.assert_close(
        each.neg().exp().view(3, N).sum(1), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-13
    )


@BOTH
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [0, 1, 4])
def test_depth_one_is_cross_entropy(reduction: str, ignored: int) -> None:
    tree = TREES["full"]
    hidden, weight, bias, target = problem(tree, 4)
    target = target.clamp(min=0)
    target[:ignored] = -7
    ours = hierarchical_cross_entropy(
        hidden,
        weight,
        target,
        tree,
        bias,
        reduction=reduction,  # type: ignore[arg-type]
        ignore_index=-7,
    )
    truth = F.cross_entropy(hidden @ weight.T + bias, target, reduction=reduction, ignore_index=-7)
    if ignored == 4 and reduction == "mean":
        truth = torch.zeros_like(truth)  # 0 instead of 0 / 0
    torch.testing.assert_close(ours, truth)


@BOTH
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", TREES)
def test_nothing_to_predict_costs_nothing(name: str) -> None:
    tree = TREES[name]
    hidden, weight, bias, _ = problem(tree, 3)
    loss = hierarchical_cross_entropy(hidden, weight, torch.full((3,), -100), tree, bias)
    grads = torch.autograd.grad(loss, (hidden, weight, bias))
    assert loss.item() == 0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)
    empty = hierarchical_cross_entropy(hidden[:0], weight, torch.zeros(0).long(), tree, bias)
    assert empty.item() == 0
    grads = torch.autograd.grad(empty, (hidden, weight, bias))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@BOTH
@pytest.mark.usefixtures("backend")
def test_a_class_of_one_word_costs_nothing_and_gets_no_gradient() -> None:
    tree = ClassTree.two_level([0, 1, 2])
    hidden, weight, bias = (torch.randn(s, requires_grad=True) for s in [(4, H), (6, H), (6,)])
    target = torch.tensor([0, 1, 2, 1])
    loss = hierarchical_cross_entropy(hidden, weight, target, tree, bias)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight[:3].T + bias[:3], target))
    d_weight, d_bias = torch.autograd.grad(loss, (weight, bias))
    assert torch.equal(d_weight[3:], torch.zeros(3, H))
    assert torch.equal(d_bias[3:], torch.zeros(3))


@BOTH
@pytest.mark.usefixtures("backend")
def test_a_vocabulary_of_one_word_is_certain() -> None:
    for tree in (ClassTree.full(1), ClassTree.two_level([0]), ClassTree.balanced(1, 2)):
        weight = torch.randn(tree.num_rows, H)
        loss = hierarchical_cross_entropy(torch.randn(3, H), weight, torch.zeros(3).long(), tree)
        assert loss.item() == 0


@BOTH
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", TREES)
def test_a_constant_added_to_all_logits_of_a_node_changes_nothing(name: str) -> None:
    tree = TREES[name]
    hidden, weight, bias, target = problem(tree, 6)
    shift = torch.randn(tree.num_nodes, dtype=torch.float64)[tree.node_of_row]
    before = hierarchical_cross_entropy(hidden, weight, target, tree, bias)
    after = hierarchical_cross_entropy(hidden, weight, target, tree, bias + shift)
    torch.testing.assert_close(after, before, rtol=1e-13, atol=1e-13)


@BOTH
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", TREES)
def test_the_order_of_positions_does_not_matter(name: str) -> None:
    tree = TREES[name]
    hidden, weight, bias, target = problem(tree, 12)
    order = torch.randperm(12)
    each = hierarchical_cross_entropy(hidden, weight, target, tree, bias, reduction="none")
    shuffled = hierarchical_cross_entropy(
        hidden[order], weight, target[order], tree, bias, reduction="none"
    )
    torch.testing.assert_close(shuffled, each[order], rtol=1e-13, atol=1e-13)


@BOTH
@pytest.mark.usefixtures("backend")
def test_the_order_of_words_within_a_class_does_not_matter() -> None:
    word_class = (torch.arange(N) * 7) % 5
    tree = ClassTree.two_level(word_class)
    hidden, weight, bias, target = problem(tree, 8)
    order = torch.randperm(N)  # word w becomes word order[w], with its class and its row
    other = ClassTree.two_level(torch.empty_like(word_class).scatter(0, order, word_class))
    rows = torch.arange(tree.num_rows)
    rows[other.row_of_word[order]] = tree.row_of_word
    renamed = torch.where(target >= 0, order[target.clamp(min=0)], target)
    torch.testing.assert_close(
        hierarchical_cross_entropy(hidden, weight[rows], renamed, other, bias[rows]),
        hierarchical_cross_entropy(hidden, weight, target, tree, bias),
        rtol=1e-13,
        atol=1e-13,
    )


@BOTH
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("wanted", range(8))
def test_any_subset_of_the_gradients_may_be_asked_for(wanted: int) -> None:
    tree = TREES["two_level"]
    *inputs, target = problem(tree, 6)
    loss = hierarchical_cross_entropy(inputs[0], inputs[1], target, tree, inputs[2])
    truth = torch.autograd.grad(loss, inputs)
    chosen = [
        tensor.detach().requires_grad_(bool(wanted >> i & 1)) for i, tensor in enumerate(inputs)
    ]
    loss = hierarchical_cross_entropy(chosen[0], chosen[1], target, tree, chosen[2])
    assert loss.requires_grad == bool(wanted)
    if wanted:
        torch.autograd.backward(loss)
    for tensor, true in zip(chosen, truth, strict=True):
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, true)
        else:
            assert tensor.grad is None


@ALL
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_huge_logits_stay_finite(scale: float) -> None:
    tree = TREES["two_level"]
    hidden, weight, bias, target = problem(tree, 6, dtype=torch.float32)
    nll = hierarchical_cross_entropy(hidden * scale, weight, target, tree, bias, reduction="none")
    truth = definition_by_log_softmax(hidden * scale, weight, bias, target, tree)
    torch.testing.assert_close(nll, truth.float(), rtol=1e-5, atol=0.2)
    grads = torch.autograd.grad(nll.sum(), (hidden, weight, bias))
    assert all(grad.isfinite().all() for grad in grads)


def definition_by_log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor, tree: ClassTree
) -> Tensor:
    """The definition, with torch's own log_softmax in fp64 for each node."""
    nlls = torch.zeros(target.shape, dtype=torch.float64)
    for position, word in enumerate(target.tolist()):
        for node, row in tree.path(word) if word != -100 else []:
            first = int(tree.first_row[node])
            rows = slice(first, first + int(tree.num_children[node]))
            logits = weight[rows].double() @ hidden[position].double() + bias[rows].double()
            nlls[position] -= F.log_softmax(logits, 0)[row - first]
    return nlls


def test_confident_predictions_keep_their_gradient() -> None:
    """q - 1 is -1e-6 here, which a probability in bf16 cannot tell from 0."""
    tree = ClassTree.full(2)
    weight = torch.tensor([[13.8125], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    hidden, target = torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(1).long()
    loss = hierarchical_cross_entropy(hidden, weight, target, tree)
    (d_weight,) = torch.autograd.grad(loss, weight)
    truth = torch.sigmoid(torch.tensor(-13.8125, dtype=torch.float64))
    assert float((hidden @ weight.detach().T).softmax(1)[0, 0]) - 1 == 0
    torch.testing.assert_close(d_weight[0, 0].double(), -truth, rtol=0.1, atol=0)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TREES)
def test_errors_are_within_twice_those_of_plain_torch(
    name: str, dtype: torch.dtype, backend: str
) -> None:
    if backend == "fused" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bf16 wrongly")
    tree = TREES[name]
    *inputs, target = problem(tree, 40)
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    upstream = torch.randn(40)
    results: list[list[Tensor]] = []
    for kind, (hidden, weight, bias) in {"ours": inputs, "plain": inputs, "truth": exact}.items():
        if kind == "ours":
            nll = hierarchical_cross_entropy(hidden, weight, target, tree, bias, reduction="none")
            assert nll.dtype == torch.float32
        else:
            nll = definition(hidden, weight, bias, target, tree)
        grads = torch.autograd.grad(nll, (hidden, weight, bias), upstream.to(nll.dtype))
        results.append([nll, *grads])
    slack = 4 * torch.finfo(dtype).eps
    for what, ours, plain, truth in zip(
        ["nll", "d_hidden", "d_weight", "d_bias"], *results, strict=True
    ):
        size = truth.abs().max()
        error, allowed = (ours - truth).abs().max(), 2 * (plain - truth).abs().max() + slack * size
        assert error <= allowed, f"{what}: ours is off by {error}, plain torch {allowed / 2}"


def test_inputs_of_any_strides_give_the_same() -> None:
    tree = TREES["two_level"]
    hidden, weight, bias, target = problem(tree, 4, 3)
    plain = hierarchical_cross_entropy(hidden, weight, target, tree, bias)
    strided = hierarchical_cross_entropy(
        hidden.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0),
        torch.stack([weight, weight], dim=2)[:, :, 1].T.contiguous().T,
        target.T.contiguous().T,
        tree,
        torch.stack([bias, bias], dim=1)[:, 0],
    )
    torch.testing.assert_close(strided, plain, rtol=1e-13, atol=1e-13)


@BOTH
@pytest.mark.usefixtures("backend")
def test_results_repeat_bit_for_bit() -> None:
    tree = TREES["balanced"]
    *inputs, target = problem(tree, 50, dtype=torch.float32)
    runs = []
    for _ in range(2):
        loss = hierarchical_cross_entropy(inputs[0], inputs[1], target, tree, inputs[2])
        runs.append([loss, *torch.autograd.grad(loss, inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_what_was_not_visited_is_zero_in_mapped_gradients_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "LARGE_BYTES", 1 << 20)
    tree = ClassTree.two_level(torch.arange(4000) // 64)
    weight = torch.randn(tree.num_rows, 80, requires_grad=True)
    assert weight.numel() * 4 > memory.LARGE_BYTES
    hidden, target = torch.randn(5, 80), torch.tensor([1, 70, 71, 3999, 5])
    (d_weight,) = torch.autograd.grad(
        hierarchical_cross_entropy(hidden, weight, target, tree), weight
    )
    dense = weight.detach().clone().requires_grad_()
    (truth,) = torch.autograd.grad(_dense(hidden, dense, target, tree), dense)
    torch.testing.assert_close(d_weight, truth)
    assert int((d_weight.abs().sum(1) > 0).sum()) == 63 + 64 + 64 + 32


def test_a_gradient_in_the_memory_of_an_earlier_one_is_zero_where_nobody_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(memory, "_free", [])
    tree = ClassTree.two_level(torch.arange(400) // 20)
    hidden, weight = torch.randn(300, 80), torch.randn(tree.num_rows, 80, requires_grad=True)

    def gradient(target: Tensor) -> Tensor:
        nll = hierarchical_cross_entropy(hidden, weight, target, tree)
        return torch.autograd.grad(nll, weight)[0]

    def truth(target: Tensor) -> Tensor:
        dense = weight.detach().clone().requires_grad_()
        return torch.autograd.grad(_dense(hidden, dense, target, tree), dense)[0]

    everywhere, nearly, seldom = (torch.arange(300) % size for size in (400, 280, 40))
    first = gradient(everywhere)
    place = first.data_ptr()
    first.fill_(torch.nan)
    other = gradient(nearly)  # while the first one lives
    assert other.data_ptr() != place
    del first
    reused = gradient(nearly)
    assert reused.data_ptr() == place
    torch.testing.assert_close(reused, truth(nearly))
    torch.testing.assert_close(other, reused)
    del reused
    fresh = gradient(seldom)  # of which little is written
    assert fresh.data_ptr() != place
    torch.testing.assert_close(fresh, truth(seldom))
    assert len(memory._free) == 1


def _dense(hidden: Tensor, weight: Tensor, target: Tensor, tree: ClassTree) -> Tensor:
    """Mean loss of two levels out of a full matrix of logits."""
    logits = hidden @ weight.T
    nll = torch.zeros(())
    for position, word in enumerate(target.tolist()):
        for node, row in tree.path(word):
            first = int(tree.first_row[node])
            own = logits[position, first : first + int(tree.num_children[node])]
            nll = nll - F.log_softmax(own, 0)[row - first]
    return nll / target.numel()


def test_no_tensor_of_the_size_of_the_vocabulary_is_made_besides_the_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "LARGE_BYTES", 1 << 20)
    num_words = 250_000
    tree = ClassTree.two_level(torch.arange(num_words) // 500)
    weight = torch.zeros(tree.num_rows, 8, requires_grad=True)
    hidden, target = torch.randn(64, 8, requires_grad=True), torch.arange(64) * 3900
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        loss = hierarchical_cross_entropy(hidden, weight, target, tree)
        _, d_weight = torch.autograd.grad(loss, (hidden, weight))
    events = profile.events()
    assert events is not None
    largest = max(event.self_cpu_memory_usage for event in events)
    assert 0 < largest <= 64 * tree.max_path_columns * 4  # the gradient is mapped, not allocated
    assert d_weight.shape == weight.shape


@BOTH
@pytest.mark.usefixtures("backend")
def test_compiled_with_fullgraph_equals_eager() -> None:
    tree = TREES["balanced"]
    for positions in (5, 9):
        hidden, weight, bias, target = problem(tree, positions)

        def loss(hidden: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
            return hierarchical_cross_entropy(hidden.tanh(), weight, target, tree, bias) * 2

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        expected = loss(hidden, weight, bias, target)
        actual = compiled(hidden, weight, bias, target)
        torch.testing.assert_close(actual, expected)
        for ours, true in zip(
            torch.autograd.grad(actual, (hidden, weight, bias)),
            torch.autograd.grad(expected, (hidden, weight, bias)),
            strict=True,
        ):
            torch.testing.assert_close(ours, true)


def test_autocast_takes_half_precision_hidden_with_full_precision_weights() -> None:
    tree = TREES["two_level"]
    hidden, weight, bias, target = problem(tree, 30, dtype=torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = hierarchical_cross_entropy(half, weight, target, tree, bias)
    grads = torch.autograd.grad(loss, (half, weight, bias))
    exact = half.detach().float().requires_grad_()
    truth = hierarchical_cross_entropy(exact, weight, target, tree, bias)
    true_grads = torch.autograd.grad(truth, (exact, weight, bias))
    torch.testing.assert_close(loss, truth)
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(grads[0].float(), true_grads[0], rtol=0.01, atol=1e-4)
    torch.testing.assert_close(grads[1:], true_grads[1:])


@BOTH
@pytest.mark.usefixtures("backend")
def test_checkpointed_activations_give_the_same_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    tree = TREES["two_level"]
    hidden, weight, bias, target = problem(tree, 6)

    def loss(hidden: Tensor) -> Tensor:
        return hierarchical_cross_entropy(hidden.tanh(), weight, target, tree, bias)

    (plain,) = torch.autograd.grad(loss(hidden), hidden)
    (again,) = torch.autograd.grad(checkpoint(loss, hidden, use_reentrant=False), hidden)
    assert torch.equal(plain, again)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.zeros(5, H)}, ValueError, "hidden must be .* got .5, 6. and .6."),
        ({"hidden": torch.zeros(6, H).long()}, ValueError, "floating point, got torch.int64"),
        ({"weight": torch.zeros(3, H)}, ValueError, r"weight must be .* got \[3, 6\]"),
        ({"bias": torch.zeros(3)}, ValueError, r"bias must be .* got \[3\]"),
        ({"weight": torch.zeros(28, H).double()}, ValueError, "less precision outside of autocast"),
        ({"target": torch.zeros(6)}, ValueError, "target must be int64, got torch.float32"),
        ({"target": torch.full((6,), N)}, IndexError, "target 23 is out of bounds for 23 words"),
        ({"target": torch.full((6,), -1)}, IndexError, "target -1 is out of bounds for 23 words"),
        ({"reduction": "max"}, ValueError, "reduction must be mean, sum or none, got 'max'"),
        ({"backend": "cuda"}, ValueError, "must be auto, reference or triton, got 'cuda'"),
    ],
)
def test_mistakes_are_named(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    tree = TREES["two_level"]
    arguments: dict[str, object] = {
        "hidden": torch.zeros(6, H),
        "weight": torch.zeros(tree.num_rows, H),
        "target": torch.zeros(6).long(),
        "tree": tree,
        "bias": torch.zeros(tree.num_rows),
    }
    with pytest.raises(error, match=message):
        hierarchical_cross_entropy(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "cuda", "obstacle", "chosen"),
    [
        ("auto", False, None, "reference"),
        ("auto", True, None, "triton"),
        ("auto", True, "does not take fp64", "reference"),
        ("reference", True, None, "reference"),
        ("triton", True, None, "triton"),
    ],
)
def test_auto_takes_the_kernels_on_cuda_where_nothing_is_against_them(
    backend: Any, cuda: bool, obstacle: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "obstacle", lambda *_: obstacle)
    hidden: Any = SimpleNamespace(is_cuda=cuda)
    assert functional._choose(backend, hidden, torch.empty(0), ClassTree.full(2)) == chosen
