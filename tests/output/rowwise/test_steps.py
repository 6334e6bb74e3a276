"""Steps from row-wise gradients: of every backend, those of dense gradients."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends.compiled import division, passes
from lm.output.backends.triton import rows
from lm.output.backends.triton.launch import Launch, execute, instrumented
from lm.output.backends.triton.routing import Routing
from lm.output.rowwise import RowAdam, RowGradient, RowSGD, factors

from ..definition import SMALL_TILES, nll, zipf_targets
from ..laws import SETTINGS
from .tables import KINDS, SHORTLIST, TREES, H, P, Way, accumulate, not_in_memory, table, trained

pytest.importorskip("triton")

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
ORDERS: Any = ("loss first", "lookups first")
OF_TREES = [Way(tree, kind) for tree in TREES for kind in KINDS]
TIED = [Way("three levels", kind, order=order) for kind in KINDS for order in ORDERS]
SUMS = [Way("shortlist", kind, order="loss first", batches=2) for kind in KINDS]
LONG = pytest.mark.long


@pytest.mark.parametrize("elements", [1 << 19, 48])
@pytest.mark.parametrize("way", [*OF_TREES, *TIED, *SUMS], ids=str)
def test_steps_of_the_reference_are_those_of_dense_gradients(
    way: Way, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whole nodes, and in blocks of two rows."""
    for name in ("PRODUCT_ELEMENTS", "ROWS_ELEMENTS"):
        monkeypatch.setattr(factors, name, elements)
    with SETTINGS["blocks" if elements == 48 else ""]():
        found, expected = (trained(way, backend) for backend in ("reference", "dense"))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("way", "backend"),
    [
        *((way, "compiled") for way in (*OF_TREES, *TIED, *SUMS)),
        *((Way("shortlist", kind, SINGLE), "compiled") for kind in KINDS),
        *((Way("shortlist", kind, HALF), "compiled") for kind in KINDS),
        *((Way(tree, "adagrad"), "triton") for tree in TREES if tree != "huffman"),
        pytest.param(Way("huffman", "adagrad"), "triton", marks=LONG),
        *((Way(tree, "adagrad", clip=math.inf), "triton") for tree in list(TREES)[1:6:2]),
        *((Way("shortlist", kind, SINGLE), "triton") for kind in KINDS),
        *((Way("three levels", kind), "triton") for kind in ("sgd", "adam")),
        *((way._replace(positions=9), "triton") for way in TIED),
        *((Way("full", kind, positions=110), "triton") for kind in KINDS),
        (SUMS[1]._replace(positions=9), "triton"),
    ],
    ids=str,
)
def test_steps_of_loops_and_kernels_are_those_of_the_reference(way: Way, backend: str) -> None:
    """Without clipping, Adagrad forms the norms itself; in bf16 the tables alone are compared."""
    near = {DOUBLE: 1e-10, SINGLE: 2e-4, HALF: 2e-2}[way.dtype]
    some = slice(2 if way.dtype == HALF else None)
    found, expected = (trained(way, name)[some] for name in (backend, "reference"))
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


@pytest.mark.parametrize("visits", [1, 5, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_the_same_bit_for_bit_for_any_number_of_threads(
    kind: str, visits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of visited nodes and of others, formed once or at each use."""
    monkeypatch.setattr(passes, "FORMED_VISITS", visits)
    monkeypatch.setattr(passes, "NARROW", 2)
    monkeypatch.setattr(division, "LEAST_COLUMNS", 1)
    way = Way("three levels", kind, order="loss first", positions=9)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(trained(way, "compiled"))
    assert all(all(map(torch.equal, found, results[0])) for found in results[1:])
    torch.testing.assert_close(results[0], trained(way, "reference"), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["triton", "compiled", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", [0, 2])
def test_a_batch_without_targets_changes_nothing(kind: str, positions: int, backend: str) -> None:
    """All positions are ignored."""
    params = table(SHORTLIST, SINGLE)
    optimizer = KINDS[kind](params)

    def numbers() -> list[Tensor]:
        state = [each for param in params for each in optimizer.state[param].values()]
        return [each.detach().clone() for each in [*params, *state] if torch.is_tensor(each)]

    accumulate(params, SHORTLIST, 0, backend)
    optimizer.step()
    optimizer.zero_grad()
    before = numbers()
    accumulate(params, SHORTLIST, 1, backend, positions=positions, ignored=True)
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    assert float(norm) == 0
    assert all(map(torch.equal, numbers(), before))


def test_norms_do_not_depend_on_the_order_in_which_lists_are_written() -> None:
    """Programs reserve entries in any order; here in that of shuffled lists."""
    tree = TREES["three levels"]
    params = table(tree, SINGLE)
    hidden = accumulate(params, tree, 0, "triton")
    for param in params:
        assert isinstance(param.grad, RowGradient)
        of_table: Any = param.grad.factors
        first, batch = param.grad.norm(), of_table.factors
        batch.formed.clear()
        routing = Routing.of(batch.memory.routing, len(hidden), tree.depth)
        for place, name in ((1, "light_nodes"), (3, "row_tiles"), (5, "split_tiles")):
            entries = getattr(routing, name)[: int(routing.num_entries[place])]
            entries.copy_(entries.flip(0))
        with instrumented(tiles=SMALL_TILES):
            assert torch.equal(param.grad.norm(), first)


def test_gradients_of_a_recorded_backward_are_new_in_each_replay(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `torch.cuda.make_graphed_callables`, which detaches them; there is no step."""
    params, hidden = table(SHORTLIST), torch.randn(P, H, dtype=DOUBLE)
    loss = partial(nll, [hidden, *params, zipf_targets(SHORTLIST, P)], SHORTLIST, reduction="sum")
    with monkeypatch.context() as capture, instrumented(tiles=SMALL_TILES):
        capture.setattr("lm.output.rowwise.row_gradient.is_captured", lambda _: True)
        recorded = torch.autograd.grad(loss(backend="triton", row_wise=True), params)
    graph = [*launches]
    for scale in (3, 0.2):
        hidden *= scale
        for launch in graph:
            execute(launch)
        found = []
        for grads in ([each.detach() for each in recorded], torch.autograd.grad(loss(), params)):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
            found.append([norm, *(grad.to_dense() for grad in grads)])
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("shared_blocks", "most_programs"), [(1, 1000), (2, 1000), (1, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_programs_that_share_a_node_make_the_same_step(
    kind: str,
    shared_blocks: int,
    most_programs: int,
    launches: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A root of 70 rows with few visits, of which programs take 16, 32 or all; bit for bit."""
    way = Way("full", kind, SINGLE, positions=9)
    of_one_program = trained(way, "triton")
    monkeypatch.setattr(rows, "SHARED_BLOCKS", shared_blocks)
    monkeypatch.setattr(rows, "UPDATE_PROGRAMS", most_programs)
    launches.clear()
    found = trained(way, "triton")
    sizes = {each.num_programs for each in launches if each.kernel.__name__ == "_update"}
    assert sizes == {min(most_programs, -(-70 // (16 * shared_blocks)))}
    assert all(map(torch.equal, found, of_one_program))


@pytest.mark.parametrize(
    ("backend", "optimizer"),
    [
        *((name, partial(RowSGD, lr=0.3)) for name in ("triton", "compiled", "reference")),
        ("compiled", partial(RowAdam, lr=0.001)),
    ],
)
def test_rows_in_bf16_are_rounded_at_random_in_proportion_to_the_distance(
    backend: Any, optimizer: Any
) -> None:
    """All words have probability 1/300: numbers of all but one fall from 1 by 0.001."""
    tree, hidden = ClassTree.full(300), torch.ones(1, 64)
    weights = torch.ones(2, 300, 64, dtype=torch.bfloat16).unbind()
    for weight in map(Tensor.requires_grad_, weights):
        with instrumented(tiles=SMALL_TILES), not_in_memory(backend):
            each = nll([hidden, weight, torch.tensor([3])], tree, backend=backend, row_wise=True)
            torch.autograd.backward(each)
            optimizer([weight]).step()
    assert not torch.equal(*weights)
    for weight in weights:
        others = torch.cat([weight.detach()[:3], weight.detach()[4:]]).float()
        values, counts = torch.unique(others, return_counts=True)
        assert values.tolist() == [1 - 1 / 256, 1]
        assert float(counts[0] / counts.sum()) == pytest.approx(0.256, abs=0.01)
        changed = (others != 1).float()
        for dim in (0, 1):  # no row or column of numbers is rounded alike
            assert float((changed.mean(dim) - 0.256).abs().max()) < 0.3
        change = 0.299 if optimizer.func is RowSGD else 0.001
        target = weight.detach()[3].float()
        torch.testing.assert_close(target, torch.full((64,), 1 + change), rtol=0, atol=2**-7)
