"""`lm prepare`: corpus → tokenizer → token files → word classes."""

import argparse

from lm.commands.arguments import NO_PROGRESS, SOURCE
from lm.run import Run

HELP = "corpus → tokenizer → token files → classes"
OPTIONS = SOURCE | NO_PROGRESS


def run(options: argparse.Namespace) -> None:
    """Prepare the data."""
    Run.read(options.source, options.overrides).prepare(progress=not options.no_progress)
