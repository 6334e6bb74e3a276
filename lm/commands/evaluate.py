"""`lm evaluate`: the perplexity of a trained model on a text."""

import argparse
import json
import logging

from data_prep.errors import UserError
from lm.commands.arguments import COMPUTING, JSON, NO_PROGRESS, RUN, Options
from lm.run import Run

HELP = "perplexity of a trained model on a text"
_TEXT: Options = {
    "--split": {"default": "test", "choices": ("train", "valid", "test"), "help": "default: test"},
    "--text": {
        "metavar": "FILE|-",
        "help": "text instead of a split, with its rule for empty lines",
    },
}
OPTIONS = RUN | _TEXT | COMPUTING | NO_PROGRESS | JSON
EXCLUSIVE = tuple(_TEXT)
_log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> None:
    """Print the figures, and write those of a split to `evaluate-<split>.json`."""
    from data_prep.corpus.lines import read_text
    from data_prep.storage import write_json_atomically
    from lm.evaluation import evaluate_split, evaluate_text

    run = Run.open(options.run_dir, device=options.device, threads=options.threads)
    progress = not options.no_progress
    if options.text is None:
        result = evaluate_split(run, options.split, progress=progress)
    else:
        result = evaluate_text(run, read_text(options.text), progress=progress)
    values = result.to_dict()
    print(json.dumps(values) if options.json else result.table(options.text or options.split))
    if options.text is None:
        path = run.folder / f"evaluate-{options.split}.json"
        try:
            write_json_atomically(path, values)
        except (OSError, UserError) as error:
            _log.warning("the figures are printed only: %s", error)
