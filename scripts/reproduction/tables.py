"""The tables of results, made from logs of benchmarks and of training runs."""

import json
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from scripts.reproduction import markdown
from scripts.reproduction.runs import Run, RunTable, read_logs, read_tables

Row = dict[str, Any]
Key = TypeVar("Key", bound=Hashable)
LOG_TABLES = Path(__file__).with_name("log_tables.yaml")
SEARCHES = ("", "_ptb_650", "_wikitext2", "_hungarian", "_hungarian_all_words")
"""Ends of the names of the declared comparisons, of Penn Treebank first: see `declaration`."""
SUMMARY = {
    "corpus, model": "{corpus}",
    "published": "{published}",
    "output layer": "{row}",
    "training tokens": "{tokens:.1f/1e6}M",
    "test perplexity": "{perplexity:.2f}",
    "relative tokens/s": "{ratio:.2f}",
}
COMPARISONS = {
    "text, model": "{title}",
    "training tokens": "{tokens:.1f/1e6}M",
    "seeds": "{seeds}",
    "full softmax": "{full:.1f}",
    "classes": "{classes:.1f}",
    "full, path sums": "{full_path_sum:.1f}",
    "classes, path sums": "{classes_path_sum:.1f}",
    "adaptive": "{adaptive:.1f}",
    "sampled": "{sampled:.1f}",
    "5-gram": "{ngrams:.1f}",
}
VOCABULARIES = {
    "N": "{words:,}",
    "text": "{text}",
    "full, tokens/s": "{full_tokens_per_second:,.0f}",
    "classes, tokens/s": "{tokens_per_second_median:,.0f}",
    "÷ full softmax": "{ratio:.1f}",
    "÷ adaptive softmax": "{ratio_to_adaptive:.2g}",
    "full, perplexity": "{full_perplexity:.1f}",
    "classes, perplexity": "{perplexity:.1f}",
}
"""Title of a column → template of its cells."""
GPU_COLUMNS = {
    "graph": "ours, CUDA graph",
    "full": "full softmax, torch",
    "cce": "cut-cross-entropy",
    "liger": "Liger",
    "published": "full softmax, fastest published",
    "floor": "floor",
    "random": "ours, eager",
    "adaptive": "adaptive softmax",
    "grouped": "`grouped_mm`",
}
"""Methods in the logs of GPUs → titles of columns."""
PUBLISHED_FLOPS = 745e12
"""Operations per second, six for each position, feature and word, published for QuACK 0.6 and
Liger's kernels for sm_90 on Hopper: the fastest full softmax."""


def generate_tables(results: Path) -> dict[str, str]:
    """All tables of results by name, from the logs in the folder `results`."""
    tables = read_tables()
    generated = {name: table_of_runs(each, each.runs(results)) for name, each in tables.items()}
    for name, layout in yaml.safe_load(LOG_TABLES.read_text(encoding="utf-8")).items():
        generated[name] = table_of_log(results, **{"log": name, **layout})
    summary = [r for t in tables.values() for r in relative_to_full(t, t.summary, results)]
    generated["summary"] = markdown.table_of_rows(SUMMARY, summary)
    generated["comparisons"] = markdown.table_of_rows(COMPARISONS, comparisons(results))
    generated["gpu_layer"] = gpu_layer(results)
    generated["vocabularies"] = markdown.table_of_rows(VOCABULARIES, vocabularies(results))
    return generated


def read_log(results: Path, name: str, where: Mapping[str, Any] | None = None) -> list[Row]:
    """The rows of a log with the values of `where`; none if there is no log."""
    path = results / f"{name}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if (where or {}).items() <= row.items()]


def last_row(results: Path, name: str, where: Mapping[str, Any]) -> Row:
    """The last row of a log with the values of `where`; empty if there is none."""
    return (read_log(results, name, where) or [{}])[-1]


def last_rows(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, Row]:
    """The row of each key that tables and figures take: the last one, from the newest run."""
    return {key(row): row for row in rows}


def table_of_log(
    results: Path, *, log: str | list[str], where: Mapping[str, Any] | None = None, **layout: Any
) -> str:
    """A table as log_tables.yaml describes it."""
    logs = [log] if isinstance(log, str) else log
    rows = [row for name in logs for row in read_log(results, name, where)]
    if "columns" not in layout:
        return pivot(rows, **layout)
    last = last_rows(rows, lambda row: tuple(row[name] for name in layout["key"]))
    return markdown.table_of_rows(layout["columns"], last.values())


def pivot(
    rows: Iterable[Row],
    *,
    row: str,
    column: str,
    cell: str,
    row_titles: Mapping[str, str] | None = None,
    column_titles: Mapping[str, str] | None = None,
    otherwise: str = "",
    corner: str = "",
) -> str:
    """A table with a cell for each pair of names, as log_tables.yaml describes it."""
    cells: dict[tuple[str, str], str] = {}
    last = last_rows(rows, lambda each: (markdown.cell(row, each), markdown.cell(column, each)))
    for names, each in last.items():
        text = markdown.cell(cell, each)
        cells[names] = markdown.cell(otherwise, each) if otherwise and "–" in text else text
    lines = _titles(row_titles, [name for name, _ in cells])
    columns = _titles(column_titles, [name for _, name in cells])
    body = ([title, *(cells.get((r, c), "–") for c in columns)] for r, title in lines.items())
    return markdown.table([corner, *columns.values()], body)


def _titles(titles: Mapping[str, str] | None, found: Sequence[str]) -> dict[str, str]:
    """The names that were found → their titles."""
    known = titles or {name: name for name in found}
    return {name: title for name, title in known.items() if name in found}


def table_of_runs(table: RunTable, runs: Sequence[Run]) -> str:
    """The rows that have logs: means over seeds, and the first figure for each of several seeds."""
    titles = [name.replace("_", " ").replace("oov", "OOV") for name in table.figures]
    rows = []
    for row in table.rows:
        logs = [
            last_row(run.results / table.name, "speed", {"row": row}) | log
            for run in runs
            if run.row == row and (log := run.log)
        ]
        figures = [[_figure(log, name) for log in logs] for name in table.figures]
        if logs:
            rows.append([row, *(short(statistics.fmean(each)) for each in figures)])
            if len(table.seeds) > 1:
                first = zip((log["seed"] for log in logs), map(short, figures[0]), strict=True)
                rows[-1].append(", ".join(f"{seed}: {figure}" for seed, figure in first))
    titles += [f"{titles[0]} by seed"] * (len(table.seeds) > 1)
    return markdown.table(["model", *titles], rows)


def relative_to_full(table: RunTable, rows: Iterable[str], results: Path) -> list[Row]:
    """Training tokens, perplexity and speed, over the fastest full softmax, of rows with logs."""
    found: list[Row] = []
    for row in rows:
        if logs := [log for run in table.runs(results, [row]) if (log := run.log)]:
            where = {"config": Path(table.rows[row][0]).name, "precision": "bf16-mixed"}
            speeds = {each["tree"]: each for each in read_log(results, "training_speed", where)}
            speed = speeds.get(table.summary[row], {})
            full = max(map(_speed_if_full, speeds.values()), default=0.0)
            tokens = full if _speed_if_full(speed) else speed.get("tokens_per_second_median")
            figures = {
                "ratio": tokens / full if tokens and full else None,
                "corpus": "" if found else table.title,
                "published": "" if found else table.published,
                "row": row,
                "tokens": logs[0]["tokens"],
                "perplexity": statistics.fmean(log["test"]["word_perplexity"] for log in logs),
            }
            found.append(speed | figures)
    return found


def _speed_if_full(row: Row) -> float:
    """Tokens/s of a log's row of a full softmax; 0 of another."""
    is_full = row.get("tree", "").startswith(("full", "torch"))
    return row["tokens_per_second_median"] if is_full else 0.0


def gpu_layer(results: Path) -> str:
    """Milliseconds of the output layer on a GPU, with its floor and the fastest published rate."""
    rows = read_log(results, "gpu", {"what": "layer"})
    for row in [row for row in rows if row["method"] == "graph"]:
        size = {name: row[name] for name in ("vocab_size", "hidden", "positions")}
        published = 6 * math.prod(size.values()) / PUBLISHED_FLOPS
        times = {"published": published, "floor": row["seconds_median"] / row["ratio_to_floor"]}
        rows += [size | {"method": k, "seconds_median": v} for k, v in times.items()]
    return pivot(
        rows,
        corner="N × H",
        row="{vocab_size:,} × {hidden}",
        column="{method}",
        column_titles=GPU_COLUMNS,
        cell="{seconds_median:,.2f/1e-3}",
    )


def vocabularies(results: Path) -> list[Row]:
    """Speeds of classes, the fastest full and the adaptive softmax for each size of the vocabulary.

    Perplexities are means over the final runs of the declared comparison on the corpus.
    """
    found: list[Row] = []
    for table in read_tables().values():
        if chosen := table.vocabulary:
            names = [chosen[name] for name in ("ours", "full") if name in chosen]
            ours, *_ = relative_to_full(table, names, results)
            ours["text"], ours["words"] = table.title.split(",")[0], chosen["words"]
            speed = ours["tokens_per_second_median"]
            ours["full_tokens_per_second"] = speed / ours["ratio"]
            where = {name: ours[name] for name in ("config", "precision")}
            adaptive = last_row(results, "training_speed", where | {"tree": chosen["adaptive"]})
            ours["ratio_to_adaptive"] = speed / adaptive["tokens_per_second_median"]
            finals = final_perplexities(chosen["search"], results)
            ours["perplexity"] = _mean(finals[chosen["method"]])
            ours["full_perplexity"] = _mean(finals["full"]) if "full" in finals else None
            found.append(ours)
    return [*found, *read_log(results, "code", {"text": "source code"})]


def declaration(search: str) -> dict[str, Any]:
    """What was declared about a comparison before its first run, see PROTOCOL.md."""
    text = LOG_TABLES.with_name(f"protocol{search}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def final_perplexities(search: str, results: Path) -> dict[str, dict[int, float]]:
    """Test perplexities of the final runs of a comparison, by method and seed."""
    finals: dict[str, dict[int, float]] = {}
    for (method, seed), log in read_logs(results / f"search{search}").items():
        if "test" in log:
            finals.setdefault(method, {})[seed] = log["test"]["perplexity"]
    return finals


def comparisons(results: Path) -> list[Row]:
    """Test perplexities of all declared comparisons, of each method the mean over its seeds."""
    found: list[Row] = []
    for search in SEARCHES:
        declared, finals = declaration(search), final_perplexities(search, results)
        row: Row = {method: _mean(of_seeds) for method, of_seeds in finals.items()}
        trained = [method for method in declared["methods"] if method in finals]
        seeds = sorted({len(finals[method]) for method in trained})
        row["seeds"] = " to ".join(map(str, dict.fromkeys([seeds[0], seeds[-1]])))
        row["tokens"] = read_logs(results / f"search{search}")[trained[0], 1]["tokens"]
        found.append(row | {"title": declared["title"].removesuffix(", equal search")})
    return found


def _mean(of_seeds: Mapping[int, float]) -> float:
    return statistics.fmean(of_seeds.values())


def short(value: float) -> str:
    """A number with about four digits, and a dash for nan.

    Example:
        >>> [short(x) for x in (6890.67, 109.374, 2.9531, 1.0)]
        ['6,891', '109.37', '2.953', '1']
    """
    if math.isnan(value):
        return "–"
    if value >= 1000 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 10 else f"{value:.4g}"


def _figure(log: Row, name: str) -> float:
    """A figure of the test split, minutes of training or the logged speed; nan without one."""
    if name == "minutes":
        return float(log["seconds"] / 60)
    if name == "step_milliseconds":
        return float(log.get(name, math.nan))
    value = log["test"][name]
    return math.nan if value is None else float(value)
