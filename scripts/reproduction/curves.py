"""Validation perplexity against training time, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from scripts.reproduction.runs import Run, validations

SUFFIXES = (".png", ".svg", ".pdf")


def draw_curves(title: str, runs: Sequence[Run], path: Path) -> None:
    """Draw a line for each run of a table that has a log; the file has one of `SUFFIXES`."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        if run.done:
            rows = validations(run.curve_path)
            minutes = [row.seconds / 60 for row in rows]
            label = f"{run.row} (seed {run.seed})"
            axes.plot(minutes, [row.valid_perplexity or 0 for row in rows], "o-", label=label)
    axes.set(title=title, xlabel="minutes of training", ylabel="validation perplexity")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
