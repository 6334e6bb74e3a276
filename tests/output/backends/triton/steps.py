"""Steps of row-wise optimizers from factors, by the compiled kernels, and what they read and write.

The functions run in processes of `cases.pool`, where kernels are compiled, not interpreted.
"""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lm.output.rowwise import RowAdagrad, RowAdam, RowFactors, RowGradient, RowOptimizer, RowSGD
from scripts.kernels.emulator import Emulator

from ...definition import assert_errors_are_small, gradients
from .cases import DTYPES, EPSILON, Case, emulated, in_all_orders, inputs, num_visited_rows


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
    """A step of an optimizer from the factors is right."""
    (hidden, *params), target, tree, upstream = given = inputs(case)
    with mock.patch.object(RowFactors, "blocks", side_effect=AssertionError("formed in memory")):
        found = in_all_orders(case, given, lambda rows: stepped(name, params, rows))
    results = [found[2:]]
    for kind, wide in ((DTYPES[case.dtype], torch.float32), (torch.float64, torch.float64)):
        inner = [each.to(kind) for each in (hidden, *params)]
        _, _, *dense = gradients(inner, target, tree, upstream, "reference")
        results.append(stepped(name, [p.to(wide) for p in params], [d.to(wide) for d in dense]))
    assert_errors_are_small(results, 8 * EPSILON[case.dtype])


def check_updates(case: Case, name: str) -> None:
    """A step reads and writes the visited rows, and their state of the same size, once."""
    emulator = Emulator(case.capability, recording=True)
    case = case._replace(bias=False)
    given = inputs(case)
    weight = given[0][1]
    emulated(case, given, emulator, use=lambda rows: stepped(name, [weight], rows))
    updates = [run.memory for run in emulator.history if "table" in run.memory.names]
    num_numbers = num_visited_rows(given) * weight.shape[1]
    expected = {"table": num_numbers * weight.element_size()}
    expected |= dict.fromkeys({"mean", "square"} & {*updates[0].names}, 4 * num_numbers)
    assert len(updates) == 1
    for counts in (updates[0].loaded, updates[0].stored):
        assert {each: counts[each] for each in expected} == expected
