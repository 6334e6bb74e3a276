"""`lm evaluate`: the perplexity of a trained model on a text."""

import argparse
import json
import logging
from pathlib import Path

from data_prep.errors import UserError
from lm.commands.arguments import (
    ARPA,
    COMPUTING,
    JSON,
    NO_PROGRESS,
    OPEN_VOCABULARY,
    RUN,
    Options,
)
from lm.run import Run

HELP = "perplexity of a trained model on a text"
_TEXT: Options = {
    "--split": {"default": "test", "choices": ("train", "valid", "test"), "help": "default: test"},
    "--text": {
        "metavar": "FILE|-",
        "help": "text instead of a split, with its rule for empty lines",
    },
}
OPTIONS = RUN | _TEXT | OPEN_VOCABULARY | ARPA | COMPUTING | NO_PROGRESS | JSON
EXCLUSIVE = tuple(_TEXT)
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Print the figures, and write those of a split to `evaluate-<split>[-open].json`."""
    if options.mixture is not None and options.arpa is None:
        raise UserError("--mixture requires --arpa")
    if options.arpa and options.open_vocabulary:
        raise UserError("--arpa excludes --open-vocabulary: <unk> is one word for both")
    from data_prep.corpus.lines import read_text
    from data_prep.storage import write_json_atomically
    from lm.evaluation import encode_text, evaluate_split, evaluate_text
    from lm.scoring.mixture import Mixture, evaluate_mixture

    run = Run.open(options.run_dir, device=options.device, threads=options.threads)
    settings = {"progress": not options.no_progress, "open_vocabulary": options.open_vocabulary}
    lines = [] if options.text is None else list(read_text(options.text))
    mixture = options.arpa and Mixture.open(run, Path(options.arpa), options.mixture)
    if options.text is None:
        result = evaluate_split(run, options.split, **settings)
    else:
        result = evaluate_text(run, lines, **settings)
    values = result.to_dict()
    tables = [result.table(options.text or options.split)]
    mixed = {}
    if mixture:
        is_split = options.text is None
        tokens = run.prepared.tokens(options.split) if is_split else encode_text(run, lines)[0]
        figures = evaluate_mixture(run, mixture, tokens)
        mixed = {"mixture": figures.to_dict()}
        tables.append(figures.table(f"mixture: {mixture.describe(run)}"))
    print(json.dumps(values | mixed) if options.json else "\n".join(tables))
    if options.text is None:
        suffix = "-open" if options.open_vocabulary else ""
        path = run.folder / f"evaluate-{options.split}{suffix}.json"
        try:
            write_json_atomically(path, values)
        except UserError as error:
            _log.warning("the figures are printed only: %s", error)
