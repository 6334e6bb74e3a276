"""The figures of pages, drawn from logs."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.reproduction.runs import read_tables, validations
from scripts.reproduction.tables import Row, read_log

PARTS = ("data", "embedding", "backbone", "layer", "clipping", "optimizer", "loop")
"""Of a training step, fields of the log `step`."""
LAYERS = {
    "full": ("full softmax", "C3"),
    "adaptive": ("adaptive softmax", "C1"),
    "random": ("class-based softmax (ours)", "C0"),
}
"""Method in the log `output_layer` → label and color."""


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
        _line(left, rows, "seconds_median", color=color, label=label)
        _line(right, rows, "memory", 1e9, color=color, label=label)
    steps = read_log(results, "scale", {"method": "layer", "outcome": "done"})
    label = "ours, with update"
    _line(left, steps, "cpu_seconds", color="C0", ls="--", mfc="white", label=label)
    _line(right, steps, "peak_bytes", 1e9, color="C0", ls="--", mfc="white", label=label)
    for axes, title in ((left, "seconds per step"), (right, "memory, GB")):
        axes.set(xscale="log", yscale="log", title=title, xlabel="words in the vocabulary, N")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(True, alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def draw_steps(results: Path, path: Path) -> None:
    """Draw the parts of training steps as bars, each with the plain loop's time, from `step`."""
    rows = {(row["config"], row["tree"]): row for row in read_log(results, "step")}
    figure = Figure(figsize=(9, 1.4 + 0.6 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows.values()):
        begin = 0.0
        for number, part in enumerate(PARTS):
            width, label = 1e3 * row["seconds"] * row[part], part if place == 0 else None
            axes.barh(place, width, left=begin, color=f"C{number}", label=label)
            begin += width
        plain = 1e3 * row["seconds"] / (1 + row["overhead"])
        label = "plain loop" if place == 0 else None
        axes.plot([plain, plain], [place - 0.4, place + 0.4], color="k", label=label)
    labels = [f"{config.removesuffix('.yaml')}\n{tree.split(',')[0]}" for config, tree in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set(xlabel="milliseconds per step")
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def draw_curves(name: str, results: Path, path: Path) -> None:
    """Draw validation perplexity against training time, a line for each logged run of a table."""
    table = read_tables()[name]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for run in table.runs(results):
        if run.log:
            rows = validations(run.curve_path)
            minutes = [row.seconds / 60 for row in rows]
            label = f"{run.row} (seed {run.seed})"
            axes.plot(minutes, [row.valid_perplexity or 0 for row in rows], "o-", label=label)
    axes.set(title=table.title, xlabel="minutes of training", ylabel="validation perplexity")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _line(axes: Axes, rows: list[Row], field: str, unit: float = 1, **style: Any) -> None:
    sizes = [row["vocab_size"] for row in rows]
    axes.plot(sizes, [row[field] / unit for row in rows], marker="o", **style)
