"""`lm rescore`."""

import argparse

HELP = "rescore"


def add_options(parser: argparse.ArgumentParser) -> None:
    """X."""
    from lm.commands.stub import add

    add(parser, "rescore")


def run(options: argparse.Namespace) -> None:
    """X."""
    from lm.rescoring.command import run

    end = "" if "rescore" == "generate" else None
    for x in run(options):
        print(x, end=end, flush=True)
