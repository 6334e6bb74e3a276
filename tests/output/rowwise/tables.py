"""A table of words as output rows and input vectors, batches for it, and steps of optimizers."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SparseAdam

from lm.output import ClassTree
from lm.output.backends.triton.launch import instrumented
from lm.output.rowwise import RowAdagrad, RowAdam, RowFactors, RowOptimizer, RowSGD, lookup

from ..definition import SMALL_TILES, nll, two_level, zipf_targets

H, W, P = 18, 24, 40
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
SHORTLIST = TREES["shortlist"]
Table = list[Tensor]
Kind = Callable[..., RowOptimizer]
OPTIMIZERS: list[Kind] = [RowSGD, RowAdagrad, RowAdam]
Order = Literal["", "loss first", "lookups first"]
"""Whether rows are also read as input vectors, and which gradient is there first."""


class Adagrad(torch.optim.Optimizer):
    """Row-wise Adagrad by its formula, for dense gradients."""

    def __init__(self, params: Table) -> None:
        super().__init__(params, {})
        self.sums = [torch.zeros(len(param), 1, dtype=param.dtype) for param in params]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for param, total in zip(self.param_groups[0]["params"], self.sums, strict=True):
            grad = param.grad.view(len(param), -1)
            total += (grad**2).mean(1, keepdim=True)
            param -= (0.3 * grad / (total.sqrt() + 1e-8)).view(param.shape)


TINY = 1e-30
"""eps of Adam, which PyTorch adds elsewhere."""
KINDS: dict[str, Callable[[Table], RowOptimizer]] = {
    "sgd": partial(RowSGD, lr=0.3),
    "adagrad": partial(RowAdagrad, lr=0.3),
    "adam": partial(RowAdam, lr=0.05, eps=TINY),
}
DENSE: dict[str, Callable[[Table], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.3),
    "adagrad": Adagrad,
    "adam": partial(SparseAdam, lr=0.05, eps=TINY),
}


def table(tree: ClassTree, dtype: torch.dtype = torch.float64) -> Table:
    """Weight [R, W] and bias, the same each time."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((tree.num_rows, W), (tree.num_rows,))
    numbers = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [each.to(dtype).requires_grad_() for each in numbers]


def accumulate(
    params: Table,
    tree: ClassTree,
    number: int,
    backend: str = "reference",
    *,
    order: Order = "",
    positions: int = P,
    ignored: bool = False,
) -> Tensor:
    """Add the gradients of a batch to those of a table; returns that of its hidden vectors.

    The backend "dense" is the reference's with dense gradients.
    """
    torch.manual_seed(number)
    weight, bias = params
    dtype, is_dense = torch.promote_types(weight.dtype, torch.float32), backend == "dense"
    hidden, upstream = torch.randn(2, positions, H, dtype=torch.float64).to(dtype).unbind()
    hidden = hidden.clone().requires_grad_()
    target = zipf_targets(tree, positions)
    target = target.fill_(-100) if ignored else target
    index = torch.randint(-1, tree.num_rows // 2, (positions,))  # rows repeat; -1 is none
    if order:
        found = F.embedding(index.clamp(min=0), weight) * (index >= 0)[:, None]
        found = found if is_dense else lookup(weight, index)
        if order == "lookups first":
            torch.autograd.backward(found.sin().sum())
            found = found.detach()
    inputs = hidden + found[:, :H].to(dtype).tanh() if order else hidden
    with instrumented(tiles=SMALL_TILES):
        name: Any = "reference" if is_dense else backend
        each = nll([inputs, weight, bias, target], tree, backend=name, row_wise=not is_dense)
        torch.autograd.backward(each, upstream[:, 0])
    d_hidden: Tensor | None = hidden.grad
    assert d_hidden is not None
    return d_hidden


class Way(NamedTuple):
    """What is trained for two steps, and how."""

    tree: str
    kind: str  # of the optimizer
    dtype: torch.dtype = torch.float64
    clip: float = 2.0
    order: Order = ""
    batches: int = 1  # whose gradients are added up, halved before each
    positions: int = P


def trained(way: Way, backend: str) -> list[Tensor]:
    """The table, each batch's d_hidden, and each step's norm; of several batches their gradient.

    Unless batches are added up, loops and kernels form no gradient in memory.
    """
    tree, is_dense, found = TREES[way.tree], backend == "dense", list[Tensor]()
    params = table(tree, way.dtype)
    optimizer = (DENSE if is_dense else KINDS)[way.kind](params)
    several = way.batches > 1
    for step in range(2):
        optimizer.zero_grad()
        for number in range(way.batches):
            for param in params if number else ():
                assert param.grad is not None
                param.grad.mul_(torch.tensor(0.5))
            of = {"order": way.order, "positions": way.positions}
            found.append(accumulate(params, tree, 2 * step + number, backend, **of))  # type: ignore[arg-type]
        with nullcontext() if several else not_in_memory(backend):
            if way.clip < math.inf:
                found.append(torch.nn.utils.clip_grad_norm_(params, way.clip))
            for param in params if several else ():
                assert param.grad is not None
                found.append(param.grad.to_dense())
            for param in params if way.kind == "adam" and is_dense else ():
                assert param.grad is not None
                param.grad = param.grad.to_sparse(1)
            optimizer.step()
    return [*(param.detach() for param in params), *found]


def not_in_memory(backend: str) -> Any:
    """A context in which loops and kernels form no gradient in memory."""
    if backend in ("dense", "reference"):
        return nullcontext()
    return mock.patch.object(RowFactors, "blocks", side_effect=AssertionError("formed in memory"))
