"""Exports: the figures of `lm score`, computed without this package."""

import json
from pathlib import Path
from runpy import run_path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lm
from data_prep.errors import UserError
from data_prep.storage import sha256_file
from lm.export import export
from lm.run import TrainedRun
from tests.conftest import LETTERS, OTHER_LETTERS, PIECES_WITH_BYTES, Printed, Train, python

NEW = ["--word_table.tied=true"]  # as `lm new` writes it
NEW += ["--model={hidden: 8, layers: 1, input_embedding: path_sum, input_pieces: 12}"]
KINDS = {
    "lstm": NEW,
    "untied": ["--model.layers=2", "--model.embedding=6"],
    "path sums of their own": ["--model.input_embedding=path_sum", "--classes.shortlist=2"],
    "residual": ["--word_table.tied=true", "--model.residual=true"],
    "transformer": ["--model={backbone: transformer, hidden: 8, layers: 2, heads: 2}"],
    "projected": ["--model={backbone: transformer, hidden: 8, layers: 1, embedding: 5}"],
    "punctuation": ["--tokenizer={lowercase: true, split_punctuation: true, min_count: 2}"],
    "pieces": PIECES_WITH_BYTES,
    "huffman": ["--output.tree=huffman"],
    "bf16": ["--word_table={dtype: bf16, tied: true, optimizer: adagrad, lr: 0.1}"],
}
TEXT = [*LETTERS[:6], *OTHER_LETTERS, "ab, «Ba». ab?! (b)", "▁ab <unk>,b", "ab " * 11]


def loaded(folder: Path) -> Any:
    """The model of an exported folder, by its own script."""
    model = run_path(str(folder / "score.py"))["Model"]
    model.score.__wrapped__.__globals__["LOGITS"] = 100  # few positions at once
    return model(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_the_probabilities_of_the_model(
    kind: str, letters: Train, tmp_path: Path, printed: Printed
) -> None:
    run = letters("export", *KINDS[kind])
    folder = Path(printed("export", run, tmp_path / "export").strip())
    model, own = lm.load(run), loaded(folder)
    own.log_prob = Mock(wraps=own.log_prob)
    for line, score in zip(TEXT, model.score(TEXT), strict=True):
        found = own.score(line).double().numpy()
        assert own.encode(line) == score.tokens.id[:-1].tolist()
        np.testing.assert_allclose(found, score.tokens.log_prob, rtol=1e-5, atol=1e-6)
    at_once = max(len(call.args[0]) for call in own.log_prob.call_args_list)
    assert at_once == max(1, 100 // len(own.node_of_row))
    ids = own.encode("ab ab b ba ab b aab ab ba b")
    whole, _ = own.read(ids)
    parts, state = own.read(ids[:3])
    for id in ids[3:]:  # a token at a time, past the context of a Transformer
        hidden, state = own.read([id], state)
        parts = torch.cat([parts, hidden])
    assert own.read([], state)[0].shape == parts[:0].shape
    assert own.read([], state)[1] is state
    torch.testing.assert_close(parts, whole)
    log_prob = own.log_prob(whole[5])
    torch.testing.assert_close(log_prob, model.log_prob(ids[:5]).float(), rtol=1e-5, atol=1e-5)
    assert float(log_prob.exp().sum()) == pytest.approx(1, abs=1e-5)


def test_an_export_is_computed_where_this_package_is_absent(
    lstm_run: Path, tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any locale. The manifest has the checksums of the files; in bf16, weights take half."""
    folders = tmp_path / "fp32", tmp_path / "bf16"
    printed("export", lstm_run, folders[0])
    printed("export", lstm_run, folders[1], "--bf16")
    text = "\ufeffthe old cat sees a dog now\r\na zebra\rthe\n\n\ufeffa dog"
    lines = ["the old cat sees a dog now", "a zebra", "the", "", "a dog"]
    blocked = "import sys; sys.modules |= dict.fromkeys(['lm', 'data_prep', 'numba', 'lightning'])"
    call = "runpy.run_path('score.py', None, '__main__')"
    program = f"{blocked}; sys.argv[1:] = ['.']; import runpy; {call}"
    for name, value in (("LC_ALL", "C"), ("PYTHONCOERCECLOCALE", "0"), ("PYTHONUTF8", "0")):
        monkeypatch.setenv(name, value)
    expected = [each.log_prob.sum() for each in lm.load(lstm_run).score(lines)]
    sizes = []
    for folder, error in zip(folders, (1e-5, 0.1), strict=True):
        out = python("-c", program, input=text, cwd=folder, check=True).stdout
        np.testing.assert_allclose(np.array(out.split(), float), expected, atol=error)
        files = json.loads((folder / "manifest.json").read_text())["files"]
        sums = {path.name: sha256_file(path) for path in folder.iterdir() if path.name in files}
        assert files == sums
        assert {"score.py", "model.safetensors", "model.json", "README.md"} < files.keys()
        weights = load_file(folder / "model.safetensors").values()
        sizes.append(sum(value.nbytes for value in weights if value.is_floating_point()))
    assert sizes[1] * 2 == sizes[0]


def test_unknown_items_are_left_out(letters: Train, tmp_path: Path, printed: Printed) -> None:
    run = letters("items", "--data.sequences=independent", "--data.predict_eos=true")
    printed("export", run, tmp_path / "export")
    (score,) = lm.load(run).score(["ab x b aab"])
    found = loaded(tmp_path / "export").score("ab x b aab")
    np.testing.assert_allclose(found, score.tokens.log_prob, rtol=1e-5)


@pytest.mark.parametrize("kind", ["lstm", "transformer", "pieces", "huffman", "large"])
def test_onnx_files_have_the_probabilities_of_the_model(
    kind: str, letters: Train, tmp_path: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For texts of several lengths at once, and word by word with states; 8 bits are close."""
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    run = letters("onnx", *KINDS.get(kind, NEW))
    int8, names = ["--int8"], {"nll.onnx": 1e-4, "nll.int8.onnx": 1.0}
    if kind == "large":  # refused in 8 bits, without a folder that would have to be deleted
        monkeypatch.setattr("lm.export.onnx.MAX_BYTES", 0)
        with pytest.raises(UserError, match="--int8: onnxruntime"):
            export(TrainedRun.open(run), tmp_path / "export", onnx=True, int8=True)
        int8, names = [], {"nll.onnx": 1e-4}
    printed("export", run, tmp_path / "export", "--onnx", *int8)
    files = json.loads((tmp_path / "export/manifest.json").read_text())["files"]
    model = lm.load(run)

    def session(name: str) -> Any:
        assert files[name] == sha256_file(tmp_path / "export" / name)
        return onnxruntime.InferenceSession(tmp_path / "export" / name)

    scores = model.score(TEXT)
    ids = [score.tokens.id[:-1] for score in scores]
    lengths = np.array(list(map(len, ids)))
    x = np.zeros((len(ids), lengths.max()), np.int64)
    for row, line in zip(x, ids, strict=True):
        row[: len(line)] = line
    expected = [-score.tokens.log_prob.sum() for score in scores]
    for name, error in names.items():
        assert (f"{name}.data" in files) == (kind == "large")
        empty = {"x": x[:1, :0], "x_lens": np.zeros(1, np.int64)}
        (nll,) = session(name).run(["nll"], empty)
        np.testing.assert_allclose(nll, -float(model.log_prob()[model.eos_id]), atol=error)
        (nll,) = session(name).run(["nll"], {"x": x, "x_lens": lengths})
        np.testing.assert_allclose(nll, expected, atol=error)
    if kind == "transformer":
        assert "step.onnx" not in files
        return
    step, state = session("step.onnx"), model.start()
    meta = step.get_modelmeta().custom_metadata_map
    assert int(meta["sos_id"]) == model.eos_id
    h = c = np.zeros((int(meta["num_layers"]), 2, int(meta["hidden_size"])), np.float32)
    for id in [model.eos_id, *ids[0]]:
        outputs = ["log_softmax", "next_h0", "next_c0"]
        log_softmax, h, c = step.run(outputs, {"x": np.full((2, 1), id), "h0": h, "c0": c})
        state = model.start() if id == model.eos_id else model.step(state, id).state
        for row in log_softmax[:, 0]:
            np.testing.assert_allclose(row, model.log_prob(state), atol=1e-4)


@pytest.mark.filterwarnings("default")  # transformers has some
@pytest.mark.parametrize("kind", ["transformer", "projected", "summed", "classes as input"])
def test_a_transformer_is_one_of_transformers(
    kind: str, letters: Train, tmp_path: Path, printed: Printed
) -> None:
    """Past its context; `generate` has the most probable words; other classes refuse the folder."""
    transformers = pytest.importorskip("transformers")
    options = [*NEW, "--model.backbone=transformer", "--model.heads=2"]
    if kind == "classes as input":
        options += ["--model.input_tree=two_level", "--output.tree=full", "--word_table.tied=false"]
    run = letters("hf", *KINDS.get(kind, options))
    printed("export", run, tmp_path / "hf", "--hf")
    model, own = lm.load(run), transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = model.encode("ab ab b ba ab b aab ab ba b")
    words = torch.tensor([[model.eos_id, *ids]])
    log_prob = own(words).logits[0]
    for t in (0, 3, len(ids)):
        expected = model.log_prob(ids[:t])
        torch.testing.assert_close(log_prob[t], expected, rtol=1e-4, atol=1e-5)
    found = own.generate(words, max_new_tokens=1, do_sample=False)[0, -1]
    assert int(found) == int(expected.argmax())
    assert (tmp_path / "hf" / "vocab.txt").read_bytes() == (run / "vocab.txt").read_bytes()
    assert len({path.stat().st_mode for path in (tmp_path / "hf").iterdir()}) == 1
