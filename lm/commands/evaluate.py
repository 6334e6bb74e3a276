"""`lm evaluate`: the perplexity of a trained model on a text."""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from lm.commands.arguments import (
    COMPUTING,
    COUNT,
    EXCLUDE,
    FILE,
    JSON,
    NO_PROGRESS,
    NUMBER,
    OPEN_VOCABULARY,
    RUN,
    SWITCH,
    Options,
)
from lm.run import TrainedRun

HELP = "perplexity of a trained model on a text"
OPTIONS: Options = (
    RUN
    | {
        "--split": {
            "default": "test",
            "choices": ("train", "valid", "test"),
            "help": "default: test",
        },
        "--text": {
            "metavar": "FILE|-",
            "help": "text instead of a split, with its rule for empty lines",
        },
    }
    | OPEN_VOCABULARY
    | {
        "--arpa": FILE | {"help": "ARPA model over the same words, to mix with"},
        "--mixture": NUMBER
        | {"help": "share of RUN in the mixture (default: tuned on the validation split)"},
        "--by-frequency": SWITCH
        | {"help": "also the loss by frequency rank of tokens, <unk> and <eos> among them"},
        "--compare": {
            "nargs": "+",
            "default": [],
            "metavar": "RUN",
            "help": "other runs on the same text: differences in nats per token, or with"
            " --open-vocabulary in bits per byte, and 95 %% intervals",
        },
        "--ranking": SWITCH
        | {"help": "sequences of items: instead, how high the next items rank in the catalogue"},
        "--k": COUNT
        | {"nargs": "+", "help": "with --ranking: numbers of first items (default: 10)"},
        "--exclude": EXCLUDE["--exclude"]
        | {"default": None, "help": "with --ranking: " + EXCLUDE["--exclude"]["help"]},
    }
    | COMPUTING
    | NO_PROGRESS
    | JSON
)
EXCLUSIVE = ("--split", "--text")
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Print the figures, and write those of a split to `evaluate-<split>[-open].json`."""
    _check(options)
    from data_prep.corpus.lines import read_lines, read_text
    from lm.evaluation import encode_text, evaluate_split, evaluate_text
    from lm.figures import as_json
    from lm.scoring.comparison import TextLosses, check_comparable, compare
    from lm.scoring.frequency import frequency_report
    from lm.scoring.mixture import evaluate_mixture
    from lm.scoring.unknown import noted_words

    is_open = options.open_vocabulary
    run = TrainedRun.open(options.run_dir, device=options.device, threads=options.threads)
    if options.ranking:
        _rank(options, run)
        return
    others = [TrainedRun(Path(each), options.device) for each in options.compare]
    _check_text(options, [run, *others])
    lines = None
    if options.text is not None:
        lines = list(noted_words(run.tokenizer, read_text(options.text), options.text))
    check_comparable(run, others, open_vocabulary=is_open, lines=lines)
    tables, further = list[str](), dict[str, Any]()
    tokens: Any = None
    if options.arpa or options.by_frequency or others:
        if lines is None:
            tokens = run.prepared.tokens(options.split)
        else:
            tokens, _ = encode_text(run, lines, options.text)
    if options.arpa:
        path = Path(options.arpa)
        further["mixture"] = mixture = evaluate_mixture(run, path, options.mixture, tokens)
        tables.append(mixture.table(run.folder, path))
    settings = {"progress": not options.no_progress, "open_vocabulary": is_open}
    if lines is None:
        result = evaluate_split(run, options.split, **settings)
    else:
        result = evaluate_text(run, lines, name=options.text, **settings)
    values = result.to_dict()
    tables.insert(0, result.table(options.text or options.split))
    if options.by_frequency or others:
        if is_open and lines is None:
            lines = list(read_lines(run.config.data, options.split))
        losses, report = TextLosses.of(run, tokens, lines if is_open else None), None
    if options.by_frequency:
        report = frequency_report(run.prepared, tokens, losses.nats, losses.spelling)
        further["by_frequency"] = report
        tables.append(report.table())
    if others:
        found = [compare(losses, each, by_frequency=options.by_frequency) for each in others]
        further["compared"] = found
        tables += [each.table(report.target if report else None) for each in found]
    print(json.dumps(values | as_json(further)) if options.json else "\n".join(tables))
    if options.text is None:
        suffix = "-open" if options.open_vocabulary else ""
        _write(run.folder / f"evaluate-{options.split}{suffix}.json", values)


def _write(path: Path, values: dict[str, Any]) -> None:
    """Write figures to the folder of the run, if it can be written."""
    from data_prep.storage import write_json_atomically

    try:
        write_json_atomically(path, values)
    except UserError as error:
        _log.warning("the figures are printed only: %s", error)


def _rank(options: argparse.Namespace, run: TrainedRun) -> None:
    """Print how high the next items rank, and write it to `evaluate-<split>-ranking.json`."""
    from lm.figures import as_json
    from lm.scoring.ranking import evaluate_ranking

    report = evaluate_ranking(
        run,
        options.split,
        options.k or [10],
        options.exclude or "nothing",
        progress=not options.no_progress,
    )
    values = as_json(report)
    print(json.dumps(values) if options.json else report.table(options.split))
    _write(run.folder / f"evaluate-{options.split}-ranking.json", values)


def _check_text(options: argparse.Namespace, runs: list[TrainedRun]) -> None:
    """Raises UserError if a run is on independent sequences, and an option is not."""
    needs_text = ("open_vocabulary", "arpa", "by_frequency", "compare")
    given = [f"--{name.replace('_', '-')}" for name in needs_text if getattr(options, name)]
    for run in runs:
        if given and run.is_independent:
            problem = f"requires a text, but {run.folder} has independent sequences"
            raise UserError(f"{given[0]} {problem}")


def _check(options: argparse.Namespace) -> None:
    """Raises UserError if options exclude each other."""
    if not options.ranking and (options.k or options.exclude):
        raise UserError("--k and --exclude require --ranking")
    others = (options.text, options.open_vocabulary, options.arpa, options.by_frequency)
    if options.ranking and (any(others) or options.compare):
        raise UserError("--ranking is of a split, and excludes other figures")
    if options.mixture is not None and options.arpa is None:
        raise UserError("--mixture requires --arpa")
    if options.arpa and options.open_vocabulary:
        raise UserError("--arpa excludes --open-vocabulary: <unk> is one word for both")
    if options.compare and options.arpa:
        raise UserError("--compare excludes --arpa")
