"""`lm evaluate`: the perplexity of a trained model on a text."""

import argparse
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from lm.commands.arguments import (
    ADAPTATION,
    COMPUTING,
    COUNT,
    EXCLUDE,
    FILE,
    JSON,
    NGRAM,
    NO_PROGRESS,
    NUMBER,
    OPEN_VOCABULARY,
    RUN,
    SWITCH,
    Options,
    open_run,
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
    | ADAPTATION
    | {
        "--arpa": FILE | {"help": "ARPA model over the same words, to mix with"},
        "--ngram": NGRAM["--ngram"],
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
        | {"help": "with --ranking: " + EXCLUDE["--exclude"]["help"]},
        "--users": COUNT
        | {"metavar": "N", "help": "with --ranking: N users drawn at random, the same each time"},
        "--ranks": {
            "metavar": "FILE.parquet",
            "help": "with --ranking: write user, position, item, rank and probability of each"
            " prediction",
        },
    }
    | COMPUTING
    | NO_PROGRESS
    | JSON
)
EXCLUSIVE = ("--split", "--text")
_OF_TEXTS = ("cache", "dynamic", "open_vocabulary", "arpa", "ngram", "by_frequency", "compare")
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Print the figures, and write those of a split to `evaluate-<split>….json`."""
    _check(options)
    from data_prep.corpus.lines import read_text
    from lm.evaluation import TextLosses, encode_text, evaluate_split, evaluate_text, split_lines
    from lm.figures import as_json
    from lm.scoring.adaptation import Adaptation, evaluate_adaptation
    from lm.scoring.comparison import check_comparable, compare
    from lm.scoring.frequency import frequency_report
    from lm.scoring.mixture import RunNGram, evaluate_mixture
    from lm.scoring.unknown import noted_words

    run, is_open, name = open_run(options), options.open_vocabulary, options.text or options.split
    if options.ranking:
        _rank(options, run)
        return
    others = [TrainedRun(Path(each), options.device) for each in options.compare]
    _check_text(options, [run, *others])
    lines = None
    if options.text is not None:
        lines = list(noted_words(run.tokenizer, read_text(options.text), options.text))
    check_comparable(run, others, options.split, open_vocabulary=is_open, lines=lines)
    if is_open and lines is None:
        lines = split_lines(run, options.split)
    # Read or tuned before the text is evaluated, which may take long.
    path = Path(options.arpa) if options.arpa else None
    ngram = RunNGram.chosen(run, path, options.mixture) if path or options.ngram else None
    adaptation = Adaptation.tuned(run, cache=options.cache, dynamic=options.dynamic)
    settings = {"progress": not options.no_progress, "open_vocabulary": is_open}
    if lines is None:
        result = evaluate_split(run, options.split, **settings)
    else:
        result = evaluate_text(run, lines, name=name, **settings)
    source, weights = _weights(options, run)
    values = result.to_dict() | weights
    tables, further, report = [result.table(f"{name}, {source}")], dict[str, Any](), None
    if ngram or adaptation or options.by_frequency or others:
        tokens: Any = run.prepared.tokens(name) if lines is None else encode_text(run, lines)[0]
        losses = TextLosses.of(run, tokens, lines if is_open else None)
    if ngram:
        num_bytes = None if result.bits_per_byte is None else result.utf8_bytes
        further["mixture"] = mixture = evaluate_mixture(ngram, losses, num_bytes)
        tables.append(mixture.table(run.folder, path or Path("its n-gram model")))
    if adaptation:
        further["adaptation"] = adapted = evaluate_adaptation(adaptation, losses)
        tables.append(adapted.table())
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
        _write(run, f"{options.split}{'-open' * is_open}", values)


def _weights(options: argparse.Namespace, run: TrainedRun) -> tuple[str, dict[str, Any]]:
    """Which weights are evaluated: in words, and as figures."""
    from lm.training.batches import make_batches

    step, total = run.description.step, None
    if options.text is None and (run.folder / "checkpoints").exists():  # it was trained here
        total = make_batches(run.config, run.prepared).num_steps
    text = f"the model of step {step:,}" + (f" of {total:,}" if total else "")
    text += " planned" * (step < (total or 0))
    text += f" ({run.checkpoint})" if run.checkpoint else ""
    file = None if run.checkpoint is None else str(run.checkpoint)
    return text, {"step": step, "num_steps": total, "checkpoint": file}


def _write(run: TrainedRun, name: str, values: dict[str, Any]) -> None:
    """Write figures to the folder of the run, if it can be written."""
    from data_prep.storage import write_json_atomically

    name += f"-step-{run.description.step}" if run.checkpoint else ""
    try:
        write_json_atomically(run.folder / f"evaluate-{name}.json", values)
    except UserError as error:
        _log.warning("the figures are printed only: %s", error)


def _rank(options: argparse.Namespace, run: TrainedRun) -> None:
    """Print how high the next items rank, and write it to `evaluate-<split>-ranking-….json`."""
    from lm.commands.ranks import check_ranks, write_ranks
    from lm.figures import as_json
    from lm.scoring.ranking import evaluate_ranking

    split, ranks = options.split, options.ranks and Path(options.ranks)
    if ranks:
        check_ranks(ranks)
    report = evaluate_ranking(
        run,
        split,
        options.k or [10],
        options.exclude,
        users=options.users,
        progress=not options.no_progress,
        keep=partial(write_ranks, ranks, run, split) if ranks else None,
    )
    source, weights = _weights(options, run)
    values = {"split": split, "seed": run.config.seed, "kept_by": run.config.criterion}
    values |= as_json(report) | weights
    print(json.dumps(values) if options.json else report.table(f"{split}, {source}"))
    drawn = f"-{report.users}-users" if report.users < report.all_users else ""
    _write(run, f"{split}-ranking-{report.excluded}{drawn}", values)


def _check_text(options: argparse.Namespace, runs: list[TrainedRun]) -> None:
    """Raises UserError if a run is on independent sequences, and an option is not."""
    given = [f"--{name.replace('_', '-')}" for name in _OF_TEXTS if getattr(options, name)]
    for run in runs if given else ():
        run.check_text(given[0])


def _check(options: argparse.Namespace) -> None:
    """Raises UserError if options exclude each other."""
    if not options.ranking and (options.k or options.exclude or options.users or options.ranks):
        raise UserError("--k, --exclude, --users and --ranks require --ranking")
    ranks = Path(options.ranks or ".parquet")
    if not (ranks.name.endswith(".parquet") and ranks.parent.is_dir()):
        raise UserError(f"--ranks {ranks}: expected FILE.parquet in a folder that exists")
    mixed = "--ngram" if options.ngram else "--arpa" if options.arpa else None
    if options.ranking and any(getattr(options, name) for name in ("text", *_OF_TEXTS)):
        raise UserError("--ranking excludes --text, --arpa, --ngram, --compare and others of texts")
    if options.mixture is not None and mixed is None:
        raise UserError("--mixture requires --arpa or --ngram")
    if options.arpa and options.ngram:
        raise UserError("--arpa and --ngram exclude each other")
    if mixed and options.compare:
        raise UserError(f"--compare excludes {mixed}")
