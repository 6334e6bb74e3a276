"""`lm classes`: a report on the word classes or the tree, as text or JSON."""

import argparse
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from data_prep.errors import UserError
from lm.commands.arguments import COUNT, JSON, SOURCE, Options
from lm.run import Run

if TYPE_CHECKING:
    from data_prep.classes.report import ClassReport

HELP = "report on the word classes or the tree"
_SHOWN: Options = {
    "--words": COUNT | {"default": 8, "help": "number of words to show per class (default 8)"},
    "--nodes": COUNT | {"default": 60, "help": "number of nodes of a tree to show (default 60)"},
}
OPTIONS = SOURCE | _SHOWN | JSON


def run(options: argparse.Namespace) -> None:
    """Print the report."""
    run = Run.read(options.source, options.overrides)
    if run.config.needed_classes is None and run.config.output.tree in ("full", "adaptive"):
        raise UserError(f"output.tree: {run.config.output.tree} has no word classes to report on")
    run.check_classes()
    if run.config.needed_classes is not None and run.config.output.tree != "multi_level":
        _report_classes(run, options)
    else:
        _report_tree(run, options)


def _report_tree(run: Run, options: argparse.Namespace) -> None:
    import torch

    from lm.tree_report import tree_report

    tree, counts = run.tree, torch.tensor(run.prepared.counts())
    assert tree is not None
    report = tree_report(tree, counts, num_nodes=options.nodes, num_top_words=options.words)
    token = run.prepared.tokenizer().token
    values = asdict(report)
    for node in values["nodes"]:
        node["top_words"] = list(map(token, node["top_words"]))
    print(json.dumps(values, ensure_ascii=False) if options.json else _tree_lines(values))


def _tree_lines(report: dict[str, Any]) -> str:
    """Lines of text: the levels, then the heaviest nodes below their parents."""
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
        words = " ".join(node["top_words"])
        indent = "  " * node["level"]
        lines.append(f"{100 * node['token_mass']:6.2f} {node['words']:9,d}  {indent}{words}")
    shown = len(report["nodes"])
    if shown < report["num_nodes"]:
        lines.append(f"({report['num_nodes'] - shown:,} further nodes: --nodes)")
    return "\n".join(lines)


def _report_classes(run: Run, options: argparse.Namespace) -> None:
    from data_prep.classes.report import class_report

    prepared = run.prepared
    report = class_report(
        prepared.counts(),
        prepared.word_class(),
        prepared.tokens("train"),
        shortlist=prepared.shortlist,
        num_top_words=options.words,
    )
    token = prepared.tokenizer().token
    top_words = [list(map(token, words)) for words in report.top_words]
    if options.json:
        print(json.dumps(asdict(report) | {"top_words": top_words}, ensure_ascii=False))
    else:
        print(_table(report, top_words, prepared.vocab_size))


def _table(report: "ClassReport", top_words: list[list[str]], vocab_size: int) -> str:
    """Lines of text, the classes in decreasing order of token mass."""
    summary = [
        f"{report.num_word_classes:,} classes of {report.min_words:,} to {report.max_words:,}"
        f" words, median {report.median_words:g};"
        f" shortlist of {report.shortlist:,} words with {100 * report.shortlist_mass:.1f} % of the"
        " tokens",
        f"columns per token   {report.columns_per_token:.1f} of {vocab_size:,}",
        f"bigram likelihood   {report.log_likelihood:.4f} nats per token "
        f"(perplexity {math.exp(-report.log_likelihood):.1f})",
        f"entropy             class {report.class_entropy:.3f} bits,"
        f" word in class {report.word_entropy:.3f} bits",
        "",
        "class   words   mass %  top words",
    ]
    heaviest = sorted(range(report.num_word_classes), key=lambda c: -report.token_mass[c])
    rows = [
        f"{c:5d} {report.sizes[c]:7,d} {100 * report.token_mass[c]:8.3f}  " + " ".join(top_words[c])
        for c in heaviest
    ]
    return "\n".join(summary + rows)
