"""Markdown tables of benchmarks, from the JSON lines that `scripts.benchmarks` appends to logs.

A log may hold several measurements of one thing; the last one counts. `results` is the folder of
logs.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from lm.config.renamed import translate_override
from scripts.reproduction import markdown

Row = dict[str, Any]

_WORD_INPUT = "model.input_embedding=word,model.count_word_dropout=0"
_PATH_SUM_INPUT = "model.input_embedding=path_sum,model.count_word_dropout=5"
_MEDIUM = "train.matmul_precision=medium"
SPEEDS = {
    "ptb_lstm_small.yaml": {
        f"full,{_MEDIUM}": "full softmax, `matmul_precision=medium`",
        "full": "full softmax",
        "torch": "full softmax as PyTorch's `linear` and `cross_entropy`",
        "adaptive": "adaptive softmax",
        "two_level": "exchange classes",
        f"two_level,{_PATH_SUM_INPUT}": "exchange classes, path-sum input",
        "none": "no output layer",
    },
    "wikitext2_lstm.yaml": {
        f"full,{_WORD_INPUT},{_MEDIUM}": "full softmax, `matmul_precision=medium`",
        f"full,{_WORD_INPUT}": "full softmax",
        f"two_level,{_WORD_INPUT}": "exchange classes, word input",
        f"two_level,classes.shortlist=4000,{_WORD_INPUT}": (
            "exchange classes, shortlist of 4000, word input"
        ),
        "two_level": "exchange classes, path-sum input",
    },
    "eltec_hun_lstm.yaml": {
        f"full,{_WORD_INPUT},{_MEDIUM}": "full softmax, `matmul_precision=medium`",
        f"full,{_WORD_INPUT}": "full softmax",
        "two_level": "exchange classes, path-sum input",
    },
}
"""Recipe → the output layer's name in the log → title; the first layer has speed 1.00."""
LAYERS = {
    "random": "ours, random classes",
    "blocks": "ours, classes of neighboring frequency ranks",
    "full": "full softmax",
    "chunked": "full softmax, chunked `linear_cross_entropy`",
    "adaptive": "`AdaptiveLogSoftmaxWithLoss`",
    "gather": "class rows gathered for every position",
    "grouped": "`grouped_mm` over classes of equal size",
    "loop": "one position after the other",
    "floor": "floor",
}
"""Method in the log of the output layer, and the floor → title."""
_COST = "{peak_gb:.2f} GB, {seconds:,.0f} s"
TEN_MILLION = {
    "`lm prepare`, 362M tokens, once for both": ("prepare", _COST),
    "`lm train`, checkpoint at step 100, `kill -9` after step 120": (
        "train, killed after step 120",
        _COST,
    ),
    "`--resume auto` to step 240, validation, final model": ("resume to step 240", _COST),
    "`lm evaluate`, 210,000 tokens": ("evaluate", _COST),
    "`lm generate`, 30 words": ("generate", _COST),
    "the same with top-k 20, top-p 0.9, temperature 0.8": ("generate, top-k, top-p", _COST),
    "a training step": ("steps 1 to 100", "{seconds_per_step:.2f} s"),
    "train perplexity, steps 1–20": ("steps 1 to 100", "{train_perplexity_first_20:,.0f}"),
    "train perplexity, steps 221–240": ("steps 1 to 100", "{train_perplexity_last_20:,.0f}"),
    "test perplexity after 240 steps": ("steps 1 to 100", "{test_perplexity:,.0f}"),
}
"""Title of a row → step in the log of ten million words, and format of the cell."""
SCALE = {
    "N": "{N:,}",
    "rows visited": "{layer[rows_visited]:,.0f}",
    "kB to move per position": "{layer[kb]:,.0f}",
    "layer, s (µs per position)": "{layer[cell]} ({layer[us]:.0f})",
    "whole step, s (steps per minute)": "{step[cell]} ({step[per_minute]:.0f})",
    "peak, GB": "{step[gb]:.1f}",
    "dense gradients, s": "{dense[cell]}",
    "full softmax, s": "{full[cell]}",
    "class rows gathered, s": "{gather[cell]}",
    "rows looked up on the host, s": "{host[cell]}",
    "position by position, s": "{loop[cell]}",
}
"""Title of a column → format of the cell, given the figures of each method."""
RENAMED_FIELDS = {"by_rows_gb": "row_wise_gb", "by_rows_ms": "row_wise_ms"}
"""Field in old logs → its name of today."""


class Log(NamedTuple):
    """A table of one line for each row of a log."""

    key: tuple[str, ...]  # fields that identify a row
    columns: dict[str, str]  # title → format of the cell
    chosen: tuple[str, str] | None = None  # only rows with this field and value


_MODEL = {
    "N": "{N:,}",
    "H": "{H}",
    "method": "{method}",
    "modelled µs": "{us:,.0f}",
    "floor, µs": "{floor_us:,.0f}",
    "÷ floor": "{ratio:.2f}",
}
LOGS = {
    "class_building": Log(
        ("method",),
        {
            "`classes.method`": "`{method}`",
            "seconds": "{seconds:,.0f}",
            "peak, MiB": "{peak_mib:,}",
            "words in the largest class": "{max_words:,}",
            "columns per token": "{columns_per_token:,.0f}",
            "bigram log-likelihood per token, nats": "{bigram_log_likelihood:.3f}",
        },
    ),
    "kernel_model": Log(("N", "method", "launch"), _MODEL, ("launch", "total")),
    "kernel_model_before": Log(("N", "method", "launch"), _MODEL, ("launch", "total")),
    "openmp_spin": Log(
        ("load", "setting"),
        {
            "load": "{load}",
            "setting": "{setting}",
            "tokens/s ÷ one thread": "{ratio_to_one_thread:.2f}",
            "tokens/s ÷ libgomp's default": "{ratio_to_default:.2f}",
        },
    ),
    "step_bytes": Log(
        ("words", "dtype"),
        {
            "N": "{words:,}",
            "word table": "{dtype}",
            "rows visited": "{visited_rows:,}",
            "row-wise, GB (ms)": "{row_wise_gb:.2f} ({row_wise_ms:.2f})",
            "floor, GB (ms)": "{floor_gb:.2f} ({floor_ms:.2f})",
            "dense Adam, GB (ms)": "{dense_adam_gb:.1f} ({dense_adam_ms:.2f})",
            "held row-wise, GB": "{held_gb:.1f}",
            "held by dense Adam, GB": "{dense_held_gb:.1f}",
        },
    ),
}


def read_rows(path: Path, *key: str) -> list[Row]:
    """The rows of a log, of those with equal `key` fields the last one; all rows without a key."""
    rows: dict[object, Row] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = {RENAMED_FIELDS.get(name, name): value for name, value in json.loads(line).items()}
        rows[tuple(row.get(name) for name in key) or number] = row
    return list(rows.values())


def table_of_log(results: Path, name: str) -> str:
    """A line for each row of a log, `name` in `LOGS`."""
    log = LOGS[name]
    rows = read_rows(results / f"{name}.jsonl", *log.key)
    if log.chosen:
        field, value = log.chosen
        rows = [row for row in rows if row[field] == value]
    return markdown.format_rows(log.columns, rows)


def training_speed(results: Path, recipe: str) -> str:
    """Tokens per second ÷ those of the first row, for each processor and precision."""
    layers, speeds = SPEEDS[recipe], _speeds(results, recipe)
    reference = next(iter(layers))
    complete = {
        where: ", ".join(where) for where in speeds if layers.keys() <= speeds[where].keys()
    }

    def cell(layer: str, where: tuple[str, str]) -> str:
        speed, full = speeds[where][layer], speeds[where][reference]
        return f"{speed / full:.2f}" + f" ({speed:,.0f} tokens/s)" * (layer == reference)

    return markdown.pivot("output layer", layers, complete, cell)


def relative_speed(results: Path, recipe: str, layer: str | None, reference: str | None) -> str:
    """Tokens per second in bf16-mixed ÷ those of the reference on the same processor; or a dash."""
    ratio = "–"
    for (_, precision), speeds in _speeds(results, recipe).items():
        if precision == "bf16-mixed" and {layer, reference} <= speeds.keys():
            ratio = f"{speeds[layer] / speeds[reference]:.2f}"
    return ratio


def _speeds(results: Path, recipe: str) -> dict[tuple[str, str], dict[str | None, float]]:
    """(Processor, precision) → layer → tokens per second."""
    found: dict[tuple[str, str], dict[str | None, float]] = {}
    for row in read_rows(results / "training_speed.jsonl"):
        if row["config"] == recipe:
            processor = str(row.get("device", row.get("machine")))
            name = "Intel Xeon" if processor == "x86_64" else processor.split(",")[0]
            options = dict(override.split("=") for override in row["overrides"])
            tree, *overrides = row["tree"].split(",")
            layer = ",".join([tree, *map(translate_override, overrides)])
            where = name, options["--train.precision"].replace("32-true", "fp32")
            found.setdefault(where, {})[layer] = row["tokens_per_second_median"]
    return found


def output_layer(results: Path) -> str:
    """Time of forward and backward ÷ that of our layer with random classes, and the floor."""
    ratios: dict[tuple[str, int], float] = {}
    for row in read_rows(results / "output_layer.jsonl", "vocab_size", "label"):
        if row["backend"] in ("reference", "torch"):
            ratios[row["method"], row["vocab_size"]] = row["ratio_to_ours"]
            if row["method"] == "random":
                ratios["floor", row["vocab_size"]] = 1 / row["ratio_to_floor"]
    sizes = {size: f"N = {size:,}" for size in sorted({size for _, size in ratios})}
    return markdown.pivot("", LAYERS, sizes, lambda method, n: f"{ratios[method, n]:.2f}")


def scale(results: Path) -> str:
    """Processor seconds of a training step as the vocabulary grows."""
    sizes: dict[int, Row] = {}
    for row in read_rows(results / "scale.jsonl", "vocab_size", "method"):
        missing = {name: {"cell": "–"} for name in ("dense", "full", "gather", "host", "loop")}
        figures = sizes.setdefault(row["vocab_size"], {"N": row["vocab_size"], **missing})
        figures[row["method"]] = row | _scale_figures(row)
    return markdown.format_rows(SCALE, [sizes[size] for size in sorted(sizes)])


def _scale_figures(row: Row) -> Row:
    """Derived figures, and the table's cell: seconds, or the reason why there are none."""
    if row["outcome"] != "done":
        late = row["outcome"] == "time"
        return {"cell": f"> {row['time_limit_seconds']:.0f}" if late else row["outcome"]}
    seconds = row["cpu_seconds"]
    return {
        "cell": f"{seconds:.2f}",
        "us": 1e6 * seconds / row["positions"],
        "per_minute": 60 / seconds,
        "kb": row["bytes_per_position"] / 1e3,
        "gb": row["peak_bytes"] / 1e9,
    }


def ten_million(results: Path) -> str:
    """Memory and time of training, evaluating and generating with ten million words."""
    steps = {
        (row["what"], row.get("table")): row for row in read_rows(results / "ten_million.jsonl")
    }

    def cell(title: str, dtype: str) -> str:
        what, text = TEN_MILLION[title]
        return text.format(**steps.get((what, dtype)) or steps[what, None])

    dtypes = {dtype: f"word table in {dtype}" for dtype in ("fp32", "bf16")}
    return markdown.pivot("", {title: title for title in TEN_MILLION}, dtypes, cell)
