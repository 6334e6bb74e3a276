"""The fused kernels and row-wise updates on a GPU, `pytest -m gpu`: bf16, tensor cores, races,
streams and graphs, which the interpreter cannot show.
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

from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.decoding import compiled, distribution, fused
from lm.output.decoding.draws import Sampling
from lm.output.decoding.positions import Positions
from lm.output.rowwise import RowAdagrad, RowAdam, RowSGD, lookup

from ..decoding.truth import assert_distributed, restricted
from ..definition import gradients, nll
from ..laws import LAWS, Case, Law, Way, equals_the_definition, problem_of
from ..rowwise.tables import OPTIMIZERS, Kind

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
TRITON, ROW_WISE = Way("triton"), Way("triton", "row-wise")


def on_gpu(
    name: str, positions: int, size: int, dtype: torch.dtype, rows: torch.dtype | None = None
) -> Case:
    return Case(TREES[name]().cuda(), positions, size, dtype, rows=rows, device="cuda")


@pytest.mark.parametrize("size", [64, 300, 650, 1024, 33])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loss_and_gradients_are_those_of_the_definition(
    name: str, dtype: torch.dtype, size: int
) -> None:
    case = on_gpu(name, 1000, size, dtype)
    equals_the_definition(TRITON, case, *problem_of(case))


@pytest.mark.parametrize("size", [300, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_fp32_under_autocast_are_as_exact_as_in_half_precision(
    dtype: torch.dtype, size: int
) -> None:
    case = on_gpu("two_level", 1000, size, dtype, torch.float32)
    equals_the_definition(TRITON, case, *problem_of(case))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law: Law) -> None:
    law(TRITON, on_gpu("shortlist", 700, 64, *LAWS[law]))


def test_tf32_is_used_when_torch_allows_it() -> None:
    case = on_gpu("two_level", 1000, 256, torch.float32)
    exact = TRITON.solve(case, *problem_of(case))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        fast = TRITON.solve(case, *problem_of(case))
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


def test_gpu_tests_run_without_deterministic_algorithms() -> None:
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("positions", [1, 16, 17, 700, 5000])
def test_results_repeat_bit_for_bit(positions: int) -> None:
    case = on_gpu("two_level", positions, 300, torch.bfloat16)
    given = problem_of(case)
    first = TRITON.solve(case, *given)
    for _ in range(5):
        assert all(map(torch.equal, TRITON.solve(case, *given), first))


@pytest.mark.parametrize("size", [300, 650])
def test_a_thousand_steps_give_the_same_results(size: int) -> None:
    """Kernels that read a register or shared memory too early are right or wrong by timing, which
    copies on another stream vary.
    """
    tree = ClassTree.two_level(torch.randperm(33_278) % 182).cuda()
    case = Case(tree, 16_384, size, torch.bfloat16, further=-size % 8, device="cuda")
    given = problem_of(case)
    first = TRITON.solve(case, *given)
    num_different = torch.zeros((), dtype=torch.int64, device="cuda")
    side, unrelated = torch.cuda.Stream(), torch.zeros(1 << 24, device="cuda")  # type: ignore[no-untyped-call]
    for turn in range(1000):
        if turn % 2:
            with torch.cuda.stream(side):
                unrelated.add_(1)
        again = TRITON.solve(case, *given)
        equal = [(a == b).all() for a, b in zip(first, again, strict=True)]
        num_different += ~torch.stack(equal).all()
    assert int(num_different) == 0


def test_a_row_wise_step_never_waits_for_the_device() -> None:
    case = on_gpu("two_level", 700, 64, torch.bfloat16)
    (*inputs, target), _ = problem_of(case)
    hidden, *table = (tensor.requires_grad_() for tensor in inputs)
    optimizer = RowAdagrad(table, lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(ROW_WISE.nll(case.tree, hidden, *table, target, reduction="sum"))
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


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("row_wise", [True, False])
def test_a_graphed_layer_trains_as_an_eager_one(row_wise: bool, kind: Kind) -> None:
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
    case = on_gpu(name, 700, size, dtype)
    dense, rows = (way.solve(case, *problem_of(case)) for way in (TRITON, ROW_WISE))
    assert all(map(torch.equal, rows, dense))


@pytest.mark.parametrize("kind", [RowSGD, RowAdagrad, partial(RowAdam, eps=0.1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_updated_on_the_device_as_on_the_host(dtype: torch.dtype, kind: Kind) -> None:
    case = on_gpu("shortlist", 700, 300, dtype)
    (*inputs, target), _ = problem_of(case)
    tables = []
    for device in ("cuda", "cpu"):
        hidden, weight, bias = (tensor.detach().to(device) for tensor in inputs)
        table = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        optimizer = kind(table, lr=0.1)
        given = [hidden, *table, target.to(device)]
        loss = nll(given, case.tree.to(device), reduction="mean", row_wise=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(table, 0.1)
        optimizer.step()
        tables.append([part.detach().cpu().float() for part in table])
    close = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(*tables, rtol=close, atol=close)


def after_lookups(kind: Kind, dtype: torch.dtype, record: bool) -> Tensor:
    """A table after steps in which rows repeat, and some are absent; then with other rates."""
    torch.manual_seed(0)
    index, lr = torch.randint(-1, 40, (700,), device="cuda"), torch.tensor(0.1, device="cuda")
    upstream = torch.randn(700, 64, device="cuda")
    table = torch.randn(3000, 64, device="cuda").to(dtype).requires_grad_()
    optimizer = kind([table], lr=lr)

    def step() -> None:
        torch.autograd.backward((lookup(table, index).float() * upstream).sum())
        torch.nn.utils.clip_grad_norm_([table], 0.5)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    graph, replay = torch.cuda.CUDAGraph(), step
    if record:
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    for number in range(1, 6):
        index.random_(-1, 40 * number)
        lr.fill_(0.1 / number)
        replay()
    return table.detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_recorded_update_of_looked_up_rows_is_the_eager_one(
    kind: Kind, dtype: torch.dtype
) -> None:
    assert torch.equal(*(after_lookups(kind, dtype, record) for record in (False, True)))


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
    case = on_gpu(name, 64, 40, dtype)
    ((hidden, weight, bias, _), _), tree = problem_of(case), case.tree
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
