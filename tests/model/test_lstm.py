"""The LSTM backbone against its equations, written out step by step in fp64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm.model.lstm import LSTM, Dropout

T, B, E, H, LAYERS = 5, 3, 4, 6, 2


def make(**dropouts: Any) -> LSTM:
    torch.manual_seed(0)
    return LSTM(E, H, LAYERS, **dropouts).double()


def inputs() -> tuple[Tensor, tuple[Tensor, ...]]:
    torch.manual_seed(1)
    embedded = torch.randn(T, B, E, dtype=torch.float64)
    return embedded, torch.randn(2, LAYERS, B, H, dtype=torch.float64).unbind()


def by_equations(
    layer: nn.Module, weight_hh: Tensor, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer, one time step after the other, as in the module docstring."""
    weight_ih = layer.get_parameter("weight_ih_l0")
    bias = layer.get_parameter("bias_ih_l0") + layer.get_parameter("bias_hh_l0")
    outputs = []
    for x_t in x:
        i, f, g, o = (weight_ih @ x_t.T + weight_hh @ h.T + bias[:, None]).T.chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs), h, c


def definition(
    model: LSTM, x: Tensor, state: tuple[Tensor, ...], weights_hh: list[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    ends = []
    for k, layer in enumerate(model.layers):
        x, h, c = by_equations(layer, weights_hh[k], x, state[0][k], state[1][k])
        ends.append((h, c))
    return x, (torch.stack([h for h, _ in ends]), torch.stack([c for _, c in ends]))


def raw_weights_hh(model: LSTM) -> list[Tensor]:
    return [layer.get_parameter("weight_hh_l0") for layer in model.layers]


@pytest.mark.parametrize("at_once", [False, True])  # as on a GPU
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_equals_the_equations_step_by_step_with_dropped_weights(
    p: float, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks are redrawn from the same seed, so that the definition gets the same W_hh."""
    monkeypatch.setattr("lm.model.lstm._runs_at_once", lambda _: at_once)
    model, (embedded, state) = make(dropout_weight=p), inputs()
    torch.manual_seed(3)
    actual = model(embedded, state)
    torch.manual_seed(3)
    dropped = [nn.functional.dropout(weight, p) for weight in raw_weights_hh(model)]
    expected = definition(model, embedded, state, dropped)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)

    parameters = list(model.parameters())
    actual_grads = torch.autograd.grad(actual[0].sum(), parameters)
    expected_grads = torch.autograd.grad(expected[0].sum(), parameters)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.4, "dropout_weight": 0.5}])
def test_scaled_gradients_are_those_without_scale(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, after which gradients of powers of two are the same; also those of states."""
    found = []
    for scale in (1.0, 64.0):
        monkeypatch.setattr("lm.model.lstm._gradient_scale", lambda _, scale=scale: scale)
        model, (embedded, state) = make(**options), inputs()
        model, leaves = model.bfloat16(), [embedded.bfloat16(), *(x.bfloat16() for x in state)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        torch.manual_seed(4)
        output, end = model(leaves[0], tuple(leaves[1:]))
        end = tuple(part.float() for part in end)
        loss = (output.sum() + sum(part.square().sum() for part in end)) / 1000
        found.append([output, *end, *torch.autograd.grad(loss, [*leaves, *model.parameters()])])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.gpu
def test_autocast_on_a_gpu_has_gradients_of_a_mean_over_many_tokens() -> None:
    torch.manual_seed(0)
    model = LSTM(64, 64, 2).cuda()
    inputs, weights = torch.randn(2, 64, 128, 64, device="cuda")
    found = []
    for enabled in (False, True):
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            output = model(inputs)[0]
        loss = (output.float() * weights).mean()  # gradients of 1e-6
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for truth, ours in zip(*found, strict=True):
        assert float((ours - truth).norm() / truth.norm()) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("trains", [False, True])
def test_one_call_on_a_gpu_equals_the_equations(trains: bool) -> None:
    model, (embedded, state) = make().train(trains), inputs()
    embedded.requires_grad_()
    expected = definition(model, embedded, state, raw_weights_hh(model))
    upstream = torch.randn(T, B, H, dtype=torch.float64)
    truth = torch.autograd.grad((expected[0] * upstream).sum(), [embedded, *model.parameters()])
    on_gpu = copy.deepcopy(model).cuda()
    x, state = embedded.detach().cuda().requires_grad_(), tuple(part.cuda() for part in state)
    output, end = on_gpu(x, state)
    torch.testing.assert_close([output, end], [*expected], rtol=0, atol=1e-12, check_device=False)
    ours = torch.autograd.grad((output * upstream.cuda()).sum(), [x, *on_gpu.parameters()])
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11, check_device=False)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_between_layers_on_a_gpu_continues_from_its_noise(autocast: bool) -> None:
    """The second layer's cells are 0 after the first step where its input is dropped, else ± ½."""
    size, p = 64, 0.5
    model = LSTM(size, size, 2, dropout=p).cuda()
    with torch.no_grad():
        for name, parameter in model.layers[1].named_parameters():
            parameter.zero_()
            if name == "weight_ih_l0":
                parameter[2 * size : 3 * size].copy_(1e4 * torch.eye(size))
    x = torch.randn(9, 40, size, device="cuda")
    found = []
    for _ in range(3):
        noise = None if model.noise is None else model.noise.clone()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            found.append(model(x)[0])
    assert not torch.equal(found[1], found[2])
    assert noise is not None
    model.noise = noise
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        assert torch.equal(model(x)[0], found[2])
    first_step = found[2][0]
    share = (first_step == 0).double().mean().item()
    assert share == pytest.approx(p, abs=5 * (p * (1 - p) / first_step.numel()) ** 0.5)


def test_weight_dropout_leaves_parameters_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = make(), make(dropout_weight=0.5)
    moved: list[object] = []  # to one piece of memory, on a GPU
    monkeypatch.setattr(nn.LSTM, "_init_flat_weights", lambda layer: moved.append(layer))
    embedded, state = inputs()
    model(embedded, state)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    found = model.eval()(embedded, state)
    torch.testing.assert_close(found, plain(embedded, state), rtol=0, atol=0)
    assert not moved


@pytest.mark.parametrize("variational", [False, True])
def test_dropout_acts_between_layers_only(variational: bool) -> None:
    model = make(dropout=0.5, dropout_variational=variational)
    embedded, state = inputs()
    torch.manual_seed(4)
    actual, _ = model(embedded, state)
    torch.manual_seed(4)
    weights = raw_weights_hh(model)
    lower, *_ = by_equations(model.layers[0], weights[0], embedded, state[0][0], state[1][0])
    between = Dropout(0.5, variational)(lower)
    expected, *_ = by_equations(model.layers[1], weights[1], between, state[0][1], state[1][1])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
