"""Compiled loops have the results of Python, in which NumPy checks every index."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lm.output import ClassTree
from lm.output.backends.compiled import memory, passes
from lm.output.rowwise import lookup

from ...as_python import as_python
from ...definition import TREES, gradients, nll, problem, two_level
from ...laws import SETTINGS
from ...rowwise.tables import OPTIMIZERS


def results(tree: ClassTree, inputs: list[Tensor], target: Tensor) -> list[Tensor]:
    """nll and gradients; rows after steps with gradients of the loss and of looked-up rows."""
    for words in (target.flip(0), target):  # the second one in the memory of the first one
        upstream = torch.linspace(-1, 2, len(target))
        found = gradients(inputs, words, tree, upstream, "compiled")
    index = torch.tensor([0, tree.num_rows - 1, tree.num_rows // 2])
    for kind in OPTIMIZERS:
        torch.manual_seed(0)  # for rounding to bf16
        hidden, *table = (tensor.detach().clone() for tensor in inputs)
        optimizer = kind([each.requires_grad_() for each in table], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            torch.autograd.backward(lookup(table[0], index).sum())
            each = nll([hidden, *table, target], tree, row_wise=True, backend="compiled")
            torch.autograd.backward(each.sum())
            torch.nn.utils.clip_grad_norm_(table, 0.5)
            optimizer.step()
        found += [each.detach() for each in table]
    return found


def row_address(rows: Any, i: int) -> int:
    """Address of a row that is there, or of the end; nothing is read where there are no numbers."""
    assert 0 <= i <= len(rows) or not rows.size
    return int(rows.ctypes.data + i * rows.strides[0])


@pytest.mark.parametrize(
    ("tree", "dtype"),
    [
        *((TREES["shortlist"], torch.float64), (TREES["shortlist"], torch.bfloat16)),
        *((TREES["balanced"], torch.float64), (ClassTree.full(40), torch.float64)),
        (two_level(400, 3), torch.bfloat16),
    ],
    ids=lambda value: str(getattr(value, "num_rows", value)),
)
def test_loops_have_the_results_of_python(
    tree: ClassTree, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts as of three threads, with gradients written past the caches."""
    monkeypatch.setattr(memory, "_free", [])
    monkeypatch.setattr(passes, "FORMED_VISITS", 20)
    monkeypatch.setattr(passes, "NARROW", 2)
    *inputs, target = problem(tree, 70, size=33, dtype=dtype)
    near = 1e-12 if dtype == torch.float64 else 1e-5
    with SETTINGS["three parts"]():
        modules = as_python("backends.compiled.loops", "backends.compiled.row_updates")
        expected = results(tree, inputs, target)
        monkeypatch.setattr(modules["loops"], "CACHE_BYTES", 1 << 12)
        for module in modules.values():
            monkeypatch.setattr(module, "row_address", row_address)
        monkeypatch.setattr(passes, "loops", modules["loops"])
        monkeypatch.setattr(passes, "CompiledFactors", modules["row_updates"].CompiledFactors)
        torch.testing.assert_close(results(tree, inputs, target), expected, rtol=near, atol=near)
        with pytest.raises(IndexError, match="target -1 is out of bounds"):
            results(tree, inputs, target.clamp(max=-1))
