"""The fused kernels in the interpreter: routing, and what they read and save."""

import pytest
import torch

from lm.output import ClassTree
from lm.output.backends import BACKENDS
from lm.output.backends.base import Needs, Problem
from lm.output.backends.triton import backend as triton_backend
from lm.output.backends.triton.backend import TritonBackend
from lm.output.backends.triton.launch import Launch, instrumented
from lm.output.backends.triton.plan import Memory, path_slots
from lm.output.backends.triton.routing import Routing, sizes
from lm.output.backends.visits import route
from tests.conftest import python

from ...definition import SMALL_TILES, execute_routing, gradients, problem, two_level, zipf_targets

pytest.importorskip("triton")


def test_a_batch_that_would_save_too_much_saves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, needs, backend = two_level(90, 9), Needs(True, True, True), BACKENDS["triton"]
    hidden, weight, bias, target = problem(tree, 70, size=20)
    whole = Problem.of(hidden, weight, tree, bias)
    expected, *_ = backend.nll(target, whole, needs)
    monkeypatch.setattr(triton_backend, "MAX_SAVED_BYTES", 20 * 8 * path_slots(whole))
    assert backend.part_size(whole) == 20
    (planned,) = backend.new_saved(whole, needs)
    softmaxes, (saved,) = backend.softmaxes(target, whole, needs)
    assert torch.equal(saved, target)
    assert (planned.shape, planned.dtype) == (saved.shape, saved.dtype)
    torch.testing.assert_close(softmaxes.nll_by_level().sum(0), expected)


def test_as_many_columns_are_taken_as_the_limit_says(monkeypatch: pytest.MonkeyPatch) -> None:
    posed = Problem.without_values(30, 8, two_level(90, 9), torch.float32)
    for excess in (0, 1):
        monkeypatch.setattr(triton_backend, "MAX_COLUMNS", path_slots(posed) - excess)
        obstacle = TritonBackend().obstacle(posed, torch.device("cpu"))
        assert (obstacle is None) == (excess == 0), obstacle


def test_autocast_reads_full_precision_weights_without_casting_them_as_a_whole(
    launches: list[Launch],
) -> None:
    tree = two_level(60, 8)
    hidden, weight, bias, target = problem(tree, 40, size=32, dtype=torch.float32)
    inputs = [hidden.half().float(), weight, bias]
    with torch.autocast("cpu", torch.float16):
        ours = gradients(inputs, target, tree, torch.ones(40), "triton")
    truth = gradients(inputs, target, tree, torch.ones(40), "reference")
    products = [each.arguments["inputs"] for each in launches if "inputs" in each.arguments]
    dtypes = [(of.sorted_hidden.dtype, of.weight.dtype) for of in products if of is not None]
    assert dtypes == [(torch.float16, torch.float32)] * 3
    assert [each.dtype for each in ours] == [torch.float32] * 4
    torch.testing.assert_close(ours, truth, rtol=0.02, atol=2e-3)


LAST_ROWS = """
import os; os.environ["TRITON_INTERPRET"] = "1"
import torch
from lm.output import ClassTree
from lm.output.backends import BACKENDS
from lm.output.backends.base import (Needs, Problem)
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
problem = Problem.of(hidden, weight, tree)
needs = Needs(hidden=True, weight=True, bias=False)


def run(launch):
    if "R" in launch.arguments:
        launch.arguments["R"] = 0  # it would write zeros to all other rows
    execute(launch)


with instrumented(run=run):
    nll, _, saved = BACKENDS["triton"].nll(target, problem, needs)
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
    done = python("-c", LAST_ROWS)
    assert done.stdout == "last rows: right\n", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("num_positions", "most_runs"),
    [
        (1, 64),
        (17, 0),
        (300, 64),
        *(pytest.param(n, 64, marks=pytest.mark.long) for n in (600, 1100)),
    ],
)
@pytest.mark.parametrize(
    "tree", [two_level(200, 14), ClassTree.balanced(200, 3), ClassTree.huffman(torch.arange(20))]
)
def test_visits_are_those_of_the_reference_in_lists_that_have_room(
    tree: ClassTree, num_positions: int, most_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of entries is not checked where they are written."""
    monkeypatch.setattr(triton_backend, "MOST_RUNS", most_runs)
    target = zipf_targets(tree, num_positions)
    hidden, weight = torch.zeros(num_positions, 1), torch.zeros(tree.num_rows, 1)
    given = Problem.of(hidden, weight, tree)

    with instrumented(run=execute_routing, tiles=SMALL_TILES):
        _, _, saved = TritonBackend().nll(target, given, Needs(True, True, False))
        most = sizes(given, SMALL_TILES)
    assert isinstance(saved, Memory)
    found = Routing.of(saved.routing, num_positions, tree.depth)
    truth = route(target, given.tree, tree.depth, -100)
    assert torch.equal(found.position.long(), truth.position)
    for ours, true in ((found.node, truth.node), (found.child, truth.child)):
        assert torch.equal(ours.view(tree.depth, -1).long(), true)
    visited = saved.visited
    assert torch.equal(visited.nonzero().flatten(), torch.unique(truth.node[truth.node >= 0]))
    used = found.num_entries[: len(most)].tolist()
    assert all(a <= b for a, b in zip(used, most, strict=True)), (used, most)
    lists = found._fields[-6:]
    for name, num in zip(lists, used, strict=False):  # what is beyond is as it was allocated
        assert (getattr(found, name)[num:] == torch.iinfo(torch.int32).max).all(), name
