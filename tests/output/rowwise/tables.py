"""A table of words as output rows and input vectors, and batches for it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.output import ClassTree
from lm.output.rowwise import lookup

from ..definition import nll

N, H, W, P = 41, 6, 8, 15
SHORTLIST = ClassTree.two_level((torch.arange(N) * 7) % 9, 4)
Table = list[Tensor]
Test = Callable[..., None]
WHOLE_NODES, TWO_ROWS = 1 << 19, 12


def in_blocks(test: Test) -> Test:
    """Decorator of tests of all backends, whose gradients are formed in whole nodes and in blocks
    of two rows; those of the kernels, which the interpreter computes slowly, in the latter only.
    """
    ways = [("reference", WHOLE_NODES), ("reference", TWO_ROWS), ("triton", TWO_ROWS)]
    chosen = pytest.mark.parametrize(("backend", "portion"), ways, indirect=True)
    return pytest.mark.usefixtures("backend", "portion")(chosen(test))


def table(tree: ClassTree, dtype: torch.dtype = torch.float64, width: int = W) -> Table:
    """Weight [R, width] and bias, the same each time."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((tree.num_rows, width), (tree.num_rows,))
    numbers = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [each.to(dtype).requires_grad_() for each in numbers]


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [P, H], input words [P] and targets [P], one of them ignored."""
    generator = torch.Generator().manual_seed(number)
    hidden = torch.randn(P, H, dtype=torch.float64, generator=generator)
    words, target = torch.randint(0, N // 2, (2, P), generator=generator)
    target[3] = -100
    return hidden, words, target


def accumulate(tree: ClassTree, params: Table, number: int, rows: bool) -> None:
    """Add the gradients of a batch whose input vectors begin the output rows."""
    weight, bias = params
    hidden, words, target = batch(number)
    index = tree.row_of_word[words]
    vectors = lookup(weight, index) if rows else F.embedding(index, weight)
    hidden = hidden + vectors[:, :H].to(hidden.dtype).tanh()
    each = nll([hidden, weight, bias, target], tree, row_wise=rows)
    torch.autograd.backward(each, torch.linspace(-1, 2, P, dtype=each.dtype))
