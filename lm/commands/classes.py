"""`lm classes`: a report on the word classes or the tree, as text, JSON and a picture."""

import argparse
import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.errors import UserError
from data_prep.storage import write_atomically
from lm.commands.arguments import COUNT, JSON, PLOT, SOURCE, Options, check_picture
from lm.run import Run
from lm.tree_picture import draw_tree, fonts_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from data_prep.classes.report import ClassReport

HELP = "report on the word classes or the tree"
_SHOWN: Options = {
    "--words": COUNT | {"default": 8, "help": "number of words to show per class (default 8)"},
    "--nodes": COUNT | {"default": 60, "help": "number of nodes of a tree to show (default 60)"},
    "--plot": PLOT | {"help": "also draw the classes"},
}
OPTIONS = SOURCE | _SHOWN | JSON
_log = logging.getLogger(__name__)
LABELLED_CLASSES = 25  # in the picture: those with the most tokens


def run(options: argparse.Namespace) -> None:
    """Print the report, and draw it if asked to."""
    run = Run.read(options.source, options.overrides)
    if run.config.needed_classes is None and run.config.output.tree in ("full", "adaptive"):
        raise UserError(f"output.tree: {run.config.output.tree} has no word classes to report on")
    run.check_classes()
    if options.plot:
        check_picture(options.plot)
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
    token = _name(run)
    if options.plot:
        draw_tree(tree, counts, token, options.plot)
    values = asdict(report)
    for node in values["nodes"]:
        node["top_words"] = list(map(token, node["top_words"]))
    print(json.dumps(values, ensure_ascii=False) if options.json else _tree_lines(values))


def _name(run: Run) -> Callable[[int], str]:
    """The word of an id; an item of a table as it is there, in quotation marks if it has spaces."""
    token = run.prepared.tokenizer().token
    if run.config.data.user_field is None:
        return token

    from data_prep.corpus.events import word_item  # imports pyarrow

    def item(id: int) -> str:
        found = word_item(token(id))
        return json.dumps(found, ensure_ascii=False) if " " in found else found

    return item


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
    top_words = [list(map(_name(run), words)) for words in report.top_words]
    if options.plot:
        _draw(report, top_words, options.plot)
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


def _label(axes: "Axes", classes: list[int], top_words: list[list[str]]) -> None:
    """Label bars by the words of their classes, or by its number if no font has a word."""
    labels = [" ".join(top_words[c][:5]) for c in classes]
    families, missing = fonts_of("".join(labels))
    if missing:
        letters = "".join(sorted(missing)[:5])
        _log.warning("the picture has numbers of classes: no installed font has %s", ascii(letters))
        labels = [
            f"class {c}" if missing & set(label) else label
            for c, label in zip(classes, labels, strict=True)
        ]
    ticks = range(len(labels))
    axes.set_yticks(ticks, labels, fontsize=8, fontfamily=families or None, parse_math=False)


def _draw(report: "ClassReport", top_words: list[list[str]], path: Path) -> None:
    """Draw the top words of classes, their sizes and token masses, and their cumulated cost."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, MaxNLocator

    sizes, mass = np.array(report.sizes), np.array(report.token_mass)
    heaviest = np.argsort(-mass, kind="stable")
    figure = Figure(figsize=(13, 7), layout="constrained")
    bars, cloud, curve = figure.subplot_mosaic([["bars", "cloud"], ["bars", "curve"]]).values()
    shown = heaviest[:LABELLED_CLASSES]
    bars.barh(range(len(shown)), 100 * mass[shown])
    _label(bars, shown.tolist(), top_words)
    bars.invert_yaxis()
    bars.set(xlabel="% of the tokens", title="classes with the most tokens")
    cloud.scatter(sizes, 100 * mass, s=12, alpha=0.6)
    cloud.set(xlabel="words in the class", ylabel="% of the tokens", title="all classes")
    if mass.min() > 0:
        cloud.set_yscale("log")
        cloud.yaxis.set_major_formatter(LogFormatter())
        cloud.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
    in_shortlist = f", {100 * report.shortlist_mass:.0f} % are in the shortlist"
    tokens = f"tokens{in_shortlist * (report.shortlist > 0)}"
    rank = np.arange(1, len(mass) + 1)
    curve.plot(rank, 100 * mass[heaviest].cumsum(), label=tokens)
    cost = (mass * sizes)[heaviest].cumsum()
    curve.plot(rank, 100 * cost / cost[-1], label="columns within classes")
    curve.set(
        xlabel="classes by token mass", ylabel="% of the total", title="cumulated tokens and cost"
    )
    curve.legend()
    for axes in (cloud, curve):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (bars, cloud, curve):
        axes.grid(True, alpha=0.3)
    shortlist = f", shortlist of {report.shortlist:,} words" if report.shortlist else ""
    figure.suptitle(
        f"{report.num_word_classes:,} classes{shortlist}, {report.columns_per_token:,.0f} columns"
        f" per token, {report.class_entropy:.2f} bits for the class + {report.word_entropy:.2f} for"
        " the word"
    )
    name = path.suffix[1:].lower()
    write_atomically(path, lambda file: figure.savefig(file, format=name, dpi=120), shared=True)
