"""Markdown tables of training runs: each table of tables.yaml, and those that combine several."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.reproduction import markdown
from scripts.reproduction.benchmark_tables import relative_speed
from scripts.reproduction.runs import Run, Table

OVERVIEW = {
    "corpus, model": "{corpus}",
    "output layer": "{row}",
    "test perplexity": "{perplexity}",
    "relative tokens/s": "{speed}",
}
SUMMARY = {
    "corpus, model": "{corpus}",
    "published": "{published}",
    "output layer": "{row}",
    "training tokens": "{tokens:.1f}M",
    "test perplexity": "{perplexity}",
    "relative tokens/s": "{speed}",
}
"""Title of a column → format of the cell."""


def table_of_runs(table: Table, runs: Sequence[Run]) -> str:
    """The rows that have logs: means over seeds, and the first figure for each seed."""
    titles = [name.replace("_", " ").replace("oov", "OOV") for name in table.figures]
    header = ["model", *titles, f"{titles[0]} by seed"]
    rows = []
    for row in dict.fromkeys(run.row for run in runs):
        logs = [run.read_log() for run in runs if run.row == row and run.done]
        if logs:
            means = [statistics.fmean(_figure(log, name) for log in logs) for name in table.figures]
            by_seed = ", ".join(
                f"{log['seed']}: {markdown.short(_figure(log, table.figures[0]))}" for log in logs
            )
            rows.append([row, *map(markdown.short, means), by_seed])
    return markdown.table(header, rows)


def overview(tables: Iterable[Table], results: Path) -> str:
    """The rows that tables.yaml lists under `overview`."""
    found = [row for table in tables for row in _comparisons(table, table.overview, results)]
    return markdown.format_rows(OVERVIEW, found)


def summary(tables: Iterable[Table], results: Path) -> str:
    """The rows that tables.yaml lists under `summary`, with published figures."""
    found = [row for table in tables for row in _comparisons(table, table.summary, results)]
    return markdown.format_rows(SUMMARY, found)


def _comparisons(table: Table, rows: Iterable[str], results: Path) -> list[dict[str, Any]]:
    """Training tokens, word perplexity and speed relative to the table's full softmax."""
    full = next((layer for layer in table.summary.values() if layer and "full" in layer), None)
    found: list[dict[str, Any]] = []
    for row in rows:
        if logs := [run.read_log() for run in table.runs(results, [row]) if run.done]:
            perplexity = statistics.fmean(log["test"]["word_perplexity"] for log in logs)
            recipe = Path(table.rows[row][0]).name
            figures = {
                "corpus": "" if found else table.title,
                "published": "" if found else table.published,
                "row": row,
                "tokens": logs[0]["tokens"] / 1e6,
                "perplexity": markdown.short(perplexity),
                "speed": relative_speed(results, recipe, table.summary[row], full),
            }
            found.append(figures)
    return found


def _figure(log: dict[str, Any], name: str) -> float:
    """A figure of the test split, or the minutes of training."""
    return float(log["seconds"] / 60 if name == "minutes" else log["test"][name])
