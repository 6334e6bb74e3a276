"""The figure of README.md, drawn from logs."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.reproduction.tables import Row, last_rows, read_log

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


def _line(
    axes: Axes, rows: list[Row], x: str, y: str, unit: float = 1, fmt: str = "o-", **style: Any
) -> None:
    """Draw the field `y` against `x`, of the last row for each `x`."""
    points = sorted(last_rows(rows, lambda row: row[x]).items())
    axes.plot([at for at, _ in points], [row[y] / unit for _, row in points], fmt, **style)
