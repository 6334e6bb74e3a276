"""The figures of pages, drawn from logs."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from scripts.reproduction.runs import read_tables
from scripts.reproduction.tables import Row, last_rows, read_log

LAYERS = {
    "full": ("full softmax", "C3"),
    "adaptive": ("adaptive softmax", "C1"),
    "random": ("class-based softmax (ours)", "C0"),
}
"""Method in the log `output_layer` → label and color."""
TREE_TABLES = ("ptb_trees", "wikitext2_trees")
DEPTHS = ("depth 3", "depth 4", "depth 8", "branching 2")
"""Trees in the log `trees` between the full softmax and the deepest one."""


def draw_vocabularies(results: Path, path: Path) -> None:
    """Draw seconds and memory of one step of the output layer against the vocabulary size.

    Lines are forward and backward, from the log `output_layer`, with the memory of weights,
    gradients and temporaries. The dashed line is a step of our layer with row-wise gradients and
    the optimizer's update, from the log `scale`, with the memory of the whole process.
    """
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, (label, color) in LAYERS.items():
        rows = read_log(
            results, "output_layer", {"method": method, "refused": None, "dtype": "fp32"}
        )
        for row in rows:
            # Weights take as much memory as their gradients.
            row["memory"] = row["gradient_bytes"] + row["peak_bytes"]
        _line(left, rows, "vocab_size", "seconds_median", color=color, label=label)
        _line(right, rows, "vocab_size", "memory", 1e9, color=color, label=label)
    steps = read_log(results, "scale", {"method": "layer", "outcome": "done", "dtype": "fp32"})
    dashed: dict[str, Any] = {"fmt": "o--", "color": "C0", "mfc": "white"}
    dashed["label"] = "ours, with update"
    _line(left, steps, "vocab_size", "cpu_seconds", **dashed)
    _line(right, steps, "vocab_size", "peak_bytes", 1e9, **dashed)
    for axes, title in ((left, "seconds per step"), (right, "memory, GB")):
        axes.set(xscale="log", yscale="log", title=title, xlabel="words in the vocabulary, N")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(True, alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def draw_curves(name: str, results: Path, path: Path) -> None:
    """Draw validation perplexity against training time, a line for each logged run of a table."""
    table = read_tables()[name]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for run in table.runs(results):
        if run.log:
            rows = run.curve
            minutes = [row.seconds / 60 for row in rows]
            label = f"{run.row} (seed {run.seed})"
            axes.plot(minutes, [row.valid_perplexity for row in rows], "o-", label=label)
    axes.set(title=table.title, xlabel="minutes of training", ylabel="validation perplexity")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_tree_curves(results: Path, path: Path) -> None:
    """Draw validation perplexity against tokens and against time, a line for each tree.

    Tables `ptb_trees` and `wikitext2_trees`, also of runs that have not ended. The time is that of
    the training steps alone, by the log of speeds. Random classes are dashed, Huffman trees dotted.
    """
    figure = Figure(figsize=(10, 9), layout="constrained")
    for name, (left, right) in zip(TREE_TABLES, figure.subplots(2, 2, sharey="row"), strict=True):
        table = read_tables()[name]
        runs = [run for run in table.runs(results) if run.curve and run.speed]
        for number, run in enumerate(runs):
            rows = run.curve
            kind = run.row.split(",")[0].split()[0]
            color = "black" if kind == "full" else f"C{number % 10}"
            style = {"exchange": "o-", "random": "x--", "Huffman": "s:", "full": "o-"}[kind]
            figures = [row.valid_perplexity for row in rows]
            options = {"color": color, "label": run.row, "markersize": 3, "lw": 1}
            left.plot([row.tokens / 1e6 for row in rows], figures, style, **options)
            seconds = [row.tokens / run.speed["tokens_per_second"] for row in rows]
            right.plot(seconds, figures, style, **options)
        left.set(title=table.title, xlabel="million tokens", ylabel="validation perplexity")
        right.set(title="the same against time", xlabel="seconds of training", xscale="log")
        left.set_yscale("log")
        for axes in (left, right):
            axes.yaxis.set_major_formatter("{x:.0f}")
            axes.yaxis.set_minor_formatter("{x:.0f}")
            axes.grid(True, which="both", alpha=0.3)
        right.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        right.xaxis.set_major_formatter("{x:g}")
        right.xaxis.set_minor_formatter("")
        right.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def draw_trees(results: Path, path: Path) -> None:
    """Draw the time of a step against the depth of the tree, relative to two levels.

    Nodes of a tree have nearly equal numbers of children on all levels; words are sorted by
    frequency, or with dashes, shuffled.
    """
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    rows = read_log(results, "trees", {"hidden_size": 300, "role": "fit", "kind": "dense"})
    for i, size in enumerate(sorted({row["vocab_size"] for row in rows})):
        for order, style in (("clustered", "o-"), ("random", "x--")):
            names = {"full", "two_level" if order == "clustered" else "two_level, random"}
            names |= {f"{shape}, {order}" for shape in DEPTHS}
            drawn = [row for row in rows if row["vocab_size"] == size and row["tree"] in names]
            label = f"N = {size:,}" if order == "clustered" else None
            _line(axes, drawn, "depth", "ratio", fmt=style, color=f"C{i}", label=label)
    axes.set(xscale="log", yscale="log", title="CPU, one thread", xlabel="depth of the tree")
    axes.set_xticks([1, 2, 3, 4, 8, 16], minor=False)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, alpha=0.3)
    axes.legend()
    axes.set_ylabel("forward and backward ÷ two levels")
    figure.savefig(path, dpi=120)


def _line(
    axes: Axes, rows: list[Row], x: str, y: str, unit: float = 1, fmt: str = "o-", **style: Any
) -> None:
    """Draw the field `y` against `x`, of the last row for each `x`."""
    points = sorted(last_rows(rows, lambda row: row[x]).items())
    axes.plot([at for at, _ in points], [row[y] / unit for _, row in points], fmt, **style)
