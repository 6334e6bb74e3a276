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
PEERS = {
    "dense": "dense gradients, s",
    "full": "full softmax, s",
    "gather": "class rows gathered, s",
    "host": "rows looked up on the host, s",
    "loop": "position by position, s",
}
"""Method in the log of growing vocabularies → title of its column."""
TEN_MILLION = {
    "train, killed after step 120": "`lm train`, checkpoint at step 100, `kill -9` after step 120",
    "resume to step 240": "`--resume auto` to step 240, validation, final model",
    "evaluate": "`lm evaluate`, 210,000 tokens",
    "generate": "`lm generate`, 30 words",
    "generate, top-k, top-p": "the same with top-k 20, top-p 0.9, temperature 0.8",
}
"""Command in the log of ten million words → title of its row."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a log."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


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
    found = {(row["vocab_size"], row["method"]): row for row in _cpu_rows(results)}
    sizes = sorted({size for size, _ in found})
    rows = [
        [title, *(f"{found[size, method]['ratio_to_ours']:.2f}" for size in sizes)]
        for method, title in LAYERS.items()
    ]
    floor = [f"{1 / found[size, 'random']['ratio_to_floor']:.2f}" for size in sizes]
    return markdown.table(["", *(f"N = {size:,}" for size in sizes)], [*rows, ["floor", *floor]])


def _cpu_rows(results: Path) -> list[Row]:
    rows = read_rows(results / "output_layer.jsonl")
    return [row for row in rows if row["backend"] in ("reference", "torch")]


def scale(results: Path) -> str:
    """Processor seconds of a training step as the vocabulary grows."""
    found = {(row["vocab_size"], row["method"]): row for row in read_rows(results / "scale.jsonl")}
    rows = []
    for size in sorted({size for size, _ in found}):
        layer, step = found[size, "layer"], found[size, "step"]
        seconds, whole = layer["cpu_seconds"], step["cpu_seconds"]
        rows.append(
            [
                f"{size:,}",
                f"{layer['rows_visited']:,.0f}",
                f"{layer['bytes_per_position'] / 1e3:,.0f}",
                f"{seconds:.2f} ({1e6 * seconds / layer['positions']:.0f})",
                f"{whole:.2f} ({60 / whole:.0f})",
                f"{step['peak_bytes'] / 1e9:.1f}",
                *(_peer_seconds(found.get((size, peer))) for peer in PEERS),
            ]
        )
    header = ["N", "rows visited", "kB to move per position", "layer, s (µs per position)"]
    header += ["whole step, s (steps per minute)", "peak, GB", *PEERS.values()]
    return markdown.table(header, rows)


def _peer_seconds(row: Row | None) -> str:
    if row is None:
        return "–"
    if row["outcome"] == "time":
        return f"> {row['time_limit_seconds']:.0f}"
    return f"{row['cpu_seconds']:.2f}" if row["outcome"] == "done" else str(row["outcome"])


def class_building(results: Path) -> str:
    """Time, memory and quality of each method of making word classes."""
    rows = [
        [
            f"`{row['method']}`",
            f"{row['seconds']:,.0f}",
            f"{row['peak_mib'] / 1024:.1f}",
            f"{row['max_words']:,}",
            f"{row['columns_per_token']:,.0f}",
            f"{row['bigram_log_likelihood']:.3f}",
        ]
        for row in read_rows(results / "class_building.jsonl")
    ]
    header = ["`classes.method`", "seconds", "peak, GiB", "words in the largest class"]
    header += ["columns per token", "bigram log-likelihood per token, nats"]
    return markdown.table(header, rows)


def ten_million(results: Path) -> str:
    """Memory and time of training, evaluating and generating with ten million words."""
    found = {
        (row["what"], row.get("table")): row for row in read_rows(results / "ten_million.jsonl")
    }
    tables = ("fp32", "bf16")
    steps = [found["steps 1 to 100", table] for table in tables]
    first, last = (
        [f"{row[f'train_perplexity_{which}_20']:,.0f}" for row in steps]
        for which in ("first", "last")
    )
    rows = [
        ["`lm prepare`, 362M tokens", _cost(found["prepare", None]), "the same"],
        ["a training step", *(f"{row['seconds_per_step']:.2f} s" for row in steps)],
        ["train perplexity, steps 1–20", *first],
        ["train perplexity, steps 221–240", *last],
        *([title, *(_cost(found[what, t]) for t in tables)] for what, title in TEN_MILLION.items()),
        ["test perplexity after 240 steps", *(f"{row['test_perplexity']:,.0f}" for row in steps)],
    ]
    return markdown.table(["", *(f"word table in {table}" for table in tables)], rows)


def _cost(row: Row) -> str:
    return f"{row['peak_kib'] * 1024 / 1e9:.2f} GB, {row['seconds'] / 60:.1f} min"


def kernel_report(results: Path) -> str:
    """Registers, spills and shared memory of the compiled kernel variants."""
    variants = read_rows(results / "kernel_report.jsonl")
    rows = []
    for capability in sorted({row["sm"] for row in variants}):
        chosen = [row for row in variants if row["sm"] == capability]
        rows.append(
            [
                f"sm_{capability}",
                str(len(chosen)),
                str(max(row["registers"] for row in chosen)),
                str(max(row["spilled_bytes"] for row in chosen)),
                f"{max(row['shared_bytes'] for row in chosen) / 1024:.0f}",
                ", ".join(sorted({row["tensor_cores"] for row in chosen})),
            ]
        )
    header = ["target", "variants", "most registers", "most spilled bytes"]
    return markdown.table([*header, "most shared memory, KiB", "tensor cores"], rows)


def kernel_bytes(results: Path) -> str:
    """Bytes that the kernels read and write ÷ the floor, for random classes."""
    rows = [
        [
            f"{row['N']:,}",
            str(row["H"]),
            f"{row['floor_mb']:,}",
            f"{row['cache_mb']:,}",
            *(f"{row[f'{x}_ratio']:.2f}" for x in ("cache", "half_cache", "memory", "all")),
        ]
        for row in read_rows(results / "kernel_bytes.jsonl")
        if row["classes"] == "random"
    ]
    header = ["N", "H", "floor, MB", "ours with a cache of 50 MB, MB", "÷ floor"]
    header += ["cache of 25 MB ÷ floor", "each element once per launch ÷ floor", "no cache ÷ floor"]
    return markdown.table(header, rows)


def step_bytes(results: Path) -> str:
    """Bytes that a training step moves and holds, computed; milliseconds at 4.8 TB/s."""
    rows = [
        [
            f"{row['words']:,}",
            row["dtype"],
            f"{row['visited_rows']:,}",
            f"{row['by_rows_gb']:.2f} ({row['by_rows_ms']:.2f})",
            f"{row['floor_gb']:.2f} ({row['floor_ms']:.2f})",
            f"{row['dense_adam_gb']:.1f} ({row['dense_adam_ms']:.2f})",
            f"{row['held_gb']:.1f}",
            f"{row['dense_held_gb']:.1f}",
        ]
        for row in read_rows(results / "step_bytes.jsonl")
    ]
    header = ["N", "word table", "rows visited", "row-wise, GB (ms)", "floor, GB (ms)"]
    header += ["dense Adam, GB (ms)", "held row-wise, GB", "held by dense Adam, GB"]
    return markdown.table(header, rows)
