"""ShardedSoftmax obeys the definition in processes, which compute and send what a plan says."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from lm.output import ClassTree
from lm.output.backends.base import Needs, row_size
from lm.output.backends.visits import route
from lm.output.functional import BackendName
from lm.output.rowwise import RowGradient
from lm.output.sharded import ShardedSoftmax
from lm.output.sharded.placement import GATHERED, PlacementName, Plan, place, recipients_of

from ..definition import TREES, H, N, definition_by_level
from ..laws import Case, by_definition, problem_of
from .processes import columns_per_process, in_processes

NUM_POSITIONS = 100
FEW = ClassTree.two_level([0, 0])
PLACEMENTS: tuple[PlacementName, ...] = ("word", "class")
TREE = ClassTree.two_level(num_words=250_000)


def streams(tree: ClassTree, tokens: Tensor, num_positions: int) -> Iterator[tuple[str, Tensor]]:
    text = tokens[: num_positions * 8]
    yield "text", text
    yield "sorted text", tokens.sort().values[:: max(1, len(tokens) // len(text))][: len(text)]
    counts = torch.bincount(tokens, minlength=tree.vocab_size)
    words = (tree.node_of_row == tree.num_nodes - 1).nonzero().squeeze(1)
    words = tree.item_of_row[words]
    yield "one class", words[torch.arange(num_positions) % len(words)]
    yield "one word", counts.argmax().expand(num_positions)


def sent_bytes(tree: ClassTree, plan: Plan, target: Tensor) -> Tensor:
    """What each process sends for a batch of which each has an equal part, [W].

    For a position, to another process: the hidden vector, the target, and in the backward the
    log-sum-exps and d_nll; back: log-sum-exps, logits and d_hidden. Besides numbers of positions,
    and gathered rows with their gradients, and whether a process visits them.
    """
    world_size = plan.world_size
    owner = torch.arange(len(target)) * world_size // len(target)
    pairs = torch.zeros(world_size, world_size, dtype=torch.int64)  # recipient, process
    pairs.index_add_(1, owner, recipients_of(target, tree, plan.owner, world_size).long())
    pairs.fill_diagonal_(0)
    there, back = 4 * H + 8 + 4 * (tree.depth + 1), 8 * tree.depth + 4 * H
    gathered = int((plan.owner == GATHERED)[tree.node_of_row].sum())
    rows = -(-gathered // world_size) * (2 * (row_size(H) + 1) + 2) * 4
    return pairs.sum(0) * there + pairs.sum(1) * back + (world_size - 1) * (8 + rows)


class Traffic:
    """Bytes that this process hands to torch.distributed for others."""

    def __init__(self) -> None:
        self.sent = 0
        names = ("all_to_all_single", "all_gather")
        self._functions = {name: getattr(dist, name) for name in names}
        for name in self._functions:
            setattr(dist, name, getattr(self, name))

    def all_to_all_single(self, out: Tensor, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Count all but the part for the process itself."""
        size, rank = dist.get_world_size(), dist.get_rank()
        own = args[1][rank] if len(args) > 1 else len(tensor) // size
        self.sent += (len(tensor) - own) * (tensor[:1].numel() or 1) * tensor.element_size()
        self._functions["all_to_all_single"](out, tensor, *args, **kwargs)

    def all_gather(self, parts: list[Tensor], tensor: Tensor, **kwargs: Any) -> None:
        """Count the tensor once for each other process."""
        self.sent += (dist.get_world_size() - 1) * tensor.nbytes
        self._functions["all_gather"](parts, tensor, **kwargs)


def _check_plans(rank: int, world_size: int, tree: ClassTree, tokens: Tensor) -> None:
    """One of the processes: columns computed and bytes sent of each kind of batch."""
    counts = torch.bincount(tokens, minlength=tree.vocab_size)
    positions = NUM_POSITIONS * world_size
    traffic = Traffic()
    by_word, by_class = Plan.by_word(tree, world_size), Plan.by_class(tree, world_size, counts)
    by: dict[PlacementName, Plan] = {"word": by_word, "class": by_class}
    for placement, plan in by.items():
        layer = ShardedSoftmax(H, tree, row_wise=True, placement=placement, counts=counts)
        for name, target in streams(tree, tokens, positions):
            batch = target[:positions]
            own = batch[rank * NUM_POSITIONS :][:NUM_POSITIONS]
            hidden = torch.randn(len(own), H, requires_grad=True)
            traffic.sent = 0
            layer.loss(hidden, own).backward()  # type: ignore[no-untyped-call]
            sent = traffic.sent
            layer.zero_grad()
            problem = layer._problem(hidden.detach(), own)
            exchange, columns = layer._backend(own), 0
            with torch.no_grad():
                _, saved = exchange.softmaxes(own, problem, Needs(False, False, False))
            _, parts = tree_unflatten(saved, exchange.structure)
            for (each, _), (_, visits) in zip(exchange.sizes, parts, strict=True):
                columns += int(each.tree.num_children[visits.node[visits.node >= 0]].sum())
            done = torch.zeros(world_size, 2, dtype=torch.float64)
            done[rank] = torch.tensor([columns, sent])
            dist.all_reduce(done)
            planned = columns_per_process(tree, plan, batch), sent_bytes(tree, plan, batch)
            assert torch.equal(done, torch.stack([each.double() for each in planned], dim=1)), name


def test_processes_compute_and_send_what_is_planned() -> None:
    tree = ClassTree.two_level(torch.arange(600) // 30, shortlist=4)
    words, full = torch.arange(9), ClassTree.full(9)
    assert recipients_of(words, full, Plan.by_word(full, 2).owner, 2).all()
    in_processes(3, _check_plans, tree, (600 ** torch.rand(20_000)).long())


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
    options: Any = {"backend": backend, "placement": placement}
    layer = ShardedSoftmax(H, TREES[tree], row_wise=row_wise, dtype=dtype, **options)
    for name, buffer in layer.named_buffers():  # loaders replace all others
        assert torch.equal(buffer, layer.state_dict()[name])
    equal = {"even": [7] * world_size, "few": [2] * world_size, "empty": [0] * world_size}
    shares = equal.get(shares_of, [0, *range(4, 3 + world_size)])  # one without positions
    case = Case(TREES[tree], sum(shares), dtype=dtype, further=layer.weight.shape[1] - H)
    (hidden, *tables, target), upstream = problem_of(case)
    for parameter, table in zip(layer.parameters(), tables, strict=True):
        parameter.detach().copy_(layer.dealt.held(table))
        gathered = layer.dealt.whole(parameter)
        assert gathered is None or torch.equal(gathered, table)
    mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    own = hidden[mine].clone().requires_grad_(shares[rank] > 0)
    nll = layer.loss(own, target[mine], "none")
    torch.autograd.backward(nll, upstream[mine])
    given = [hidden, *tables, target]
    truth, d_hidden, *d_tables = by_definition(case, given, upstream, torch.float64)
    h, weight, bias = (each.double() for each in (hidden, *tables))
    d_own = torch.zeros_like(own) if own.grad is None else own.grad
    found: list[Any] = [nll, d_own, layer.nll_by_level(hidden, target)]
    terms = definition_by_level(h, weight, bias, target, case.tree)
    expected = [truth[mine], d_hidden[mine], terms]
    node = route(target, case.tree.arrays, case.tree.depth, -100).node
    visited = layer.dealt.held(torch.isin(case.tree.node_of_row, node)).nonzero().squeeze(1)
    for parameter, gradient in zip(layer.parameters(), d_tables, strict=True):
        assert isinstance(parameter.grad, RowGradient) == row_wise
        if isinstance(parameter.grad, RowGradient):  # no others, whose moments would decay
            assert torch.equal(parameter.grad.to_sparse().indices()[0], visited)
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
        for row_wise in (False, True):  # one row: other processes hold none
            layer = ShardedSoftmax(H, ClassTree.full(1), row_wise=row_wise, placement=placement)
            torch.autograd.backward(layer.embed(torch.zeros(2, dtype=torch.int64)).sum())
            if len(layer.weight):
                grad = cast(Tensor, layer.weight.grad).to_dense()[0, :H]  # of 2 each, their mean
                torch.testing.assert_close(grad, torch.full((H,), 2.0))


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
    dist.init_process_group("gloo", rank=0, world_size=1, store=cast(Any, dist).HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("placement", ["word", "class"])
@pytest.mark.parametrize("tree", ["paths", "shortlist"])
def test_a_group_may_be_one_process(tree: str, placement: Any) -> None:
    for shares in ("empty", "even", "few"):
        _check(0, 1, tree, placement, shares, shares != "empty", torch.float64)
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
    in_processes(2, _interpreted)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_by_word_rows_are_dealt_evenly(tree: ClassTree, world_size: int) -> None:
    """Every node and the whole weight to within one row, each row once."""
    plan = Plan.by_word(tree, world_size)
    places = [place(tree, plan, plan.dealt(tree, rank)).held for rank in range(world_size)]
    assert ((torch.stack([each.local_row for each in places]) >= 0).sum(0) == 1).all()
    sizes = torch.stack([each.num_children for each in places])
    assert torch.equal(sizes.sum(0), torch.where(tree.num_children > 1, tree.num_children, 0))
    assert (sizes.amax(0) - sizes.amin(0)).max() <= 1
    held = [len(each.node_of_row) for each in places]
    assert sum(held) == tree.num_rows
    assert max(held) - min(held) <= 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("tree", [*TREES.values(), FEW], ids=[*TREES, "few"])
def test_by_class_each_row_has_one_process(tree: ClassTree, world_size: int) -> None:
    """A table is the same after it was dealt and gathered again; a process may have no rows."""
    plan = Plan.by_class(tree, world_size, None if tree is FEW else torch.arange(N) + 1)
    dealt = [plan.dealt(tree, rank) for rank in range(world_size)]
    rows = torch.cat([each.held(torch.arange(tree.num_rows)) for each in dealt])
    assert torch.equal(rows.sort().values, torch.arange(tree.num_rows))
    assert [each.num_held for each in dealt] == [len(each.held(rows)) for each in dealt]
    assert tree is not FEW or [each.num_held for each in dealt].count(0) == max(0, world_size - 2)


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
    assert _load(plan, torch.multinomial(counts, 200_000, replacement=True)) <= 1.2
    held = torch.bincount(plan.process_of_row(TREE), minlength=world_size)
    assert held.max() <= 1.15 * held.double().mean()
