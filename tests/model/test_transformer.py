"""The Transformer backbone against its definition in fp64: loops, softmax, complex rotation."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lm.model.transformer import Transformer

T, B, E, H, LAYERS, HEADS, CONTEXT = 7, 2, 6, 8, 2, 2, 16


def make(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    """A small model with weights large enough for attention to be far from uniform."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"input_size": E, "hidden_size": H, "layers": LAYERS}
    model = Transformer(**(sizes | {"heads": HEADS, "context": CONTEXT} | changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return model.to(dtype)


def inputs(length: int = T, size: int = E, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, B, size, generator=generator, dtype=torch.float64)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight


def rotated(vector: Tensor, position: int) -> Tensor:
    """Component j + i · component (j + D/2), times exp(i · position · 10000^(−2j / D))."""
    half = vector.shape[-1] // 2
    turn = torch.exp(1j * position * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half))
    turned = torch.complex(vector[..., :half], vector[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def attention_by_loops(x: Tensor, weights: dict[str, Any], heads: int, context: int) -> Tensor:
    """Attention computed query by query; `x` is [T, B, H]."""
    queries, keys, values = (
        (x @ block.T).view(*x.shape[:2], heads, -1)
        for block in weights["attention.query_key_value.weight"].chunk(3)
    )
    scale = queries.shape[-1] ** -0.5
    rows = []
    for t in range(len(x)):
        seen = range(max(0, t - context + 1), t + 1)
        query = rotated(queries[t], t)
        logits = torch.stack([(query * rotated(keys[s], s)).sum(-1) * scale for s in seen])
        weight = logits.exp() / logits.exp().sum(0)  # [seen, B, heads]
        attended: Any = sum(weight[k, ..., None] * values[s] for k, s in enumerate(seen))
        rows.append(attended.flatten(1) @ weights["attention.out.weight"].T)
    return torch.stack(rows)


def definition(model: Transformer, embedded: Tensor) -> Tensor:
    weights = dict(model.named_parameters())
    x = embedded @ weights["project.weight"].T if "project.weight" in weights else embedded
    for k in range(len(model.blocks)):
        prefix = f"blocks.{k}."
        block = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        normed = rms_norm(x, block["attention_norm.weight"])
        x = x + attention_by_loops(normed, block, model.heads, model.context)
        normed = rms_norm(x, block["feedforward_norm.weight"])
        gate, up = block["feedforward.gate_up.weight"].chunk(2)
        inner = F.silu(normed @ gate.T) * (normed @ up.T)
        x = x + inner @ block["feedforward.down.weight"].T
    return rms_norm(x, weights["norm.weight"])


CHANGES: Any = [{}, {"input_size": H}, {"heads": 4, "feedforward": 5}, {"context": 3}]
CHANGES += [{"context": T}, {"layers": 1, "context": 1}]


@pytest.mark.parametrize("changes", CHANGES)
def test_equals_the_definition(changes: dict[str, Any]) -> None:
    model = make(**changes)
    embedded = inputs(size=changes.get("input_size", E))
    torch.testing.assert_close(model(embedded)[0], definition(model, embedded), rtol=0, atol=1e-12)


@pytest.mark.parametrize("context", [1, 3, T - 1, T, CONTEXT])
@pytest.mark.parametrize("sizes", [[1] * T, [T], [3, 4], [4, 1, 2]])
def test_cached_chunks_equal_one_window(sizes: list[int], context: int) -> None:
    """Also beyond the context: the window of a position does not depend on the chunks."""
    model, embedded = make(context=context), inputs()
    whole, none = model(embedded)
    assert none is None
    state, hidden = model.init_state(B), list[Tensor]()
    for chunk in torch.split(embedded, sizes):
        of_chunk, state = model(chunk, state)
        hidden.append(of_chunk)
    keys, values, position = state
    torch.testing.assert_close(torch.cat(hidden), whole, rtol=0, atol=1e-12)
    assert keys.shape == values.shape == (LAYERS, B, HEADS, min(T, context - 1), H // HEADS)
    assert position.item() == T


def test_dropout_acts_on_the_outputs_of_sublayers_only() -> None:
    """As p → 1 only the normalized input remains."""
    model = make(input_size=H, dropout=1 - 1e-9)
    embedded = inputs(size=H)
    expected = rms_norm(embedded, model.norm.weight)
    torch.testing.assert_close(model(embedded)[0], expected, rtol=0, atol=1e-13)


def test_initial_std_of_residual_projections_is_scaled() -> None:
    torch.manual_seed(0)
    for name, weight in Transformer(96, 192, 3, heads=4, context=8).named_parameters():
        if weight.dim() == 1:
            torch.testing.assert_close(weight, torch.ones_like(weight), rtol=0, atol=0)
            continue
        expected = 0.02 / 6**0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
        standard_error = expected / (2 * weight.numel()) ** 0.5
        assert weight.std().item() == pytest.approx(expected, abs=5 * standard_error), name


@pytest.mark.parametrize(("hidden_size", "inner"), [(8, 32), (192, 512), (200, 544), (768, 2048)])
def test_default_inner_size_is_eight_thirds_rounded_up_to_32(hidden_size: int, inner: int) -> None:
    with torch.device("meta"):
        model = Transformer(hidden_size, hidden_size, 1, heads=4, context=8)
    down = dict(model.named_parameters())["blocks.0.feedforward.down.weight"]
    assert down.shape == (hidden_size, inner)


def test_compiles_as_one_graph_for_windows_of_any_length() -> None:
    model = make()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (T, T + 1, CONTEXT + 3):
        embedded = inputs(length)
        expected, _ = model(embedded)
        torch.testing.assert_close(compiled(embedded)[0], expected, rtol=0, atol=1e-13)


def test_autocast_computes_angles_in_fp32() -> None:
    """In bf16 positions 300 and 301 would be equal."""
    model = make(dtype=torch.float32, layers=1)
    embedded = inputs().float()
    keys, values, position = model.init_state(B)
    truth, _ = model(embedded, (keys, values, position + 300))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, state = model(embedded[:4], (keys, values, position + 300))
        rest, _ = model(embedded[4:], state)
    torch.testing.assert_close(torch.cat([hidden, rest]), truth, rtol=0, atol=20 * 2**-8)


def test_heads_of_an_odd_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"even integer, got 200 / 8 = 25"):
        Transformer(200, 200, 1, heads=8, context=8)
    with pytest.raises(ValueError, match=r"even integer, got 10 / 4 = 2\.5"):
        Transformer(10, 10, 1, heads=4, context=8)
