"""`torch.export`, `torch.jit.trace` and ONNX of the layer: what they take has the same numbers."""

import builtins
import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm.output import HierarchicalSoftmax
from lm.output.backends import verify
from lm.output.functional import BackendName

from .definition import METHODS, TREES, H, Method, N

EXPORTED = ("loss", "nll", "forward", "log_prob", "candidate_log_prob")


class Called(nn.Module):
    def __init__(self, layer: HierarchicalSoftmax, method: Method) -> None:
        super().__init__()
        self.layer, self.method = layer, method

    def forward(self, hidden: Tensor, target: Tensor) -> Any:
        return self.method(self.layer, hidden, target)


def inputs(num_positions: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num_positions, H), torch.randint(0, N, (num_positions,))


def exported(module: Called) -> Any:
    return torch.export.export(module, inputs(4)).module()


def exported_for_any_size(module: Called) -> Any:
    size = torch.export.Dim("num_positions", min=2)
    dynamic = {"hidden": {0: size}, "target": {0: size}}
    if module.method is METHODS["log_prob"]:
        dynamic["target"] = {0: torch.export.Dim("num_targets", min=2)}
    with torch.no_grad():
        return torch.export.export(module, inputs(4), dynamic_shapes=dynamic).module()


def traced(module: Called) -> Any:
    with warnings.catch_warnings(action="ignore"):
        trace = torch.jit.trace(module, inputs(4))  # type: ignore[no-untyped-call]
        torch.jit.save(trace, file := io.BytesIO())
        file.seek(0)
        return torch.jit.load(file)  # type: ignore[no-untyped-call]


WAYS = (exported, exported_for_any_size, traced)
KINDS: list[tuple[str, BackendName]] = [
    ("full", "reference"), ("huffman", "compiled"), ("full", "compiled"), ("huffman", "reference"),
]  # fmt: skip
CASES = [(*KINDS[(i + j) % 4], EXPORTED[j], WAYS[i]) for i in range(3) for j in range(5)]
ONNX = [("shortlist", False), ("huffman", False), ("full", False), ("shortlist", True)]


@pytest.mark.parametrize(("shape", "backend", "name", "way"), CASES)
def test_losses_and_distributions_are_exported_with_their_gradients(
    shape: str, backend: BackendName, name: str, way: Callable[[Called], Any]
) -> None:
    row_wise = shape == "huffman" and way is traced
    layer = HierarchicalSoftmax(H, TREES[shape], backend=backend, row_wise=row_wise)
    module = Called(layer, METHODS[name])
    function = way(module)
    hidden, target = inputs(4 if way is exported else 9)
    results = []
    for call in (function, module):
        own = hidden.clone().requires_grad_(way is not exported_for_any_size)
        outputs = call(own, target)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if own.requires_grad:
            outputs += torch.autograd.grad(outputs[-1].sum(), own)
        results.append(outputs)
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("way", [exported, traced])
@pytest.mark.parametrize("name", [name for name in METHODS if name not in EXPORTED])
def test_what_depends_on_values_is_refused(name: str, way: Callable[[Called], Any]) -> None:
    module = Called(HierarchicalSoftmax(H, TREES["paths"]), METHODS[name])
    with pytest.raises(RuntimeError, match=rf"{name}.* cannot be traced or exported"):
        way(module)


def test_loops_are_compiled_with_pythons_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.export` replaces some by others, which numba does not know."""
    found = []

    def difference(*of: object) -> None:
        found.append((builtins.max, builtins.min, math.pow))

    monkeypatch.setattr(verify, "_differences", {})
    monkeypatch.setattr(verify, "difference", difference)
    exported(Called(HierarchicalSoftmax(H, TREES["paths"]), METHODS["loss"]))
    assert found == [(max, min, math.pow)]


def test_gradients_that_were_not_exported_are_refused() -> None:
    module = Called(HierarchicalSoftmax(H, TREES["paths"]), METHODS["loss"])
    loss = exported_for_any_size(module)(*inputs(4))
    with pytest.raises(RuntimeError, match="exported without gradients"):
        loss.backward()


@pytest.mark.parametrize("name", [name for name in EXPORTED if name != "forward"])
@pytest.mark.parametrize(("shape", "dynamo"), ONNX)
def test_onnx_has_the_layers_functions(shape: str, name: str, dynamo: bool, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript") if dynamo else ("onnx",):
        pytest.importorskip(package)
    onnxruntime = pytest.importorskip("onnxruntime")
    ignored = N if shape == "huffman" else -100
    layer = HierarchicalSoftmax(H, TREES[shape], ignore_index=ignored).eval()
    module, path = Called(layer, METHODS[name]), tmp_path / "module.onnx"
    example, (hidden, target) = inputs(4), inputs(9)
    example[1][1] = target[3] = ignored if name in ("loss", "nll") else 0
    options: dict[str, Any] = {"dynamo": dynamo, "opset_version": 18, "verbose": False}
    batch = torch.export.Dim("batch")
    axes: dict[str, Any] = {"dynamic_shapes": ({0: batch}, {0: batch})}
    if not dynamo:
        axes = {"dynamic_axes": {"hidden": {0: "batch"}, "target": {0: "batch"}}}
    with warnings.catch_warnings(action="ignore"):
        names = ["hidden", "target"]
        torch.onnx.export(module, example, str(path), input_names=names, **options, **axes)
    session = onnxruntime.InferenceSession(path)
    given = {"hidden": hidden.numpy(), "target": target.numpy()}
    (found,) = session.run(None, {each.name: given[each.name] for each in session.get_inputs()})
    torch.testing.assert_close(torch.from_numpy(found), module(hidden, target).detach())
