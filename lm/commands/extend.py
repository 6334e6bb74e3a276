"""`lm extend`: the new words or items of newer data in a trained run, without training."""

import argparse
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from lm.commands.arguments import COMPUTING, COUNT, FILE, NO_PROGRESS, TEXT_FIELD, Options
from lm.run import Run, TrainedRun

HELP = "add new words or items to a trained run, without training"
_RUN: Options = {
    "source": {
        "metavar": "RUN",
        "help": "folder of the run; --run_dir=FOLDER is the new one. Of items,"
        " --data.files.train=FILE is the newer data, with all events so far",
    },
    "--text": FILE | {"type": Path, "help": "text with new words, of a run on text"},
    "--min-count": COUNT
    | {"help": "--text: least number of times that a new word occurs (default 1)"},
}
OPTIONS = _RUN | {"--text-field": TEXT_FIELD} | COMPUTING | NO_PROGRESS


def run(options: argparse.Namespace) -> None:
    """Write the run; print its folder."""
    if options.text is None and (options.min_count or options.text_field):
        raise UserError("--min-count and --text-field require --text")
    config = Run.read(options.source, options.overrides).config
    if config.run_path.resolve() == Path(options.source).resolve():
        raise UserError("lm extend writes another run: name its folder, --run_dir=FOLDER")
    if config.run_path.exists():  # before the model is read
        raise UserError(f"{config.run_path} already exists: delete it, or choose another name")
    trained = TrainedRun.open(options.source, device=options.device, threads=options.threads)
    from lm.extension import extend

    others: dict[str, Any] = {"text_field": options.text_field, "min_count": options.min_count or 1}
    extend(trained, config, text=options.text, progress=not options.no_progress, **others)
    print(config.run_path)
