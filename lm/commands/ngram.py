"""`lm ngram`: an n-gram model of a run's training text, to mix with the run."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from data_prep.tokenizer.tokenizer import Tokenizer
from lm.commands.arguments import COMPUTING, COUNT, JSON, NUMBER, RUN, Options
from lm.run import TrainedRun

MAX_ORDER = 10
HELP = "count an n-gram model of the training text, to mix with RUN"
OPTIONS: Options = (
    {"run_dir": RUN["run_dir"]}
    | {
        "--order": COUNT | {"default": 5, "help": "largest n (default 5)"},
        "--prune": {
            "type": int,
            "nargs": "+",
            "default": [],
            "metavar": "N",
            "help": "leave out n-grams that occur N times at most, for n = 1, 2, …; the last one"
            " also for larger n, for instance 0 0 1",
        },
        "--mixture": NUMBER
        | {"help": "share of RUN in the mixture (default: tuned on the validation split)"},
        "--arpa": {"metavar": "FILE", "help": "also write an ARPA file"},
    }
    | COMPUTING
    | JSON
)


def run(options: argparse.Namespace) -> None:
    """Write `ngram.npy` and `ngram.json` to the folder of the run, and print their figures."""
    _check(options)
    from lm.figures import table_of
    from lm.scoring.mixture import NODES, RunNGram

    run = TrainedRun.open(options.run_dir, device=options.device, threads=options.threads)
    began = time.perf_counter()
    found = RunNGram.count(run, options.order, options.prune, options.mixture)
    values: dict[str, Any] = {
        "order": options.order,
        "prune": options.prune,
        "tokens": run.prepared.splits["train"].tokens,
        "ngrams": found.tree.sizes,
        "bytes": (run.folder / NODES).stat().st_size,
        "weights": found.weights.tolist(),
        "valid_perplexity": found.valid_perplexity,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if options.arpa:
        found.tree.write_arpa(Path(options.arpa), _words(run.tokenizer))
    if options.json:
        print(json.dumps(values))
        return
    rows = {f"{n}-grams": f"{size:,}" for n, size in enumerate(found.tree.sizes, 1)}
    shares = ", ".join(map("{:.2f}".format, values["weights"]))
    rows["share of the run after 0, 1, … words"] = shares
    if found.valid_perplexity is not None:
        rows["validation perplexity of the mixture"] = f"{found.valid_perplexity:.2f}"
    size = f"{values['bytes'] / 1e6:,.1f} MB of {values['tokens']:,} tokens"
    print(table_of(f"{run.folder / NODES}: {size}, {values['seconds']} s", rows))


def _words(tokenizer: Tokenizer) -> list[str]:
    """The words of an ARPA file by id, and `<s>`."""
    words = list(map(tokenizer.token, range(tokenizer.vocab_size)))
    words[tokenizer.eos_id] = "</s>"
    return [*words, "<s>"]


def _check(options: argparse.Namespace) -> None:
    """Raises UserError unless the options make sense."""
    prune, given = options.prune, " ".join(map(str, options.prune))
    if not 2 <= options.order <= MAX_ORDER:
        raise UserError(f"--order must be within 2 … {MAX_ORDER}, got {options.order}")
    if prune and (prune[0] != 0 or prune != sorted(prune) or len(prune) > options.order):
        raise UserError(
            f"--prune {given}: expected at most {options.order} numbers, the first one 0, none"
            " less than the one before"
        )
