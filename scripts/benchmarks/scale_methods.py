"""What `bench_scale` compares: one task, and the ways to make its training step."""

import argparse
import math
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from bench_method import parameter, zipf
from torch import Tensor
from torch.nn import functional as F

from lm.output import ClassTree, hierarchical_cross_entropy
from lm.output.rowwise.optimizers import RowAdagrad

SEQUENCES = 32
"""Of the batch that `step` reads."""
RATE = 0.1
"""Learning rate of the layers alone."""
RANGE = 0.05
"""Weights begin uniform in ±RANGE."""
PORTION = 1 << 16
"""Rows filled at once."""


class Task:
    """What a method is given.

    Attributes:
        dtype: of the table.
        home: where the table and the tree are: on the device, but for `host`.
        tree: √N classes of equal sums of √count; for `full` the ordinary softmax.
        words: [steps, 2, P] int64: for each step, those that are read and those to be predicted.
        hidden: [P, H] fp32, a leaf.
    """

    def __init__(
        self, name: str, vocab_size: int, dtype: torch.dtype, options: argparse.Namespace
    ) -> None:
        torch.manual_seed(options.seed)
        steps, positions = options.steps + 1, options.positions
        words, counts = zipf(vocab_size, steps * 2 * positions)
        full = name == "full"
        tree = ClassTree.full(vocab_size) if full else ClassTree.two_level(classes(counts))
        self.dtype = dtype
        self.home = torch.device("cpu") if name == "host" else options.device
        self.tree = tree.to(self.home)
        self.words = words.view(steps, 2, positions).to(options.device)
        self.hidden = torch.randn(positions, options.hidden).to(options.device).requires_grad_()

    @cached_property
    def table(self) -> tuple[Tensor, Tensor]:
        """Rows [R, H] and biases [R]; the same numbers on every device, and no second copy."""
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.home}
        weight = torch.empty(self.tree.num_rows, self.hidden.shape[1], **like)
        bias = torch.empty(self.tree.num_rows, **like)
        for tensor in (weight, bias):
            for rows in torch.split(tensor, PORTION):
                rows.copy_(torch.empty(rows.shape).uniform_(-RANGE, RANGE))
        return weight, bias

    def parameters(self) -> tuple[Tensor, Tensor]:
        """The table as two leaves."""
        weight, bias = self.table
        return parameter(weight), parameter(bias)

    def parts(self, *bounds: int) -> list[tuple[Tensor, Tensor]]:
        """Intervals of its rows as leaves, so that none gets a gradient of the table's size."""
        weight, bias = self.table
        return [(parameter(weight[a:b]), parameter(bias[a:b])) for a, b in pairwise(bounds)]

    def find(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Class of each target and place in it, [P] each."""
        row = self.tree.row_of_word[target]
        node = self.tree.node_of_row[row]
        return node - 1, row - self.tree.first_row[node]


class Method(NamedTuple):
    """One way to make a step.

    Attributes:
        loss: from words [2, P'] to the mean loss of the first P' positions.
        update: brings the gradients into the weights and forgets them.
    """

    loss: Callable[[Tensor], Tensor]
    update: Callable[[], object]


def classes(counts: Tensor) -> Tensor:
    """The class [N] of each word: √N intervals of ranks with equal sums of √count."""
    mass = counts.double().sqrt()
    middle = mass.cumsum(0) - mass / 2
    return (middle * (round(math.sqrt(len(counts))) / mass.sum())).long()


def layer(task: Task) -> Method:
    """Ours, the output layer alone."""
    weight, bias = task.parameters()
    optimizer = RowAdagrad([weight, bias], RATE)
    return Method(_ours(task, weight, bias, sparse=True), _update(optimizer))


def dense(task: Task) -> Method:
    """Ours with dense gradients."""
    weight, bias = task.parameters()
    return Method(_ours(task, weight, bias, sparse=False), _sgd(weight, bias))


def _ours(task: Task, weight: Tensor, bias: Tensor, sparse: bool) -> Callable[[Tensor], Tensor]:
    def loss(words: Tensor) -> Tensor:
        hidden = task.hidden[: words.shape[1]]
        return hierarchical_cross_entropy(hidden, weight, words[1], task.tree, bias, sparse=sparse)

    return loss


def step(task: Task) -> Method:
    """Ours, a whole language model."""
    from lm.config import ModelConfig, OptimConfig, OutputConfig  # needs more than torch
    from lm.model.language_model import build_model
    from lm.training.optimizers import build_optimizer

    num_positions, size = task.hidden.shape
    model_config = ModelConfig(hidden=size, layers=1, tied=True, init_range=RANGE)
    output = OutputConfig(dtype="bf16" if task.dtype == torch.bfloat16 else "fp32")
    optim = OptimConfig(optimizer="adamw", table="adagrad", table_lr=RATE, clip=1.0)
    with task.hidden.device:
        model = build_model(
            model_config, output, task.tree, num_positions // SEQUENCES, sparse=True
        )
    update = _update(build_optimizer(model, optim, table=model.table))

    def loss(words: Tensor) -> Tensor:
        inputs, targets = words.view(2, -1, SEQUENCES)
        return model.loss(inputs, targets)[0]

    def clip_and_update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        update()

    return Method(loss, clip_and_update)


def full(task: Task) -> Method:
    """The ordinary softmax."""
    weight, bias = task.parameters()

    def loss(words: Tensor) -> Tensor:
        hidden = task.hidden.to(task.dtype)
        return F.cross_entropy(F.linear(hidden, weight, bias), words[1])

    return Method(loss, _sgd(weight, bias))


def gather(task: Task) -> Method:
    """Positions × widest class × H numbers copied, and a gradient as large."""
    tree, num_classes = task.tree, int(task.tree.num_children[0])
    root, words_of = task.parts(0, num_classes, tree.num_rows)

    def loss(words: Tensor) -> Tensor:
        own, place = task.find(words[1])
        hidden = task.hidden.to(task.dtype)
        width = tree.num_children[own + 1, None]
        column = torch.arange(int(width.max()), device=own.device)
        first = tree.first_row[own + 1, None] - num_classes
        rows = first + torch.minimum(column, width - 1)
        copies = F.embedding(rows, words_of[0])  # [P, widest, H]
        logits = torch.bmm(copies, hidden[:, :, None]).squeeze(2) + words_of[1][rows]
        logits = torch.where(column < width, logits, -torch.inf)
        of_class = F.cross_entropy(F.linear(hidden, *root), own)
        return of_class + F.cross_entropy(logits, place)

    return Method(loss, _sgd(*root, *words_of))


def host(task: Task) -> Method:
    """Rows looked up on the host, class by class. Positions are sorted by class, so that each class
    is one product.
    """
    device, tree = task.hidden.device, task.tree
    table = [part.numpy() for part in task.table]
    first, width = tree.first_row.tolist(), tree.num_children.tolist()
    spans: list[slice] = []
    copies: list[Tensor] = []

    def look_up(nodes: list[int]) -> None:
        spans[:] = [slice(first[node], first[node] + width[node]) for node in nodes]
        for part in table:
            rows = torch.cat([torch.from_numpy(part[span]) for span in spans])
            copies.append(parameter(rows.to(device)))

    def loss(words: Tensor) -> Tensor:
        own, place = task.find(words[1].cpu())
        order = own.argsort()
        present, counts = torch.unique(own, return_counts=True)
        nodes = [0, *(present + 1).tolist()]
        copies.clear()
        look_up(nodes)
        widths, sizes = [width[node] for node in nodes], counts.tolist()
        root, *classes_rows = zip(*(torch.split(part, widths) for part in copies), strict=True)
        nll = [F.cross_entropy(F.linear(task.hidden, *root), own.to(device), reduction="sum")]
        hidden = torch.split(task.hidden[order.to(device)], sizes)
        target = torch.split(place[order].to(device), sizes)
        for h, w, rows in zip(hidden, target, classes_rows, strict=True):
            nll.append(F.cross_entropy(F.linear(h, *rows), w, reduction="sum"))
        return torch.stack(nll).sum() / len(own)

    def update() -> None:
        for part, copy in zip(table, copies, strict=True):
            assert copy.grad is not None
            d_rows, start = copy.grad.cpu().numpy(), 0
            for span in spans:
                stop = start + span.stop - span.start
                part[span] -= RATE * d_rows[start:stop]
                start = stop
        copies.clear()

    return Method(loss, update)


def loop(task: Task) -> Method:
    """One position after the other."""
    root, *words_of = task.parts(*task.tree.first_row.tolist(), task.tree.num_rows)

    def loss(words: Tensor) -> Tensor:
        own, place = task.find(words[1])
        hidden = task.hidden[: len(own)].to(task.dtype)
        nll = []
        for h, c, w in zip(*(torch.split(part, 1) for part in (hidden, own, place)), strict=True):
            nll.append(F.cross_entropy(F.linear(h, *root), c))
            nll.append(F.cross_entropy(F.linear(h, *words_of[int(c)]), w))
        return torch.stack(nll).float().sum() / len(own)

    return Method(loss, _sgd(*root, *(tensor for part in words_of for tensor in part)))


def _sgd(*parameters: Tensor) -> Callable[[], None]:
    return _update(torch.optim.SGD(parameters, RATE))


def _update(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update
