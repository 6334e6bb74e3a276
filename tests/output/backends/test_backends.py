"""The registry of backends and their visits: which one is chosen, what it saves."""

import pytest
import torch

from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.backends import BACKENDS, choose_backend, saved_bytes
from lm.output.backends.base import Needs, Problem
from lm.output.backends.compiled import memory
from lm.output.backends.triton.launch import instrumented
from lm.output.backends.visits import route

from ..definition import nll, two_level

TREE = ClassTree.two_level(torch.arange(90) // 9)


@pytest.mark.parametrize(
    ("requested", "device", "dtype", "chosen"),
    [
        ("auto", "cpu", torch.float32, "compiled"),
        ("auto", "cpu", torch.float64, "compiled"),
        ("reference", "cpu", torch.float32, "reference"),
        ("auto", "cuda", torch.float32, "triton"),
        ("reference", "cuda", torch.float32, "reference"),
        ("triton", "cuda", torch.bfloat16, "triton"),
    ],
)
def test_auto_chooses_the_backend_that_is_made_for_a_device(
    requested: str, device: str, dtype: torch.dtype, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    problem = Problem.without_values(30, 8, TREE, dtype)
    for capability in (80, 90):
        with instrumented(capability=capability):
            assert choose_backend(requested, problem, torch.device(device)) == chosen


@pytest.mark.parametrize(
    ("tree", "dtype", "reason"),
    [
        (ClassTree.full(17_000_000), torch.float32, "takes at most 16777216 columns on a path"),
        (TREE, torch.float64, "does not support fp64"),
    ],
)
def test_a_warning_says_why_auto_takes_the_reference_on_cuda(
    tree: ClassTree, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    problem = Problem.without_values(8000, 8, tree, dtype)
    with instrumented(capability=90), pytest.warns(UserWarning, match=f"slowly on cuda.*{reason}"):
        assert choose_backend("auto", problem, torch.device("cuda")) == "reference"


@pytest.mark.parametrize("name", ["compiled", "reference"])
def test_the_memory_of_parameters_can_be_freed_after_a_loss_as_fsdp_does(name: str) -> None:
    layer = HierarchicalSoftmax(12, TREE, backend=name)  # type: ignore[arg-type]
    hidden = torch.randn(30, 12, requires_grad=True)
    layer.loss(hidden, torch.randint(90, (30,))).backward()  # type: ignore[no-untyped-call]
    assert all(tensor.untyped_storage().resizable() for tensor in (*layer.parameters(), hidden))


@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("tree", [TREE, ClassTree.full(90)])
@pytest.mark.parametrize("name", BACKENDS)
def test_saved_bytes_are_those_of_what_a_forward_saves(
    name: str, tree: ClassTree, row_wise: bool
) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    hidden, weight = torch.randn(30, 12), torch.randn(tree.num_rows, 16)  # as of a layer
    problem, needs = Problem.of(hidden, weight, tree), Needs(True, True, False, row_wise)
    _, _, saved = BACKENDS[name].nll(torch.randint(90, (30,)), problem, needs)
    planned = Problem.without_values(30, 12, tree, torch.float32)
    assert sum(each.nbytes for each in saved) == saved_bytes(name, planned, row_wise=row_wise)


@pytest.mark.parametrize("name", ["compiled", "triton"])
def test_no_other_tensor_of_the_size_of_the_vocabulary_is_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LARGE_BYTES", 1 << 20)
    tree = two_level(250_000, 500)
    weight = torch.zeros(tree.num_rows, 8, requires_grad=True)
    hidden, target = torch.randn(64, 8, requires_grad=True), torch.arange(64) * 3900
    profiler = torch.profiler.profile(profile_memory=True, acc_events=True)
    with instrumented(run=lambda _: None), profiler as profile:
        loss = nll([hidden, weight, target], tree, reduction="mean", backend=name)
        _, d_weight = torch.autograd.grad(loss, (hidden, weight))
    sizes = sorted(event.self_cpu_memory_usage for event in profile.events() or ())
    if name == "triton":  # the gradient, which the compiled backend maps
        assert sizes.pop() >= d_weight.numel() * 4
    planned = Problem.without_values(64, 8, tree, torch.float32)
    assert 0 < sizes[-1] <= saved_bytes(name, planned, row_wise=False)


@pytest.mark.parametrize("num_nodes", [32_767, 32_768, 70_000])
def test_positions_are_sorted_by_node_in_trees_of_any_number_of_nodes(num_nodes: int) -> None:
    """Ranks are sorted in 16 bits while these hold them."""
    tree = ClassTree.two_level(torch.arange(2 * (num_nodes - 1)) // 2)
    assert tree.num_nodes == num_nodes
    target = torch.randint(tree.vocab_size, (400,))
    target[:2], target[2] = tree.vocab_size - 1, -100
    visits = route(target, tree.arrays, tree.depth, -100)
    leaf = tree.node_of_row[tree.row_of_word[target[visits.position[:-1]]]]
    assert (tree.preorder[leaf].diff() >= 0).all()
    assert int(visits.position[-1]) == 2  # ignored ones last
