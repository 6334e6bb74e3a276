"""The fused kernels on a GPU, `pytest -m gpu`: bf16, tensor cores, races, streams and graphs,
which the interpreter cannot show.
"""

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, HierarchicalSoftmax, hierarchical_cross_entropy
from lm.output.decoding import compiled, distribution, fused
from lm.output.decoding.draws import Sampling
from lm.output.decoding.positions import Positions
from lm.output.rowwise import RowAdagrad, RowAdam, RowOptimizer, RowSGD

from ..decoding.truth import assert_distributed, restricted
from ..definition import assert_errors_are_small, gradients, nll

pytestmark = pytest.mark.gpu
PAGE = Path(__file__).parents[3] / "lm" / "output" / "README.md"
TREES: dict[str, Callable[[], ClassTree]] = {
    "two_level": lambda: ClassTree.two_level(torch.arange(3000) // 55),
    "classes dealt at random": lambda: ClassTree.two_level(torch.randperm(3000) % 55),
    "shortlist": lambda: ClassTree.two_level(torch.arange(3000) % 55, 200),
    "balanced": lambda: ClassTree.balanced(3000, 12),
    "huffman": lambda: ClassTree.huffman(torch.arange(300) ** 2 + 1, arity=4),
    "full": lambda: ClassTree.full(3000),
}


def problem(
    tree: ClassTree, positions: int, size: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, ClassTree, Tensor]:
    """hidden, weight, bias; targets by inverse rank, some ignored; the tree; the upstream."""
    torch.manual_seed(0)
    hidden = torch.randn(positions, size, device="cuda", dtype=dtype)
    weight = (torch.randn(tree.num_rows, size, device="cuda") * 0.1).to(dtype)
    bias = torch.randn(tree.num_rows, device="cuda", dtype=dtype)
    target = (tree.vocab_size ** torch.rand(positions, device="cuda")).long() - 1
    target[::17] = -100
    upstream = torch.randn(positions, device="cuda")
    return [hidden, weight, bias], target, tree.to("cuda"), upstream


def plain(inputs: list[Tensor], target: Tensor, tree: ClassTree, upstream: Tensor) -> list[Tensor]:
    """The gradients with the products and log_softmax in the dtype of the inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    hidden, weight, bias = inputs
    logits = hidden @ weight.T + bias
    valid = target != -100
    row = tree.row_of_word[torch.where(valid, target, 0)]
    nll = torch.zeros(
        target.numel(), device="cuda", dtype=torch.promote_types(logits.dtype, torch.float32)
    )
    for _ in range(tree.depth):
        node = tree.node_of_row[row]
        inside = tree.node_of_row[None, :] == node[:, None]
        node_logits = logits.masked_fill(~inside, -torch.inf).to(nll.dtype)
        log_q = node_logits.gather(1, row[:, None])[:, 0] - node_logits.logsumexp(1)
        nll = nll - torch.where(valid, log_q, 0)
        row = tree.row_of_node[node]
        valid, row = valid & (row >= 0), row.clamp(min=0)
    return [nll.detach(), *torch.autograd.grad(nll, inputs, upstream.to(nll.dtype))]


@pytest.mark.parametrize("size", [64, 300, 650, 1024, 33])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_are_within_twice_those_of_plain_torch(
    name: str, dtype: torch.dtype, size: int
) -> None:
    inputs, target, tree, upstream = problem(TREES[name](), 1000, size, dtype)
    ours = gradients(inputs, target, tree, upstream, "triton")
    baseline = plain(inputs, target, tree, upstream)
    truth = plain([x.double() for x in inputs], target, tree, upstream.double())
    assert_errors_are_small([ours, baseline, truth], 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("size", [300, 1024])
@pytest.mark.parametrize("name", ["two_level"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_errors_with_rows_in_fp32_under_autocast_are_those_of_half_precision(
    name: str, dtype: torch.dtype, size: int
) -> None:
    inputs, target, tree, upstream = problem(TREES[name](), 1000, size, torch.float32)
    with torch.autocast("cuda", dtype):
        ours = gradients(inputs, target, tree, upstream, "triton")
    baseline = plain([x.to(dtype) for x in inputs], target, tree, upstream)
    truth = plain([x.double() for x in inputs], target, tree, upstream.double())
    assert_errors_are_small([ours, baseline, truth], 8 * torch.finfo(dtype).eps)


def test_tf32_is_used_when_torch_allows_it() -> None:
    inputs, target, tree, upstream = problem(TREES["two_level"](), 1000, 256, torch.float32)
    exact = gradients(inputs, target, tree, upstream, "triton")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        fast = gradients(inputs, target, tree, upstream, "triton")
    finally:
        torch.set_float32_matmul_precision(before)
    difference = (fast[0] - exact[0]).abs().max()
    assert 0 < difference < 0.02


def test_a_layer_that_was_used_on_a_cpu_moves_to_the_device() -> None:
    layer = HierarchicalSoftmax(64, TREES["two_level"]())
    hidden, target = torch.randn(90, 64), torch.arange(90)
    target[3:8] = -100
    before = layer(hidden, target).loss
    after = layer.to("cuda")(hidden.cuda(), target.cuda()).loss
    torch.testing.assert_close(after.cpu(), before, rtol=1e-4, atol=1e-4)


def test_words_banned_by_the_lowest_number_fill_whole_blocks() -> None:
    inputs, target, tree, upstream = problem(TREES["full"](), 200, 64, torch.bfloat16)
    inputs[2][:1500] = torch.finfo(torch.bfloat16).min
    target.clamp_(min=1500)
    ours = gradients(inputs, target, tree, upstream, "triton")
    truth = gradients([x.double() for x in inputs], target, tree, upstream.double(), "reference")
    assert all(each.isfinite().all() for each in ours)
    torch.testing.assert_close(ours[0].double(), truth[0], rtol=1e-3, atol=1e-3)


def test_gpu_tests_run_without_deterministic_algorithms() -> None:
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("positions", [1, 16, 17, 700, 5000])
def test_results_repeat_bit_for_bit(positions: int) -> None:
    inputs, target, tree, upstream = problem(TREES["two_level"](), positions, 300, torch.bfloat16)
    first = gradients(inputs, target, tree, upstream, "triton")
    for _ in range(5):
        again = gradients(inputs, target, tree, upstream, "triton")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("size", [300, 650])
def test_a_thousand_steps_give_the_same_results(size: int) -> None:
    """Kernels that read a register or shared memory too early are right or wrong by timing, which
    copies on another stream vary.
    """
    tree = ClassTree.two_level(torch.randperm(33_278) % 182)
    inputs, target, tree, upstream = problem(tree, 16_384, size, torch.bfloat16)
    inputs[1] = torch.nn.functional.pad(inputs[1], (0, -size % 8))  # as in the layer
    first = gradients(inputs, target, tree, upstream, "triton")
    num_different = torch.zeros((), dtype=torch.int64, device="cuda")
    side, unrelated = torch.cuda.Stream(), torch.zeros(1 << 24, device="cuda")  # type: ignore[no-untyped-call]
    for turn in range(1000):
        if turn % 2:
            with torch.cuda.stream(side):
                unrelated.add_(1)
        again = gradients(inputs, target, tree, upstream, "triton")
        equal = [(a == b).all() for a, b in zip(first, again, strict=True)]
        num_different += ~torch.stack(equal).all()
    assert int(num_different) == 0


def test_a_row_wise_step_never_waits_for_the_device() -> None:
    inputs, target, tree, _ = problem(TREES["two_level"](), 700, 64, torch.bfloat16)
    hidden, *table = (tensor.detach().requires_grad_() for tensor in inputs)
    optimizer = RowAdagrad(table, lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss = nll([hidden, *table, target], tree, backend="triton", row_wise=True, reduction="sum")
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(table, 0.1)
        optimizer.step()

    step()  # compiles
    before = table[0].detach().clone()
    torch.cuda.set_sync_debug_mode("error")  # waiting raises
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.equal(table[0], before)


@pytest.mark.parametrize("row_wise", [True, False])
def test_the_recorded_step_of_the_page_trains_as_one_that_is_not_recorded(row_wise: bool) -> None:
    (block,) = re.findall(r"```python\n([^`]*CUDAGraph.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    block = block.replace("row_wise=True", f"row_wise={row_wise}")
    plain = block.replace("with torch.cuda.graph(graph, stream=stream):\n    loss = step()\n", "")
    trained: list[dict[str, Any]] = []
    for text in (block, plain.replace("graph.replay()", "loss = step()")):
        torch.manual_seed(0)
        trained.append({})
        exec(text, trained[-1])
    recorded, eager = trained
    assert torch.equal(recorded["loss"], eager["loss"])
    assert torch.equal(recorded["layer"].weight, eager["layer"].weight)


@pytest.mark.parametrize("kind", [RowSGD, RowAdagrad, RowAdam])
@pytest.mark.parametrize("row_wise", [True, False])
def test_a_graphed_layer_trains_as_an_eager_one(
    row_wise: bool, kind: Callable[..., RowOptimizer]
) -> None:
    layers: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        tree = TREES["two_level"]()
        layers.append(HierarchicalSoftmax(64, tree, row_wise=row_wise, device="cuda"))
    optimizers = [kind(layer.parameters(), lr=0.1) for layer in layers]
    weights = [layer.weight for layer in layers]
    hidden = torch.randn(700, 64, device="cuda", requires_grad=True)
    target = torch.randint(3000, (700,), device="cuda")
    layers[1] = torch.cuda.make_graphed_callables(layers[1], (hidden, target))
    for _ in range(5):
        with torch.no_grad():
            hidden.normal_()
        target.random_(3000)
        for layer, optimizer in zip(layers, optimizers, strict=True):
            layer(hidden, target).loss.backward()
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*weights)


@pytest.mark.parametrize("size", [64, 300, 650, 33])
@pytest.mark.parametrize("name", ["shortlist", "balanced", "classes dealt at random"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_row_wise_gradients_are_bit_for_bit_the_dense_ones(
    dtype: torch.dtype, name: str, size: int
) -> None:
    inputs, target, tree, upstream = problem(TREES[name](), 700, size, dtype)
    _, *dense = gradients(inputs, target, tree, upstream, "triton")
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    each = nll([*leaves, target], tree, backend="triton", row_wise=True)
    torch.autograd.backward(each, upstream.to(each.dtype))
    for leaf, expected in zip(leaves, dense, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad.to_dense(), expected)


@pytest.mark.parametrize("kind", [RowSGD, RowAdagrad, partial(RowAdam, eps=0.1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_updated_on_the_device_as_on_the_host(
    dtype: torch.dtype, kind: Callable[..., RowOptimizer]
) -> None:
    inputs, target, tree, _ = problem(TREES["shortlist"](), 700, 300, dtype)
    tables = []
    for device in ("cuda", "cpu"):
        hidden, weight, bias = (tensor.detach().to(device) for tensor in inputs)
        table = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        optimizer = kind(table, lr=0.1)
        loss = hierarchical_cross_entropy(
            hidden, table[0], target.to(device), tree.to(device), table[1], row_wise=True
        )
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(table, 0.1)
        optimizer.step()
        tables.append([part.detach().cpu().float() for part in table])
    close = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(*tables, rtol=close, atol=close)


def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GB of free memory")
    tree = ClassTree.two_level(torch.arange(10_000_000) // 3163).cuda()
    weight = torch.empty(tree.num_rows, 300, device="cuda", dtype=torch.bfloat16).normal_(std=0.05)
    hidden = torch.randn(64, 300, device="cuda", dtype=torch.bfloat16)
    target = torch.arange(64, device="cuda") + (10_000_000 - 64)
    ours = gradients(
        [hidden, weight, torch.zeros(tree.num_rows, device="cuda", dtype=torch.bfloat16)],
        target, tree, torch.ones(64, device="cuda"), "triton",
    )  # fmt: skip
    root, last = int(tree.num_children[0]), int(tree.num_children[-1])
    rows = torch.cat([weight[:root], weight[-last:]]).double().requires_grad_()
    logits = hidden.double() @ rows.T
    nll = -logits[:, :root].log_softmax(1)[:, -1]
    nll = nll - logits[:, root:].log_softmax(1)[torch.arange(64), torch.arange(64) + last - 64]
    (truth,) = torch.autograd.grad(nll.sum(), rows)
    torch.testing.assert_close(ours[0].double(), nll.detach(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours[2][-last:].double(), truth[root:], rtol=0.05, atol=0.02)
    assert int((ours[2] != 0).any(1).sum()) == root + last


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TREES)
def test_words_are_found_and_drawn_as_on_a_cpu(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding may change a word or two of 64; at another temperature, frequencies are right."""
    monkeypatch.setattr(compiled, "has_numba", lambda: False)  # which draws in another way
    (hidden, weight, bias), _, tree, _ = problem(TREES[name](), 64, 40, dtype)
    on_cpu = hidden.cpu(), weight.cpu(), copy.deepcopy(tree).cpu(), bias.cpu()
    layer, seeds = (hidden, weight, tree, bias), torch.arange(64)
    assert fused.is_usable(Positions(hidden.float(), weight, tree, bias))
    best, expected = distribution.topk(*layer, k=9), distribution.topk(*on_cpu, k=9)
    torch.testing.assert_close(best.log_prob.cpu(), expected.log_prob, rtol=1e-4, atol=1e-4)
    assert int((best.word[:, 0].cpu() != expected.word[:, 0]).sum()) <= 2
    for sampling in (Sampling(), Sampling(top_p=0.9), Sampling(top_k=9), Sampling(min_p=0.1)):
        words = distribution.sample(*layer, sampling, seeds=seeds.cuda())
        others = distribution.sample(*on_cpu, sampling, seeds=seeds)
        assert int((words.cpu() != others).sum()) <= 2, sampling
    many = hidden[:1].expand(20_000, -1), weight, tree, bias
    warmer = Sampling(temperature=1.3, excluded=(0, 7))
    words = distribution.sample(*many, warmer, seeds=torch.arange(20_000).cuda())
    full = distribution.log_prob(*on_cpu)[0].double()
    assert_distributed(words.cpu(), restricted(full, 1.3, excluded=(0, 7)))
