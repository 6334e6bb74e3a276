"""Steps of row-wise optimizers from factors, by the compiled kernels, and what they read and write.

The functions run in processes of `cases.pool`, where kernels are compiled, not interpreted.
"""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lm.output.backends.triton.launch import Launch, execute
from lm.output.rowwise import RowAdagrad, RowAdam, RowGradient, RowOptimizer, RowSGD
from lm.output.rowwise.blocks import Factored
from scripts.kernels.compilation import values
from scripts.kernels.emulator import Emulator
from scripts.kernels.work import work

from ...definition import assert_errors_are_small, gradients
from .cases import DTYPES, EPSILON, Case, emulated, inputs

UPDATED = ("sorted_hidden", "errors", "partial_rows", "table", "mean", "square")
UPDATED_ONCE = (*UPDATED, "total", "squares", "sums")
"""Tensors whose bytes `scripts.kernels.work` counts for updates: loads, and every element once."""


def stepped(name: str, params: list[Tensor], gradients: list[Any]) -> list[Tensor]:
    """The squared norm, the table after a step, and the optimizer's state, first of the weight.

    The norms that "adagrad, clipped" needs are formed by then, those of "adagrad" are not. eps is
    large: divided by their size alone, numbers close to 0 would be signs of roundings.
    """
    params = [param.clone().requires_grad_() for param in params]
    optimizer: RowOptimizer = (
        RowSGD(params, 1.0)
        if name == "sgd"
        else {"adagrad": RowAdagrad, "adam": RowAdam}[name.split(",")[0]](params, 1.0, eps=0.1)
    )
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    if name == "adagrad":
        optimizer.step()
    squares = [
        each.square_norm() if isinstance(each, RowGradient) else each.square().sum()
        for each in gradients
    ]
    if name != "adagrad":
        optimizer.step()
    state = [v.flatten() for p in params for v in optimizer.state[p].values() if torch.is_tensor(v)]
    tables = [param.detach() for param in params]
    return [torch.stack(squares), *tables, *([torch.cat(state)] if state else [])]


def check_step(case: Case, name: str) -> None:
    """A step of an optimizer from the factors is right, and the same in all orders."""
    torch.set_num_threads(1)
    (hidden, *params), target, tree, upstream = given = inputs(case)
    first = None
    for order in case.orders:
        emulator = Emulator(case.capability, order)
        with mock.patch.object(Factored, "parts", side_effect=AssertionError("formed in memory")):
            torch.manual_seed(1)  # for the rounding
            found = emulated(case, given, emulator, use=lambda rows: stepped(name, params, rows))
        assert not emulator.ambiguous
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), order
    assert first is not None
    results = [first[2:]]
    for kind, wide in ((DTYPES[case.dtype], torch.float32), (torch.float64, torch.float64)):
        inner = [each.to(kind) for each in (hidden, *params)]
        _, _, *dense = gradients(inner, target, tree, upstream, "reference")
        results.append(stepped(name, [p.to(wide) for p in params], [d.to(wide) for d in dense]))
    assert_errors_are_small(results, 8 * EPSILON[case.dtype])


def check_updates(case: Case, name: str) -> None:
    """The norm of a gradient and a step read and write what `scripts.kernels.work` counts.

    The compiler loads numbers of rows twice.
    """
    emulator = Emulator(case.capability, counting=True, recording=True)
    num_launches = 0

    def run(launch: Launch) -> None:
        nonlocal num_launches
        execute(launch)
        if launch.kernel.__name__ == "_update" and (model := work(launch)).memory:
            num_launches += 1
            memory = emulator.history[-1].memory
            once = memory.once()
            loaded = sum(memory.loaded[each] for each in UPDATED)
            if values(launch)["table"] is not None:
                loaded += once["squares"] + once["total"] // 2  # which is read and written
            found = loaded, sum(once[each] for each in UPDATED_ONCE)
            assert found == (model.loaded, model.memory), values(launch)["table"] is None

    params = (given := inputs(case))[0][1:]
    emulated(case, given, emulator, run, lambda rows: stepped(name, params, rows))
    assert num_launches == 2, "the norm and the step of the weight"
