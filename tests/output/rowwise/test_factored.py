"""Gradients that kernels or loops form when they use them: norms and steps are the reference's."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends.compiled import division, factors
from lm.output.backends.triton import rows
from lm.output.backends.triton.launch import Launch, execute, instrumented
from lm.output.backends.triton.routing import Routing
from lm.output.functional import BackendName
from lm.output.rowwise import (
    RowAdagrad,
    RowAdam,
    RowFactors,
    RowGradient,
    RowOptimizer,
    RowSGD,
    lookup,
)

from ..definition import SMALL_TILES, nll, two_level, zipf_targets
from .tables import table

pytest.importorskip("triton")

H, W, P = 18, 24, 40
Make = Callable[..., RowOptimizer]
OPTIMIZERS: dict[str, Make] = {"sgd": RowSGD, "adagrad": RowAdagrad, "adam": RowAdam}
TREES = {
    "full": ClassTree.full(70),
    "two levels": two_level(60, 7),
    "a class of one word": ClassTree.two_level((torch.arange(40) + 1) // 40),
    "classes of one word": two_level(6, 6),
    "shortlist": ClassTree.two_level(torch.arange(60) % 5, 20),
    "three levels": ClassTree.balanced(60, 4),
    "binary": ClassTree.balanced(23, 2),
    "huffman": ClassTree.huffman(torch.arange(23) + 1),
}


def accumulate(
    params: list[Tensor], tree: ClassTree, step: int, backend: BackendName, positions: int = P
) -> Tensor:
    """Add the gradients of a batch to those of the table; returns that of its hidden vectors."""
    torch.manual_seed(step)
    dtype = torch.promote_types(params[0].dtype, torch.float32)
    hidden = torch.randn(positions, H, dtype=dtype, requires_grad=True)
    target, upstream = zipf_targets(tree, positions), torch.randn(positions, dtype=dtype)
    with instrumented(tiles=SMALL_TILES):
        each = nll([hidden, *params, target], tree, backend=backend, row_wise=True)
        torch.autograd.backward(each, upstream)
    assert hidden.grad is not None
    return hidden.grad


def trained(
    name: str,
    tree: ClassTree,
    backend: BackendName,
    dtype: torch.dtype,
    *,
    steps: int = 2,
    clip: float = 2.0,
    **options: Any,
) -> list[Tensor]:
    """The table, the optimizer's state, and each step's norm and d_hidden."""
    params, found = table(tree, dtype, W), []
    optimizer = OPTIMIZERS[name](params, lr=0.3)
    for step in range(steps):
        optimizer.zero_grad()
        found.append(accumulate(params, tree, step, backend, **options))
        if clip < math.inf:
            found.append(torch.nn.utils.clip_grad_norm_(params, clip))
        optimizer.step()
    return [*numbers(params, optimizer), *found]


def numbers(params: list[Tensor], optimizer: RowOptimizer) -> list[Tensor]:
    """Copies of the table and of the optimizer's state."""
    state = [each for param in params for each in optimizer.state[param].values()]
    return [each.detach().clone() for each in [*params, *state] if torch.is_tensor(each)]


def not_in_memory() -> Any:
    """A context in which no gradient is formed in memory."""
    return mock.patch.object(RowFactors, "blocks", side_effect=AssertionError("formed in memory"))


UNCLIPPED = ("two levels", "classes of one word", "three levels")


@pytest.mark.parametrize(
    ("tree", "name", "dtype", "backend", "clip"),
    [
        *((tree, "adagrad", torch.float64, "triton", 2.0) for tree in TREES if tree != "huffman"),
        pytest.param("huffman", "adagrad", torch.float64, "triton", 2.0, marks=pytest.mark.long),
        *((tree, "adagrad", torch.float64, "triton", math.inf) for tree in UNCLIPPED),
        *(("shortlist", name, torch.float32, "triton", 2.0) for name in OPTIMIZERS),
        ("three levels", "sgd", torch.float64, "triton", 2.0),
        ("three levels", "adam", torch.float64, "triton", 2.0),
        *((tree, name, torch.float64, "compiled", 2.0) for tree in TREES for name in OPTIMIZERS),
        *(("shortlist", name, torch.float32, "compiled", 2.0) for name in OPTIMIZERS),
    ],
)
def test_steps_clipped_or_not_are_those_of_the_reference(
    tree: str, name: str, dtype: torch.dtype, backend: BackendName, clip: float
) -> None:
    """Without clipping, Adagrad forms the norms itself."""
    expected = trained(name, TREES[tree], "reference", dtype, clip=clip)
    with not_in_memory():
        found = trained(name, TREES[tree], backend, dtype, clip=clip)
    near = 1e-10 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


@pytest.mark.parametrize("visits", [1, 5, 100])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_that_are_input_vectors_too_are_never_formed(
    name: str, visits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of visited nodes and of others, formed once or at each use; for 1 to 3 threads."""
    monkeypatch.setattr(factors, "FORMED_VISITS", visits)
    monkeypatch.setattr(factors, "NARROW", 2)
    monkeypatch.setattr(division, "LEAST_COLUMNS", 1)
    tree, results = ClassTree.balanced(60, 4), []
    index = torch.tensor([0, 3, 3, 17, 40, 41, tree.num_rows - 1, -1])
    backends: list[tuple[BackendName, int]] = [("reference", 1)]
    backends += [("compiled", num_threads) for num_threads in (1, 2, 3)]
    backends += [("triton", 1)] * (visits == 1)
    for backend, num_threads in backends:
        params = table(tree, width=W)
        optimizer = OPTIMIZERS[name](params, lr=0.3)
        torch.manual_seed(0)
        torch.set_num_threads(num_threads)
        for step in range(2):
            optimizer.zero_grad()
            upstream = torch.randn(8, W, dtype=torch.float64)
            if step:  # before the layer's, or after it
                torch.autograd.backward(lookup(params[0], index), upstream)
            accumulate(params, tree, step, backend, positions=9)
            if not step:
                torch.autograd.backward(lookup(params[0], index), upstream)
            with nullcontext() if backend == "reference" or step else not_in_memory():
                norm = torch.nn.utils.clip_grad_norm_(params, 2.0)
                optimizer.step()
        results.append([*(param.detach() for param in params), norm])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-10, atol=1e-10)
    assert all(all(map(torch.equal, found, results[1])) for found in results[2:4])


@pytest.mark.parametrize("backend", ["triton", "compiled", "reference"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("positions", [0, 2])
def test_a_batch_without_targets_changes_nothing(
    name: str, positions: int, backend: BackendName
) -> None:
    """Both positions are ignored."""
    tree = TREES["two levels"]
    params = table(tree, torch.float32, W)
    optimizer = OPTIMIZERS[name](params, lr=0.3)
    accumulate(params, tree, 0, backend)
    optimizer.step()
    optimizer.zero_grad()
    before = numbers(params, optimizer)
    with mock.patch(f"{__name__}.zipf_targets", lambda _, size: torch.full((size,), -100)):
        accumulate(params, tree, 1, backend, positions)
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    assert float(norm) == 0
    assert all(map(torch.equal, numbers(params, optimizer), before))


def test_other_uses_form_the_rows() -> None:
    """Inspection, several batches, and gradients that are multiplied by a number."""
    tree, grads = TREES["two levels"], []
    backends: list[BackendName] = ["triton", "compiled", "reference"]
    for backend in backends:
        params = table(tree, width=W)
        accumulate(params, tree, 0, backend)
        shown: list[Tensor] = []
        for param in params:
            grad = param.grad
            assert isinstance(grad, RowGradient)
            shown += [grad.to_dense() * 3, grad.norm()]
            grad.mul_(torch.tensor(0.5))
        accumulate(params, tree, 1, backend)
        for param in params:
            assert param.grad is not None
            shown += [param.grad.to_dense(), param.grad.norm()]
        RowAdagrad(params, lr=0.1).step()
        grads.append([*shown, *(param.detach() for param in params)])
    for found in grads[:-1]:
        torch.testing.assert_close(found, grads[-1], rtol=1e-10, atol=1e-10)


def test_norms_do_not_depend_on_the_order_in_which_lists_are_written() -> None:
    """Programs reserve entries in any order; here in that of shuffled lists."""
    tree, params = TREES["three levels"], table(TREES["three levels"], torch.float32, W)
    accumulate(params, tree, 0, "triton")
    for param in params:
        assert isinstance(param.grad, RowGradient)
        of_table: Any = param.grad.factors
        first, batch = of_table.square_norm(), of_table.factors
        batch.formed.clear()
        routing = Routing.of(batch.memory.routing, P, tree.depth)
        for place, name in ((1, "light_nodes"), (3, "row_tiles"), (5, "split_tiles")):
            entries = getattr(routing, name)[: int(routing.num_entries[place])]
            entries.copy_(entries.flip(0))
        with instrumented(tiles=SMALL_TILES):
            assert torch.equal(of_table.square_norm(), first)


@pytest.mark.parametrize(("shared_blocks", "most_programs"), [(1, 1000), (2, 1000), (1, 3)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_programs_that_share_a_node_make_the_same_step(
    name: str, shared_blocks: int, most_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root of 70 rows with few visits, of which programs take 16, 32 or all; bit for bit."""
    of_one_program = trained(name, TREES["full"], "triton", torch.float32, positions=9)
    monkeypatch.setattr(rows, "SHARED_BLOCKS", shared_blocks)
    monkeypatch.setattr(rows, "UPDATE_PROGRAMS", most_programs)
    sizes = set()

    def run(launch: Launch) -> None:
        if launch.kernel.__name__ == "_update":
            sizes.add(launch.num_programs)
        execute(launch)

    with instrumented(run=run):
        found = trained(name, TREES["full"], "triton", torch.float32, positions=9)
    assert sizes == {min(most_programs, -(-70 // (16 * shared_blocks)))}
    assert all(map(torch.equal, found, of_one_program))


def test_rows_in_bf16_are_rounded_at_random_in_proportion_to_the_distance() -> None:
    """All words but one have probability 1/300, so that numbers fall from 1 by 0.3 / 300."""
    tree, hidden = ClassTree.full(300), torch.ones(1, 64)
    weight = torch.ones(300, 64, dtype=torch.bfloat16, requires_grad=True)
    with instrumented(tiles=SMALL_TILES):
        each = nll([hidden, weight, torch.tensor([3])], tree, backend="triton", row_wise=True)
        torch.autograd.backward(each)
        RowSGD([weight], lr=0.3).step()
    others = torch.cat([weight.detach()[:3], weight.detach()[4:]]).float()
    values, counts = torch.unique(others, return_counts=True)
    assert values.tolist() == [1 - 1 / 256, 1]
    assert float(counts[0] / counts.sum()) == pytest.approx(0.256, abs=0.015)
    changed = (others != 1).float()
    for dim in (0, 1):  # no row or column of numbers is rounded alike
        assert float((changed.mean(dim) - 0.256).abs().max()) < 0.3
    target = weight.detach()[3].float()
    torch.testing.assert_close(target, torch.full((64,), 1.299), rtol=0, atol=2**-7)
