"""`lm classes`: a report on the word classes, as the nodes of a tree, as text or JSON."""

import argparse
import json
from typing import Any

from data_prep.errors import UserError
from data_prep.sequences import word_item
from lm.commands.arguments import COUNT, JSON, SOURCE, Options
from lm.run import Run

HELP = "report on the word classes or the tree"
_SHOWN: Options = {
    "--words": COUNT | {"default": 8, "help": "number of words to show per class (default 8)"},
    "--nodes": COUNT | {"default": 60, "help": "number of classes to show (default 60)"},
}
OPTIONS = SOURCE | _SHOWN | JSON


def run(options: argparse.Namespace) -> None:
    """Print the report on the tree of the output layer, or else on that of the input vectors."""
    run = Run.read(options.source, options.overrides)
    has_none = run.config.output.tree in ("full", "adaptive")
    if run.config.needed_classes is None and has_none:
        raise UserError(f"output.tree: {run.config.output.tree} has no word classes to report on")
    run.check_classes()
    import torch

    from lm.commands.tree_report import tree_report

    tree, counts = run.input_tree if has_none else run.tree, torch.tensor(run.prepared.counts())
    assert tree is not None
    report = tree_report(tree, counts, num_nodes=options.nodes, num_top_words=options.words)
    token, are_items = run.prepared.tokenizer.token, run.config.data.user_field is not None
    for node in report["nodes"]:
        words = list(map(token, node["top_words"]))
        node["top_words"] = list(map(word_item, words)) if are_items else words
    print(json.dumps(report, ensure_ascii=False) if options.json else _lines(report))


def _lines(report: dict[str, Any]) -> str:
    """Lines of text: the levels, then the heaviest nodes below their parents.

    Items with spaces are in quotation marks.
    """
    lines = [
        f"{report['num_nodes']:,} nodes, depth {report['depth']}",
        f"nodes per token     {report['visits_per_token']:.2f}",
        f"columns per token   {report['columns_per_token']:.1f} of {report['vocab_size']:,}",
        "",
        "level     nodes     words  children: min  median     max  visits/token  columns/token",
    ]
    for number, level in enumerate(report["levels"]):
        lines.append(
            f"{number:5d} {level['num_nodes']:9,d} {level['num_words']:9,d} "
            f"{level['min_children']:14,d} {level['median_children']:7g} "
            f"{level['max_children']:7,d} {level['visits_per_token']:13.3f} "
            f"{level['columns_per_token']:14.1f}"
        )
    lines += ["", "mass %     words  top words"]
    for node in report["nodes"]:
        names = node["top_words"]
        words = " ".join(json.dumps(n, ensure_ascii=False) if " " in n else n for n in names)
        indent = "  " * node["level"]
        lines.append(f"{100 * node['token_mass']:6.2f} {node['words']:9,d}  {indent}{words}")
    shown = len(report["nodes"])
    if shown < report["num_nodes"]:
        lines.append(f"({report['num_nodes'] - shown:,} further nodes: --nodes)")
    return "\n".join(lines)
