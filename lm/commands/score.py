"""`lm score`."""

import argparse

HELP = "score"


def add_options(parser: argparse.ArgumentParser) -> None:
    """X."""
    from lm.commands.stub import add

    add(parser, "score")


def run(options: argparse.Namespace) -> None:
    """X."""
    from lm.scoring.command import run

    end = "" if "score" == "generate" else None
    for x in run(options):
        print(x, end=end, flush=True)
