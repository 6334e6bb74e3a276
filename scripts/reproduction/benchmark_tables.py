"""Markdown tables of benchmarks, from the JSON lines that `scripts.benchmarks` appends to logs.

A log may hold several measurements of one thing; the last one counts. Every function takes the
folder of logs and returns a table.
"""

import json
from pathlib import Path
from typing import Any

from lm.config.renamed import translate_override
from scripts.reproduction import markdown

Row = dict[str, Any]

_WORD_INPUT = "model.input_embedding=word,model.count_word_dropout=0"
_PATH_SUM_INPUT = "model.input_embedding=path_sum,model.count_word_dropout=5"
_MEDIUM = "train.matmul_precision=medium"
SPEEDS = {
    "ptb_lstm_small.yaml": {
        "full softmax, `matmul_precision=medium`": f"full,{_MEDIUM}",
        "full softmax": "full",
        "full softmax as PyTorch's `linear` and `cross_entropy`": "torch",
        "adaptive softmax": "adaptive",
        "exchange classes": "two_level",
        "exchange classes, path-sum input": f"two_level,{_PATH_SUM_INPUT}",
        "no output layer": "none",
    },
    "wikitext2_lstm.yaml": {
        "full softmax, `matmul_precision=medium`": f"full,{_WORD_INPUT},{_MEDIUM}",
        "full softmax": f"full,{_WORD_INPUT}",
        "exchange classes, word input": f"two_level,{_WORD_INPUT}",
        "exchange classes, shortlist of 4000, word input": (
            f"two_level,classes.shortlist=4000,{_WORD_INPUT}"
        ),
        "exchange classes, path-sum input": "two_level",
    },
    "eltec_hun_lstm.yaml": {
        "full softmax, `matmul_precision=medium`": f"full,{_WORD_INPUT},{_MEDIUM}",
        "full softmax": f"full,{_WORD_INPUT}",
        "exchange classes, path-sum input": "two_level",
    },
}
"""Recipe → title of a row → the output layer's name in the log; the first row has speed 1.00."""
LAYERS = {
    "random": "ours, random classes",
    "blocks": "ours, classes of neighboring frequency ranks",
    "full": "full softmax",
    "chunked": "full softmax, chunked `linear_cross_entropy`",
    "adaptive": "`AdaptiveLogSoftmaxWithLoss`",
    "gather": "class rows gathered for every position",
    "grouped": "`grouped_mm` over classes of equal size",
    "loop": "one position after the other",
}
"""Method in the log of the output layer → title of its row."""
TEN_MILLION = {
    "train, killed after step 120": "`lm train`, checkpoint at step 100, `kill -9` after step 120",
    "resume to step 240": "`--resume auto` to step 240, validation, final model",
    "evaluate": "`lm evaluate`, 210,000 tokens",
    "generate": "`lm generate`, 30 words",
    "generate, top-k, top-p": "the same with top-k 20, top-p 0.9, temperature 0.8",
}
"""Command in the log of ten million words → title of its row."""
RENAMED_FIELDS = {"by_rows_gb": "row_wise_gb", "by_rows_ms": "row_wise_ms"}
"""Field in old logs → its name of today."""


def read_rows(path: Path, *key: str) -> list[Row]:
    """The rows of a log.

    Args:
        path: File of JSON lines.
        key: Fields that identify a row; of equal rows the last one is returned. All rows if none.

    Returns:
        Rows with the field names of today.
    """
    rows: dict[object, Row] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = {RENAMED_FIELDS.get(name, name): value for name, value in json.loads(line).items()}
        rows[tuple(row.get(name) for name in key) or number] = row
    return list(rows.values())


def training_speed(results: Path, recipe: str) -> str:
    """Tokens per second ÷ those of the first row, for each processor and precision."""
    speeds = _speeds(results, recipe)
    layers = SPEEDS[recipe]
    reference = next(iter(layers.values()))
    columns = [where for where in speeds if all(x in speeds[where] for x in layers.values())]
    rows = [
        [title, *(f"{speeds[c][layer] / speeds[c][reference]:.2f}" for c in columns)]
        for title, layer in layers.items()
    ]
    rows[0][1:] = [f"1.00 ({speeds[c][reference]:,.0f} tokens/s)" for c in columns]
    header = ["output layer", *(f"{processor}, {precision}" for processor, precision in columns)]
    return markdown.table(header, rows)


def relative_speed(results: Path, recipe: str, layer: str | None, reference: str | None) -> str:
    """Tokens per second in bf16-mixed ÷ those of the reference on the same processor; or a dash."""
    measured = {
        processor: speeds
        for (processor, precision), speeds in _speeds(results, recipe).items()
        if precision == "bf16-mixed" and layer in speeds and reference in speeds
    }
    if layer is None or reference is None or not measured:
        return "–"
    speeds = list(measured.values())[-1]
    return f"{speeds[layer] / speeds[reference]:.2f}"


def _speeds(results: Path, recipe: str) -> dict[tuple[str, str], dict[str, float]]:
    """(Processor, precision) → layer → tokens per second."""
    found: dict[tuple[str, str], dict[str, float]] = {}
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
    found = {
        (row["vocab_size"], row["method"]): row
        for row in read_rows(results / "output_layer.jsonl", "vocab_size", "label")
        if row["backend"] in ("reference", "torch")
    }
    sizes = sorted({size for size, _ in found})
    rows = [
        [title, *(f"{found[size, method]['ratio_to_ours']:.2f}" for size in sizes)]
        for method, title in LAYERS.items()
    ]
    rows.append(["floor", *(f"{1 / found[n, 'random']['ratio_to_floor']:.2f}" for n in sizes)])
    return markdown.table(["", *(f"N = {size:,}" for size in sizes)], rows)


def scale(results: Path) -> str:
    """Processor seconds of a training step as the vocabulary grows."""
    sizes: dict[int, Row] = {}
    for row in read_rows(results / "scale.jsonl", "vocab_size", "method"):
        sizes.setdefault(row["vocab_size"], {})[row["method"]] = _scale_figures(row)
    missing = {key: {"cell": "–"} for key in ("dense", "full", "gather", "host", "loop")}
    columns = {
        "N": "{N:,}",
        "rows visited": "{layer[rows]:,.0f}",
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
    return markdown.format_rows(columns, [missing | {"N": n} | sizes[n] for n in sorted(sizes)])


def _scale_figures(row: Row) -> Row:
    """Derived figures, and the table's cell: seconds, or the reason why there are none."""
    if row["outcome"] == "time":
        return {"cell": f"> {row['time_limit_seconds']:.0f}"}
    if row["outcome"] != "done":
        return {"cell": row["outcome"]}
    seconds = row["cpu_seconds"]
    return {
        "cell": f"{seconds:.2f}",
        "us": 1e6 * seconds / row["positions"],
        "per_minute": 60 / seconds,
        "rows": row["rows_visited"],
        "kb": row["bytes_per_position"] / 1e3,
        "gb": row["peak_bytes"] / 1e9,
    }


def class_building(results: Path) -> str:
    """Time, memory and quality of each method of making word classes."""
    columns = {
        "`classes.method`": "`{method}`",
        "seconds": "{seconds:,.0f}",
        "peak, MiB": "{peak_mib:,}",
        "words in the largest class": "{max_words:,}",
        "columns per token": "{columns_per_token:,.0f}",
        "bigram log-likelihood per token, nats": "{bigram_log_likelihood:.3f}",
    }
    return markdown.format_rows(columns, read_rows(results / "class_building.jsonl", "method"))


def ten_million(results: Path) -> str:
    """Memory and time of training, evaluating and generating with ten million words."""
    found = {
        (row["what"], row.get("table")): row for row in read_rows(results / "ten_million.jsonl")
    }
    steps = {
        "a training step": "{seconds_per_step:.2f} s",
        "train perplexity, steps 1–20": "{train_perplexity_first_20:,.0f}",
        "train perplexity, steps 221–240": "{train_perplexity_last_20:,.0f}",
        "test perplexity after 240 steps": "{test_perplexity:,.0f}",
    }
    cost = "{peak_gb:.2f} GB, {seconds:,.0f} s"
    rows = [["`lm prepare`, 362M tokens", cost.format(**found["prepare", None]), "the same"]]
    for what, title, text in (
        *((what, title, cost) for what, title in TEN_MILLION.items()),
        *(("steps 1 to 100", title, text) for title, text in steps.items()),
    ):
        rows.append([title, *(text.format(**found[what, table]) for table in ("fp32", "bf16"))])
    return markdown.table(["", "word table in fp32", "word table in bf16"], rows)


def kernel_report(results: Path) -> str:
    """Registers, spills and shared memory of the compiled kernel variants."""
    variants = read_rows(results / "kernel_report.jsonl", "sm", "kernel", "dtype", "H", "tile")
    rows = []
    for capability in sorted({row["sm"] for row in variants}):
        chosen = [row for row in variants if row["sm"] == capability]
        most = (max(row[x] for row in chosen) for x in ("registers", "spilled_bytes"))
        shared = max(row["shared_bytes"] for row in chosen) / 1024
        rows.append([f"sm_{capability}", str(len(chosen)), *map(str, most), f"{shared:.0f}"])
    header = ["target", "variants", "most registers", "most spilled bytes"]
    return markdown.table([*header, "most shared memory, KiB"], rows)


def kernel_bytes(results: Path) -> str:
    """Bytes that the kernels read and write ÷ the floor, for random classes."""
    columns = {
        "N": "{N:,}",
        "H": "{H}",
        "floor, MB": "{floor_mb:,}",
        "ours with a cache of 50 MB, MB": "{cache_mb:,}",
        "÷ floor": "{cache_ratio:.2f}",
        "cache of 25 MB ÷ floor": "{half_cache_ratio:.2f}",
        "each element once per launch ÷ floor": "{memory_ratio:.2f}",
        "no cache ÷ floor": "{all_ratio:.2f}",
    }
    rows = read_rows(results / "kernel_bytes.jsonl", "classes", "N", "H")
    return markdown.format_rows(columns, [row for row in rows if row["classes"] == "random"])


def step_bytes(results: Path) -> str:
    """Bytes that a training step moves and holds, computed; milliseconds at 4.8 TB/s."""
    columns = {
        "N": "{words:,}",
        "word table": "{dtype}",
        "rows visited": "{visited_rows:,}",
        "row-wise, GB (ms)": "{row_wise_gb:.2f} ({row_wise_ms:.2f})",
        "floor, GB (ms)": "{floor_gb:.2f} ({floor_ms:.2f})",
        "dense Adam, GB (ms)": "{dense_adam_gb:.1f} ({dense_adam_ms:.2f})",
        "held row-wise, GB": "{held_gb:.1f}",
        "held by dense Adam, GB": "{dense_held_gb:.1f}",
    }
    return markdown.format_rows(columns, read_rows(results / "step_bytes.jsonl", "words", "dtype"))
