"""Exports of a run: what computes its probabilities without this package, or in transformers.

Without the package, a folder with the weights and trees, the tokenizer, `score.py`, a card and a
manifest: `lm/export/README.md` has the names and layouts. `score.py` is not imported here.
"""

from dataclasses import asdict
from pathlib import Path
from shutil import copyfile, rmtree
from typing import Any

import yaml

from data_prep.errors import UserError
from data_prep.storage import read_json, sha256_file, write_hashed, write_json_atomically
from data_prep.tokenizer.punctuation import marks_and_pattern
from data_prep.tokenizer.serialization import MODEL_FILE, TOKENIZER
from data_prep.tokenizer.speller import SPELLER
from lm.export.hf import check_hf, write_hf
from lm.export.onnx import check_packages, write_onnx
from lm.model.files import save_model
from lm.run import TrainedRun

SCORE, CARD, MANIFEST = "score.py", "README.md", "manifest.json"
FORMAT_VERSION = 1
USAGE = f"""```sh
python {SCORE} . < sentences.txt  # log-probabilities in nats
```"""
HF_USAGE = """```python
import lm.output.hf  # registers the type of model
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("folder")
```"""
_RECIPE = ("tokenizer", "classes", "model", "output", "word_table", "optim", "train", "seed")


def export(
    run: TrainedRun,
    folder: Path,
    *,
    bf16: bool = False,
    onnx: bool = False,
    int8: bool = False,
    hf: bool = False,
) -> None:
    """Write the folder of an exported model, which must not exist or be empty.

    Args:
        run: a run of a tree of softmaxes whose input vectors are words' or sum paths of that tree.
        folder: where to.
        bf16: whether weights are rounded to bf16, for half of the bytes.
        onnx: whether ONNX files are written too, see `lm.export.onnx`.
        int8: whether these are written with weights of 8 bits too.
        hf: whether it is a model of transformers instead, with the tokenizer and the card.

    Raises:
        UserError: if the model is of another kind, the folder has files, or a package is missing.
    """
    if onnx:
        check_packages()
    description = run.description
    if hf:
        check_hf(run)
    elif description.output.tree == "adaptive" or description.model.input_tree == "two_level":
        is_adaptive = description.output.tree == "adaptive"
        key = "output.tree: adaptive" if is_adaptive else "model.input_tree: two_level"
        raise UserError(f"{run.folder} has {key}, which {SCORE} does not compute")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists: an export is a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _write(run, folder, bf16=bf16, onnx=onnx, int8=int8, hf=hf)
    except BaseException:  # an interrupt too
        rmtree(folder, ignore_errors=True)
        raise


def _write(run: TrainedRun, folder: Path, *, bf16: bool, onnx: bool, int8: bool, hf: bool) -> None:
    """Write all files of an export."""
    description, tokenizer = run.description, run.tokenizer
    card = _card(run, HF_USAGE if hf else USAGE, bf16=bf16)
    write_hashed(folder / CARD, [card.encode()])
    for name in (TOKENIZER, MODEL_FILE[tokenizer.kind], SPELLER):
        if (run.folder / name).exists():
            copyfile(run.folder / name, folder / name)
    if hf:
        write_hf(run, folder)
        return
    copyfile(Path(__file__).parent / SCORE, folder / SCORE)
    weights = run.model.state_dict()
    if bf16:
        weights = {n: t.bfloat16() if t.is_floating_point() else t for n, t in weights.items()}
    save_model(folder, weights, description)
    _write_manifest(run, folder)
    if onnx:
        write_onnx(folder, int8=int8)
        _write_manifest(run, folder)


def _write_manifest(run: TrainedRun, folder: Path) -> None:
    """Write the checksums of all files, and what the script cannot read from them."""
    marks, pattern = marks_and_pattern()
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    content: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "leaves_out_unknown": run.is_independent,
        "marks": marks,
        "pattern": pattern,
        "heads": getattr(run.model.backbone, "heads", None),
        "files": {path.name: sha256_file(path) for path in files},
    }
    write_json_atomically(folder / MANIFEST, content)


def _card(run: TrainedRun, usage: str, *, bf16: bool) -> str:
    """What the model is, how it is used, its figures and its recipe, as Markdown."""
    description, backbone = run.description, run.description.model
    size = sum(parameter.numel() for parameter in run.model.parameters())
    about = (
        f"{backbone.backbone} {backbone.layers} × {backbone.hidden}, {run.model.vocab_size:,}"
        f" {'pieces' if run.tokenizer.kind != 'words' else 'words'}, {size:,} parameters in"
        f" {'bf16' if bf16 else description.word_table.dtype}, after {description.step:,} steps"
    )
    parts = [f"# {run.folder.resolve().name}", about, usage, "## Figures"]
    figures = {"validation perplexity": description.valid_perplexity}
    for path in sorted(run.folder.glob("evaluate-*.json")):
        values = read_json(path, dict[str, Any])
        split = path.stem.removeprefix("evaluate-")
        kinds = ("perplexity", "word_perplexity", "bits_per_byte")
        figures |= {f"{split}: {kind}": values.get(kind) for kind in kinds}
    rows = [f"| {name} | {value:.4g} |" for name, value in figures.items() if value is not None]
    parts.append("\n".join(["| figure | value |", "|---|---|", *rows]))
    if run.has_config:
        recipe = {name: value for name, value in asdict(run.config).items() if name in _RECIPE}
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        parts += ["## Recipe", f"```yaml\n{text}```"]
    return "\n\n".join(parts) + "\n"
