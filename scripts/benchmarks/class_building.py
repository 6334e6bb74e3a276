"""Time and peak memory of building word classes, and figures of the classes.

Every method builds the classes of the vocabulary of one recipe, whose token files are prepared
first if they are missing. Each method runs in a new process, so its peak memory is the operating
system's figure for that process, token file and compiler included; preparation runs in another
process because a process inherits its parent's peak. Columns per token and bigram likelihood are
those of `lm classes`.
"""

import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from data_prep.classes.report import class_report
from data_prep.classes.word_classes import build_class_levels
from data_prep.prepare import prepare
from data_prep.prepared import open_prepared
from data_prep.settings import ClassesConfig
from lm.config import load_config
from scripts import run
from scripts.benchmarks.reporting import Table, benchmark_parser

Result = TypeVar("Result")
METHODS = ("random", "uniform", "frequency", "embedding", "exchange")


def measure(settings: ClassesConfig, folder: Path) -> dict[str, Any]:
    """Seconds, peak memory and figures of one method, in this process."""
    prepared = open_prepared(folder)
    counts, tokens = prepared.counts(), prepared.tokens("train")
    start = time.perf_counter()
    (word_class,) = build_class_levels(
        counts, settings, tokens=tokens, words=list, folder=Path(), progress=True
    )
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, bytes on macOS
    peak //= 1024 if sys.platform == "darwin" else 1
    report = class_report(counts, word_class, tokens, shortlist=settings.shortlist, num_top_words=1)
    return {
        "method": settings.method,
        "vocab_size": len(counts),
        "tokens": len(tokens),
        "num_word_classes": report.num_word_classes,
        "max_words": report.max_words,
        "seconds": round(seconds, 1),
        "peak_mib": round(peak / 1024),
        "columns_per_token": round(report.columns_per_token, 1),
        "bigram_log_likelihood": round(report.log_likelihood, 4),
        "cores": os.cpu_count(),
    }


def in_new_process(function: Callable[..., Result], *arguments: object) -> Result:
    """The result of a function, computed in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    """Print a table, and write a log if asked."""
    parser = benchmark_parser(__doc__, takes_config=True)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    options, overrides = parser.parse_known_args()
    config = load_config(options.config, overrides)
    # Token files that are missing; classes that exist stay as they are.
    settings = config.data, config.tokenizer, None, config.prepared_path
    in_new_process(partial(prepare, keep=True), *settings)
    table = Table(log=options.json)
    for method in options.methods:
        classes = replace(config.classes, method=method)
        table.add(in_new_process(measure, classes, config.prepared_path))


if __name__ == "__main__":
    run(main)
