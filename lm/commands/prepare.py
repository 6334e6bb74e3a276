"""`lm prepare`: corpus → tokenizer → token files → word classes."""

import argparse

from lm.commands.arguments import add_config, add_no_progress
from lm.run import Run

HELP = "corpus → tokenizer → token files → classes"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    add_config(parser)
    add_no_progress(parser)


def run(options: argparse.Namespace) -> None:
    """Prepare the data."""
    Run.read(options.config, options.overrides).prepare(progress=not options.no_progress)
