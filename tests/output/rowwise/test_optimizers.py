"""Optimizers of rows: equal to the dense ones, and without effect on rows without a gradient."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.output import HierarchicalSoftmax
from lm.output.rowwise import (
    RowAdagrad,
    RowAdam,
    RowGradient,
    RowOptimizer,
    RowSGD,
    lookup,
    optimizers,
)
from lm.output.rowwise.factors import Block, Rule

from ..definition import nll
from .tables import OPTIMIZERS, SHORTLIST, TREES, H, Kind, accumulate, table

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_dense_gradients_give_the_same_steps(kind: Kind) -> None:
    tree = TREES["full"]  # every row is visited, so that Adam's moments are equal
    params = table(tree), table(tree)
    for table_of, backend in zip(params, ("dense", "reference"), strict=True):
        optimizer = kind(table_of, lr=0.2)
        for step in range(3):
            optimizer.zero_grad()
            optimizer.step(partial(accumulate, table_of, tree, step, backend))
    torch.testing.assert_close(params[1], params[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", OPTIMIZERS[1:])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP32, FP64), (FP64, FP32)])
def test_a_restored_optimizer_continues_with_state_in_the_precision_of_its_table(
    kind: Kind, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Loops read it as numbers of that size; that of rows in bf16 is in fp32."""
    tables = [table(SHORTLIST, dtype) for dtype in dtypes]
    saved, loaded = (kind(params, lr=0.1) for params in tables)
    accumulate(tables[0], SHORTLIST, 0)
    saved.step()
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for state, expected in zip(loaded.state.values(), saved.state.values(), strict=True):
        for name, value in expected.items():
            if isinstance(value, Tensor):
                value = value.to(torch.promote_types(dtypes[1], FP32))
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    for old, new in zip(*tables, strict=True):
        new.data.copy_(old.data)
    for params, optimizer in zip(tables, (saved, loaded), strict=True):
        optimizer.zero_grad()
        accumulate(params, SHORTLIST, 1)
        torch.manual_seed(9)  # for the rounding
        optimizer.step()
    near = 0.0 if BF16 in dtypes else 1e-4
    torch.testing.assert_close(*tables, rtol=near, atol=near, check_dtype=False)


@pytest.mark.parametrize("kind", OPTIMIZERS[1:])
def test_hooks_change_what_is_loaded(kind: Kind) -> None:
    """They keep the precision of the state."""
    tables = [table(SHORTLIST, BF16) for _ in range(2)]
    saved, loaded = (kind(params, lr=0.1) for params in tables)
    accumulate(tables[0], SHORTLIST, 0)
    saved.step()
    name = next(name for name, value in saved.state[tables[0][0]].items() if torch.is_tensor(value))

    def before(_: object, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {
            place: each | {name: each[name] * 3} for place, each in state_dict["state"].items()
        }
        return state_dict | {"state": state}

    def after(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[tables[1][0]][name].add_(1)

    loaded.register_load_state_dict_pre_hook(before)
    loaded.register_load_state_dict_post_hook(after)
    loaded.load_state_dict(saved.state_dict())
    for number, (old, new) in enumerate(zip(*tables, strict=True)):
        expected = saved.state[old][name] * 3 + (number == 0)
        torch.testing.assert_close(loaded.state[new][name], expected, rtol=0, atol=0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "no rows": lambda x: x[:0],
    "empty rows": lambda x: x[:, :0],
    "number": lambda x: x[1, 2, 3, 0],
    "vector": lambda x: x[:, 0, 0, 0],
    "by column": lambda x: x[:, :, 0, 0].T.contiguous().T,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_of_any_layout_are_updated(kind: Kind, layout: str, dtype: torch.dtype) -> None:
    """As rows without gaps are, by two ordinary gradients and a row-wise one."""
    numbers = [LAYOUTS[layout](each.to(dtype)) for each in torch.randn(3, 6, 5, 4, 2)]
    found, shape = numbers[0].clone(), numbers[0].shape
    size = (shape[0], shape[1:].numel()) if shape else (1, 1)
    expected = found.float().contiguous().view(size).clone()
    for param in (found, expected):
        param.requires_grad_()
        optimizer = kind([param], lr=0.1)
        for number in numbers[1:]:
            param.grad = number if param is found else number.contiguous().float().view(size)
            optimizer.step()
        if shape and param.numel():
            param.grad = None
            torch.autograd.backward(lookup(param, torch.tensor([1, 5, 1])).square().sum())
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    near = 1e-6 if dtype == FP32 else 3e-2
    assert found.stride() == numbers[0].clone().stride()
    torch.testing.assert_close(found.float().reshape(size), expected, rtol=near, atol=near)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -0x400000, -1])
def test_nan_remains_nan(bits: int) -> None:
    """NaN of any bits: 0x7FFFFFFF is that of a GPU, 0xFFC00000 that of a CPU."""
    number = torch.full((300, 7), bits, dtype=torch.int32).view(torch.float32)
    out = torch.empty_like(number, dtype=torch.bfloat16)
    optimizers._round_stochastically(out, number)
    assert out.isnan().all()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtypes", [(FP16, FP16), (FP16, FP64), (FP32, FP64)])
def test_rows_are_updated_in_fp32_and_rounded_once(
    kind: Kind, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    hidden, target = torch.randn(6, H).to(dtypes[1]), torch.arange(6)
    layer = HierarchicalSoftmax(H, SHORTLIST, row_wise=True, dtype=dtypes[0])
    truth = HierarchicalSoftmax(H, SHORTLIST, row_wise=True)
    truth.load_state_dict(layer.state_dict())
    for each, inputs in ((layer, hidden), (truth, hidden.float())):
        torch.autograd.backward(each.loss(inputs, target))
        kind(each.parameters(), lr=0.1).step()
    torch.testing.assert_close(layer.weight.float(), truth.weight, rtol=2e-3, atol=2e-3)


class Momentum(RowOptimizer):
    """A rule that no backend knows, with the name of a state that they know."""

    def _rule(self, param: Tensor, table: Tensor, group: dict[str, Any]) -> Rule:
        state = self.state[param]
        if not state:
            state["mean"] = torch.zeros_like(table)
        return Rule("momentum", (group["lr"],), {"mean": state["mean"]})

    def _change(self, rows: Tensor, block: Block, rule: Rule) -> None:
        mean = 0.9 * rule.state["mean"][block.rows] + block.values()
        rule.state["mean"][block.rows] = mean
        rows.sub_(mean, alpha=rule.numbers[0])


def test_a_rule_of_a_users_own_is_applied_with_every_backend(backend: str) -> None:
    tree = TREES["full"]  # every row is visited
    params, truth = table(tree, FP32), table(tree, FP32)
    optimizer = Momentum(params, {"lr": 0.1})
    expected = torch.optim.SGD(truth, lr=0.1, momentum=0.9)
    for step in range(3):
        accumulate(params, tree, step, backend)
        accumulate(truth, tree, step, "dense")
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    torch.testing.assert_close(params, truth, rtol=1e-4, atol=1e-5)


def test_a_backward_after_the_step_is_refused(backend: str) -> None:
    """As with the optimizers of PyTorch: it would read rows that have changed."""
    params = table(SHORTLIST)
    hidden, target = torch.randn(6, H, dtype=FP64), torch.arange(6)
    loss = nll([hidden, *params, target], SHORTLIST, row_wise=True).sum()
    torch.autograd.backward(loss, retain_graph=True)
    RowSGD(params, lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


def test_a_learning_rate_and_eps_must_be_positive_and_decay_rates_below_one() -> None:
    for lr in (0.0, math.nan):
        with pytest.raises(ValueError, match=f"lr must be positive, got {lr}"):
            RowSGD(table(SHORTLIST), lr=lr)
    for kind in (RowAdagrad, RowAdam):
        with pytest.raises(ValueError, match="eps must be positive, got 0"):
            kind(table(SHORTLIST), lr=0.1, eps=0)
    with pytest.raises(ValueError, match=r"betas must be within \[0, 1\), got \(0.9, 1\)"):
        RowAdam(table(SHORTLIST), lr=0.1, betas=(0.9, 1))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(9, 5), (9,)])
def test_rates_and_numbers_of_rows_that_stay_on_a_device_change_nothing(
    kind: Kind, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device is a CPU whose values the host does not read."""
    found: list[list[Tensor]] = []
    for is_host in (True, False):
        for module in ("factors", "row_gradient", "optimizers"):
            monkeypatch.setattr(f"lm.output.rowwise.{module}.on_host", lambda _, is_=is_host: is_)
        torch.manual_seed(0)
        param = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        rate = torch.tensor(0.3, dtype=torch.float64)
        optimizer = kind([param], lr=0.3 if is_host else rate)
        found.append([])
        for words in ([3, -1, 3, 8, 0, 3], [5, 5], [-1, 7], [2]):
            for more in ([], [3, 3]):
                rows = lookup(param, torch.tensor(words + more))
                torch.autograd.backward((rows * torch.randn_like(rows)).sum())
            assert isinstance(param.grad, RowGradient)
            found[-1] += [param.grad.to_dense(), param.grad.to_sparse().to_dense()]
            found[-1].append(torch.nn.utils.clip_grad_norm_([param], 0.5))
            optimizer.step()
            optimizer.zero_grad()
            found[-1].append(param.detach().clone())
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_adam_counts_its_steps_where_a_checkpoint_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = []
    state: object = None
    for is_host in (True, False, True):
        monkeypatch.setattr("lm.output.rowwise.optimizers.on_host", lambda _, is_=is_host: is_)
        param = torch.ones(3, 2, requires_grad=True)
        optimizer = RowAdam([param], lr=0.1)
        if state is not None:
            optimizer.load_state_dict(copy.deepcopy(state))  # type: ignore[arg-type]
        param.grad = torch.ones(3, 2)
        optimizer.step()
        state = optimizer.state_dict()
        steps.append(optimizer.state[param]["step"])
    assert steps == [1, torch.tensor(2.0, dtype=torch.float64), 3]
    assert [type(step) for step in steps] == [int, Tensor, int]
