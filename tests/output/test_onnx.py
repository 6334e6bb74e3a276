"""The layer in a user's module that is exported to ONNX: ordinary operations, any batch."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lm.output import ClassTree, HierarchicalSoftmax

TREES = {
    "two levels": ClassTree.two_level(torch.arange(30) % 4, shortlist=3),
    "huffman": ClassTree.huffman(torch.arange(1, 31)),
    "full": ClassTree.full(30),
}
CALLS: dict[str, Any] = {
    "none": lambda layer, h, t: layer.loss(h, t, "none"),
    "mean": lambda layer, h, t: layer.loss(h, t),
    "log_prob": lambda layer, h, t: layer.log_prob(h) + 0 * t[:, None],
    "candidates": lambda layer, h, t: layer.candidate_log_prob(h, t.clamp(min=0)[:, None] // 2),
}


class Module(nn.Module):
    """A user's module."""

    def __init__(self, tree: ClassTree, call: str) -> None:
        super().__init__()
        self.linear, self.layer, self.call = nn.Linear(5, 6), HierarchicalSoftmax(6, tree), call

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        found: Tensor = CALLS[self.call](self.layer, self.linear(x), target)
        return found


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("tree", "dynamo"), [*((tree, False) for tree in TREES), ("two levels", True)]
)
def test_exported_functions_are_those_of_the_layer(
    tree: str, call: str, dynamo: bool, tmp_path: Path
) -> None:
    for package in ("onnx", "onnxscript") if dynamo else ("onnx",):
        pytest.importorskip(package)
    onnxruntime = pytest.importorskip("onnxruntime")
    module, path = Module(TREES[tree], call).eval(), tmp_path / "module.onnx"
    names: dict[str, Any] = {"input_names": ["x", "target"], "dynamo": dynamo, "opset_version": 18}
    batch = torch.export.Dim("batch")
    axes: dict[str, Any] = {"dynamic_shapes": ({0: batch}, {0: batch})}
    if not dynamo:
        axes = {"dynamic_axes": {"x": {0: "batch"}, "target": {0: "batch"}}}
    inputs = torch.randn(4, 5), torch.randint(30, (4,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, inputs, str(path), verbose=False, **names, **axes)
    x, target = torch.randn(9, 5), torch.randint(30, (9,))
    target[3] = -100
    session = onnxruntime.InferenceSession(path)
    (found,) = session.run(None, {"x": x.numpy(), "target": target.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(x, target).detach())
