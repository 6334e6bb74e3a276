"""`lm report`: one HTML page about a trained run, which needs no other file."""

import argparse
import base64
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from data_prep.storage import read_json, write_hashed
from lm.commands.arguments import COMPUTING, COUNT, RUN, Options, open_run
from lm.run import TrainedRun
from lm.training.metrics import read_metrics

HELP = "one HTML page about a trained model"
OPTIONS: Options = (
    RUN
    | {
        "--output": {"metavar": "FILE", "help": "default: report.html in the folder of the run"},
        "--samples": COUNT | {"default": 5, "help": "number of texts to generate (default 5)"},
    }
    | COMPUTING
)
NUM_TOKENS = 50_000
"""Tokens of the held-out text that the losses by frequency and position are measured on."""
POSITIONS = (1, 2, 3, 5, 9, 17, 33, 65)
"""First positions of bins, from 1."""
NUM_CLASSES = 40
FIGURES = ("tokens", "perplexity", "word_perplexity", "bits_per_byte", "hit_rate", "ndcg")
"""What the page has of the figures of `lm evaluate`."""
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #bbb }
table { border-collapse: collapse; display: block; overflow-x: auto; margin-bottom: 1rem }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }
td.n { text-align: right } img { max-width: 100% } .bar { background: #4878b0; height: .7rem }
pre { background: #f4f4f4; padding: .8rem; white-space: pre-wrap }
"""


def run(options: argparse.Namespace) -> None:
    """Write the page; print its path."""
    run = open_run(options)
    path = Path(options.output or run.folder / "report.html")
    write_hashed(path, [_page(run, options.samples).encode()])
    print(path)


def _page(run: TrainedRun, num_samples: int) -> str:
    name = escape(run.folder.resolve().name)
    parts = [f"<h1>{name}</h1><p>{escape(_about(run))}</p>"]
    has_data = run.has_config and run.config.prepared_path.exists()
    sections = {
        "Training": _training(run),
        "Figures": _figures(run),
        "Where the loss is": _losses(run) if has_data and not run.is_independent else [],
        "Classes": _classes(run) if has_data else [],
        "Samples": [] if run.is_independent else _samples(run, num_samples),
        "Settings": _settings(run),
    }
    for title, section in sections.items():
        if section:
            parts += [f"<h2>{title}</h2>", *section]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{name}</title><style>{STYLE}</style>"
    return f"<!DOCTYPE html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _about(run: TrainedRun) -> str:
    network, size = run.description.model, sum(run.model.num_parameters().values())
    words = f"{run.model.vocab_size:,} {'items' if run.is_independent else run.tokenizer.kind}"
    sizes = f"{network.layers} × {network.hidden}, {words}, {size:,} parameters"
    return f"{network.backbone}, {sizes}, step {run.description.step:,}"


def _table(head: list[str], rows: list[list[Any]]) -> str:
    """A table; numbers are aligned to the right."""
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}' for cell in head)}"] if head else []
    for row in rows:
        cells = [f"<td>{x}" if isinstance(x, str) else f"<td class=n>{_number(x)}" for x in row]
        lines.append(f"<tr>{''.join(cells)}")
    return f"<table>{''.join(lines)}</table>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4f}"


def _training(run: TrainedRun) -> list[str]:
    """The curves, and what training took."""
    parts, path = [], run.folder / "curves.png"
    if path.exists():
        image = base64.b64encode(path.read_bytes()).decode()
        parts.append(f'<img alt="perplexity by step" src="data:image/png;base64,{image}">')
    rows = list[list[Any]]()
    if lines := read_metrics(run.folder / "metrics.csv"):
        names = ("step", "epoch", "tokens", "seconds", "train_perplexity")
        rows += [[name.replace("_", " "), getattr(lines[-1], name)] for name in names]
        rows.append(["tokens per second", rows[2][1] / max(rows[3][1], 1e-9)])
    if (path := run.folder / "env.json").exists():
        values = read_json(path, dict[str, Any])
        rows += [[escape(str(key)), escape(str(value))] for key, value in values.items()]
    return [*parts, _table([], rows)] if rows else parts


def _figures(run: TrainedRun) -> list[str]:
    """The figures of `lm evaluate` that have been written, and the validation's."""
    rows: list[list[Any]] = []
    for name in ("valid_perplexity", "valid_ndcg"):
        if (value := getattr(run.description, name)) is not None:
            rows.append(["validation", name.removeprefix("valid_"), value])
    for path in sorted(run.folder.glob("evaluate-*.json")):
        values = read_json(path, dict[str, Any])
        values |= (values.get("model") or {}).get("at", [{}])[0]
        for name in FIGURES:
            if isinstance(values.get(name), int | float):
                rows.append([escape(path.stem.removeprefix("evaluate-")), name, values[name]])
    return [_table(["text", "figure", "value"], rows)] if rows else []


def _losses(run: TrainedRun) -> list[str]:
    """The loss by frequency rank of the word and by position in the line, of a held-out text."""
    import numpy as np

    from lm.evaluation import token_nats
    from lm.figures import perplexity
    from lm.scoring.frequency import frequency_report

    split = next((each for each in ("test", "valid") if each in run.prepared.splits), None)
    if split is None:
        return []
    tokens = run.prepared.tokens(split)[:NUM_TOKENS]
    nats = token_nats(run, tokens)
    rows: list[list[Any]] = [
        [f"{each.first_rank:,} … {each.last_rank:,}", each.tokens, each.nll_nats]
        for each in frequency_report(run.prepared, tokens, nats).target
    ]
    is_end = tokens == run.description.eos_id
    ends = np.append(-1, np.flatnonzero(is_end))
    place = np.arange(len(tokens)) - ends[np.cumsum(is_end) - is_end]
    number, places = np.digitize(place, POSITIONS), list[list[Any]]()
    for k, (low, high) in enumerate(pairwise([*POSITIONS, None]), 1):
        shown = f"from {low}" if high is None else f"{low} … {high - 1}".removesuffix(f" … {low}")
        chosen = nats[number == k]
        places.append([shown, len(chosen), float(chosen.sum())])
    parts = [f"<p>{len(tokens):,} tokens of {split}.</p>"]
    for title, bins in (("rank in the training text", rows), ("position in the line", places)):
        found = [[name, size, perplexity(sums, size)] for name, size, sums in bins if size]
        parts.append(_table([title, "tokens", "perplexity"], found))
    return parts


def _classes(run: TrainedRun) -> list[str]:
    """The heaviest nodes of the tree, with their most frequent words."""
    tree = getattr(run.model.output, "tree", None)
    if tree is None or tree.depth == 1:
        return []
    import torch

    from lm.commands.tree_report import tree_report
    from lm.generation.items import Catalogue

    counts = torch.tensor(run.prepared.counts())
    report = tree_report(tree, counts, num_nodes=NUM_CLASSES + 1, num_top_words=12)
    rows = []
    for node in report["nodes"][1:]:
        words = map(Catalogue(run).item, node["top_words"])
        share = 100 * node["token_mass"]
        bar = f'<div class=bar style="width:{max(1, round(20 * share))}px"></div>'
        rows.append([bar, f"{share:.2f}&nbsp;%", node["words"], escape(" · ".join(words))])
    about = f"{report['num_nodes']:,} softmaxes, {report['columns_per_token']:.0f} scores a token"
    return [f"<p>{about}.</p>", _table(["tokens", "", "words", "most frequent"], rows)]


def _samples(run: TrainedRun, number: int) -> list[str]:
    from lm.generation import Sampling, generate_text

    sampling = Sampling(temperature=0.8)
    (texts,) = generate_text(run, [""], num_tokens=40, num_samples=number, sampling=sampling)
    return [f"<pre>{escape(each.text)}</pre>" for each in texts]


def _settings(run: TrainedRun) -> list[str]:
    from lm.config.load import to_yaml

    return [f"<pre>{escape(to_yaml(run.config))}</pre>"] if run.has_config else []
