"""ShardedSoftmax equals HierarchicalSoftmax, in processes connected by gloo."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm.output import ClassTree, HierarchicalSoftmax
from lm.output.rowwise import RowGradient
from lm.output.sharded import ShardedSoftmax
from lm.output.sharded.placement import GATHERED, Plan, place
from tests.output.definition import TREES, H, N

from .processes import columns_per_process, in_processes


def _positions(shares: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, target and upstream gradient of the positions of all processes."""
    num_positions = sum(shares)
    hidden, d_nll = torch.randn(num_positions, H, dtype=dtype), torch.randn(num_positions)
    target = torch.randint(0, N, (num_positions,))
    target[::5] = -100
    return hidden, target, d_nll.to(dtype)


def _shares(rank: int, world_size: int, case: str) -> list[int]:
    return {
        "even": [7] * world_size,
        "one without positions": [0, *range(4, 3 + world_size)],
        "empty": [0] * world_size,
    }[case]


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def _whole(layer: ShardedSoftmax, dtype: torch.dtype) -> HierarchicalSoftmax:
    whole = HierarchicalSoftmax(H, layer.tree, backend=layer.backend, dtype=dtype)
    for name in ("weight", "bias"):
        gathered = layer.dealt.whole(getattr(layer, name))
        table = getattr(whole, name).detach()
        if gathered is not None:
            table.copy_(gathered)
        dist.broadcast(table, 0)
        _close(layer.dealt.held(table), getattr(layer, name).detach(), torch.float64)
    return whole


def _check_equal(
    rank: int, world_size: int, tree: ClassTree, placement: Any, backend: Any, case: str
) -> None:
    for dtype in (torch.float64, torch.float32) if backend == "reference" else (torch.float64,):
        for row_wise in (False, True) if dtype == torch.float64 else (True,):
            torch.manual_seed(1)
            layer = ShardedSoftmax(
                H, tree, backend=backend, row_wise=row_wise, dtype=dtype, placement=placement
            )
            for name, buffer in layer.named_buffers():  # loaders replace all others
                assert torch.equal(buffer, layer.state_dict()[name])
            nn.init.normal_(cast(Tensor, layer.bias))
            whole = _whole(layer, dtype)
            torch.manual_seed(2)
            shares = _shares(rank, world_size, case)
            hidden, target, d_nll = _positions(shares, dtype)
            mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
            own = hidden[mine].clone().requires_grad_()
            hidden.requires_grad_()
            nll = layer.loss(own, target[mine], "none")
            torch.autograd.backward(nll, d_nll[mine])
            truth = whole.loss(hidden, target, "none")
            torch.autograd.backward(truth, d_nll / world_size)  # the mean over processes
            _close(nll, truth[mine], dtype)
            _close(cast(Tensor, own.grad), cast(Tensor, hidden.grad)[mine] * world_size, dtype)
            for name in ("weight", "bias"):
                grad = getattr(layer, name).grad
                assert isinstance(grad, RowGradient) == row_wise
                expected = layer.dealt.held(getattr(whole, name).grad)
                _close(grad.to_dense() if row_wise else grad, expected, dtype)
            levels = layer.nll_by_level(hidden.detach(), target)
            _close(levels, whole.nll_by_level(hidden.detach(), target), dtype)


def _all_trees(rank: int, world_size: int) -> None:
    for tree in TREES.values():
        for placement in ("word", "class"):
            for case in ("even", "one without positions", "empty"):
                _check_equal(rank, world_size, tree, placement, "reference", case)


def _interpreted(rank: int, world_size: int) -> None:
    for name, placement in (("paths", "word"), ("shortlist", "class")):
        _check_equal(rank, world_size, TREES[name], placement, "triton", "one without positions")


@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 4))]
)
def test_loss_and_gradients_are_those_of_one_process(world_size: int) -> None:
    """Every tree; dense and row-wise; a process without positions; empty batches."""
    in_processes(world_size, _all_trees)


@pytest.fixture
def _alone() -> Iterator[None]:
    """This process is a group."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=cast(Any, dist).HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("placement", ["word", "class"])
@pytest.mark.parametrize("tree", ["paths", "shortlist"])
def test_a_group_may_be_one_process(tree: str, placement: Any) -> None:
    for case in ("even", "empty"):
        _check_equal(0, 1, TREES[tree], placement, "reference", case)
    row = torch.tensor([[3, -1, 0], [5, 3, 2]])
    for row_wise in (False, True):
        layer = ShardedSoftmax(H, TREES[tree], placement=placement)
        whole = nn.Parameter(cast(Tensor, layer.dealt.whole(layer.weight)))
        found = layer.lookup(row, row_wise=row_wise)
        expected = whole[row] * (row >= 0)[..., None]
        assert torch.equal(found, expected)
        none = layer.lookup(row[:, :0], row_wise=row_wise)
        assert none.shape == (2, 0, layer.weight.shape[1])
        torch.autograd.backward([found.exp().sum(), expected.exp().sum(), none.sum()])
        grad = cast(Tensor, layer.weight.grad)
        _close(grad.to_dense(), layer.dealt.held(cast(Tensor, whole.grad)), torch.float32)
    with pytest.raises(ValueError, match='must be "word" or "class", got \'row\''):
        ShardedSoftmax(H, TREES[tree], placement=cast(Any, "row"))
    with pytest.raises(ValueError, match=r"hidden must be .* target .*, got .3, 6. and .2."):
        layer.loss(torch.zeros(3, H), row[:, 0])
    with pytest.raises(RuntimeError, match=r"decode with .* dealt\.whole"):
        layer.candidate_log_prob(torch.zeros(2, H), row)


def test_fused_kernels_compute_a_shard() -> None:
    """In Triton's interpreter."""
    in_processes(2, _interpreted)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_by_word_rows_are_dealt_evenly(tree: ClassTree, world_size: int) -> None:
    """Every node and the whole weight to within one row, each row once."""
    plan = Plan.by_word(tree, world_size)
    places = [place(tree, plan, plan.dealt(tree, rank)).held for rank in range(world_size)]
    local = torch.stack([each.local_row for each in places])
    assert ((local >= 0).sum(0) == 1).all()
    sizes = torch.stack([each.num_children for each in places])
    expected = torch.where(tree.num_children > 1, tree.num_children, 0)
    assert torch.equal(sizes.sum(0), expected)
    assert (sizes.amax(0) - sizes.amin(0)).max() <= 1
    held = [len(each.node_of_row) for each in places]
    assert sum(held) == tree.num_rows
    assert max(held) - min(held) <= 1


def test_a_process_may_have_no_rows() -> None:
    tree = ClassTree.two_level([0, 0])
    whole, plan = torch.arange(tree.num_rows), Plan.by_class(tree, 4)
    held = [plan.dealt(tree, rank).held(whole).tolist() for rank in range(4)]
    assert held.count([]) == 2
    assert sorted(row for rows in held for row in rows) == whole.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_by_class_each_row_has_one_process(tree: ClassTree, world_size: int) -> None:
    """A table is the same after it was dealt and gathered again."""
    plan = Plan.by_class(tree, world_size, torch.arange(N) + 1)
    dealt = [plan.dealt(tree, rank) for rank in range(world_size)]
    rows = torch.cat([each.held(torch.arange(tree.num_rows)) for each in dealt])
    assert torch.equal(rows.sort().values, torch.arange(tree.num_rows))
    assert [each.num_held for each in dealt] == [len(each.held(rows)) for each in dealt]


TREE = ClassTree.two_level(num_words=250_000)


def _load(plan: Plan, target: Tensor) -> float:
    columns = columns_per_process(TREE, plan, target)
    return float(columns.max() / columns.mean())


@pytest.mark.parametrize("world_size", [2, 4, 8, 64])
def test_work_is_balanced_if_all_targets_are_in_one_class(world_size: int) -> None:
    """The worst case of contiguous classes, whose owner does the work of all."""
    words = TREE.item_of_row[TREE.node_of_row == TREE.num_nodes - 1]
    target = words[torch.arange(4096) % len(words)]
    assert _load(Plan.by_word(TREE, world_size), target) <= 1.05
    counts = torch.bincount(target, minlength=TREE.vocab_size)
    assert _load(Plan.by_class(TREE, world_size, counts), target) <= 1.2
    owner = torch.arange(TREE.num_nodes) * world_size // TREE.num_nodes
    owner[0] = GATHERED
    assert _load(Plan(owner, world_size), target) > (world_size + 1) / 2.1


@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_work_by_class_is_balanced_for_text_like_the_counted_one(world_size: int) -> None:
    """Whatever the frequencies of the words; and so is memory."""
    counts = 1e9 / (torch.arange(TREE.vocab_size) + 1.0)
    plan = Plan.by_class(TREE, world_size, counts)
    torch.manual_seed(0)
    target = torch.multinomial(counts, 200_000, replacement=True)
    assert _load(plan, target) <= 1.2
    held = torch.bincount(plan.process_of_row(TREE), minlength=world_size)
    assert held.max() <= 1.15 * held.double().mean()
