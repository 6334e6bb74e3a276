"""ONNX files of an exported model, with the names that icefall and sherpa-onnx load.

- `nll.onnx`: words x [B, L] and their numbers x_lens [B] → nll [B], of each text and its `<eos>`.
- `step.onnx`, of an LSTM: words x [B, L], h0 and c0 [layers, B, H] → log_softmax [B, L, N] of the
  next words, next_h0 and next_c0.

All numbers are int64 and fp32; B and L are any. Both form the logits of all words, as `Model` of
`score.py` computes them. Of a file of more than `MAX_BYTES`, the weights are in `….onnx.data`.
"""

import importlib.util
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from runpy import run_path
from shutil import copymode
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from data_prep.errors import UserError

OPSET = 18
"""The first one with the largest of scattered values."""
MAX_BYTES = 2_000_000_000
"""Most bytes of one file: protobuf has no messages of more than 2 GiB."""


class _Nll(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, x_lens: Tensor) -> Tensor:
        end = x.new_full((x.shape[0], 1), self.model.eos_id)
        hidden, _ = self.model(torch.cat([end, x], 1).T)
        place = torch.arange(x.shape[1] + 1)
        target = torch.cat([x, end], 1).where(place < x_lens[:, None], self.model.eos_id)
        log_prob = self.model.log_prob(hidden, target.T).T
        nll: Tensor = -log_prob.where(place <= x_lens[:, None], 0.0).sum(1)
        return nll


class _Step(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, (h, c) = self.model(x.T, (h0, c0))
        return self.model.log_prob(hidden).transpose(0, 1), h, c


def check_packages() -> None:
    """Raises UserError if a package is missing."""
    if missing := [name for name in ("onnx", "onnxruntime") if not importlib.util.find_spec(name)]:
        raise UserError(f"--onnx requires {missing[0]}: pip install onnx onnxruntime")


def write_onnx(folder: Path, *, int8: bool = False) -> None:
    """Write the files of the exported model in a folder, and `….int8.onnx` if asked for."""
    model: Any = run_path(str(folder / "score.py"))["Model"](folder).eval()
    model.ids = None  # of the words, which no file has: large
    config = model.config
    known: dict[str, Any] = {"model_type": "rnnlm", "version": "1", "comment": "sqrtlm"}
    known |= {"sos_id": model.eos_id, "eos_id": model.eos_id, "vocab_size": len(model.path)}
    text, lengths = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2])
    axes = {"x": {0: "B", 1: "L"}, "x_lens": {0: "B"}, "nll": {0: "B"}}
    names = ["x", "x_lens"], ["nll"]
    paths = [_export(folder / "nll.onnx", _Nll(model), (text, lengths), names, axes, known)]
    if int8 and Path(f"{paths[0]}.data").exists():
        raise UserError("--int8: onnxruntime converts models of less than 2 GB: leave it out")
    if config["backbone"] == "lstm":
        known |= {"num_layers": config["layers"], "hidden_size": config["hidden"]}
        start = torch.zeros(config["layers"], 1, config["hidden"])
        axes = {"x": axes["x"], "log_softmax": axes["x"]}
        axes |= {name: {1: "B"} for name in ("h0", "c0", "next_h0", "next_c0")}
        names = ["x", "h0", "c0"], ["log_softmax", "next_h0", "next_c0"]
        step = _Step(model), (text, start, start), names, axes, known
        paths.append(_export(folder / "step.onnx", *step))
    for path in paths if int8 else ():
        _quantize(path)


def _export(
    path: Path,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    names: tuple[Sequence[str], Sequence[str]],
    axes: dict[str, dict[int, str]],
    known: dict[str, Any],
) -> Path:
    import onnx

    with warnings.catch_warnings():
        # By tracing: the exporter through graphs unrolls an LSTM to the length of its example.
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"input_names": names[0], "output_names": names[1]}
        options |= {"dynamic_axes": axes, "opset_version": OPSET, "dynamo": False}
        exporter: Any = torch.onnx
        exporter.register_custom_op_symbolic("aten::scatter_reduce", _largest, OPSET)
        with TemporaryDirectory(dir=path.parent) as folder:  # a large one is many files
            written = Path(folder, path.name)
            try:
                exporter.export(module, inputs, str(written), **options)
            finally:
                exporter.unregister_custom_op_symbolic("aten::scatter_reduce", OPSET)
            is_large = sum(each.stat().st_size for each in Path(folder).iterdir()) > MAX_BYTES
            model = onnx.load(written)
    for key, value in known.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, str(value)
    data = path.with_name(f"{path.name}.data")
    onnx.save(model, path, save_as_external_data=is_large, location=data.name if is_large else None)
    if is_large:
        copymode(path, data)  # which others could not read
    return path


def _largest(g: Any, top: Any, dim: Any, index: Any, rows: Any, *_: Any) -> Any:
    """The largest of scattered values; the exporter's own has a branch for scalars."""
    return g.op("ScatterElements", top, index, rows, axis_i=-1, reduction_s="max")


def _quantize(path: Path) -> None:
    """Write a file with the weights of products in 8 bits next to one."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it advises on another optimization
    try:
        quantize_dynamic(path, path.with_suffix(".int8.onnx"), weight_type=QuantType.QInt8)
    finally:
        root.setLevel(level)
