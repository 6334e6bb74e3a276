"""The fused kernels in the interpreter: they equal the reference over a grid of shapes, and leave
alone what they should.
"""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.backends.triton import backend as fused
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from lm.output.backends.visits import LIGHT, Visits, route, schedule
from lm.output.tree.class_tree import TreeArrays

pytest.importorskip("triton")

SMALL = Tiles(16, *[Tile(v=16, h=16, warps=4, stages=1)] * 4)
MIXED = Tiles(16, *(Tile(v, h, 4, 1) for v, h in [(32, 32), (16, 64), (32, 16), (16, 32)]))


def two_level(num_words: int, num_classes: int) -> ClassTree:
    return ClassTree.two_level(torch.arange(num_words) * num_classes // num_words)


GRID: dict[str, tuple[ClassTree, int, int, Tiles, int]] = {
    # name: tree, positions, H, tiles, splits
    "one position: everything is light": (two_level(50, 7), 1, 20, SMALL, 1),
    "exactly LIGHT positions: the root is light": (two_level(50, 7), LIGHT, 20, SMALL, 1),
    "one more: the root is heavy": (two_level(50, 7), LIGHT + 1, 20, SMALL, 1),
    "several tiles, the last one ragged": (two_level(50, 7), 75, 20, SMALL, 1),
    "H below a block": (two_level(50, 7), 40, 3, SMALL, 1),
    "H that 4 divides and 16 does not": (two_level(50, 7), 40, 36, SMALL, 1),
    "H odd": (two_level(50, 7), 40, 33, SMALL, 1),
    "tiles of unequal shapes": (two_level(300, 20), 90, 40, MIXED, 1),
    "children that fill blocks exactly": (two_level(256, 16), 60, 16, SMALL, 1),
    "the children of a node shared by programs": (two_level(300, 60), 40, 20, SMALL, 3),
    "more programs than blocks": (two_level(20, 4), 40, 20, SMALL, 5),
    "one node, many blocks": (ClassTree.full(200), 40, 20, SMALL, 2),
    "classes of one word": (two_level(6, 6), 40, 20, SMALL, 1),
    "words at the root": (
        ClassTree.two_level(torch.arange(90) % 9, head=20), 60, 20, SMALL, 1,
    ),
    "deep: levels heavy and light": (ClassTree.balanced(200, 4), 70, 20, SMALL, 1),
    "paths of many lengths": (ClassTree.huffman(torch.arange(30) ** 3 + 1), 60, 20, SMALL, 2),
}  # fmt: skip


def problem(
    tree: ClassTree, positions: int, size: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """hidden, weight, bias, and targets of which half are drawn by inverse rank, one is ignored."""
    hidden = torch.randn(positions, size, dtype=dtype)
    weight = torch.randn(tree.num_rows, size, dtype=dtype)
    bias = torch.randn(tree.num_rows, dtype=dtype)
    target = torch.randint(0, tree.vocab_size, (positions,))
    frequent = (tree.vocab_size ** torch.rand(positions)).long().clamp(max=tree.vocab_size - 1)
    target = torch.where(torch.rand(positions) < 0.5, frequent, target)
    target[1:2] = -100
    return [hidden, weight, bias, target]


def gradients(
    backend: str, inputs: list[Tensor], target: Tensor, tree: ClassTree, upstream: Tensor
) -> list[Tensor]:
    """nll of every position, and the gradients of the inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    bias = inputs[2] if len(inputs) == 3 else None
    nll = hierarchical_cross_entropy(
        inputs[0], inputs[1], target, tree, bias, reduction="none", backend=backend,  # type: ignore[arg-type]
    )  # fmt: skip
    return [nll.detach(), *torch.autograd.grad(nll, inputs, upstream.to(nll.dtype))]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", GRID)
def test_the_kernels_equal_the_reference(
    name: str, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, positions, size, shape, splits = GRID[name]
    monkeypatch.setattr(fused, "tiles", lambda *_: shape)
    monkeypatch.setattr(fused, "_num_splits", lambda *_: splits)
    *inputs, target = problem(tree, positions, size)
    inputs = inputs[: 3 if with_bias else 2]
    upstream = torch.randn(positions)
    ours = gradients("triton", inputs, target, tree, upstream)
    truth = gradients("reference", inputs, target, tree, upstream)
    for own, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(own, true, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("banned", [slice(0, 16), slice(4, 40), slice(100, 116)])
def test_whole_blocks_of_children_may_be_impossible(
    banned: slice, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias of -inf bans a word or a class; here all children of a block, of a program."""
    monkeypatch.setattr(fused, "tiles", lambda *_: SMALL)
    monkeypatch.setattr(fused, "_num_splits", lambda *_: splits)
    tree = ClassTree.two_level(torch.arange(240) // 3)  # rows: 80 classes, then 240 words
    hidden, weight, bias, _ = problem(tree, 40, 20)
    bias[banned] = -torch.inf
    target = torch.randint(120, 240, (40,))
    upstream = torch.randn(40)
    ours = gradients("triton", [hidden, weight, bias], target, tree, upstream)
    truth = gradients("reference", [hidden, weight, bias], target, tree, upstream)
    for own, true in zip(ours, truth, strict=True):
        assert true.isfinite().all()
        torch.testing.assert_close(own, true, rtol=1e-10, atol=1e-12)


def test_what_is_no_number_is_not_hidden() -> None:
    tree = two_level(60, 8)
    hidden, weight, bias, target = problem(tree, 20, 16)
    weight[2] = torch.nan  # a class that no target is in
    target = torch.where(tree.root_child(target.clamp(min=0)) == 2, 59, target)
    for backend in ("reference", "triton"):
        nll, *_ = gradients(backend, [hidden, weight, bias], target, tree, torch.ones(20))
        assert torch.equal(nll.isnan(), target >= 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_empty_batch_has_gradients_of_zero(dtype: torch.dtype) -> None:
    tree = two_level(60, 8)
    *inputs, target = problem(tree, 0, 16, dtype)
    _, d_hidden, d_weight, d_bias = gradients("triton", inputs, target, tree, torch.ones(0))
    assert d_hidden.shape == (0, 16)
    assert not d_weight.any()
    assert not d_bias.any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_the_shapes_that_are_shipped_equal_the_reference(
    dtype: torch.dtype, tolerance: float
) -> None:
    tree = two_level(700, 26)
    *inputs, target = problem(tree, 150, 100, dtype)
    inputs[1] *= 0.1
    upstream = torch.randn(150)
    ours = gradients("triton", inputs, target, tree, upstream)
    truth = gradients("reference", [x.double() for x in inputs], target, tree, upstream)
    for own, true in zip(ours, truth, strict=True):
        error = (own.double() - true).abs().max() / true.abs().max()
        assert error < tolerance


def test_gradients_of_a_small_loss_survive_half_precision() -> None:
    """d nll = 1e-8 times an error is 0 in fp16; divided by its maximum it is there."""
    tree = two_level(60, 8)
    hidden, weight, _, target = problem(tree, 40, 32, torch.float32)
    half, weight = hidden.half(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        nll = hierarchical_cross_entropy(half, weight, target, tree, backend="triton")
    (ours,) = torch.autograd.grad(nll, weight, torch.tensor(3e-7))
    truth = hierarchical_cross_entropy(half.float(), weight, target, tree)
    (true,) = torch.autograd.grad(truth, weight, torch.tensor(3e-7))
    assert 0 < true.abs().max() < 1e-7
    torch.testing.assert_close(ours, true, rtol=0.01, atol=1e-3 * float(true.abs().max()))


def test_autocast_reads_full_precision_weights_without_casting_them_as_a_whole() -> None:
    tree = two_level(60, 8)
    hidden, weight, bias, target = problem(tree, 40, 32, torch.float32)
    half, weight, bias = (
        hidden.half().requires_grad_(), weight.requires_grad_(), bias.requires_grad_(),
    )  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        loss = hierarchical_cross_entropy(half, weight, target, tree, bias, backend="triton")
    grads = torch.autograd.grad(loss, (half, weight, bias))
    assert [grad.dtype for grad in grads] == [torch.float16, torch.float32, torch.float32]
    exact = half.detach().float().requires_grad_()
    truth = hierarchical_cross_entropy(exact, weight, target, tree, bias)
    true_grads = torch.autograd.grad(truth, (exact, weight, bias))
    torch.testing.assert_close(loss, truth, rtol=1e-3, atol=1e-3)
    for own, true in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(own.float(), true, rtol=0.02, atol=2e-3)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels, as they are launched."""
    names: list[str] = []
    launch = fused._launch

    def note(kernel: Any, *args: Any, **arguments: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *args, **arguments)

    monkeypatch.setattr(fused, "_launch", note)
    return names


def test_one_launch_forward_and_three_backward(launched: list[str]) -> None:
    tree = ClassTree.balanced(300, 6)
    *inputs, target = problem(tree, 60, 16)
    gradients("triton", inputs, target, tree, torch.ones(60))
    assert launched == ["_forward", "_d_hidden", "_d_weight", "_d_light"]


def test_without_gradients_nothing_is_kept(launched: list[str]) -> None:
    tree = two_level(60, 8)
    hidden, weight, bias, target = problem(tree, 40, 16)
    kept: list[int] = []
    new_state = fused.new_state

    def note(*args: Any) -> fused.State:
        state = new_state(*args)
        kept.append(state.kept.numel())
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "new_state", note)
        nll = hierarchical_cross_entropy(hidden, weight, target, tree, bias, backend="triton")
    torch.testing.assert_close(nll, hierarchical_cross_entropy(hidden, weight, target, tree, bias))
    assert kept == [0]
    assert launched == ["_forward"]


def test_nothing_is_read_back_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values every decision of the host must follow from shapes alone."""
    tree = two_level(100_000, 316)
    taken: list[int] = []
    monkeypatch.setattr(fused, "_launch", lambda kernel, programs, *_, **__: taken.append(programs))
    arrays = TreeArrays(*(array.to("meta") for array in tree.arrays))
    target = torch.empty(2000, dtype=torch.int64, device="meta")
    hidden = torch.empty(2000, 48, device="meta")
    weight = torch.empty(tree.num_rows, 48, device="meta")
    visits = route(target, arrays, tree.depth, -100)
    plan = schedule(visits, arrays)
    nll, state = fused.forward(
        hidden, weight, None, visits, plan, arrays, tree.max_path_columns, True
    )
    grads = fused.backward(
        nll, hidden, weight, None, visits, plan, arrays, state, [True, True, False]
    )
    assert [grad.shape for grad in grads if grad is not None] == [hidden.shape, weight.shape]
    assert taken[0] >= 2000 // 64 + 317
    assert len(taken) == 4


def test_no_tensor_of_the_size_of_the_vocabulary_is_made_besides_the_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "_launch", lambda *_, **__: None)
    tree = two_level(250_000, 500)
    weight = torch.zeros(tree.num_rows, 8, requires_grad=True)
    hidden, target = torch.randn(64, 8, requires_grad=True), torch.arange(64) * 3900
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        loss = hierarchical_cross_entropy(hidden, weight, target, tree, backend="triton")
        _, d_weight = torch.autograd.grad(loss, (hidden, weight))
    events = profile.events()
    assert events is not None
    sizes = sorted(event.self_cpu_memory_usage for event in events)
    blocks = fused.kept_blocks(tree.max_path_columns, 2, 32)
    assert sizes[-1] >= d_weight.numel() * 4
    assert 0 < sizes[-2] <= 64 * blocks * 32 * 4
    assert sum(size > 64 * blocks * 32 * 4 for size in sizes) == 1


@pytest.mark.parametrize("num_positions", [1, 17, 300])
@pytest.mark.parametrize(
    "tree", [two_level(200, 14), ClassTree.balanced(200, 3), ClassTree.huffman(torch.arange(40))]
)
def test_the_schedule_covers_every_visit_once(tree: ClassTree, num_positions: int) -> None:
    *_, target = problem(tree, num_positions, 1)
    visits = route(target, tree.arrays, tree.depth, -100)
    plan = schedule(visits, tree.arrays)
    counts: dict[int, int] = {}
    for node in visits.node.flatten().tolist():
        counts[node] = counts.get(node, 0) + 1
    heavy = {node for node, count in counts.items() if node >= 0 and count > LIGHT}
    listed = [flat for flat in plan.heavy_first.tolist() if flat >= 0]
    nodes = visits.node.flatten()[listed].tolist()
    assert set(nodes) == heavy
    assert len(nodes) == len(heavy)
    assert [counts[node] for node in nodes] == sorted((counts[n] for n in nodes), reverse=True)
    covered = torch.zeros_like(visits.node)
    for level, own in enumerate(visits.node):
        for place, node in enumerate(own.tolist()):
            covered[level, place] = node in heavy
    for first in plan.light_first.tolist():
        if first < num_positions:
            top = int(plan.light_level[first])
            stop = int(plan.stop[top, first])
            assert stop - first <= LIGHT
            covered[top:, first:stop] += (visits.node[top:, first:stop] >= 0).long()
    assert torch.equal(covered, (visits.node >= 0).long())


def test_visits_are_those_of_the_paths() -> None:
    tree = ClassTree.balanced(90, 4)
    *_, target = problem(tree, 50, 1)
    visits = route(target, tree.arrays, tree.depth, -100)
    for place, position in enumerate(visits.position.tolist()):
        word = int(target[position])
        path = tree.path(word) if word != -100 else []
        expected = [(node, row) for node, row in path if int(tree.num_children[node]) > 1]
        own = [
            (int(node), int(tree.first_row[node]) + int(child))
            for node, child in zip(visits.node[:, place], visits.child[:, place], strict=True)
            if node >= 0
        ]
        assert own == expected
    assert_runs(visits)


def assert_runs(visits: Visits) -> None:
    """Each node's visits are an interval."""
    for own in visits.node:
        firsts = torch.unique_consecutive(own[own >= 0])
        assert firsts.numel() == firsts.unique().numel()


def test_problems_that_the_kernels_cannot_take_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = two_level(60, 8)
    hidden, weight, bias, target = problem(tree, 20, 16, torch.float32)

    def loss() -> Tensor:
        return hierarchical_cross_entropy(hidden, weight, target, tree, bias, backend="triton")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "KEPT_BYTES", 1000)
        with pytest.raises(ValueError, match=r"would keep .* for 20 positions with up to 16 col"):
            loss()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_capability", lambda _: 75)
        with pytest.raises(ValueError, match=r"needs compute capability 8.0, got 7.5"):
            loss()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm.output.backends.triton.backend.os.environ", {})
        with pytest.raises(ValueError, match="backend triton needs a CUDA device, got cpu"):
            loss()
    weight = weight.T.contiguous().T
    with pytest.raises(ValueError, match=r"needs weight rows that are contiguous, got .*\(1, 68\)"):
        loss()
    weight = weight[:1].contiguous().expand(68, 16)
    with pytest.raises(ValueError, match=r"needs weight rows that do not overlap, got .*\(0, 1\)"):
        loss()


LAST_ROWS = """
import os; os.environ["TRITON_INTERPRET"] = "1"
import torch
from lm.output import ClassTree
from lm.output.backends.triton import backend as fused
from lm.output.backends.visits import route, schedule

N, H = 9_000_000, 256
launch = fused._launch
fused._launch = lambda kernel, *args, **rest: (
    None if kernel.__name__ == "_d_weight" else launch(kernel, *args, **rest)
)  # it would write zeros to all other rows
tree = ClassTree.two_level(torch.arange(N) // 3000)
weight = torch.empty(tree.num_rows, H, dtype=torch.float16)  # virtual: 4.6 GB
assert weight.numel() > 2**31
rows = slice(tree.num_rows - 3000, tree.num_rows)
torch.manual_seed(0)
weight[:3000], weight[rows] = torch.randn(3000, H) / 16, torch.randn(3000, H) / 16
hidden, target = torch.randn(2, H).half(), torch.tensor([N - 1, N - 3000])
visits = route(target, tree.arrays, tree.depth, -100)
plan = schedule(visits, tree.arrays)
problem = (hidden, weight, None, visits, plan, tree.arrays)
nll, state = fused.forward(*problem, tree.max_path_columns, True)
d_hidden, d_weight, _ = fused.backward(torch.ones(2), *problem, state, [True, True, False])
own = weight[rows].double().requires_grad_()
log_q = (hidden.double() @ own.T).log_softmax(1)
root = (hidden.double() @ weight[:3000].double().T).log_softmax(1)
truth = -(log_q[[0, 1], [2999, 0]] + root[:, 2999])
(true_d,) = torch.autograd.grad(truth.sum(), own)
torch.testing.assert_close(nll.double(), truth.detach(), rtol=1e-3, atol=1e-3)
torch.testing.assert_close(d_weight[rows].double(), true_d, rtol=1e-2, atol=1e-3)
print("last rows: right")
"""


def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    """In a process of its own: with 32-bit offsets it would be killed."""
    done = subprocess.run(
        [sys.executable, "-c", LAST_ROWS], capture_output=True, text=True, check=False
    )
    assert done.stdout == "last rows: right\n", done.stderr[-2000:]


@pytest.mark.parametrize("num_nodes", [32_767, 32_768, 70_000])
def test_positions_are_sorted_by_node_in_trees_of_any_number_of_nodes(num_nodes: int) -> None:
    """Ranks are sorted in 16 bits while these hold them."""
    tree = ClassTree.two_level(torch.arange(2 * (num_nodes - 1)) // 2)
    assert tree.num_nodes == num_nodes
    target = torch.randint(tree.vocab_size, (400,))
    target[:2], target[2] = tree.vocab_size - 1, -100
    visits = route(target, tree.arrays, tree.depth, -100)
    assert (visits.rank.diff() >= 0).all()
    assert int(visits.position[-1]) == 2  # ignored ones last
