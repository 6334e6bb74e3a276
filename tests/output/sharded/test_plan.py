"""Processes compute the columns and send the bytes that their plan says."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from lm.output import ClassTree
from lm.output.backends.base import Needs
from lm.output.backends.visits import route
from lm.output.inputs import row_size
from lm.output.sharded import ShardedSoftmax
from lm.output.sharded.placement import GATHERED, PlacementName, Plan, recipients_of

from .processes import columns_per_process, in_processes

NUM_POSITIONS, H = 100, 12


def streams(tree: ClassTree, tokens: Tensor, num_positions: int) -> Iterator[tuple[str, Tensor]]:
    """Batches of each kind."""
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
    and gathered rows with their gradients.
    """
    world_size = plan.world_size
    recipients = recipients_of(target, tree, plan.owner, world_size)
    owner = torch.arange(len(target)) * world_size // len(target)
    pairs = torch.zeros(world_size, world_size, dtype=torch.int64)  # recipient, process
    pairs.index_add_(1, owner, recipients.long())
    pairs.fill_diagonal_(0)
    there, back = 4 * H + 8 + 4 * (tree.depth + 1), 8 * tree.depth + 4 * H
    gathered = int((plan.owner == GATHERED)[tree.node_of_row].sum())
    rows = 2 * -(-gathered // world_size) * (row_size(H) + 1) * 4
    return pairs.sum(0) * there + pairs.sum(1) * back + (world_size - 1) * (8 + rows)


class Traffic:
    """Bytes that this process hands to torch.distributed for others."""

    def __init__(self) -> None:
        self.sent = 0
        self._functions = {
            name: getattr(dist, name) for name in ("all_to_all_single", "all_gather")
        }
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
    by: dict[PlacementName, Plan] = {
        "word": Plan.by_word(tree, world_size),
        "class": Plan.by_class(tree, world_size, counts),
    }
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
            exchange, columns = layer._backend(problem), 0
            with torch.no_grad():
                _, saved = exchange.softmaxes(problem, Needs(False, False, False))
            _, parts = tree_unflatten(saved, exchange.structure)
            for (each, _), (tensors, _) in zip(exchange.sizes, parts, strict=True):
                each = each._replace(**tensors)
                at = (each.depth, each.ignore_index, each.shard)
                node = route(each.target, each.tree, *at).node
                columns += int(each.tree.num_children[node[node >= 0]].sum())
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
