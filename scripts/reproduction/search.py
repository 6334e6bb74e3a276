"""The comparison of output layers that PROTOCOL.md describes: trials, final runs, test figures.

  python -m scripts.reproduction.search trials --data-dir DIR   trains the trials without a log
  python -m scripts.reproduction.search finals --data-dir DIR   trains the chosen points
  python -m scripts.reproduction.search test                    test figures, once for each run
  python -m scripts.reproduction.search show                    prints the tables

`--protocol scripts/reproduction/protocol_wikitext2.yaml` does the same for another corpus. An
interrupted run resumes. PROTOCOL.md describes how to declare a comparison of your own.
"""

import argparse
import datetime
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import scripts
from data_prep.errors import UserError
from scripts.reproduction.protocol import PROTOCOL, SEARCH, Protocol, log_of
from scripts.reproduction.runs import Run, append_log, read_logs
from scripts.reproduction.search_tables import NGRAMS, search_tables, write_lines


def train_missing(runs: Sequence[Run], data_dir: str, folder: Path, *, progress: bool) -> None:
    """Train or resume the runs without a log, one after another, and write their logs.

    A run whose loss is not finite has an infinite perplexity.
    """
    from scripts.reproduction.training import train_and_validate  # imports PyTorch

    missing = [run for run in runs if log_of(run) is None]
    for number, run in enumerate(missing, 1):
        print(f"{number} of {len(missing)}: {run.row}, seed {run.seed}", file=sys.stderr)
        log = train_and_validate(run, data_dir, folder, progress=progress)
        figures = [perplexity or math.inf for *_, perplexity in log["curve"]]
        run.write(log | {"valid_perplexity": min(figures, default=1e99)})


def evaluate_missing(runs: Sequence[Run], folder: Path, order: int, results: Path) -> None:
    """Evaluate final runs on the test split, those that were not; write the figures and the date.

    The first time, an n-gram model of their data is evaluated as well.

    Raises:
        UserError: if every run was evaluated, or none was trained.
    """
    from scripts.benchmarks.reporting import commit
    from scripts.reproduction.training import nats_of_ngrams, nats_of_test

    logs = {run: log for run in runs if (log := log_of(run)) is not None}
    if not logs:
        raise UserError("no final run has been trained: run `search finals` first")
    untested = [run for run, log in logs.items() if "test" not in log]
    if not untested:
        raise UserError(f"all {len(logs)} final runs with a log have been evaluated, once")
    for run in untested:
        test, lines = nats_of_test(run, folder)
        write_lines(results, run.name, lines)
        run.write(logs[run] | {"test": {"date": _now()} | test})
    if NGRAMS not in read_logs(results):
        test, lines = nats_of_ngrams(untested[0], folder, order)
        write_lines(results, NGRAMS[0], lines)
        name = {"row": NGRAMS[0], "seed": NGRAMS[1]}
        command = {"command": "python -m scripts.reproduction.search test", "commit": commit()}
        append_log(results, {**name, **command, "test": {"date": _now()} | test})


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; raises UserError if the options do not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduction.search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", choices=["trials", "finals", "test", "show"])
    add("--data-dir", metavar="DIR", help="folder of the corpus")
    add("--methods", nargs="+", metavar="NAME", help="only these methods")
    add("--protocol", type=Path, default=PROTOCOL, metavar="FILE", help="the declaration")
    usual = Path("runs/reproduce")
    add("--runs", type=Path, default=usual, metavar="DIR", help=f"of the runs (default: {usual})")
    logs = "scripts/results/search…, after the name of the protocol"
    add("--results", type=Path, metavar="DIR", help=f"of the logs (default: {logs})")
    add("--no-progress", action="store_true", help="no progress bars")
    options = parser.parse_args(arguments)
    protocol = Protocol.read(options.protocol)
    name = options.protocol.stem.replace("protocol", SEARCH.name)
    results = options.results or SEARCH.with_name(name)
    for name in options.methods or ():
        if name not in protocol.methods:
            raise UserError(f"no method {name!r}; there are {', '.join(protocol.methods)}")
    trials, finals = list(protocol.trials(results)), list(protocol.finals(results))
    runs = [
        run
        for run in (trials if options.what == "trials" else finals)
        if not options.methods or run.row.split("-")[0] in options.methods
    ]
    if options.what in ("finals", "test") and not runs:
        raise UserError("no method has all of its trials: run `search trials` first")
    if options.what in ("trials", "finals"):
        if options.data_dir is None:
            raise UserError("--data-dir is required, the folder of the corpus")
        progress = not options.no_progress
        train_missing(runs, options.data_dir, options.runs, progress=progress)
    elif options.what == "test":
        evaluate_missing(runs, options.runs, protocol.ngram_order, results)
    if stale := [run.name for run in trials + finals if run.entry and not log_of(run)]:
        print(f"not shown, logs of another declaration: {', '.join(stale)}", file=sys.stderr)
    for title, table in search_tables(protocol, results).items():
        print(f"{title}:\n\n{table}\n")


if __name__ == "__main__":
    scripts.run(main, "search")
