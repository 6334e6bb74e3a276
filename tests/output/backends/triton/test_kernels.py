"""The fused kernels in the interpreter equal the reference, for sizes of all kinds; routing."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends import BACKENDS
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton import backend as triton_backend
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import Launch, execute, instrumented
from lm.output.backends.triton.plan import Memory, path_slots
from lm.output.backends.triton.routing import Routing, sizes
from lm.output.backends.triton.tile_shapes import Tile, Tiles
from lm.output.backends.visits import route

from ...definition import SMALL_TILES, gradients, nll, two_level, zipf_targets

pytest.importorskip("triton")

SMALL, LIGHT = SMALL_TILES, SMALL_TILES.light.v
MIXED = Tiles(
    Tile(32, 16, 32, 4, 1), Tile(16, 16, 0, 4, 1), Tile(64, 32, 32, 4, 1, 16),
    Tile(16, 32, 64, 4, 1), chunk=20,
)  # fmt: skip

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
    "a shortlist": (ClassTree.two_level(torch.arange(90) % 9, 20), 60, 20, SMALL, 1),
    "chunks of visits whose sums are added": (two_level(90, 3), 150, 20, SMALL, 2),
    "deep: levels heavy and light": (ClassTree.balanced(200, 4), 70, 20, SMALL, 1),
    "paths of many lengths": (ClassTree.huffman(torch.arange(30) ** 3 + 1), 60, 20, SMALL, 2),
}  # fmt: skip


def problem(
    tree: ClassTree, positions: int, size: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """hidden, weight, bias, and targets of which half are drawn by inverse rank, one is ignored."""
    shapes = ((positions, size), (tree.num_rows, size), (tree.num_rows,))
    return [*(torch.randn(shape, dtype=dtype) for shape in shapes), zipf_targets(tree, positions)]


WITHOUT_A_BIAS = (
    "exactly LIGHT positions: the root is light",
    "more programs than blocks",
    "chunks of visits whose sums are added",
)


@pytest.mark.parametrize(
    ("name", "with_bias"),
    [*((name, True) for name in GRID), *((name, False) for name in WITHOUT_A_BIAS)],
)
def test_the_kernels_equal_the_reference(name: str, with_bias: bool) -> None:
    tree, positions, size, shape, splits = GRID[name]
    *inputs, target = problem(tree, positions, size)
    inputs = inputs[: 3 if with_bias else 2]
    upstream = torch.randn(positions)
    with instrumented(tiles=shape, num_splits=splits):
        ours = gradients(inputs, target, tree, upstream, "triton")
    truth = gradients(inputs, target, tree, upstream, "reference")
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("banned", "splits"),
    [(slice(0, 16), 3), (slice(4, 40), 3), (slice(100, 116), 3), (slice(4, 40), 1)],
)
def test_whole_blocks_of_children_may_be_impossible(banned: slice, splits: int) -> None:
    """A bias of -inf bans a word or a class; here all children of a block, of a program."""
    tree = ClassTree.two_level(torch.arange(240) // 3)  # rows: 80 classes, then 240 words
    hidden, weight, bias, _ = problem(tree, 20, 20)
    bias[banned] = -torch.inf
    target = torch.randint(120, 240, (20,))
    upstream = torch.randn(20)
    with instrumented(tiles=SMALL, num_splits=splits):
        ours = gradients([hidden, weight, bias], target, tree, upstream, "triton")
    truth = gradients([hidden, weight, bias], target, tree, upstream, "reference")
    assert all(true.isfinite().all() for true in truth)
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("row_wise", "reduction"), [(False, "none"), (True, "mean")])
def test_a_batch_that_would_save_too_much_is_computed_in_parts(
    row_wise: bool, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = two_level(90, 9)
    *inputs, target = problem(tree, 70, 20)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    upstream = torch.randn(70 if reduction == "none" else (), dtype=torch.float64)
    needs = Needs(True, True, True, row_wise)
    hidden, weight, bias = inputs
    whole, one = Problem.of(hidden, weight, target, tree, bias), BACKENDS["triton"]
    expected, *_ = one.nll(whole, needs)
    monkeypatch.setattr(triton_backend, "MAX_SAVED_BYTES", 20 * 8 * path_slots(whole))
    assert one.part_size(whole) == 20
    assert one.new_saved(whole, needs) == ()
    softmaxes, saved = one.softmaxes(whole, needs)
    assert saved == ()
    torch.testing.assert_close(softmaxes.nll_by_level().sum(0), expected)
    results = []
    for name in ("triton", "reference"):
        options = {"reduction": reduction, "row_wise": row_wise, "backend": name}
        each = nll([*inputs, target], tree, **options)
        found = torch.autograd.grad(each, inputs, upstream)
        results.append([each.detach(), *(grad.to_dense() for grad in found)])
        of_hidden = nll([hidden, weight.detach(), target], tree, **options)
        results[-1] += torch.autograd.grad(of_hidden, hidden, upstream)
    if reduction == "none":
        assert torch.equal(results[0][0], expected)
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)


def test_nan_in_the_weight_is_nan_in_the_nll() -> None:
    tree = two_level(60, 8)
    hidden, weight, bias, target = problem(tree, 20, 16)
    weight[2] = torch.nan  # a class that no target is in
    target = torch.where(tree.rows_on_path(target.clamp(min=0))[:, 1] == 2, 59, target)
    for backend in ("reference", "triton"):
        found, *_ = gradients([hidden, weight, bias], target, tree, torch.ones(20), backend)
        assert torch.equal(found.isnan(), target >= 0)


def test_gradients_of_a_small_loss_survive_half_precision() -> None:
    """d nll = 1e-8 times an error is 0 in fp16, unless it is divided by its maximum."""
    tree = two_level(60, 8)
    hidden, weight, _, target = problem(tree, 40, 32, torch.float32)
    half, weight = hidden.half(), weight.requires_grad_()
    with torch.autocast("cpu", torch.float16):
        found = nll([half, weight, target], tree, reduction="mean", backend="triton")
    (ours,) = torch.autograd.grad(found, weight, torch.tensor(3e-7))
    truth = nll([half.float(), weight, target], tree, reduction="mean")
    (true,) = torch.autograd.grad(truth, weight, torch.tensor(3e-7))
    assert 0 < true.abs().max() < 1e-7
    torch.testing.assert_close(ours, true, rtol=0.01, atol=1e-3 * float(true.abs().max()))


def test_autocast_reads_full_precision_weights_without_casting_them_as_a_whole() -> None:
    tree = two_level(60, 8)
    hidden, weight, bias, target = problem(tree, 40, 32, torch.float32)
    inputs = [tensor.requires_grad_() for tensor in (hidden.half().float(), weight, bias)]
    products: list[tuple[torch.dtype, torch.dtype]] = []

    def run(launch: Launch) -> None:
        if (of := launch.arguments.get("inputs")) is not None:
            products.append((of.sorted_hidden.dtype, of.weight.dtype))
        execute(launch)

    with torch.autocast("cpu", torch.float16), instrumented(run=run):
        ours = gradients(inputs, target, tree, torch.ones(40), "triton")
    truth = gradients(inputs, target, tree, torch.ones(40), "reference")
    assert products == [(torch.float16, torch.float32)] * 3
    assert [each.dtype for each in ours] == [torch.float32] * 4
    torch.testing.assert_close(ours, truth, rtol=0.02, atol=2e-3)


LAST_ROWS = """
import os; os.environ["TRITON_INTERPRET"] = "1"
import torch
from lm.output import ClassTree
from lm.output.backends import BACKENDS
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton.launch import execute, instrumented

N, H, LAST = 9_000_060, 256, 60
tree = ClassTree.two_level(torch.arange(N) // 90_000)
ROOT = -(-N // 90_000)
weight = torch.empty(tree.num_rows, H, dtype=torch.float16)  # virtual: 4.6 GB
assert weight.numel() > 2**31
rows = slice(tree.num_rows - LAST, tree.num_rows)
torch.manual_seed(0)
weight[:ROOT], weight[rows] = torch.randn(ROOT, H) / 16, torch.randn(LAST, H) / 16
hidden, target = torch.randn(2, H).half(), torch.tensor([N - 1, N - LAST])
problem = Problem.of(hidden, weight, target, tree)
needs = Needs(hidden=True, weight=True, bias=False)


def run(launch):
    if "R" in launch.arguments:
        launch.arguments["R"] = 0  # it would write zeros to all other rows
    execute(launch)


with instrumented(run=run):
    nll, _, saved = BACKENDS["triton"].nll(problem, needs)
    d_hidden, d_weight, _ = BACKENDS["triton"].backward(torch.ones(2), problem, saved, needs)
last_rows = weight[rows].double().requires_grad_()
log_q = (hidden.double() @ last_rows.T).log_softmax(1)
root = (hidden.double() @ weight[:ROOT].double().T).log_softmax(1)
truth = -(log_q[[0, 1], [LAST - 1, 0]] + root[:, -1])
(true_d,) = torch.autograd.grad(truth.sum(), last_rows)
torch.testing.assert_close(nll.double(), truth.detach(), rtol=1e-3, atol=1e-3)
torch.testing.assert_close(d_weight[rows].double(), true_d, rtol=1e-2, atol=1e-3)
print("last rows: right")
"""


def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    """In a separate process: with 32-bit offsets it would be killed."""
    done = subprocess.run(
        [sys.executable, "-c", LAST_ROWS], capture_output=True, text=True, check=False
    )
    assert done.stdout == "last rows: right\n", done.stderr[-2000:]


ROUTING = ("_sort", "_merge", "_plan")


@pytest.mark.parametrize(
    ("num_positions", "most_runs"),
    [(1, 64), (17, 0), (300, 64), (600, 64), pytest.param(1100, 64, marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    "tree", [two_level(200, 14), ClassTree.balanced(200, 3), ClassTree.huffman(torch.arange(40))]
)
def test_visits_are_those_of_the_reference_in_lists_that_have_room(
    tree: ClassTree, num_positions: int, most_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of entries is not checked where they are written."""
    monkeypatch.setattr(triton_backend, "MOST_RUNS", most_runs)
    target = zipf_targets(tree, num_positions)
    hidden, weight = torch.zeros(num_positions, 1), torch.zeros(tree.num_rows, 1)
    given = Problem.of(hidden, weight, target, tree)

    def run(launch: Launch) -> None:
        if launch.kernel.__name__ in ROUTING:
            execute(launch)

    with instrumented(run=run, tiles=SMALL):
        _, _, saved = TritonBackend().nll(given, Needs(True, True, False))
        most = sizes(given, SMALL)
    assert isinstance(saved, Memory)
    found = Routing.of(saved.routing, num_positions, tree.depth)
    truth = route(given.target, given.tree, tree.depth, -100)
    assert torch.equal(found.position.long(), truth.position)
    for ours, true in ((found.node, truth.node), (found.child, truth.child)):
        assert torch.equal(ours.view(tree.depth, -1).long(), true)
    visited = saved.visited
    assert torch.equal(visited.nonzero().flatten(), torch.unique(truth.node[truth.node >= 0]))
    used = found.num_entries[: len(most)].tolist()
    assert all(a <= b for a, b in zip(used, most, strict=True)), (used, most)
