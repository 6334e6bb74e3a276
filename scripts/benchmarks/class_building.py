#!/usr/bin/env python
"""Making word classes: time, peak memory and what comes out, for each method on the vocabulary of
one recipe.

Each method runs in a process of its own on the prepared token files (which are prepared first if
need be, in another: a process inherits its parent's peak), so that its peak memory is the operating
system's figure for that process, token file and compiler included. Columns per token and bigram
likelihood are those of `lm classes`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data_prep.classes.report import class_report
from data_prep.classes.word_classes import build_word_classes
from data_prep.errors import UserError
from data_prep.prepare import prepare
from data_prep.prepared import META, Prepared, open_prepared, read_meta
from data_prep.settings import ClassesConfig
from lm.config import Config, load_config
from lm.training.environment import processor_name

METHODS = ("random", "uniform", "frequency", "embedding", "exchange")


def measure(settings: ClassesConfig, prepared: Prepared) -> dict[str, object]:
    """Seconds, peak memory and figures of one method, in this process."""
    counts, tokens = prepared.counts(), prepared.tokens("train")
    start = time.perf_counter()
    word_class = build_word_classes(
        counts, settings, tokens=tokens, words=list, folder=Path(), progress=True
    )
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, bytes on macOS
    peak //= 1024 if sys.platform == "darwin" else 1
    report = class_report(counts, word_class, tokens, head=settings.head, num_top_words=1)
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
        "machine": processor_name(),
    }


def prepare_alone(config: Config) -> None:
    """Prepare what is missing, with classes that take no time; the classes of a complete folder,
    and the folder if it is of another corpus, stay as they are.

    Raises:
        UserError: as `prepare`.
    """
    folder = config.prepared_path
    found = read_meta(folder) if (folder / META).exists() else None
    classes = replace(config.classes, method="uniform", file=None)
    if found is not None and found.complete:
        classes = ClassesConfig(**found.settings["classes"])
    prepare(config.data, config.tokenizer, classes, folder, keep=True)


def main() -> None:
    """Print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Overrides of the configuration: --section.key=value.",
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    config = load_config(options.config, overrides)
    if options.here:
        settings = replace(config.classes, method=options.methods[0])
        print(json.dumps(measure(settings, open_prepared(config.prepared_path))))
        return
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        alone.submit(prepare_alone, config).result()
    print("method      seconds  peak MiB  classes  most words  columns/token  nats/token")
    for method in options.methods:
        command = [
            sys.executable,
            __file__,
            options.config,
            "--here",
            "--methods",
            method,
            *overrides,
        ]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode:  # it has said why
            sys.exit(done.returncode)
        line = done.stdout
        row = json.loads(line)
        print(
            f"{method:<10} {row['seconds']:8.1f} {row['peak_mib']:9,} {row['num_word_classes']:8,}"
            f" {row['max_words']:11,} {row['columns_per_token']:14.1f}"
            f" {row['bigram_log_likelihood']:11.4f}",
            flush=True,
        )
        if options.json:
            with options.json.open("a") as file:
                file.write(line)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"bench_classes: {error}")
