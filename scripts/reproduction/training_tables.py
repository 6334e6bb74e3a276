"""Markdown tables of training runs: each table of tables.yaml, and those that combine several."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.reproduction import markdown
from scripts.reproduction.benchmark_tables import relative_speed
from scripts.reproduction.runs import Run, Table, validations

SINGLE_RUNS = {
    "Penn Treebank, LSTM 2 × 200, fp32, full softmax": "ptb_lstm_small-full.test.json",
    "the same, embedding classes, shortlist of 300": "ptb_lstm_small.test.json",
    "the same, embedding classes, no shortlist": "ptb_lstm_small-no_shortlist.test.json",
    "WikiText-2, 8,000 SentencePiece units, Transformer 4 × 256, two epochs": (
        "wikitext2_transformer_sentencepiece.test.json"
    ),
    "WikiText-2, exchange classes made for all words, word input": "wikitext2_lstm-word_input.json",
    "Hungarian novels, exchange classes made for all words, word input": (
        "eltec_hun_lstm-word_input.json"
    ),
}
"""Logs of runs that belong to no table, by their row in `single_runs`."""


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


def summary(tables: dict[str, Table], results: Path) -> str:
    """The rows that tables.yaml lists under `summary`, with published figures."""
    rows = []
    for table in tables.values():
        corpus = [table.title, table.published]
        for comparison in _comparisons(table, list(table.summary), results):
            rows.append([*corpus, *comparison])
            corpus = ["", ""]
    header = ["corpus, model", "published", "output layer", "training tokens", "test perplexity"]
    return markdown.table([*header, "relative tokens/s"], rows)


def overview(tables: dict[str, Table], results: Path) -> str:
    """The rows that tables.yaml lists under `overview`."""
    rows = []
    for table in tables.values():
        corpus = table.title
        for row, _, perplexity, speed in _comparisons(table, table.overview, results):
            rows.append([corpus, row, perplexity, speed])
            corpus = ""
    header = ["corpus, model", "output layer", "test perplexity", "relative tokens/s"]
    return markdown.table(header, rows)


def validation_curves(table: Table, results: Path) -> str:
    """Validation perplexity after each epoch, first seed of every row that has a curve."""
    curves = {
        run.row: [metrics.valid_perplexity or 0 for metrics in validations(run.curve_path)]
        for run in table.runs(results, seeds=table.seeds[:1])
        if run.curve_path.exists()
    }
    num_epochs = max(map(len, curves.values()))
    rows = [
        [row, *(f"{x:.1f}" for x in curve), *["–"] * (num_epochs - len(curve))]
        for row, curve in curves.items()
    ]
    return markdown.table(["epoch", *(str(epoch + 1) for epoch in range(num_epochs))], rows)


def single_runs(results: Path) -> str:
    """Runs that belong to no table."""
    rows = []
    for label, name in SINGLE_RUNS.items():
        log = json.loads((results / name).read_text(encoding="utf-8"))
        test = log.get("test", log)
        figures = f"{test['perplexity']:.2f}", f"{test['word_perplexity']:.2f}"
        rows.append([label, f"{test['tokens']:,}", *figures, f"{test['bits_per_byte']:.3f}"])
    header = ["run", "test tokens", "token perplexity", "word perplexity", "bits per byte"]
    return markdown.table(header, rows)


def _comparisons(table: Table, rows: Sequence[str], results: Path) -> list[list[str]]:
    """Row, training tokens, word perplexity, speed relative to the table's full softmax."""
    full = next((layer for layer in table.summary.values() if layer and "full" in layer), None)
    found = []
    for row in rows:
        if logs := table.logs(results, row):
            perplexity = statistics.fmean(log["test"]["word_perplexity"] for log in logs)
            speed = relative_speed(results, Path(table.rows[row][0]).name, table.summary[row], full)
            tokens = f"{logs[0]['tokens'] / 1e6:.1f}M"
            found.append([row, tokens, markdown.short(perplexity), speed])
    return found


def _figure(log: dict[str, Any], name: str) -> float:
    """A figure of the test split, or the minutes of training."""
    return float(log["seconds"] / 60 if name == "minutes" else log["test"][name])
