"""ShardedSoftmax obeys the definition, in processes connected by gloo; its plans."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm.output import ClassTree
from lm.output.functional import BackendName
from lm.output.rowwise import RowGradient
from lm.output.sharded import ShardedSoftmax
from lm.output.sharded.placement import GATHERED, PlacementName, Plan, place
from tests.output.definition import TREES, H, N, definition_by_level
from tests.output.laws import Case, by_definition, problem_of

from .processes import columns_per_process, in_processes

PLACEMENTS: tuple[PlacementName, ...] = ("word", "class")


def _shares(rank: int, world_size: int, case: str) -> list[int]:
    return {
        "even": [7] * world_size,
        "one without positions": [0, *range(4, 3 + world_size)],
        "empty": [0] * world_size,
    }[case]


def _check(
    rank: int,
    world_size: int,
    tree: str,
    placement: PlacementName,
    shares_of: str,
    row_wise: bool,
    dtype: torch.dtype,
    backend: BackendName = "reference",
) -> None:
    """Loss, gradients and terms of levels are those of the definition."""
    layer = ShardedSoftmax(
        H, TREES[tree], backend=backend, row_wise=row_wise, dtype=dtype, placement=placement
    )
    for name, buffer in layer.named_buffers():  # loaders replace all others
        assert torch.equal(buffer, layer.state_dict()[name])
    shares = _shares(rank, world_size, shares_of)
    case = Case(TREES[tree], sum(shares), dtype=dtype, further=layer.weight.shape[1] - H)
    (hidden, *tables, target), upstream = problem_of(case)
    for parameter, table in zip(layer.parameters(), tables, strict=True):
        parameter.detach().copy_(layer.dealt.held(table))
        gathered = layer.dealt.whole(parameter)
        assert gathered is None or torch.equal(gathered, table)
    mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    own = hidden[mine].clone().requires_grad_()
    nll = layer.loss(own, target[mine], "none")
    torch.autograd.backward(nll, upstream[mine])
    exact = [each.double() for each in (hidden, *tables)]
    truth, d_hidden, *d_tables = by_definition(case, [*exact, target], upstream, torch.float64)
    found: list[Any] = [nll, own.grad, layer.nll_by_level(hidden, target)]
    expected = [truth[mine], d_hidden[mine], definition_by_level(*exact, target, case.tree)]
    for parameter, gradient in zip(layer.parameters(), d_tables, strict=True):
        assert isinstance(parameter.grad, RowGradient) == row_wise
        found.append(parameter.grad.to_dense() if parameter.grad is not None else None)
        expected.append(layer.dealt.held(gradient) / world_size)  # of the mean over processes
    near = 1e-12 if dtype == torch.float64 else 5e-6
    expected = [each.to(dtype) for each in expected]
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def _all_trees(rank: int, world_size: int) -> None:
    for i, tree in enumerate(TREES):
        for by_class, placement in enumerate(PLACEMENTS):
            shares = ("even", "one without positions")[i % 2]
            dtype = torch.float32 if i % 3 == 2 else torch.float64
            _check(rank, world_size, tree, placement, shares, (i + by_class) % 2 > 0, dtype)
    for placement in PLACEMENTS:
        _check(rank, world_size, "shortlist", placement, "empty", False, torch.float64)


def _interpreted(rank: int, world_size: int) -> None:
    for tree, placement, row_wise in (("paths", "word", True), ("shortlist", "class", False)):
        shares: Any = "one without positions", row_wise, torch.float64, "triton"
        _check(rank, world_size, tree, placement, *shares)  # type: ignore[arg-type]


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
    for row_wise, shares in enumerate(("empty", "even")):
        _check(0, 1, tree, placement, shares, bool(row_wise), torch.float64)
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
        expected = layer.dealt.held(cast(Tensor, whole.grad))
        torch.testing.assert_close(grad.to_dense(), expected, rtol=2e-6, atol=2e-6)
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
