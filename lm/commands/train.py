"""`lm train`: a trained model from a configuration."""

import argparse

from lm.commands.arguments import add_config, add_no_progress
from lm.run import Run

HELP = "train a model (prepares the data if needed)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    add_config(parser)
    parser.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="continue the last checkpoint or that at PATH",
    )
    add_no_progress(parser)


def run(options: argparse.Namespace) -> None:
    """Train; print the folder of the run."""
    run = Run.read(options.config, options.overrides)
    # Imported after the configuration is known to be valid: torch takes seconds.
    from lm.training.loop import train

    if train(run, resume=options.resume, progress=not options.no_progress):
        print(run.folder)
